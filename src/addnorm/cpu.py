"""CPU settings for training: memory allocator, thread spinning, slow number types.

Memory: glibc returns every large tensor to the system when it is freed, and the next one of the
same size costs a page fault for every 4 KiB, although each training step allocates the same sizes
again. Threads: the threads of one operation wait for each other in a spin loop, and if another
process occupies the core of one, the others spin for its whole time slice. bfloat16: a CPU without
instructions for it is many times slower than with float32, and on some virtual machines a product
of bfloat16 or int8 matrices ends the process.
"""

import ctypes
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from addnorm.errors import InputError

ISA_VARIABLES = ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which oneDNN limits the instructions it uses."""
WITHOUT_AMX = "AVX512_CORE_FP16"
"""All instructions of oneDNN below AMX."""
TILE_SIZES_LEAF = 0x1D
"""The question to CPUID that is answered with the sizes of AMX's tiles."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_IN_USE: ContextVar[int | None] = ContextVar("threads in use", default=None)
"""The number of threads of the innermost `use_threads`."""


def keep_memory() -> bool:
    """Make the C library keep freed memory for reuse in this process; return True if it does.

    The command line calls this. In Python, call it once before training: a library should not
    change its process unasked. Peak memory may rise by 15–20 %. It has an effect with glibc (Linux)
    only: no other allocator is known to benefit.

    Examples
    --------
    >>> keep_memory() in (True, False)
    True
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    largest = 32 * 1024 * 1024  # glibc's maximum; larger blocks are still mapped
    accepted = [
        libc.mallopt(_MMAP_THRESHOLD, largest),
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1),
        libc.mallopt(_TOP_PAD, 64 * 1024 * 1024),
    ]
    return all(accepted)


def reduce_thread_spinning() -> bool:
    """Make waiting threads yield after a tenth of the usual spin count; return True if set.

    Call it before torch is first imported; a value that the user has set is kept. On an idle
    machine nothing changes; with one other busy process two threads train about four times as fast
    (docs/results/bench.md). It has an effect with GNU OpenMP on Linux only.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    keep = 0  # setenv's overwrite flag
    return bool(ctypes.CDLL(None).setenv(b"GOMP_SPINCOUNT", b"30000", keep) == 0)


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_candidates(requested: int | None = None) -> tuple[int, ...]:
    """Return the numbers of threads to choose from; one number if the user set it.

    The number is taken as set by the user if it is `requested`, inside of `use_threads`, if
    OMP_NUM_THREADS or MKL_NUM_THREADS is set, or if torch has another one than its default: the
    number of processors of this process, or of their cores.
    """
    requested = requested or _IN_USE.get()
    if requested is not None:
        return (requested,)
    import torch

    threads = torch.get_num_threads()
    variables = torch.__config__.parallel_info()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if f"{name} : " in variables and f"{name} : [not set]" not in variables:
            return (threads,)
    processors = count_processors()
    if threads == 1 or threads not in (processors, processors // 2):
        return (threads,)
    return (1, threads)


@contextmanager
def use_threads(threads: int | None) -> Iterator[None]:
    """Context with a number of threads of torch; None leaves it alone. Then it is as before."""
    import torch

    before = torch.get_num_threads()
    token = _IN_USE.set(threads or _IN_USE.get())
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _IN_USE.reset(token)


@cache
def has_broken_amx() -> bool:
    """Return whether oneDNN's use of AMX ends a process on this machine by SIGILL.

    Some virtual machines have AMX but hide the sizes of its tiles (leaf 0x1D of CPUID); oneDNN then
    configures no tile, and the first product of bfloat16 or int8 matrices is an illegal
    instruction.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    levels = re.findall(r"^cpuid level\s*:\s*(\d+)$", text, re.M)
    has_amx = re.search(r"^flags\b.*\bamx_tile\b", text, re.M) is not None
    return has_amx and any(int(level) < TILE_SIZES_LEAF for level in levels)


def amx_workaround() -> dict[str, str]:
    """Return the environment variable that keeps oneDNN from a broken AMX, or nothing.

    It is for processes that have not yet imported torch. A limit that the user has set is kept.
    """
    return {ISA_VARIABLES[0]: WITHOUT_AMX} if uses_broken_amx() else {}


def avoid_broken_amx() -> None:
    """Keep oneDNN from a broken AMX in this process; call it before torch is first imported."""
    os.environ.update(amx_workaround())


def uses_broken_amx() -> bool:
    """Return whether a product of bfloat16 or int8 matrices by oneDNN would end the process."""
    return has_broken_amx() and not any(os.environ.get(name) for name in ISA_VARIABLES)


def require_bfloat16(device: str, dtype: str) -> None:
    """Raise an InputError if computing with bfloat16 on this CPU would end the process."""
    if device == "cpu" and dtype == "bfloat16" and uses_broken_amx():
        raise InputError(
            "bfloat16 on a CPU with AMX needs the sizes of its tiles: this virtual machine hides "
            "them, and the process would be killed. Set "
            f"{ISA_VARIABLES[0]}={WITHOUT_AMX} before Python starts, or use float32."
        )


def warn_if_slow(device: str, dtype: str) -> bool:
    """Warn about bfloat16 or float16 on a CPU without instructions for it; return True if warned.

    On such CPUs, bfloat16 autocast was measured to train about 27 times slower than float32.
    """
    if not is_slow(device, dtype):
        return False
    warnings.warn(
        f"{dtype} on this CPU is many times slower than float32: it has no instructions for it. "
        "Leave autocast off, or use float32 weights.",
        RuntimeWarning,
        stacklevel=3,
    )
    return True


def is_slow(device: str, dtype: str) -> bool:
    """Return whether the device is a CPU without instructions for a 16-bit dtype."""
    if device != "cpu" or dtype not in ("bfloat16", "float16"):
        return False
    import torch

    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
