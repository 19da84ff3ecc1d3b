"""Warm-up and depth: post-norm against pre-norm over rates, warm-up lengths, depths and budgets.

    python -m bench.warmup --out FOLDER [--pairs eng-fra_24k.tsv.gz] [--part grid] [--quick]
    python -m bench.warmup --out FOLDER --pairs FILE --part budget --width 16 --rows 128

grid  6+6 blocks, 200 steps: three rates × three warm-up lengths (Xiong et al. 2020, 2002.04745,
      fig. 2).
deep  18+18 blocks, 150 steps, three seeds: post, pre, Admin, and another arrangement in the
      decoder alone or the encoder alone (Liu et al. 2020, 2004.08249, §3.2).
long  6+6 blocks, three seeds, each arrangement with the rate that was best for it in the grid, for
      each budget of --steps, and post-norm with a third of its rate (one seed): where does
      post-norm reach pre-norm?
budget  the same for other pairs, widths and batches, each arrangement with its best rate of the
      grid on Tatoeba, three seeds, and with a third of it, one seed.

Translation of the pairs (English, French); without a file, of synthetic pairs to be reversed. Width
32, 4 heads, 32 pairs in a batch, words as tokens, Adam with β₂ = 0.98, rate after the warm-up
constant (grid, deep) or falling as a cosine (long, budget); dropout 0.1 in the last two. The last
500 pairs are held out.
"""

import gzip
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from addnorm import ModelConfig, build, measure_, token_loss
from addnorm.report import Mark, heat_map, line_chart
from addnorm.training.schedule import SCHEDULES
from bench.measured import Results, Row, arguments, deviation, mean

PAD, BEGIN, END, UNKNOWN = range(4)
Pairs = list[tuple[list[int], list[int]]]
WIDTH, ROWS = 32, 32
RATES, WARMUPS = (1e-3, 3e-3, 1e-2), (0, 50, 150)
BEST = {"post": 3e-3, "pre": 1e-2}
"""The best rate of each arrangement in the grid."""
DEEP = {
    "post": ("post", None),
    "post, decoder pre": ("post", "pre"),
    "pre, decoder post": ("pre", "post"),
    "pre": ("pre", None),
    "admin": ("admin", None),
}


def read_pairs(path: Path | None, held: int, least: int = 2) -> tuple[Pairs, Pairs, int]:
    """Return training pairs, held-out pairs (the last ones) and the number of tokens.

    Words that occur fewer times than `least` are unknown ones.
    """
    if path is None:
        rng = random.Random(0)
        texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(600)]
        rows = [(text, text[::-1]) for text in texts]
    else:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        rows = [(line.split("\t")[0], line.split("\t")[1]) for line in lines]
    words = [[re.findall(r"\w+|[^\w\s]", side.lower()) for side in row] for row in rows]
    counts = Counter(w for row in words[:-held] for side in row for w in side)
    numbers = {w: i for i, (w, n) in enumerate(counts.most_common(), UNKNOWN + 1) if n >= least}
    ids: Pairs = []
    for one, other in words:
        source, target = ([numbers.get(w, UNKNOWN) for w in side] for side in (one, other))
        ids.append(([*source, END], [BEGIN, *target, END]))
    return ids[:-held], ids[-held:], len(numbers) + UNKNOWN + 1


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of ids as one tensor, padded at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def batches(pairs: Pairs, seed: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sources and targets for ever; the pairs of a batch have similar lengths."""
    rng = random.Random(seed)
    while True:
        order = sorted(rng.sample(range(len(pairs)), len(pairs)), key=lambda i: len(pairs[i][0]))
        parts = [order[i : i + rows] for i in range(0, len(order), rows)]
        rng.shuffle(parts)
        for part in parts:
            yield pad([pairs[i][0] for i in part]), pad([pairs[i][1] for i in part])


def loss_of(model: torch.nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of the next word."""
    targets = target[:, 1:].masked_fill(target[:, 1:] == PAD, -100)
    return token_loss(model, model.hidden(source, target[:, :-1]), targets)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, pairs: Pairs) -> float:
    """Return the loss per word of held-out pairs."""
    model.eval()
    total = count = 0.0
    order = sorted(pairs, key=lambda pair: len(pair[0]))
    for i in range(0, len(order), 100):
        source, target = (pad([pair[side] for pair in order[i : i + 100]]) for side in (0, 1))
        words = float((target[:, 1:] != PAD).sum())
        total, count = total + words * float(loss_of(model, source, target)), count + words
    model.train()
    return total / count


def train(
    data: tuple[Pairs, Pairs, int],
    arrangement: tuple[str, str | None],
    depth: int,
    rate: float,
    warmup: int,
    steps: int,
    seed: int,
    schedule: str = "constant",
    dropout: float = 0.0,
    every: int = 100,
    width: int = WIDTH,
    rows: int = ROWS,
) -> Row:
    """Train a translator; return the held-out loss every some steps, by step."""
    training, held, vocab = data
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab=vocab, pad=PAD, width=width, heads=4, ffn_width=4 * width, depth=depth, length=64,
        addnorm=arrangement[0], decoder_addnorm=arrangement[1], dropout=dropout,
    )  # fmt: skip
    model = build(config)
    source = batches(training, seed, rows)
    if config.has_admin:
        measure_(model, lambda: loss_of(model, *next(batches(training, seed + 1, rows))))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-9)
    factor = SCHEDULES[schedule]
    curve = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(step, warmup, steps, 0.0)
        loss = loss_of(model, *next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == steps:
            curve.append((step, held_out_loss(model, held)))
    return {"loss": curve[-1][1], "curve": curve}


def unigram_loss(data: tuple[Pairs, Pairs, int]) -> float:
    """Return the held-out loss of the frequencies of words: what a model without input reaches."""
    counts = torch.ones(data[2])
    for _, target in data[0]:
        counts.index_add_(0, torch.tensor(target[1:]), torch.ones(len(target) - 1))
    logs = (counts / counts.sum()).log()
    words = torch.tensor([w for _, target in data[1] for w in target[1:]])
    return -float(logs[words].mean())


def grid(results: Results, data: tuple[Pairs, Pairs, int], steps: int) -> None:
    for kind in ("post", "pre"):
        for rate in RATES:
            for warmup in WARMUPS:
                row = {"part": "grid", "kind": kind, "rate": rate, "warmup": warmup, "steps": steps}
                results.measure(
                    row,
                    lambda r=row: train(  # type: ignore[misc]
                        data, (r["kind"], None), 6, r["rate"], r["warmup"], steps, 0
                    ),
                )
        values = [
            [results.where(part="grid", kind=kind, rate=r, warmup=w)[0]["loss"] for w in WARMUPS]
            for r in RATES
        ]
        picture = heat_map(
            values,
            [f"rate {rate:g}" for rate in RATES],
            [f"warm-up {warmup}" for warmup in WARMUPS],
            title=f"Held-out loss after {steps} steps, {kind}-norm, 6+6 blocks",
            low=2.0,
            high=6.0,
        )
        results.write(f"warmup-grid-{kind}", picture)


def mean_curve(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the mean over seeds of the held-out loss, by step."""
    points = zip(*(row["curve"] for row in rows), strict=True)
    return [(float(p[0][0]), mean([loss for _, loss in p])) for p in points]


def summarise(kind: str, rows: Sequence[Row]) -> None:
    """Print the mean and the deviation of the last losses."""
    losses = [row["loss"] for row in rows]
    shown = ", ".join(f"{loss:.3f}" for loss in losses)
    print(f"{kind}: {mean(losses):.3f} ± {deviation(losses):.3f} ({shown})")


def deep(
    results: Results, data: tuple[Pairs, Pairs, int], steps: int, depth: int, seeds: int
) -> None:
    for seed in range(seeds):
        for name, arrangement in DEEP.items():
            row = {"part": "deep", "kind": name, "depth": depth, "steps": steps, "seed": seed}
            compute: Callable[[], Row] = lambda a=arrangement, s=seed: train(  # type: ignore[misc]  # noqa: E731
                data, a, depth, 1e-3, steps // 3, steps, s, every=max(1, steps // 6)
            )
            results.measure(row, compute)
    rows = {name: results.where(part="deep", kind=name, steps=steps) for name in DEEP}
    for name, found in rows.items():
        summarise(name, found)
    curves = {name: mean_curve(found) for name, found in rows.items()}
    level = unigram_loss(data)
    mark = Mark(steps / 10, level, "loss of the word frequencies")
    results.write(
        "warmup-deep",
        line_chart(curves, title=f"{depth}+{depth} blocks", y="held-out loss", marks=[mark]),
    )
    print(f"loss of the word frequencies {level:.3f}")


def long(results: Results, data: tuple[Pairs, Pairs, int], steps: int, seeds: int) -> None:
    rates = {}
    for kind in ("post", "pre"):
        found = [r for r in results.where(part="grid", kind=kind) if r["warmup"]]
        rates[kind] = min(found, key=lambda row: row["loss"])["rate"] if found else 1e-3
    entries = [(kind, rate, seed) for seed in range(seeds) for kind, rate in rates.items()]
    entries.append(("post", rates["post"] / 3, 0))  # a longer training may want a smaller rate
    for kind, rate, seed in entries:
        row = {"part": "long", "kind": kind, "rate": rate, "steps": steps, "seed": seed}
        results.measure(
            row,
            lambda r=row: train(  # type: ignore[misc]
                data, (r["kind"], None), 6, r["rate"], steps // 5, steps, r["seed"],
                "cosine", 0.1, max(1, steps // 10),
            ),
        )  # fmt: skip
    curves = {}
    for kind, rate, _ in [*entries[:2], entries[-1]]:
        rows = results.where(part="long", kind=kind, rate=rate, steps=steps)
        curves[f"{kind}, rate {rate:.2g}"] = mean_curve(rows)
        summarise(f"{steps} steps, {kind}, rate {rate:.2g}", rows)
    results.write(
        f"warmup-long-{steps}",
        line_chart(curves, title=f"6+6 blocks, {steps} steps", y="held-out loss"),
    )


def budget(
    results: Results, data: tuple[Pairs, Pairs, int], settings: Row, steps: int, seeds: int
) -> None:
    """Train both arrangements with the pairs, width and rows of a batch that settings name."""

    def measure(kind: str, rate: float, seed: int) -> Row:
        row = {"part": "budget", **settings, "steps": steps}
        row |= {"kind": kind, "rate": rate, "seed": seed}
        return results.measure(
            row,
            lambda: train(
                data, (kind, None), 6, rate, steps // 5, steps, seed, "cosine", 0.1,
                max(1, steps // 10), settings["width"], settings["rows"],
            ),
        )  # fmt: skip

    main = [(kind, rate, seed) for seed in range(seeds) for kind, rate in BEST.items()]
    lower = [(kind, rate / 3, 0) for kind, rate in BEST.items()]
    found: dict[str, list[Row]] = {}
    for kind, rate, seed in main + lower:
        found.setdefault(f"{kind}, rate {rate:.2g}", []).append(measure(kind, rate, seed))
    name = f"{settings['pairs']}, width {settings['width']}, {settings['rows']} × {steps:,} pairs"
    for label, rows in found.items():
        summarise(f"{name}, {label}", rows)
    curves = {label: mean_curve(rows) for label, rows in found.items()}
    results.write(
        f"warmup-{settings['pairs']}-{settings['width']}-{settings['rows']}-{steps}",
        line_chart(curves, title=f"6+6 blocks: {name}", y="held-out loss"),
    )


def main() -> None:
    args = arguments(
        "warmup",
        __doc__,
        pairs={"type": Path, "help": "tab-separated pairs, .gz"},
        part={"choices": ["grid", "deep", "long", "budget"], "nargs": "*"},
        steps={"type": int, "nargs": "*", "default": [400, 1600], "help": "of long and budget"},
        width={"type": int, "default": WIDTH, "help": "of the part budget"},
        rows={"type": int, "default": ROWS, "help": "pairs in a batch of the part budget"},
        least={"type": int, "default": 2, "help": "words that occur less often are unknown"},
    )
    results = Results(args.out, "warmup")
    parts = args.part or ["grid", "deep", "long", *(["budget"] if args.quick else [])]
    held = 100 if args.quick or args.pairs is None else 500
    data = read_pairs(args.pairs, held, args.least)
    if "grid" in parts:
        grid(results, data, 2 if args.quick else 200)
    if "deep" in parts:
        deep(results, data, *((3, 2, 1) if args.quick else (150, 18, 3)))
    if "long" in parts:
        for steps in [3] if args.quick else args.steps:
            long(results, data, steps, 1 if args.quick else 3)
    if "budget" in parts:
        name = args.pairs.name.partition(".")[0] if args.pairs else "reversed"
        settings = {"pairs": name, "width": args.width, "rows": args.rows}
        for steps in [3] if args.quick else args.steps:
            budget(results, data, settings, steps, 1 if args.quick else 3)


if __name__ == "__main__":
    main()
