"""The plugin in tests/portable.py: unmarked training fails, gradients are perturbed repeatably."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.portable import UNITS, perturb_

CASES = """
import subprocess, sys
import pytest, torch
from tests.portable import training_is_marked

def step():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()

@pytest.fixture(scope="module")
def fitted():
    step()

@pytest.mark.trains
def test_good_fixture(fitted): pass
def test_bad_fixture(fitted): pass
def test_bad_step(): step()
@pytest.mark.trains
def test_good_step(): step()
def test_bad_process(): subprocess.run([sys.executable, "-c", ""])
@pytest.mark.process
def test_good_process(): subprocess.run([sys.executable, "-c", ""])
def test_good_neither(): pass
"""


@pytest.mark.process
@pytest.mark.slow
def test_training_must_be_marked(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    trains\n    process\n")
    (tmp_path / "conftest.py").write_text("from tests.portable import pytest_fixture_setup")
    (tmp_path / "test_cases.py").write_text(CASES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    failed = set(re.findall(r"^ERROR .*::(\w+)", done.stdout, re.MULTILINE))
    assert failed == {"test_bad_fixture", "test_bad_step", "test_bad_process"}, done.stdout
    assert "7 passed, 3 errors" in done.stdout


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_perturbation_is_small_repeatable_and_depends_on_the_seed(dtype: torch.dtype) -> None:
    gradient = torch.randn(1000, dtype=dtype)
    results = []
    for seed in (1, 1, 2):
        results.append(gradient.clone())
        perturb_(results[-1], seed)
    first, again, other = results
    assert torch.equal(first, again) and not torch.equal(first, other)
    change = (first - gradient).abs() / gradient.abs()
    eps = torch.finfo(dtype).eps
    assert eps / 2 < float(change.max()) <= (UNITS + 1) * eps
    zero = torch.zeros(3, dtype=dtype)
    perturb_(zero, 1)
    assert torch.equal(zero, torch.zeros(3, dtype=dtype))
