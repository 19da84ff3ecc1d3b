"""Flags of several verbs."""

import argparse


def add_set(
    parser: argparse.ArgumentParser,
    help: str = "change one field of the configuration; may be repeated",
) -> None:
    """Add `--set section.field=value`, which sets any field of the configuration."""
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help=help,
    )
