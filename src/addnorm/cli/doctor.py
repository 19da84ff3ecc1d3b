"""The verb that checks the installation and the machine: doctor."""

import argparse

from addnorm.files import to_json


def doctor_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `addnorm doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(args: argparse.Namespace) -> None:
    """Print what was found, and what to do about it."""
    from addnorm.doctor import GOOD, NOTE, PROBLEM, check_machine

    checks = check_machine()
    if args.json:
        print(to_json([check.to_dict() for check in checks]))
        return
    signs = {GOOD: "✓", NOTE: "•", PROBLEM: "✗"}
    width = max(len(check.name) for check in checks) + 2
    for check in checks:
        print(f"{signs[check.status]} {check.name:<{width}}{check.value}")
        if check.advice:
            print(f"{'':<{width + 2}}→ {check.advice}")
    counts = {status: sum(check.status == status for check in checks) for status in signs}
    print(f"\nproblems: {counts[PROBLEM]}, notes: {counts[NOTE]}, good: {counts[GOOD]}")
