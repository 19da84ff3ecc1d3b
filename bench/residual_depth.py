"""Plain against residual networks of 20 and 56 layers, and the loss surface around their minima.

    python -m bench.residual_depth --out FOLDER [--quick]

Residual MLPs (addnorm.layers.residual_mlp) of width 32 on scikit-learn's digits: training error of
20 and 56 layers (9 and 27 blocks of two, and both ends) without shortcuts, with addition and with
concatenation (He et al. 2015, 1512.03385, fig. 1); then the training loss along two random
directions, each row of a weight scaled to the norm of the trained row (Li et al. 2018, 1712.09913,
eq. 1), for 56 layers with and without shortcuts. Adam, rate 1e-3, batches of 128.
"""

import math
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F

from addnorm.layers.residual_mlp import ResidualMLP
from addnorm.report import heat_map, line_chart
from bench.measured import Results, Row, arguments, mean

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"join": "none"},
    "addition": {"join": "add"},
    "addition, before": {"join": "add", "before": True},
    "concatenation": {"join": "concatenate", "growth": 2},
}
LAYERS = {20: 9, 56: 27}
"""Layers and blocks: two layers in a block, one before the first and one after the last."""
WIDTH, SPAN, MOST = 32, 1.0, 6.0


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    x = torch.tensor(digits.data).float()
    return (x - x.mean()) / x.std(), torch.tensor(digits.target)


def train(form: str, layers: int, epochs: int, seed: int) -> tuple[Any, list[tuple[float, float]]]:
    """Return the trained network, and the training error after each epoch."""
    x, y = data()
    torch.manual_seed(seed)
    mlp = ResidualMLP(64, 10, width=WIDTH, depth=LAYERS[layers], **FORMS[form])
    optimizer = torch.optim.Adam(mlp.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for epoch in range(1, epochs + 1):
        for part in torch.randperm(len(x), generator=generator).split(128):
            loss = F.cross_entropy(mlp(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            wrong = (mlp(x).argmax(dim=-1) != y).float().mean()
        curve.append((float(epoch), float(wrong)))
    return mlp, curve


def direction(mlp: Any, generator: torch.Generator) -> list[Tensor]:
    """Return a random direction whose rows have the norms of the weights' rows; biases stay."""
    found = []
    for weight in mlp.parameters():
        if weight.ndim < 2:
            found.append(torch.zeros_like(weight))
            continue
        noise = torch.randn(weight.shape, generator=generator)
        found.append(
            noise / noise.norm(dim=1, keepdim=True) * weight.detach().norm(dim=1, keepdim=True)
        )
    return found


@torch.no_grad()
def surface(mlp: Any, side: int) -> list[list[float]]:
    """Return the training loss over a plane through the trained weights, the top row first."""
    x, y = data()
    generator = torch.Generator().manual_seed(0)
    one, two = direction(mlp, generator), direction(mlp, generator)
    trained = [weight.clone() for weight in mlp.parameters()]
    steps = torch.linspace(-SPAN, SPAN, side).tolist()
    rows = []
    for b in reversed(steps):
        row = []
        for a in steps:
            for weight, start, d, e in zip(mlp.parameters(), trained, one, two, strict=True):
                weight.copy_(start + a * d + b * e)
            row.append(float(F.cross_entropy(mlp(x[:600]), y[:600])))
        rows.append(row)
    for weight, start in zip(mlp.parameters(), trained, strict=True):
        weight.copy_(start)
    return rows


def measure(form: str, layers: int, epochs: int, seed: int, side: int) -> Row:
    mlp, curve = train(form, layers, epochs, seed)
    row: Row = {"curve": curve, "error": curve[-1][1]}
    if layers == 56 and seed == 0 and form in ("plain", "addition"):
        row["surface"] = surface(mlp, side)
    return row


def draw(results: Results) -> None:
    curves = {}
    for form in FORMS:
        for layers in LAYERS:
            rows = results.where(form=form, layers=layers)
            points = zip(*(row["curve"] for row in rows), strict=True)
            curves[f"{form} {layers}"] = [(p[0][0], mean([e for _, e in p])) for p in points]
            print(
                f"{form:17} {layers}: training error", ", ".join(f"{r['error']:.4f}" for r in rows)
            )
    shown = {name: points for name, points in curves.items() if "before" not in name}
    results.write(
        "residual-error",
        line_chart(shown, title="Training error", x="epoch", y="share of errors"),
    )
    for form in ("plain", "addition"):
        cells = results.where(form=form, layers=56, seed=0)[0]["surface"]
        steps = [f"{-SPAN + 2 * SPAN * i / (len(cells) - 1):.2f}" for i in range(len(cells))]
        logs = [[min(math.log10(max(v, 1e-3)), MOST) for v in row] for row in cells]
        picture = heat_map(
            logs, steps[::-1], steps, title=f"log₁₀ loss, 56 layers, {form}", x="direction 1",
            y="direction 2",
        )  # fmt: skip
        results.write(f"residual-surface-{form}", picture)
        middle = cells[len(cells) // 2][len(cells) // 2]
        near = [v for row in cells for v in row if v < 10 * max(middle, 0.01)]
        share = len(near) / len(cells) ** 2
        print(f"{form}: loss {middle:.4f} in the middle, below ten times that in {share:.0%}")


def main() -> None:
    args = arguments("residual_depth", __doc__)
    results = Results(args.out, "residual_depth")
    epochs, seeds, side = (1, 1, 3) if args.quick else (25, 2, 25)
    for seed in range(seeds):
        for form in FORMS:
            for layers in LAYERS:
                results.measure(
                    {"form": form, "layers": layers, "seed": seed},
                    lambda f=form, n=layers, s=seed: measure(f, n, epochs, s, side),  # type: ignore[misc]
                )
    draw(results)


if __name__ == "__main__":
    main()
