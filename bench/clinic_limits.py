"""Where the limits of the clinic's findings come from: each measurement over well and sick models.

    python -m bench.clinic_limits

Well: every arrangement, in three modes, fresh, at depth 2 and 6. For each measurement that a rule
has a limit for, the extreme over all of them is printed beside the limit, and then the value of the
model made sick in that way. Then the signals of a run that is watched: the extreme over the looks
at runs that train, beside the limit of its warning, and over a run whose rate is far too high.
About three minutes on one core.
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
from bench.clinic_task import Drawn

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
LOW = {"token share", "position variance"}
"""Sick below the limit; the others above."""


def well() -> list[Evidence]:
    found = []
    for addnorm in ADDNORMS:
        for mode in ("encoder", "decoder", "encoder-decoder"):
            for depth in (2, 6):
                found.append(seen(addnorm=addnorm, mode=mode, depth=depth))
    return found


def seen(change: Callable[[nn.Module], object] | None = None, **changes: Any) -> Evidence:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"vocab": 500, "width": 64, "heads": 4, "depth": 2, "pad": 0}
    chosen |= {"dropout": 0.0, "addnorm": "pre", "mode": "decoder"} | changes
    model = build(ModelConfig(**chosen))
    with torch.no_grad():
        if change is not None:
            change(model)
    return examine(model, draw_batch(model)[0], sharpness=False).evidence


def linears(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def sick() -> dict[str, Evidence]:
    return {
        "attention spread": seen(attention_scale=1.0),
        "weight gain": seen(lambda m: [part.weight.mul_(3) for part in linears(m)]),
        "norm gain": seen(
            lambda m: next(p for p in m.modules() if isinstance(p, nn.LayerNorm)).weight.mul_(50)
        ),
        "token share": seen(scale_embedding=False),
        "dead units": seen(
            lambda m: [part.bias.fill_(-20) for part in linears(m) if part.out_features == 256]
        ),
        "position variance": seen(addnorm="post", depth=18),
    }


def signals(addnorm: str, lr: float, depth: int = 6) -> list[dict[str, Any]]:
    """What the clinic sees of 100 steps on the language of the grid, every 5 of them."""
    task, clinic = Drawn(text), TrainingMonitor(every=5)
    model = make(addnorm, depth, seed=0)
    settings = LoopSettings(steps=100, schedule=lambda step: min(1.0, step / 20))
    optimizer = make_optimizer(model, "adam", lr=lr)
    Loop(model, task, optimizer, settings, observers=[clinic]).run()
    return clinic.signals


def watched() -> None:
    ok = [row for kind in ("post", "pre", "admin") for row in signals(kind, 3e-3)]
    bad = signals("post", 0.3)
    print("\n| signal | trains | limit | rate 100 times too high |\n|---|---|---|---|")
    for name, (worse, limit, _) in EARLY_WARNINGS.items():
        most = min if worse == "<" else max
        ends = [most(row[name] for row in rows) for rows in (ok, bad)]
        print(f"| {name} | {ends[0]:.3g} | {limit:g} | {ends[1]:.3g} |")


def main() -> None:
    torch.set_num_threads(1)
    healthy, ill = well(), sick()
    print(f"{len(healthy)} well models\n\n| measurement | well | limit | sick |\n|---|---|---|---|")
    for name, measure in MEASURES.items():
        values = [measure(e) for e in healthy]
        worst = min(values) if name in LOW else max(values)
        bad = f"{measure(ill[name]):.3g}" if name in ill else ""
        print(f"| {name} | {worst:.3g} | {THRESHOLDS[name]:g} | {bad} |", flush=True)
    watched()


if __name__ == "__main__":
    main()
