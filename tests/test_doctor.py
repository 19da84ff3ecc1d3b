"""Every check of the machine: what is found, and what is advised when it is not good."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import doctor
from addnorm.cli.main import main
from addnorm.doctor import EXTRAS, GOOD, NOTE, PROBLEM, REQUIRED, check_machine

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[<>=\[]", line)[0] for line in requirements}
    return {MODULES.get(name, name) for name in found}


def test_the_lists_are_those_of_the_project() -> None:
    assert set(REQUIRED) == names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert {name: set(modules) for name, modules in EXTRAS.items()} == {
        name: names(extras[name]) - {"addnorm"}
        for name in extras
        if name not in ("dev", "bench", "docs")
    }


def test_every_note_has_advice() -> None:
    checks = check_machine()
    assert {check.name for check in checks} >= {"python", "cpu", "threads", "memory", "extra text"}
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.status in (GOOD, NOTE, PROBLEM) and check.value
        assert bool(check.advice) == (check.status != GOOD), check


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no-such-package"))
    checks = check_machine()
    assert checks[-1].status == PROBLEM and checks[-1].advice.endswith("install no-such-package")


def test_a_missing_extra_says_how_to_install_it() -> None:
    check = doctor._extra("tables", ("json", "no_such_module"))
    assert check.value == "without no_such_module"
    assert check.advice.endswith("pip install 'addnorm[tables]'")


@pytest.mark.parametrize(
    ("threads", "cores", "load", "advice"),
    [
        (8, 2.0, 0.0, "export OMP_NUM_THREADS=2"),
        (1, 4.0, 0.0, "Unused cores"),
        (2, 2.0, 9.0, "Other programs use the cores"),
        (2, 2.0, 0.5, ""),
    ],
)
def test_threads(
    threads: int, cores: float, load: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "available_cores", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    check = doctor._threads()
    assert advice in check.advice and (check.status == GOOD) == (not advice)


def test_little_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: (2**30, 2**34))
    assert doctor._memory().value == "1.0 of 16.0 GiB free" and doctor._memory().status == NOTE
    monkeypatch.setattr(doctor, "available_memory", lambda: None)
    assert "unknown" in doctor._memory().value
    usage: Any = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert "free some space" in doctor._disk(tmp_path).advice


def test_old_and_forced_cpus_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(doctor, "_cpu_name", lambda: ("old", False))
    assert "No AVX2" in doctor._cpu().advice
    monkeypatch.setattr(doctor, "_cpu_name", lambda: ("new", True))
    assert "unset ATEN_CPU_CAPABILITY" in doctor._cpu().advice
    monkeypatch.setattr(doctor, "has_broken_amx", lambda: True)
    assert "set DNNL_MAX_CPU_ISA=" in doctor._numbers_in().advice
    monkeypatch.setattr(doctor, "has_broken_amx", lambda: False)
    monkeypatch.setattr(doctor, "is_slow", lambda device, dtype: True)
    assert "precision=auto" in doctor._numbers_in().advice


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^✓ torch\s+\d", shown, re.M) and "\nproblems: " in shown
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {tuple(row) for row in rows} == {("name", "status", "value", "advice")}
