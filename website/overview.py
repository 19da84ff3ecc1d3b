"""Draw the picture at the top of the README: `python -m website.overview`, or `make atlas`.

Real output alone: the boxes of two arrangements, traced from their code; the gradient of each of
64 blocks for several arrangements, at initialisation; what the clinic predicts of two of them after
a rehearsal; and the attention of a translator of phrases, trained here in seconds, to a phrase that
it has never seen.
"""

import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from addnorm import ModelConfig
from addnorm.data.text.collate import collate_pairs
from addnorm.models.drawing import draw
from addnorm.report import write_picture
from addnorm.report.chart_frame import spread_labels
from addnorm.report.svg import Picture, Svg, pixels
from website.atlas_measure import profile

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs/pictures/overview.svg"
WIDTH, HEIGHT, TOP = 1080, 430, 64
SHOWN = ("res-post", "post", "deepnorm", "pre")
"""Arrangements whose gradients are compared."""
PHRASE = "five old books"
REHEARSED = ("post", "pre")
"""Arrangements that the clinic is asked about."""
PLAN = "12 + 12 blocks, rate 0.003"
SETTINGS = ("model.width=64", "model.heads=4", "model.vocab=200", "model.depth=12")


def nest(picture: Picture, drawing: Svg, place: tuple[float, float], scale: float) -> None:
    """Add a drawing at a place, scaled, without its title and its three lines of text."""
    inner = re.sub(r"^<svg[^>]*>|</svg>$|<title>.*?</title>|<desc>.*?</desc>", "", drawing)
    inner = re.sub(r'^(<text class="(name|tick)"[^>]*>[^<]*</text>){3}', "", inner)
    move = f"translate({pixels(place[0])} {pixels(place[1])}) scale({scale})"
    picture.parts.append(f'<g transform="{move}">{inner}</g>')


def draw_boxes(picture: Picture, left: float) -> None:
    """Add one block of post-norm and one of pre-norm."""
    for number, name in enumerate(("post", "pre")):
        config = ModelConfig(mode="decoder", vocab=1000, addnorm=name)
        at = left + number * 212
        picture.text(at + 20, TOP + 4, f"addnorm = {name}", "mark")
        nest(picture, draw(config), (at, TOP - 54), 0.78)


def draw_gradients(picture: Picture, left: float, curves: dict[str, Sequence[float]]) -> None:
    """Add the gradient of each block, on a logarithmic scale, each curve with its name."""
    width, height, bottom = 190, 280, TOP + 300
    values = [value for curve in curves.values() for value in curve if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = max(1, math.ceil((high - low) / 6))

    def y(value: float) -> float:
        return bottom - height * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    for power in range(low, high + 1, step):
        picture.line(left, y(10.0**power), left + width, y(10.0**power), "grid")
        label = "1" if power == 0 else f"1e{power}"
        picture.text(left - 6, y(10.0**power) + 4, label, "tick", "end")
    for number, curve in enumerate(curves.values()):
        points = [
            f"{pixels(left + width * (i + 0.5) / len(curve))} {pixels(y(v))}"
            for i, v in enumerate(curve)
        ]
        picture.path("M" + "L".join(points), f"curve c{number}")
    ends = spread_labels([y(curve[-1]) for curve in curves.values()], 16, bottom - height, bottom)
    for number, (name, end) in enumerate(zip(curves, ends, strict=True)):
        picture.text(left + width + 6, end + 4, name, f"mark c{number}")
    picture.text(left, bottom + 18, "block 1", "tick")
    picture.text(left + width, bottom + 18, "block 64", "tick", "end")


def draw_verdicts(picture: Picture, left: float, verdicts: dict[str, str]) -> None:
    """Add one line for each arrangement: whether it will train."""
    for number, (name, verdict) in enumerate(verdicts.items()):
        works = verdict.startswith("will train")
        sign, kind = ("✓", "mark c2") if works else ("✗", "mark bad")
        y = TOP + 12 + 22 * number
        picture.text(left, y, sign, kind)
        picture.text(left + 20, y, name, "mark")
        picture.text(left + 56, y, verdict, "value")


def predict(*settings: str) -> str:
    """Return what `addnorm clinic` predicts of a translator, and its losses in the rehearsal."""
    changes = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "addnorm", "clinic", "base", *changes]
    command += ["--lr", "3e-3", "--quick", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    evidence = json.loads(run.stdout)["evidence"]  # the exit code says whether it found something
    prediction = evidence["prediction"]
    losses = re.search(r"loss goes from [\d.]+ to [\d.]+", prediction["reason"])
    return prediction["answer"] + (": " + losses[0].replace("goes from ", "") if losses else "")


def draw_attention(
    picture: Picture, left: float, weights: Sequence[Sequence[float]], tokens: tuple[list[str], ...]
) -> None:
    """Add the attention of each output word to the input words."""
    source, target = tokens
    size, top = 52, TOP + 156
    left += 74
    for c, word in enumerate(source):
        picture.text(left + size * (c + 0.5), top - 8, word, "value", "middle")
    for r, (word, row) in enumerate(zip(target, weights, strict=True)):
        picture.text(left - 8, top + size * (r + 0.5) + 4, word, "value", "end")
        for c, weight in enumerate(row):
            place = (left + size * c, top + size * r)
            picture.rect(*place, size, size, "plus", f"{weight:.2f}", weight)
            kind = "cell strong" if weight > 0.55 else "cell"
            middle = (place[0] + size / 2, place[1] + size / 2 + 4)
            picture.text(*middle, f"{weight:.2f}", kind, "middle")
    picture.rect(left, top, size * len(source), size * len(target), "frame")


def attention() -> tuple[list[list[float]], tuple[list[str], list[str]]]:
    """Run examples/translate.py, and return its attention over an unseen phrase."""
    run = runpy.run_path(str(ROOT / "examples/translate.py"))["run"]
    (answer,) = run.translate([PHRASE])
    print(f"{PHRASE} → {answer}", file=sys.stderr)
    both = list(run.tokenizers.values())  # one, if both sides share it
    source, target = both[0], both[-1]
    batch = collate_pairs(
        [source.encode(PHRASE)], [target.encode(str(answer))], source.special, target.special
    )
    maps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        run.model(batch.source, batch.target_in, maps=maps)
    weights = maps["decoder.0.memory"][0].mean(dim=0)
    words = [source.piece(int(token)).strip("▁") for token in batch.source[0]]
    answers = [target.piece(token).strip("▁") for token in target.encode(str(answer))]
    return weights[: len(answers)].tolist(), (words, answers)


def main() -> int:
    """Measure, train, draw; return the exit code."""
    picture = Picture(
        WIDTH,
        HEIGHT,
        "What addnorm does",
        "Arrangements, gradients, the clinic's answer, attention.",
    )
    texts = {
        (24, 26): ("Choose where the norms stand …", "traced from the code of each arrangement"),
        (468, 26): (
            "… see what it does at 64 blocks …",
            "norm of the gradient in each block, at initialisation",
        ),
        (790, 26): ("… ask whether it will train …", f"64 steps rehearsed of {PLAN}"),
        (790, 160): ("… train, and see why.", "attention of a translator to a phrase it never saw"),
    }
    for (left, y), (heading, caption) in texts.items():
        picture.text(left, y, heading, "name")
        picture.text(left, y + 18, caption, "tick")
    draw_boxes(picture, 4)
    curves = {name: profile(64, mode="decoder", addnorm=name).gradients for name in SHOWN}
    draw_gradients(picture, 506, curves)
    verdicts = {name: predict(f"model.addnorm={name}", *SETTINGS) for name in REHEARSED}
    draw_verdicts(picture, 790, verdicts)
    draw_attention(picture, 790, *attention())
    print(write_picture(picture.close(), OUT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
