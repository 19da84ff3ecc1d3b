"""Time several contenders, each in its own process, one at a time.

Each contender gets a fresh process, because two libraries in one process share an allocator and its
settings. Every contender is timed once in each round, in an order that is reversed in every other
round, so that a slow minute of the machine affects all of them.
"""

import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

THREADS = 2


@dataclass(frozen=True)
class Contender:
    """A library and a task; `maker` names a function, `module:function`, that returns a step."""

    name: str
    maker: str
    settings: dict[str, Any] = field(default_factory=dict)
    keep_memory: bool = False
    """Whether its process calls addnorm.keep_memory, so that freed memory is reused."""
    ours: bool = False


@dataclass
class Result:
    contender: Contender
    seconds: list[float]
    note: str = ""
    """Why it could not run, if it could not."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def race(contenders: list[Contender], rounds: int, steps: int, warm: int = 2) -> list[Result]:
    """Return the seconds of a step of each contender, one value for each round."""
    workers = [_start(contender) for contender in contenders]
    results = [Result(contender, []) for contender in contenders]
    try:
        alive = []
        for number, worker in enumerate(workers):
            note = worker.ask(("warm", warm))
            results[number].note = str(note or "")
            if not note:
                alive.append(number)
        for turn in range(rounds):
            for number in alive if turn % 2 == 0 else reversed(alive):
                seconds = workers[number].ask(("run", steps))
                results[number].seconds.append(float(seconds))
            print(f"  round {turn + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            worker.stop()
    print(" " * 30, end="\r", file=sys.stderr, flush=True)
    return results


@dataclass
class _Worker:
    process: Any
    pipe: Connection

    def ask(self, message: tuple[str, int]) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()


def _start(contender: Contender) -> _Worker:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_work, args=(far, contender), daemon=True)
    process.start()
    return _Worker(process, near)


def _work(pipe: Connection, contender: Contender) -> None:
    """Run a worker: make the step on the first request, then time it on each request."""
    if contender.keep_memory:
        from addnorm import keep_memory

        keep_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    step: Callable[[], object] | None = None
    while True:
        verb, count = pipe.recv()
        try:
            if step is None:
                step = _make(contender)
            start = time.perf_counter()
            for _ in range(count):
                step()
            pipe.send(None if verb == "warm" else (time.perf_counter() - start) / count)
        except Exception as error:  # the parent process reports it in the table
            pipe.send(f"{type(error).__name__}: {error}")


def _make(contender: Contender) -> Callable[[], object]:
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    module, _, function = contender.maker.partition(":")
    make = getattr(importlib.import_module(module), function)
    step: Callable[[], object] = make(**contender.settings)
    return step


def peak_gflops() -> float:
    """Return the machine's best speed of a matrix product, in 10⁹ operations per second."""
    import torch

    torch.set_num_threads(THREADS)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * 2048**3 / (time.perf_counter() - start) / 1e9)
    return best


def show(
    title: str, results: list[Result], work: float, flops: float, peak: float
) -> dict[str, Any]:
    """Print a table of one race and return it.

    The ratio is paired: the other library's time over addnorm's in each round, then the median.

    Parameters
    ----------
    title : title of the table
    results : the times of each contender
    work : units (tokens, rows) in a step
    flops : operations in a step
    peak : speed of a matrix product, in 10⁹ operations per second
    """
    ours = next(result for result in results if result.contender.ours)
    print(f"\n{title}")
    print(f"  {'':34}{'per second':>11}{'spread':>18}{'peak share':>12}{'addnorm is':>22}")
    rows = []
    for result in results:
        name = result.contender.name
        if result.note or not result.seconds:
            print(f"  {name:34}{'did not run: ' + result.note[:80]}")
            rows.append({"name": name, "note": result.note})
            continue
        rates = [work / seconds for seconds in result.seconds]
        share = flops / result.median / 1e9 / peak
        pairs = [b / a for a, b in zip(ours.seconds, result.seconds, strict=True)]
        ratio = statistics.median(pairs)
        spread = f"{min(rates):,.0f}–{max(rates):,.0f}"
        times = f"{ratio:.2f}× [{min(pairs):.2f}–{max(pairs):.2f}]"
        print(f"  {name:34}{work / result.median:>11,.0f}{spread:>18}{share:>12.0%}{times:>22}")
        rows.append(
            {
                "name": name,
                "per_second": work / result.median,
                "low": min(rates),
                "high": max(rates),
                "peak_share": share,
                "addnorm_ratio": ratio,
                "addnorm_ratio_low": min(pairs),
                "addnorm_ratio_high": max(pairs),
            }
        )
    return {"title": title, "rows": rows}


def machine() -> dict[str, Any]:
    """Return what the figures were measured on, without naming the machine."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vector": torch.backends.cpu.get_cpu_capability(),
    }


def dump(path: str, tables: list[dict[str, Any]], peak: float) -> None:
    """Write tables and machine to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"machine": machine(), "peak_gflops": peak, "tables": tables}, file, indent=1)
