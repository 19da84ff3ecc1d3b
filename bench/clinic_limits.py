"""Where the thresholds of the rules come from: each measurement of healthy and broken models.

    python -m bench.clinic_limits

Healthy: every arrangement with residual connections in three modes, untrained, with depth 2 and 6.
For each measurement that has a threshold, print its extreme over all healthy models, the threshold,
and the value of a model that is broken in that way. Then the same for the signals of the training
monitor: runs that train, and a run whose learning rate is far too high. About three minutes on one
core.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from addnorm import ModelConfig, build
from addnorm.clinic import Evidence, examine
from addnorm.clinic.random_batch import draw_batch
from addnorm.clinic.rules import THRESHOLDS
from addnorm.clinic.training_monitor import EARLY_WARNINGS, TrainingMonitor
from addnorm.layers.addnorm import ADDNORMS
from addnorm.training.loop import Loop, LoopSettings
from addnorm.training.optimizer import make_optimizer
from bench.clinic_grid import make, text
from bench.clinic_task import RandomTask

Measure = Callable[[Evidence], float]

MEASURES: dict[str, Measure] = {
    "attention spread": lambda e: max(e.attention[0].spread),
    "weight gain": lambda e: e.weight_gain or 0.0,
    "norm gain": lambda e: max((g.size for g in e.norm_gains), default=0.0),
    "token share": lambda e: e.experiments.token_share or 1.0,
    "dead units": lambda e: max(u.dead for u in e.activations if u.kind not in ("tanh", "sigmoid")),
    "outlier": lambda e: max(s.outlier for s in e.sites),
    "padding": lambda e: e.experiments.padding_change or 0.0,
    "answer deviation": lambda e: e.answer_deviation,
    "position variance": lambda e: e.sites[-1].position_variance,
}
LOWER_IS_BROKEN = {"token share", "position variance"}
"""Measurements that are too small in a broken model; the others are too large."""


def healthy_models() -> list[Evidence]:
    evidence = []
    for addnorm in (kind for kind in ADDNORMS if kind != "none"):
        for mode in ("encoder", "decoder", "encoder-decoder"):
            for depth in (2, 6):
                evidence.append(measure_model(addnorm=addnorm, mode=mode, depth=depth))
    return evidence


def measure_model(change: Callable[[nn.Module], object] | None = None, **changes: Any) -> Evidence:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab": 500, "width": 64, "heads": 4, "depth": 2, "pad": 0}
    settings |= {"dropout": 0.0, "addnorm": "pre", "mode": "decoder"} | changes
    model = build(ModelConfig(**settings))
    with torch.no_grad():
        if change is not None:
            change(model)
    return examine(model, draw_batch(model)[0], sharpness=False).evidence


def linears(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def broken_models() -> dict[str, Evidence]:
    return {
        "attention spread": measure_model(attention_scale=1.0),
        "weight gain": measure_model(lambda m: [part.weight.mul_(3) for part in linears(m)]),
        "norm gain": measure_model(
            lambda m: next(p for p in m.modules() if isinstance(p, nn.LayerNorm)).weight.mul_(50)
        ),
        "token share": measure_model(scale_embedding=False),
        "dead units": measure_model(
            lambda m: [part.bias.fill_(-20) for part in linears(m) if part.out_features == 256]
        ),
        "position variance": measure_model(addnorm="post", depth=18),
    }


def signals(addnorm: str, lr: float, depth: int = 6) -> list[dict[str, Any]]:
    """Return the signals of 100 steps on the language of the grid, every 5 steps."""
    task, monitor = RandomTask(text), TrainingMonitor(every=5)
    model = make(addnorm, depth, seed=0)
    settings = LoopSettings(steps=100, schedule=lambda step: min(1.0, step / 20))
    optimizer = make_optimizer(model, "adam", lr=lr)
    Loop(model, task, optimizer, settings, observers=[monitor]).run()
    return monitor.signals


def print_signals() -> None:
    healthy = [row for kind in ("post", "pre", "admin") for row in signals(kind, 3e-3)]
    diverging = signals("post", 0.3)
    print("\n| signal | trains | threshold | rate 100 times too high |\n|---|---|---|---|")
    for name, (worse, limit, _) in EARLY_WARNINGS.items():
        worst = min if worse == "<" else max
        ends = [worst(row[name] for row in rows) for rows in (healthy, diverging)]
        print(f"| {name} | {ends[0]:.3g} | {limit:g} | {ends[1]:.3g} |")


def main() -> None:
    torch.set_num_threads(1)
    healthy, broken = healthy_models(), broken_models()
    print(f"{len(healthy)} healthy models\n")
    print("| measurement | healthy | threshold | broken |\n|---|---|---|---|")
    for name, measure in MEASURES.items():
        values = [measure(e) for e in healthy]
        worst = min(values) if name in LOWER_IS_BROKEN else max(values)
        value = f"{measure(broken[name]):.3g}" if name in broken else ""
        print(f"| {name} | {worst:.3g} | {THRESHOLDS[name]:g} | {value} |", flush=True)
    print_signals()


if __name__ == "__main__":
    main()
