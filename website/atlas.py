"""Write the atlas: `python -m website.atlas`, or `make atlas`.

One page for each arrangement, norm, position scheme and feed-forward network, from its docstring
and from measurements. The measurements are kept in docs/atlas/measured.json, so that `--text`
writes the pages anew without measuring.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from addnorm import ModelConfig, cost
from addnorm.layers import positions
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.feedforward import FEEDFORWARDS
from addnorm.layers.key_value import PersistentVectors, ProductKeyMemory
from addnorm.layers.norms import NORMS
from addnorm.models.drawing import draw
from addnorm.report import write_picture
from website import atlas_pictures
from website.atlas_measure import DEPTHS, Profile, profile, step_time
from website.atlas_notes import ACTIVATIONS, KINDS

FOLDER = Path(__file__).parent.parent / "docs/atlas"
MEASURED = FOLDER / "measured.json"
DEFAULTS = {"addnorm": "pre", "norm": "layer", "positions": "sinusoidal", "ffn": "relu"}
SIZE: dict[str, Any] = {"vocab": 1000, "width": 512, "heads": 8, "depth": 6, "length": 128}
"""Size of the models in drawings and of the costs by formula."""
MACHINE = "a virtual machine with two cores of an AMD EPYC that other work shared"


def variants(kind: str) -> dict[str, object]:
    """Return the class or function of each variant of a kind, by its name."""
    tables: dict[str, Mapping[str, object]] = {
        "arrangements": ADDNORMS,
        "norms": NORMS,
        "positions": positions.POSITIONS,
        "ffns": {name: entry[0] for name, entry in FEEDFORWARDS.items()}
        | {"product-key": ProductKeyMemory, "all-attention": PersistentVectors},
    }
    return dict(tables[kind])


def settings_of(kind: str, name: str) -> dict[str, Any]:
    """Return the settings that choose a variant, with those of the model around it.

    Norms are shown in an encoder (one of them cannot be causal), post-norm, where they act on the
    stream itself; the rest in a decoder, which is pre-norm unless the arrangement is the subject.
    """
    around: dict[str, Any] = {"mode": "decoder"} | DEFAULTS
    if kind == "norms":
        around = {"mode": "encoder", "head": "masked"} | DEFAULTS | {"addnorm": "post"}
    return around | {KINDS[kind][0]: name}


def baseline_of(kind: str) -> dict[str, Any]:
    """Return the settings that a variant is compared with."""
    return settings_of(kind, DEFAULTS[KINDS[kind][0]])


# ── Text ──────────────────────────────────────────────────────────────────────────────────────────


def docstring_of(variant: object) -> tuple[str, str]:
    """Return the formula of a docstring, its first paragraph, and the text up to its parameters."""
    text = (inspect.getdoc(variant) or "").partition("\nParameters\n")[0].partition("\n>>>")[0]
    formula, _, rest = text.partition("\n\n")
    return formula.strip(), rest.strip()


def with_arxiv_links(text: str) -> str:
    """Return a text whose arXiv numbers are links."""
    return re.sub(
        r"(?<![\w/.])(\d{4}\.\d{4,5})(?!\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text
    )


def page_of(kind: str, name: str, measured: Mapping[str, Any]) -> str:
    """Return the text of one page."""
    field, title, notes = KINDS[kind]
    formula, about = docstring_of(variants(kind)[name])
    if name in ("sinusoidal", "concatenated"):
        about += "\n\n" + "\n\n".join(docstring_of(positions.sinusoids))
    if name in ACTIVATIONS:
        about = f"σ(x) = {ACTIVATIONS[name]}.\n\n{about}"
    lines = [f"# {name}", "", f"{title}. {notes[name]}", "", "```text", formula, "```", ""]
    if about.strip():
        lines += [with_arxiv_links(about), ""]
    elif re.search(r"\d{4}", formula):
        lines += [with_arxiv_links(formula.partition(". ")[2]), ""]
    lines += ["## Where it is", "", _picture(kind, name, "box", "drawing of the model"), ""]
    lines += _special(kind, name)
    lines += _depth_section(kind, name, measured[kind][name])
    lines += _cost_section(kind, name, measured)
    lines += ["## Use it", "", "```python", "import addnorm", ""]
    chosen = ", ".join(f'{key}="{value}"' for key, value in _shown(kind, name).items())
    lines += [f"model = addnorm.build(addnorm.ModelConfig(vocab=1000, {chosen}))", "```", ""]
    task = "masked" if kind == "norms" else "language"
    command = f"addnorm train {task} book.txt --set model.{field}={name} --out runs/{name}"
    lines += ["```sh", command, "```"]
    return "\n".join(lines) + "\n"


def _shown(kind: str, name: str) -> dict[str, str]:
    mode = {"mode": "encoder", "head": "masked"} if kind == "norms" else {"mode": "decoder"}
    return mode | {KINDS[kind][0]: name}


def _picture(kind: str, name: str, what: str, alt: str) -> str:
    return f"![{name}: {alt}](../pictures/{kind}-{name}-{what}.svg)"


def _special(kind: str, name: str) -> list[str]:
    """Return the part that only one kind has: activations, scores by position."""
    if kind == "ffns" and name in FEEDFORWARDS:
        return [_picture(kind, name, "activation", "the activation and its derivative"), ""]
    if kind == "positions" and name != "none":
        caption = {
            "rotary": "The score of equal queries and keys, for all pairs of positions.",
            "linear-bias": "What is added to the scores, mean of 4 heads.",
            "buckets": "What is added to the scores, mean of 4 heads, with new weights.",
            "relative": "What is added to the scores, mean of 4 heads, with new weights.",
        }.get(name, "Dot products of the positions' vectors, over the width.")
        return [_picture(kind, name, "scores", "scores by position"), "", caption, ""]
    return []


def _depth_section(kind: str, name: str, row: Mapping[str, Any]) -> list[str]:
    around = "encoder, post-norm" if kind == "norms" else "decoder"
    around += ", pre-norm" if kind in ("positions", "ffns") else ""
    head = "| blocks | gradient, first block ÷ last | share of the input in the last stream |"
    lines = ["## Gradient and dependency by depth", "", head, "|---|---|---|"]
    for depth in DEPTHS:
        each = row["depth"][str(depth)]
        share = "–" if each["input"] is None else f"{100 * each['input']:.3g} %"
        lines.append(f"| {depth} | {_ratio(each['gradient'])} | {share} |")
    return [
        *lines,
        "",
        _picture(kind, name, "gradient", "gradient of each block"),
        "",
        _picture(kind, name, "dependency", "dependency maps"),
        "",
        f"At initialisation: {around}, width 64, 4 heads, random tokens. A map has a row for the "
        "stream after each block, and a column for what the input and each block wrote into it "
        "([how it is measured](../../clinic.md#what-is-measured)). Of several streams the first is "
        "shown, the one that the next sublayer reads." + UNFOLLOWED.get(name, ""),
        "",
    ]


def _ratio(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.2g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.0e}".replace("e-0", "e-")


def _cost_section(kind: str, name: str, measured: Mapping[str, Any]) -> list[str]:
    """Return parameters and operations by formula, and the measured time of a step."""
    own, other = (
        cost(ModelConfig(**SIZE | settings), SIZE["length"])
        for settings in (settings_of(kind, name), baseline_of(kind))
    )
    base = DEFAULTS[KINDS[kind][0]]
    low, middle, high = measured[kind][name]["step"]
    return [
        "## What it costs",
        "",
        f"| | {name} | compared with {base} |",
        "|---|---|---|",
        f"| parameters | {own.parameters:,} | {own.parameters - other.parameters:+,} |",
        f"| forward, operations | {own.forward / 1e9:.3g} GFLOP "
        f"| {100 * (own.forward / other.forward - 1):+.2g} % |",
        f"| forward and backward, time | | {middle:.2f} times ({low:.2f} to {high:.2f}) |",
        "",
        "Parameters and operations by formula (`addnorm cost`): width 512, 6 blocks, 8 heads, 128 "
        "positions, vocabulary 1,000. Time: width 128, 6 blocks, 4 × 64 tokens, CPU time of one "
        f"thread, alternating with {base}; median and quartiles of 15 pairs; "
        f"`make atlas` on {measured['date']}, {MACHINE}.",
        "",
    ]


def index_page() -> str:
    """Return the overview of the atlas."""
    lines = ["# Atlas", "", *INTRODUCTION.strip().splitlines(), ""]
    headings = {"arrangements": "Arrangements", "norms": "Norms", "positions": "Positions"}
    for kind, (field, _, notes) in KINDS.items():
        lines += [f"## {headings.get(kind, 'Feed-forward networks')}", ""]
        lines += [f"`model.{field}`:", "", "| name | when |", "|---|---|"]
        lines += [f"| [`{name}`]({kind}/{name}.md) | {notes[name]} |" for name in variants(kind)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


INTRODUCTION = """
Every arrangement of Add & Norm, norm, position scheme and feed-forward network that addnorm has,
one page each: formula and citation, a drawing, gradients and dependency at 6, 18 and 64 blocks,
when to use it, what it costs, and how to choose it. x is the stream, F the branch (a sublayer, then
dropout), N the norm. The pages are generated from the docstrings and from measurements (`make
atlas`).
"""
UNFOLLOWED = dict.fromkeys(
    ("hyper", "dlcl", "batch", "instance"),
    " What earlier blocks wrote cannot be told apart here, because the trace does not follow a sum "
    "through this operation: the first column is everything before the block.",
)

# ── Measuring and writing ─────────────────────────────────────────────────────────────────────────


def measure(kind: str, name: str) -> tuple[dict[str, Any], list[Profile]]:
    """Return the figures of one variant for measured.json, and its profiles for the pictures."""
    settings = settings_of(kind, name)
    profiles = [profile(depth, **settings) for depth in DEPTHS]
    rows = {
        str(each.depth): {
            "gradient": _finite(each.gradients[0] / max(each.gradients[-1], 1e-30)),
            "input": _finite(each.shares[-1][0]) if each.is_followed else None,
        }
        for each in profiles
    }
    step = [round(value, 3) for value in step_time(settings, baseline_of(kind))]
    return {"depth": rows, "step": step}, profiles


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if abs(value) < float("inf") else None


def write_pictures(kind: str, name: str, profiles: Sequence[Profile]) -> None:
    """Write the pictures of one page."""
    folder = FOLDER / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "box": draw(ModelConfig(**SIZE | settings_of(kind, name))),
        "gradient": atlas_pictures.gradient_picture(name, profiles),
        "dependency": atlas_pictures.dependency_picture(name, profiles),
    }
    if kind == "ffns" and name in FEEDFORWARDS:
        pictures["activation"] = atlas_pictures.activation_picture(name)
    scores = atlas_pictures.score_picture(name) if kind == "positions" else None
    if scores is not None:
        pictures["scores"] = scores
    for what, picture in pictures.items():
        write_picture(picture, folder / f"{kind}-{name}-{what}.svg")


def write_pages(measured: Mapping[str, Any]) -> None:
    """Write the text of all pages."""
    for kind in KINDS:
        (FOLDER / kind).mkdir(parents=True, exist_ok=True)
        for name in variants(kind):
            text = page_of(kind, name, measured)
            (FOLDER / kind / f"{name}.md").write_text(text, encoding="utf-8")
    (FOLDER / "index.md").write_text(index_page(), encoding="utf-8")


def main() -> int:
    """Measure what is named, or everything, and write the pages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m website.atlas", description=__doc__)
    parser.add_argument("names", nargs="*", help="KIND/NAME to measure (default: all)")
    parser.add_argument("--text", action="store_true", help="write the text only, measure nothing")
    args = parser.parse_args()
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    for kind in () if args.text else KINDS:
        for name in variants(kind):
            if args.names and f"{kind}/{name}" not in args.names:
                continue
            row, profiles = measure(kind, name)
            measured.setdefault(kind, {})[name] = row
            measured["date"] = date.today().isoformat()
            write_pictures(kind, name, profiles)
            print(f"{kind}/{name}: step {row['step'][1]:.2f}", file=sys.stderr)
            MEASURED.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if all(set(measured.get(kind, ())) >= set(variants(kind)) for kind in KINDS):
        write_pages(measured)
    print(FOLDER / "index.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
