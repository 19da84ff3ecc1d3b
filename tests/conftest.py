"""Shared by all tests: one thread, one seed, and small models with no weight at a special value."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from addnorm.cpu import amx_workaround

os.environ.update(amx_workaround())
# The suite runs in several processes at once; threads that wait for each other make it slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The package shap compiles for seconds in every process what the tests call a few times.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from addnorm import ModelConfig, build
from addnorm.models.build import Model

pytest_plugins = ["tests.portable"]
settings.register_profile(
    "addnorm", deadline=None, derandomize=True, database=None, max_examples=40
)
settings.load_profile("addnorm")

MODES = ("encoder", "decoder", "encoder-decoder")
POSITIONS = ("sinusoidal", "learned", "rotary", "linear-bias", "buckets", "relative", "none")
ARRANGEMENTS = ("post", "pre", "b2t", "dlcl", "hyper", "dual")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "cap": {"attention_cap": 2.0},
    "additive": {"attention": "additive"},
    "query and key norm": {"qk_norm": "head"},
    "norm across heads": {"qk_norm": "width", "norm": "rms"},
    "wide heads": {"head_width": 6},
    "gated": {"ffn": "swiglu", "attention_bias": "none", "ffn_bias": False},
    "extra norms": {"embed_norm": True, "final_norm": True, "norm": "scale"},
    "window": {"window": 3},
    "all-attention": {"ffn": "all-attention", "ffn_width": 5},
    "grouped all-attention": {"ffn": "all-attention", "ffn_width": 5, "kv_heads": 2},
    "no feed-forward": {"ffn": "none"},
    "product-key": {
        "ffn": "product-key",
        "ffn_options": {"subkeys": 4, "best": 3, "heads": 2, "key_width": 6},
    },
    "adaptive span": {"span": 4, "span_ramp": 3},
}
"""Options that must not change which positions are visible."""
VOCAB = 19
PAD = 0


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    # torch.manual_seed would also format a stack trace for each kind of GPU: slow, for every test.
    torch.default_generator.manual_seed(request.config.getoption("--seed"))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def slow_except(fast: Sequence[str], names: Iterable[str]) -> list[Any]:
    """Return the parameters of a test: all names, those not in `fast` marked slow."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


def slow_off_diagonal(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of a test's parameters, marked slow except for a diagonal.

    The fast ones are as many as the longest axis has values, and contain each value of every axis.
    """
    longest = max(axes, key=len)
    diagonal = {tuple(axis[i % len(axis)] for axis in axes) for i in range(len(longest))}
    return [
        each if each in diagonal else pytest.param(*each, marks=pytest.mark.slow)
        for each in product(*axes)
    ]


def make(mode: str, **changes: Any) -> Model:
    """Return a small model in float64, without dropout and with every weight perturbed.

    Initial weights hide errors: biases of 0, gains of 1, branches that start at 0.
    """
    sizes: dict[str, Any] = {"vocab": VOCAB, "pad": PAD, "width": 16, "depth": 2, "heads": 4}
    model = build(ModelConfig(mode=mode, **(sizes | {"length": 24, "dropout": 0.0} | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def draw(*shape: int) -> Tensor:
    """Return random token ids without padding."""
    return torch.randint(1, VOCAB, shape)


def other(ids: Tensor) -> Tensor:
    """Return ids that differ from these everywhere, without padding."""
    return ids % (VOCAB - 1) + 1


def pad_rows(rows: Sequence[Tensor], side: str) -> Tensor:
    """Return sequences of different lengths as one batch, padded on one side."""
    longest = max(len(row) for row in rows)
    batch = torch.full((len(rows), longest), PAD)
    for line, row in zip(batch, rows, strict=True):
        line[slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)] = row
    return batch


def inputs(mode: str, batch: int = 2, length: int = 6) -> tuple[Tensor, ...]:
    """Return the arguments for a model of this mode: ids, preceded by a source if it needs one."""
    ids = draw(batch, length)
    return (draw(batch, length + 2), ids) if mode == "encoder-decoder" else (ids,)


def close(one: Tensor, two: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that two tensors have the same shape and are equal up to the rounding of float64."""
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
