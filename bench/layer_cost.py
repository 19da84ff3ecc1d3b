"""Time and memory of four layers against length and width, with the formulas through the points.

    python -m bench.layer_cost --out FOLDER [--quick]

Self-attention O(n² d + n d²), feed-forward O(n d²), recurrent (GRU) O(n d²) in n steps, convolution
of k = 3 O(k n d²): Vaswani et al. 2017, table 1. CPU seconds of forward and backward on one thread,
one sequence, the least of several rounds that alternate between the layers; memory is what autograd
saves. Dashed: the operations of the formula, at the speed that the layer has at its last point.
"""

import time
from collections.abc import Callable
from math import exp, log

import torch
from torch import Tensor, nn

from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.convolution import Convolution
from addnorm.layers.feedforward import FeedForward
from addnorm.report import Mark, line_chart
from bench.measured import Results, Row, arguments

KERNEL = 3
LENGTHS, WIDTHS = (32, 64, 128, 256, 512, 1024, 2048), (16, 32, 64, 128, 256, 512)
WIDTH, LENGTH = 64, 256
NAMES = ("attention", "feed-forward", "recurrent", "convolution")
CROSSINGS = {
    "length": (("attention", "convolution"),),
    "width": (("feed-forward", "attention"), ("convolution", "attention")),
}
"""Pairs of layers whose order changes as the length or the width grows."""


def operations(name: str, n: int, d: int) -> float:
    """Return the operations of the forward pass, by formula."""
    return {
        "attention": 8 * n * d * d + 4 * n * n * d,
        "feed-forward": 16 * n * d * d,
        "recurrent": 12 * n * d * d,
        "convolution": 2 * n * d * d * (2 * KERNEL + 1),
    }[name]


def make(name: str, d: int) -> Callable[[Tensor], Tensor]:
    """Return a layer as a function from (1, length, width) to the same."""
    torch.manual_seed(0)
    heads = max(1, d // 32)
    layers: dict[str, Callable[[], nn.Module]] = {
        "attention": lambda: SelfAttention(d, heads, heads, d // heads, 0),
        "feed-forward": lambda: FeedForward(d, 4 * d, torch.relu),
        "recurrent": lambda: nn.GRU(d, d, batch_first=True),
        "convolution": lambda: Convolution(d, KERNEL, 0, causal=True, heads=heads),
    }
    layer = layers[name]()
    if name == "recurrent":
        return lambda x: layer(x)[0]
    return lambda x: layer(x, Context())


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the CPU seconds of forward and backward."""
    begin = time.process_time()
    layer(x).sum().backward()
    return time.process_time() - begin


def saved_bytes(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes that autograd saves, parameters included once."""
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(size for size, _ in saved.values())


def measure(n: int, d: int, rounds: int) -> Row:
    """Return seconds and bytes of every layer, timed in alternation."""
    layers = {name: make(name, d) for name in NAMES}
    x = torch.randn(1, n, d, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds + 1):
        for name, layer in layers.items():
            times[name].append(step(layer, x))
    row: Row = {}
    for name, layer in layers.items():
        row[name] = {"seconds": min(times[name][1:]), "bytes": saved_bytes(layer, x)}
    return row


def crossing(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> tuple[float, float] | None:
    """Return where the first curve rises above the second, between two points on log scales."""
    last = None
    for (x, a), (_, b) in zip(first, second, strict=True):
        gap = log(a) - log(b)
        if last is not None and last[1] < 0 <= gap:
            share = -last[1] / (gap - last[1])
            place = exp(log(last[0]) + share * (log(x) - log(last[0])))
            return place, exp(log(last[2]) + share * (log(b) - log(last[2])))
        last = (x, gap, b)
    return None


def draw(results: Results, axis: str, values: tuple[int, ...]) -> None:
    rows = {row[axis]: row for row in results.where(part=axis)}
    known = [value for value in values if value in rows]
    for field, y in (("seconds", "CPU seconds"), ("bytes", "bytes saved")):
        points = {name: [(float(v), rows[v][name][field]) for v in known] for name in NAMES}
        guides, marks = {}, []
        if field == "seconds":
            for name in NAMES:
                sizes = [(v, WIDTH) if axis == "length" else (LENGTH, v) for v in known]
                speed = operations(name, *sizes[-1]) / points[name][-1][1]
                guides[name] = [
                    (float(v), operations(name, *size) / speed)
                    for v, size in zip(known, sizes, strict=True)
                ]
            for one, other in CROSSINGS[axis]:
                place = crossing(points[one], points[other])
                if place is None:
                    continue
                print(f"{axis}: {one} costs more time than {other} from {place[0]:.0f}")
                marks.append(Mark(*place, f"{one} = {other} at {place[0]:.0f}"))
        fixed = f"width {WIDTH}" if axis == "length" else f"length {LENGTH}"
        picture = line_chart(
            points,
            title=f"{y} against {axis}, {fixed}",
            x=axis,
            y=y,
            log_x=True,
            log_y=True,
            marks=marks,
            guides=guides,
        )
        results.write(f"cost-{axis}-{field}", picture)
        for name, found in points.items():
            print(f"{axis} {field} {name:13}", "  ".join(f"{v:.0f}: {x:.3g}" for v, x in found))


def main() -> None:
    args = arguments("layer_cost", __doc__)
    results = Results(args.out, "layer_cost")
    rounds = 1 if args.quick else 5
    for n in LENGTHS[:2] if args.quick else LENGTHS:
        results.measure({"part": "length", "length": n}, lambda n=n: measure(n, WIDTH, rounds))  # type: ignore[misc]
    for d in WIDTHS[:2] if args.quick else WIDTHS:
        results.measure({"part": "width", "width": d}, lambda d=d: measure(LENGTH, d, rounds))  # type: ignore[misc]
    draw(results, "length", LENGTHS)
    draw(results, "width", WIDTHS)


if __name__ == "__main__":
    main()
