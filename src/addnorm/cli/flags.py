"""Flags that several verbs share."""

import argparse


def add_set(
    parser: argparse.ArgumentParser,
    help: str = "change one field of the configuration; may be repeated",
) -> None:
    """`--set section.field=value`, the one way to a field of the configuration."""
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help=help,
    )
