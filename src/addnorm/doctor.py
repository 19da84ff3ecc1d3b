"""The installation and the machine: versions, CPU, threads, kernels, memory, extras.

Each check says what was found, whether it is good, and what to do if it is not.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from addnorm.cpu import ISA_VARIABLES, WITHOUT_AMX, has_broken_amx, is_slow

GOOD, NOTE, PROBLEM = "good", "note", "problem"
REQUIRED = ("torch", "numpy", "safetensors", "sentencepiece", "rich")
"""Packages that addnorm cannot do without."""
EXTRAS: dict[str, tuple[str, ...]] = {
    "tables": ("sklearn", "narwhals", "pyarrow"),
    "shap": ("shap",),
    "text": ("sacrebleu",),
    "images": ("PIL",),
    "huggingface": ("tokenizers", "transformers"),
    "export": ("onnx", "onnxscript", "onnxruntime", "ctranslate2"),
    "track": ("tensorboardX",),
    "demo": ("babel", "num2words"),
}
"""Extras and the modules that each imports, as in pyproject.toml."""
SMALL_MEMORY = 2 * 2**30
"""Bytes of free memory below which even small trainings may not fit."""


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    """One check of the installation or the machine.

    Parameters
    ----------
    name
        What was checked.
    status
        good, note (could be better) or problem (does not work).
    value
        What was found.
    advice
        What to do about it; empty if there is nothing to do.
    """

    name: str
    status: str
    value: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def check_machine() -> list[MachineCheck]:
    """Return all checks, in the order in which they are shown.

    >>> [check.name for check in check_machine()][:3]
    ['python', 'addnorm', 'torch']
    """
    from addnorm import __version__

    checks = [
        MachineCheck(name="python", status=GOOD, value=f"{platform.python_version()}"),
        MachineCheck(name="addnorm", status=GOOD, value=__version__),
    ]
    checks += [_package(name) for name in REQUIRED]
    if any(check.status == PROBLEM for check in checks):
        return checks
    checks += [_cpu(), _numbers_in(), _threads(), _kernels(), _devices(), _speed()]
    checks += [_memory(), _disk(Path.cwd())]
    return checks + [_extra(name, modules) for name, modules in EXTRAS.items()]


def _package(name: str) -> MachineCheck:
    try:
        return MachineCheck(name=name, status=GOOD, value=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        advice = f"It is required: pip install {name}"
        return MachineCheck(name=name, status=PROBLEM, value="not installed", advice=advice)


def _cpu() -> MachineCheck:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    name, has_avx2 = _cpu_name()
    value = f"{name}; kernels for {capability}"
    if capability == "DEFAULT" and has_avx2:
        advice = "The CPU has AVX2, but torch does not use it: unset ATEN_CPU_CAPABILITY."
        return MachineCheck(name="cpu", status=NOTE, value=value, advice=advice)
    if capability == "DEFAULT":
        advice = "No AVX2: expect a fraction of the published speed. Try another machine."
        return MachineCheck(name="cpu", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="cpu", status=GOOD, value=value)


def _cpu_name() -> tuple[str, bool]:
    """Return the name of the CPU, and whether it says that it has AVX2."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), False
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    name = found[1].strip() if found else platform.machine()
    return name, re.search(r"^flags\b.*\bavx2\b", text, re.M) is not None


def _numbers_in() -> MachineCheck:
    if has_broken_amx():
        advice = (
            "The command line avoids AMX. In Python, set "
            f"{ISA_VARIABLES[0]}={WITHOUT_AMX} before Python starts."
        )
        value = "AMX of this virtual machine is broken: products by it end the process"
        return MachineCheck(name="bfloat16", status=NOTE, value=value, advice=advice)
    if is_slow("cpu", "bfloat16"):
        advice = "precision=auto trains in float32 here; do not set run.precision=bfloat16."
        value = "no instructions for bfloat16"
        return MachineCheck(name="bfloat16", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="bfloat16", status=GOOD, value="has instructions for it")


def available_cores() -> float:
    """Return the cores that this process may use, by its affinity and its group's quota."""
    cores = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _threads() -> MachineCheck:
    import torch

    threads, cores = torch.get_num_threads(), available_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    value = f"{threads} for {cores:g} cores, load {load:.1f}"
    if threads > cores:
        advice = f"More threads than cores wait for each other: export OMP_NUM_THREADS={cores:.0f}"
        return MachineCheck(name="threads", status=NOTE, value=value, advice=advice)
    if threads < int(cores):
        advice = f"Unused cores: unset OMP_NUM_THREADS, or set it to {cores:.0f}."
        return MachineCheck(name="threads", status=NOTE, value=value, advice=advice)
    if load > cores:
        advice = "Other programs use the cores: end them, or expect trainings to take longer."
        return MachineCheck(name="threads", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="threads", status=GOOD, value=value)


def _kernels() -> MachineCheck:
    import torch

    known = {
        "MKL": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "oneDNN": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "OpenMP": torch.backends.openmp.is_available(),  # type: ignore[no-untyped-call]
        "fused attention": hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
    }
    missing = [name for name, there in known.items() if not there]
    value = ", ".join(name for name, there in known.items() if there) or "none"
    if missing:
        advice = f"This build of torch lacks {', '.join(missing)}: install an official wheel."
        return MachineCheck(name="kernels", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="kernels", status=GOOD, value=value)


def _devices() -> MachineCheck:
    import torch

    names = ["cpu"]
    if torch.cuda.is_available():
        names += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return MachineCheck(name="devices", status=GOOD, value=", ".join(names))


def _speed(size: int = 512) -> MachineCheck:
    """Time matrix products for a few hundredths of a second, and take the fastest."""
    import torch

    a, b = torch.ones(size, size), torch.ones(size, size)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    value = f"{2 * size**3 / best / 1e9:.0f} GFLOP/s in float32 matrix products"
    return MachineCheck(name="speed", status=GOOD, value=value)


def available_memory() -> tuple[int, int] | None:
    """Return free and total bytes of memory, by the group's limit where there is one."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


def _memory() -> MachineCheck:
    found = available_memory()
    if found is None:
        value = "unknown on this system"
        advice = "addnorm cost CONFIG says what a model needs; compare it with your memory."
        return MachineCheck(name="memory", status=NOTE, value=value, advice=advice)
    free, total = found
    value = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < SMALL_MEMORY:
        advice = (
            "End other programs, or train a smaller size: addnorm cost CONFIG says what it needs."
        )
        return MachineCheck(name="memory", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="memory", status=GOOD, value=value)


def _disk(path: Path) -> MachineCheck:
    free = shutil.disk_usage(path).free
    value = f"{free / 2**30:.1f} GiB free in the current directory"
    if free < 2**30:
        advice = "Runs keep checkpoints: free some space, or write them elsewhere with --out."
        return MachineCheck(name="disk", status=NOTE, value=value, advice=advice)
    if not os.access(path, os.W_OK):
        advice = "The current directory cannot be written to: write runs elsewhere with --out."
        return MachineCheck(name="disk", status=NOTE, value=value, advice=advice)
    return MachineCheck(name="disk", status=GOOD, value=value)


def _extra(name: str, modules: tuple[str, ...]) -> MachineCheck:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    title = f"extra {name}"
    if missing:
        advice = f"Only if you need it: {sys.executable} -m pip install 'addnorm[{name}]'"
        value = f"without {', '.join(missing)}"
        return MachineCheck(name=title, status=NOTE, value=value, advice=advice)
    return MachineCheck(name=title, status=GOOD, value="installed")
