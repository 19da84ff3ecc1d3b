"""Position schemes: what they add, dot products by offset, and loss beyond the training length.

    python -m bench.positions --out FOLDER [--text tinyshakespeare.txt] [--steps 200 1600] [--quick]

A character model (decoder, 2 blocks, width 64, 4 heads) is trained on windows of 64 characters with
every scheme, then reads 16 to 512 characters before the same 32 held-out characters: the last 32 of
each window are predicted, so that all lengths are compared on the same targets (Press et al. 2022,
2108.12409, fig. 1), after each number of steps. Without a text the documentation of this repository
is read. The first 90 % of the text train, the rest is held out.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig, build, token_loss
from addnorm.layers.positions import POSITIONS, Buckets, Relative, sinusoids
from addnorm.lens.positions import by_offset, offset_dependence, position_vectors, rotary_scores
from addnorm.report import heat_map, line_chart
from bench.measured import Results, Row, arguments, deviation, mean, repository_text, windows

TRAINED, TARGETS = 64, 32
LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
WIDTH, HEADS = 64, 4


def read(text: str) -> tuple[Tensor, int]:
    """Return the characters of a text as numbers, and how many different ones there are."""
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def make(scheme: str, vocab: int, seed: int) -> Any:
    """Return an untrained model."""
    torch.manual_seed(seed)
    config = ModelConfig(
        mode="decoder", vocab=vocab, width=WIDTH, heads=HEADS, depth=2, positions=scheme,
        addnorm="pre", length=TRAINED, dropout=0.0,
    )  # fmt: skip
    return build(config)


def train(model: Any, ids: Tensor, steps: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    source = windows(ids, TRAINED, 32, seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 50, 1.0) * (1 - step / steps)
        batch = next(source)
        loss = token_loss(model, model.hidden(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def loss_by_length(model: Any, held: Tensor, rows: int) -> list[tuple[int, float | None]]:
    """Return the loss of the same characters after contexts of every length; None if refused."""
    longest = max(LENGTHS)
    starts = torch.linspace(0, len(held) - longest - 1, rows).long()
    batch = held[starts[:, None] + torch.arange(longest + 1)]
    found: list[tuple[int, float | None]] = []
    for length in LENGTHS:
        if model.config.positions == "learned" and length > TRAINED:
            found.append((length, None))  # there is no vector for these positions
            continue
        logits = model(batch[:, -length - 1 : -1])[:, -TARGETS:]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, -TARGETS:].flatten())
        found.append((length, float(loss)))
    return found


def measure(scheme: str, ids: Tensor, vocab: int, steps: int, seed: int, rows: int) -> Row:
    split = int(0.9 * len(ids))
    model = make(scheme, vocab, seed)
    train(model, ids[:split], steps, seed)
    model.eval()
    return {"losses": loss_by_length(model, ids[split:], rows), "bias": trained_bias(model)}


@torch.no_grad()
def trained_bias(model: Any) -> list[list[float]]:
    """Return what a scheme adds to the scores by distance, one list for each head of block 0."""
    scheme = model.decoder.positions
    if not isinstance(scheme, Buckets | Relative) or len(LENGTHS) < 2:
        return []
    local = model.decoder.stack.blocks[0].sublayers["attention"].local
    width = WIDTH // HEADS
    q = torch.zeros(1, HEADS, 1, width)
    if isinstance(scheme, Relative):  # a query of 0: what remains is v · W r
        q = q + local.u[:, None]
    keys = torch.arange(TRAINED)
    bias = scheme.bias(q, keys[-1:], keys, local, width**-0.5)
    assert bias is not None
    return bias[0, :, 0].flip(-1).tolist()


def pictures(results: Results) -> None:
    length, width = 64, 64
    table = sinusoids(torch.arange(length), width, 1e4, "interleaved")
    rows, columns = [str(p) for p in range(length)], [str(i) for i in range(width)]
    results.write(
        "positions-sinusoids",
        heat_map(table.tolist(), rows, columns, title="Sinusoids", x="number", y="position"),
    )
    sizes = (width, HEADS, width // HEADS, length, True)
    curves, explained = {}, {}
    for name in ("sinusoidal", "concatenated", "index", "learned"):
        torch.manual_seed(0)
        vectors = position_vectors(POSITIONS[name](*sizes), length, width)
        products = vectors @ vectors.T
        curves[name] = by_offset(products) / products.diagonal().mean()
        explained[name] = offset_dependence(products)
    scores = rotary_scores(POSITIONS["rotary"](*sizes), length)  # type: ignore[arg-type]
    curves["rotary"], explained["rotary"] = by_offset(scores), offset_dependence(scores)
    results.write(
        "positions-offset",
        line_chart(
            {name: list(enumerate(curve.tolist())) for name, curve in curves.items()},
            title="Mean dot product of two positions, relative to offset 0",
            x="offset",
            y="of offset 0",
        ),
    )
    for name, share in explained.items():
        print(f"{name}: the offset explains {share:.0%} of the variance of the dot products")


def summary(results: Results, steps: int) -> None:
    """Print and draw the losses after this many steps."""
    print(f"after {steps} steps:")
    curves = {}
    for scheme in POSITIONS:
        rows = [
            dict(map(tuple, row["losses"])) for row in results.where(scheme=scheme, steps=steps)
        ]
        points = []
        for length in LENGTHS:
            losses = [row[length] for row in rows if row.get(length) is not None]
            if losses:
                points.append((float(length), mean(losses)))
        if points:
            curves[scheme] = points
            shown = "  ".join(f"{length:.0f} {loss:.3f}" for length, loss in points)
            spread = deviation([row[TRAINED] for row in rows])
            print(f"{scheme:12} {shown}   (± {spread:.3f} at {TRAINED})")
    results.write(
        f"positions-extrapolation-{steps}",
        line_chart(
            curves,
            title=f"After {steps:,} steps on windows of {TRAINED} characters",
            x="characters read",
            y="held-out loss",
            log_x=True,
            most=3.2,
        ),
    )


def learned_scores(results: Results, steps: int) -> None:
    """Draw what training has made of the scores that depend on the distance alone."""
    kinds = {"buckets": "T5's buckets", "relative": "Transformer-XL"}
    for scheme, name in kinds.items():
        found = results.where(scheme=scheme, seed=0, steps=steps)
        if found and found[0]["bias"]:
            heads = {
                f"head {h}": [(float(d), value) for d, value in enumerate(curve)]
                for h, curve in enumerate(found[0]["bias"])
            }
            title = f"Learned score by distance, first block: {name}"
            picture = line_chart(heads, title=title, x="distance", y="score")
            results.write(f"positions-{scheme}", picture)


def main() -> None:
    args = arguments(
        "positions",
        __doc__,
        text={"type": Path, "help": "a plain text"},
        steps={"type": int, "nargs": "+", "default": [200, 1600], "help": "lengths of training"},
        schemes={"nargs": "+", "choices": list(POSITIONS), "default": list(POSITIONS)},
    )
    results = Results(args.out, "positions")
    ids, vocab = read(args.text.read_text() if args.text else repository_text())
    budgets, rows = ([3], 4) if args.quick else (args.steps, 64)
    for steps in budgets:
        for scheme in args.schemes:
            results.measure(
                {"scheme": scheme, "steps": steps, "seed": 0},
                lambda k=scheme, n=steps: measure(k, ids, vocab, n, 0, rows),  # type: ignore[misc]
            )
    pictures(results)
    for steps in budgets:
        summary(results, steps)
    learned_scores(results, max(budgets))


if __name__ == "__main__":
    main()
