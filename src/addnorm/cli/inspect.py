"""Verbs that show models, configurations and variants: cost, draw, show, list."""

import argparse
import inspect
from pathlib import Path

from addnorm.config import Config
from addnorm.files import to_json
from addnorm.presets import PRESETS, SIZES, find, summary
from addnorm.section import Section, describe


def cost(args: argparse.Namespace) -> None:
    """Print the parameters, operations and memory of a model."""
    from addnorm.models import size

    table = size.cost(find(args.config, args.settings), args.length, args.batch)
    if args.json:
        print(to_json(table.to_dict()))
        return
    print(f"{args.config}: {table}")


def draw_model(args: argparse.Namespace) -> None:
    """Write a drawing of a model as SVG, and print its path."""
    from addnorm.models.drawing import draw
    from addnorm.report import write_picture
    from addnorm.runs.run import RECORD, Run

    if (Path(args.config) / RECORD).is_file() and not args.settings:
        picture = Run.open(args.config).drawing(args.length)
    else:
        picture = draw(find(args.config, args.settings), args.length)
    print(write_picture(picture, args.out or f"{Path(args.config).stem}.svg"))


def show(args: argparse.Namespace) -> None:
    """Print a configuration as TOML; with --fields, with a comment on each field."""
    config = find(args.config, args.settings)
    text = config.dump()
    if args.fields:
        text = _with_help(config)
    print(text, end="")


def _with_help(config: Config) -> str:
    """Return the TOML with a comment on each field; fields without a value are comments, too."""
    lines = []
    descriptions: dict[str, str] = {}
    for line in config.dump().splitlines():
        name, equals, _ = line.partition(" = ")
        if line.startswith("["):
            section: Section = getattr(config, line.strip("[]"))
            descriptions = describe(section.__class__)
            lines.append(line)
            unset = section.unset_fields()
            lines += [f"# {item} is not set: {descriptions[item]}" for item in unset]
        else:
            lines.append(
                f"{line:<44} # {descriptions[name]}" if equals and name in descriptions else line
            )
    return "\n".join(lines) + "\n"


def list_variants(args: argparse.Namespace) -> None:
    """Print the names and formulas of all variants of one kind."""
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
    from addnorm.layers.key_value import PersistentVectors, ProductKeyMemory
    from addnorm.layers.norms import NORMS
    from addnorm.layers.positions import POSITIONS

    tables: dict[str, dict[str, object]] = {
        "addnorms": dict(ADDNORMS),
        "norms": dict(NORMS),
        "positions": dict(POSITIONS),
        "ffns": {name: kind for name, (kind, _) in FEEDFORWARDS.items()}
        | {"product-key": ProductKeyMemory, "all-attention": PersistentVectors},
    }
    return {name: _summary_line(row) for name, row in tables[kind].items()}


def _summary_line(variant: object) -> str:
    return (inspect.getdoc(variant) or "").partition("\n")[0]
