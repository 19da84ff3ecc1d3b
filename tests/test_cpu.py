"""CPU settings, observed in a child process."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from addnorm import build, cpu, examine, presets
from addnorm.cpu import thread_candidates
from addnorm.errors import InputError

SCRIPT = (
    "from addnorm.cpu import reduce_thread_spinning; print(reduce_thread_spinning()); "
    "import os; os.system('env')"
)


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it has an effect with glibc only")
@pytest.mark.parametrize(("user_value", "expected"), ((None, "30000"), ("7", "7")))
def test_thread_spinning_is_reduced_unless_the_user_set_it(
    user_value: str | None, expected: str
) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if user_value is None else {"GOMP_SPINCOUNT": user_value}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT={expected}" in done.stdout.splitlines()
    assert "True" in done.stdout.splitlines()


@pytest.mark.process
def test_thread_spinning_is_set_before_torch_is_imported() -> None:
    look = "import sys, addnorm.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("threads", "variables", "candidates"),
    [
        (8, {}, (1, 8)),
        (4, {}, (1, 4)),  # torch's default if each core has two processors
        (3, {}, (3,)),  # set by torch.set_num_threads
        (1, {}, (1,)),
        (8, {"OMP_NUM_THREADS": "8"}, (8,)),
        (8, {"MKL_NUM_THREADS": "8"}, (8,)),
    ],
)
def test_a_number_of_threads_that_the_user_set_is_kept(
    threads: int,
    variables: dict[str, str],
    candidates: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert thread_candidates() == candidates


# ── AMX that ends the process ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "level", "broken"),
    [("avx512f amx_tile", 28, True), ("avx512f amx_tile", 32, False), ("avx512f", 28, False)],
)
def test_amx_without_the_sizes_of_its_tiles_is_broken(
    monkeypatch: pytest.MonkeyPatch, flags: str, level: int, broken: bool
) -> None:
    text = f"model name\t: some\ncpuid level\t: {level}\nflags\t\t: {flags}\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    assert cpu.has_broken_amx.__wrapped__() is broken


def test_machines_without_a_description_have_no_broken_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu.has_broken_amx.__wrapped__() is False


def test_amx_is_avoided_only_where_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu.ISA_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
    monkeypatch.setattr(cpu, "has_broken_amx", lambda: False)
    cpu.avoid_broken_amx()
    assert not cpu.uses_broken_amx() and not os.environ["DNNL_MAX_CPU_ISA"]
    monkeypatch.setattr(cpu, "has_broken_amx", lambda: True)
    assert cpu.uses_broken_amx()
    cpu.avoid_broken_amx()
    assert not cpu.uses_broken_amx()
    assert os.environ["DNNL_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    cpu.avoid_broken_amx()
    assert os.environ["DNNL_MAX_CPU_ISA"] == "AVX2"


def test_bfloat16_is_refused_where_it_would_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in cpu.ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "has_broken_amx", lambda: True)
    model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).bfloat16()
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(InputError, match="Set DNNL_MAX_CPU_ISA=AVX512_CORE_FP16 before Python"):
        model(ids)
    with pytest.raises(InputError, match="this virtual machine hides them"):
        examine(torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16()), torch.ones(2, 4))
    cpu.require_bfloat16("cpu", "float32")
    cpu.require_bfloat16("cuda", "bfloat16")


@pytest.mark.process
def test_the_machine_survives_products_of_bfloat16() -> None:
    script = (
        "from addnorm.cpu import avoid_broken_amx; avoid_broken_amx(); import torch; "
        "a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a).sum()))"
    )
    hidden = cpu.ISA_VARIABLES
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == 64**3
