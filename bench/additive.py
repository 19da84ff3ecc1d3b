"""Additive against dot-product attention, scaled and unscaled, over the width of the keys.

    python -m bench.additive --out FOLDER [--quick]

start    standard deviation of the scores, and entropy of the attention weights over that of uniform
         weights, at the initial weights (Vaswani et al. 2017, §3.2.1: the variance of q·k is d_k)
train    recall: each of 8 positions holds a key and a value, the last one a key; its value is to be
         found by one attention layer. Held-out accuracy by step, two seeds, the rate of each
         chosen from two on another seed
cost     CPU seconds of forward and backward, and bytes saved for backward, for 128 queries and keys
"""

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.report import line_chart
from bench.measured import Results, Row, arguments, mean

KINDS: dict[str, dict[str, Any]] = {
    "additive": {"attention": "additive"},
    "dot, scaled": {"attention": "dot"},
    "dot, unscaled": {"attention": "dot", "attention_scale": 1.0},
}
WRITTEN_OUT = "dot, written out"
"""The scaled dot product by the same three lines as the additive score, without a fused kernel."""
WIDTHS = (16, 32, 64, 128, 256, 512)
WIDTH, KEYS, PAIRS, VALUES = 64, 16, 8, 8
RATES = (1e-3, 4e-3)


def make(kind: str, key_width: int, seed: int, width: int = WIDTH) -> Any:
    """Return one block of attention with one head, and a classifier over its last position."""
    torch.manual_seed(seed)
    config = ModelConfig(
        mode="encoder", input="vectors", head="class", outputs=VALUES, pool="last", ffn="none",
        positions="none", depth=1, width=width, heads=1, head_width=key_width, dropout=0.0,
        addnorm="pre", **KINDS[kind],
    )  # fmt: skip
    return build(config)


def recall(rows: int, generator: torch.Generator, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (rows, pairs + 1, width) and the value that belongs to the last key.

    A position has a key in its first half and a value in its second; the last has the key alone.
    """
    half = WIDTH // 2
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:PAIRS] for _ in range(rows)])
    values = torch.randint(VALUES, (rows, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (rows,), generator=generator)
    x = torch.zeros(rows, PAIRS + 1, WIDTH)
    x[:, :PAIRS, :half], x[:, :PAIRS, half:] = codes[keys], codes[KEYS + values]
    x[:, PAIRS, :half] = codes[keys.gather(1, asked[:, None])[:, 0]]
    return x, values.gather(1, asked[:, None])[:, 0]


def train(kind: str, key_width: int, rate: float, steps: int, seed: int) -> Row:
    """Return the held-out accuracy by step."""
    codes = torch.randn(KEYS + VALUES, WIDTH // 2, generator=torch.Generator().manual_seed(99))
    model = make(kind, key_width, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    held, answers = recall(512, torch.Generator().manual_seed(77), codes)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    curve = []
    for step in range(1, steps + 1):
        x, y = recall(32, generator, codes)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            with torch.no_grad():
                right = (model(held).argmax(dim=-1) == answers).float().mean()
            curve.append((step, float(right)))
    return {"accuracy": curve[-1][1], "area": mean([a for _, a in curve]), "curve": curve}


@torch.no_grad()
def start(kind: str, key_width: int) -> Row:
    """Return statistics of scores and weights at the initial weights, on random vectors."""
    found = []
    for seed in range(3):
        model = make(kind, key_width, seed)
        attention = model.encoder.stack.blocks[0].sublayers["attention"]
        x = torch.randn(16, 64, WIDTH)
        q, k, _ = (attention.split(p) for p in attention.input(x).split(attention.sizes, dim=-1))
        scores = attention.score(q, k)
        weights = scores.softmax(dim=-1)
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(dim=-1).mean() / math.log(64)
        found.append((float(scores.std()), float(entropy)))
    deviations, entropies = zip(*found, strict=True)
    return {"deviation": mean(deviations), "entropy": mean(entropies)}


def cost(kind: str, key_width: int, rounds: int) -> Row:
    """Return CPU seconds and saved bytes of one attention over 8 × 128 positions."""
    model = make("dot, scaled" if kind == WRITTEN_OUT else kind, key_width, 0)
    attention = model.encoder.stack.blocks[0].sublayers["attention"]
    fused = attention.score.fused and kind != WRITTEN_OUT
    q, k, v = (torch.randn(8, 1, 128, key_width, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def run() -> None:
        if fused:
            mixed = F.scaled_dot_product_attention(q, k, v, scale=attention.score.scale)
        else:
            mixed = attention.score(q, k).softmax(dim=-1) @ v
        mixed.sum().backward()

    run()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return {"seconds": sorted(times)[len(times) // 2], "bytes": sum(saved.values())}


def draw(results: Results) -> None:
    def curves(part: str, field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            kind: [
                (float(w), mean([row[field] for row in results.where(part=part, kind=kind, key=w)]))
                for w in WIDTHS
                if results.where(part=part, kind=kind, key=w)
            ]
            for kind in (*KINDS, WRITTEN_OUT)
            if results.where(part=part, kind=kind)
        }

    charts = {
        "start": ("deviation", "Scores at the start", "standard deviation", True),
        "entropy": ("entropy", "Attention weights at the start", "entropy / log n", False),
        "train": ("area", "Recall: mean held-out accuracy over training", "accuracy", False),
        "time": ("seconds", "Forward and backward", "CPU seconds", True),
        "memory": ("bytes", "Saved for backward", "bytes", True),
    }
    parts = {"entropy": "start", "time": "cost", "memory": "cost"}
    for name, (field, title, y, log) in charts.items():
        found = curves(parts.get(name, name), field)
        picture = line_chart(found, title=title, x="key width", y=y, log_x=True, log_y=log)
        results.write(f"additive-{name}", picture)
        for kind, points in found.items():
            print(f"{name:8} {kind:14}", "  ".join(f"{w:.0f}: {v:.3g}" for w, v in points))


def main() -> None:
    args = arguments("additive", __doc__)
    results = Results(args.out, "additive")
    steps, seeds, rounds = (2, 1, 2) if args.quick else (200, 2, 7)
    for key in WIDTHS[:2] if args.quick else WIDTHS:
        results.measure(
            {"part": "cost", "kind": WRITTEN_OUT, "key": key},
            lambda w=key: cost(WRITTEN_OUT, w, rounds),  # type: ignore[misc]
        )
        for kind in KINDS:
            place = {"kind": kind, "key": key}
            results.measure({"part": "start", **place}, lambda k=kind, w=key: start(k, w))  # type: ignore[misc]
            results.measure({"part": "cost", **place}, lambda k=kind, w=key: cost(k, w, rounds))  # type: ignore[misc]
            tried = [
                results.measure(
                    {"part": "rate", **place, "rate": rate},
                    lambda k=kind, w=key, r=rate: train(k, w, r, steps, 100),  # type: ignore[misc]
                )
                for rate in RATES
            ]
            best = max(tried, key=lambda row: row["area"])["rate"]
            for seed in range(seeds):
                results.measure(
                    {"part": "train", **place, "rate": best, "seed": seed},
                    lambda k=kind, w=key, r=best, s=seed: train(k, w, r, steps, s),  # type: ignore[misc]
                )
    draw(results)


if __name__ == "__main__":
    main()
