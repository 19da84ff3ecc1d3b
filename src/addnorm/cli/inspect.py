"""Verbs that look and do not change anything: cost, show, list."""

import argparse
import inspect

from addnorm.config import Config
from addnorm.files import to_json
from addnorm.presets import PRESETS, SIZES, find, summary
from addnorm.section import Section, describe


def cost(args: argparse.Namespace) -> None:
    """Print what a model costs."""
    from addnorm.models.size import cost as count

    found = count(find(args.config, args.settings), args.length, args.batch)
    if args.json:
        print(to_json(found.to_dict()))
        return
    print(f"{args.config}: {found}")


def show(args: argparse.Namespace) -> None:
    """Print a configuration as TOML, with help beside each field if asked."""
    config = find(args.config, args.settings)
    text = config.dump()
    if args.fields:
        text = _with_help(config)
    print(text, end="")


def _with_help(config: Config) -> str:
    """The TOML with each field's line of help beside it; fields left out come as comments."""
    lines = []
    about: dict[str, str] = {}
    for line in config.dump().splitlines():
        name, equals, _ = line.partition(" = ")
        if line.startswith("["):
            section: Section = getattr(config, line.strip("[]"))
            about = describe(section.__class__)
            lines.append(line)
            lines += [f"# {item} is left out: {about[item]}" for item in section.unset_fields()]
        else:
            lines.append(f"{line:<44} # {about[name]}" if equals and name in about else line)
    return "\n".join(lines) + "\n"


def list_variants(args: argparse.Namespace) -> None:
    """Print the rows of one table of variants: name and formula."""
    rows = _variants(args.kind)
    if args.json:
        print(to_json(rows))
        return
    width = max(len(name) for name in rows) + 2
    for name, text in rows.items():
        print(f"{name:<{width}}{text}")


def _variants(kind: str) -> dict[str, str]:
    if kind == "presets":
        return {
            name + (f"-{{{','.join(SIZES[name])}}}" if name in SIZES else ""): summary(name)
            for name in PRESETS
        }
    from addnorm.layers.addnorm import ADDNORMS
    from addnorm.layers.feedforward import FEEDFORWARDS
    from addnorm.layers.norms import NORMS
    from addnorm.layers.positions import POSITIONS

    tables: dict[str, dict[str, object]] = {
        "addnorms": dict(ADDNORMS),
        "norms": dict(NORMS),
        "positions": dict(POSITIONS),
        "ffns": {name: kind for name, (kind, _) in FEEDFORWARDS.items()},
    }
    return {name: _first_line(row) for name, row in tables[kind].items()}


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
