"""Verbs that look and do not change anything: cost, show, list."""

import argparse
import inspect
import json

from addnorm.config import Config
from addnorm.presets import PRESETS, SIZES, find, summary
from addnorm.section import Section, describe


def cost(args: argparse.Namespace) -> None:
    """Print what a model costs."""
    from addnorm.models.size import cost as count

    found = count(find(args.config, args.settings), args.length, args.batch)
    if args.json:
        print(json.dumps(found.table(), indent=1))
        return
    rows = [
        (part.name, part.parameters, part.forward, part.activations, part.cache)
        for part in found.parts
        if any((part.parameters, part.forward, part.activations, part.cache))
    ]
    rows.append(("total", found.parameters, found.forward, found.activations, found.cache))
    print(f"{args.config}: {found.batch} × {found.length} positions, float32\n")
    head = ("", "parameters", "", "forward", "", "training keeps", "cache")
    print("{:<20}{:>14}{:>7}{:>12}{:>7}{:>16}{:>10}".format(*head))
    for name, parameters, forward, kept, cache in rows:
        if name == "total":
            print("─" * 86)
        print(
            f"{name:<20}{parameters:>14,}{_share(parameters, found.parameters):>7}"
            f"{_si(forward, 'FLOP'):>12}{_share(forward, found.forward):>7}"
            f"{_bytes(kept):>16}{_bytes(cache):>10}"
        )
    print(f"\nforward and backward: {_si(found.forward + found.backward, 'FLOP')} a step")
    if found.overtakes is None:
        print("scores never overtake the rest: the window bounds them")
    else:
        print(f"scores overtake all the rest at length {found.overtakes:,}")


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
            about = describe(type(section))
            lines.append(line)
            lines += [f"# {item} is left out: {about[item]}" for item in section.left_out()]
        else:
            lines.append(f"{line:<44} # {about[name]}" if equals and name in about else line)
    return "\n".join(lines) + "\n"


def list_variants(args: argparse.Namespace) -> None:
    """Print the rows of one table of variants: name and formula."""
    rows = _variants(args.kind)
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
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


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole and part else ""


def _si(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}" if number else ""
        number /= 1000
    return f"{number:.3g} E{unit}"


def _bytes(number: float) -> str:
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if number < 1024:
            return f"{number:.3g} {prefix}B" if number else ""
        number /= 1024
    return f"{number:.3g} PiB"
