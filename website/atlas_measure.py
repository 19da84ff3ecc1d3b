"""What the atlas measures of a variant at initialisation: gradients, dependency, time of a step.

The model is small (width 64, 4 heads) and new; its input is random tokens, its loss the
cross-entropy of the next token (in an encoder, of the token itself). Seed 0.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import ModelConfig, build, measure_
from addnorm.clinic.call_model import ClinicBatch
from addnorm.clinic.measure import dependency_map
from addnorm.clinic.residual_trace import trace_stream

DEPTHS = (6, 18, 64)
SMALL: dict[str, Any] = {"vocab": 200, "width": 64, "heads": 4, "length": 32, "ffn_width": 256}
TIMED: dict[str, Any] = SMALL | {"width": 128, "length": 64, "ffn_width": 512, "depth": 6}
ROWS, REPEATS = 4, 15


@dataclass(frozen=True)
class Profile:
    """Measurements of one depth.

    Parameters
    ----------
    depth
        Number of blocks.
    gradients
        Norm of the gradient in the weights of each block.
    shares
        After each block, the share of the input and of each block in the variance of the stream;
        empty if nothing joins a stream.
    """

    depth: int
    gradients: list[float]
    shares: list[list[float]]

    @property
    def is_followed(self) -> bool:
        """Whether earlier blocks could be told apart in the stream after later ones.

        Where every branch is 0 at first, the stream is the input, and there is nothing to tell.
        """
        is_input = bool(self.shares) and not any(any(row[1:]) for row in self.shares)
        return is_input or any(any(row[1 : block + 1]) for block, row in enumerate(self.shares))


def make(**settings: Any) -> tuple[nn.Module, Tensor]:
    """Return a new model and a batch of random tokens."""
    torch.manual_seed(0)
    model = build(ModelConfig(**settings)).train()
    ids = torch.randint(settings["vocab"], (ROWS, settings["length"]))
    if settings.get("addnorm") == "admin":
        measure_(model, lambda: model(ids))
    return model, ids


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross-entropy of the next token; in an encoder, of the token itself."""
    logits = model(ids)
    shift = 1 if hasattr(model, "decoder") else 0
    return F.cross_entropy(
        logits[:, : logits.shape[1] - shift].flatten(0, 1), ids[:, shift:].flatten()
    )


def profile(depth: int, **settings: Any) -> Profile:
    """Return gradients and dependency of a new model of this depth."""
    model, ids = make(**SMALL | settings | {"depth": depth})
    loss_of(model, ids).backward()
    side = getattr(model, "decoder", None) or model.encoder
    gradients = [
        float(
            torch.stack([p.grad.square().sum() for p in block.parameters() if p.grad is not None])
            .sum()
            .sqrt()
        )
        for block in side.stack.blocks
    ]
    trace = trace_stream(model, ClinicBatch(ids), sites_only=False)
    rows = dependency_map(trace)
    last = {_block_of(site.name): row for site, row in zip(trace.sites, rows, strict=True)}
    shares = [_by_block(last[block], depth) for block in sorted(last)]
    return Profile(depth, gradients, shares)


def _block_of(name: str) -> int:
    """Return the number of the block in the name of a site, such as decoder.3.ffn."""
    return int(name.split(".")[1])


def _by_block(row: dict[str, float], depth: int) -> list[float]:
    """Return the shares of the input and of each block."""
    total = [0.0] * (depth + 1)
    for name, share in row.items():
        total[0 if name == "input" else _block_of(name) + 1] += share
    return total


def step_time(settings: dict[str, Any], baseline: dict[str, Any]) -> tuple[float, float, float]:
    """Return the time of a forward and backward pass over that of the baseline.

    Both alternate in one process; CPU time; lower quartile, median, upper quartile of the ratios.
    """
    subjects = [make(**TIMED | each) for each in (settings, baseline)]
    ratios = []
    for repeat in range(REPEATS + 2):
        seconds = []
        for model, ids in subjects:
            started = time.process_time()
            loss_of(model, ids).backward()
            seconds.append(time.process_time() - started)
            model.zero_grad()
        if repeat > 1:  # the first two warm up
            ratios.append(seconds[0] / seconds[1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high
