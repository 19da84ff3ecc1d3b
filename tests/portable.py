"""A pytest plugin that makes tests which train portable between CPUs.

The result of a short training depends on the CPU: other vector instructions round differently, and
an unstable training amplifies one bit into a different result. Therefore:

- a test that calls an optimizer's step, itself or through a fixture, must be marked `trains`;
  otherwise it fails. A child process cannot be observed, so a test that starts Python must be
  marked `trains` or `process`.
- `make portable` repeats the tests with the kernels of older CPUs and with `--seed N`. N seeds
  every test, and for N > 0 each gradient is perturbed by a few units in the last place, as another
  CPU would do. The perturbation is a function of the gradient alone, so results that must be
  bit-identical (a resumed run, a repeated run) still are.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

UNITS = 4
"""Largest perturbation of a gradient, in units in the last place."""


class Training:
    """Records which tests and fixtures call an optimizer's step or start a Python process."""

    def __init__(self) -> None:
        self.seed = 0
        self.stepped = self.started_python = False
        self.active_setups: list[object] = []
        self.fixtures_that_train: set[object] = set()

    def note(self) -> None:
        """Record that the running test trains, or uses a model that was trained and cached."""
        self.stepped = True
        self.fixtures_that_train.update(self.active_setups)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.note()
        if self.seed:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        perturb_(parameter.grad, self.seed)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and "python" in str(arguments[1]):
            self.started_python = True


training = Training()
register_optimizer_step_pre_hook(training.before_step)
sys.addaudithook(training.audit)


def perturb_(gradient: torch.Tensor, seed: int) -> None:
    """Change each element by up to UNITS in the last place, as a function of the elements alone."""
    limits = torch.finfo(gradient.dtype)
    largest = gradient.abs().max().clamp_min(limits.tiny)
    wave = torch.sin(seed + 1000 * gradient / largest)
    gradient.mul_(1 + UNITS * limits.eps * wave)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=0, help="seed of every test; above 0, gradients are perturbed"
    )


def pytest_configure(config: pytest.Config) -> None:
    training.seed = config.getoption("--seed")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: object) -> Iterator[None]:
    training.active_setups.append(fixturedef)
    try:
        return (yield)
    finally:
        training.active_setups.pop()


@pytest.fixture(autouse=True)
def training_is_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that trains, or may train in another process, and is not marked accordingly."""
    training.stepped = training.started_python = False
    yield
    fixtures = {f for each in request.node._fixtureinfo.name2fixturedefs.values() for f in each}
    marks = {mark.name for mark in request.node.iter_markers()}
    if (training.stepped or fixtures & training.fixtures_that_train) and "trains" not in marks:
        pytest.fail("this test trains: mark it `trains` so that `make portable` repeats it.")
    if training.started_python and not marks & {"trains", "process"}:
        pytest.fail(
            "this test starts a Python process: mark it `trains`, or `process` if nothing is "
            "trained there."
        )
