"""Time budgets and threads beside a load that starts and stops.

    python -m bench.time_budget [--minutes 1] [--rounds 2] [--seconds 30] [--part PART]

"CPU of others" is what processes that are not the bench's used meanwhile, in cores, with the time
that the host took: a figure is of the bench's own load only where it is near 0.

budget: runs of `addnorm train TASK --minutes N` (--task: a text, labelled texts or a table) beside
busy processes; mixed: six of them, all tasks beside loads that start, stop and alternate, in seven
minutes. Both report the duration of the whole command relative to the budget, the share of the
schedule that was completed, refits and changes of the number of threads. threads: runs through
the Python API for a fixed time with the number of threads chosen by the run, with one thread and
with all, in turn; reports steps per second of training. A decoder of width 128 and depth 4 on
generated text; a classifier and a table model of the default sizes. estimators: seconds of `fit`
and of `predict` of a table, with n_jobs=None, 1 and all. Nothing is downloaded.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from addnorm.training.checkpoint import newest
from addnorm.training.pace import Segment

LOADS: dict[str, tuple[float, float]] = {
    "no load of ours": (0.0, 1.0),
    "one busy process": (1.0, 0.0),
    "a load that starts after half the time": (0.0, 0.5),
    "a load that ends after half the time": (0.5, 0.0),
    "a load on and off, 10 s each": (10.0, 10.0),
}
"""Seconds on and off; below 1, shares of the whole time: (on first, then off) or (off, then on)."""
MODEL = ("width=128", "depth=4", "heads=4", "length=128", "dropout=0.1")


def busy() -> None:
    """Occupy one core until terminated."""
    while True:
        sum(range(10_000))


class BusyProcess:
    """A context in which a busy process starts and stops by a pattern of LOADS."""

    def __init__(self, name: str, seconds: float) -> None:
        on, off = LOADS[name]
        self.moments: list[tuple[float, bool]] = []
        if on >= 10:
            starts = [20.0 * n for n in range(1000)]
            self.moments = [m for s in starts for m in ((s, True), (s + on, False))]
        elif on == 1.0:
            self.moments = [(0.0, True)]
        elif on:
            self.moments = [(0.0, True), (on * seconds, False)]
        elif off < 1.0:
            self.moments = [(off * seconds, True)]
        self.process: Any = None
        self.ended = threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def __exit__(self, *failure: object) -> None:
        self.ended.set()
        self.thread.join()
        self._switch(False)

    def _follow(self) -> None:
        start = time.monotonic()
        for moment, on in self.moments:
            if self.ended.wait(max(0.0, start + moment - time.monotonic())):
                return
            self._switch(on)

    def _switch(self, on: bool) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.process = None
        if on:
            self.process = multiprocessing.get_context("spawn").Process(target=busy, daemon=True)
            self.process.start()


def write_text(path: Path) -> None:
    """Write sentences of generated words."""
    draw = random.Random(1)
    words = [
        "".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 7))) for _ in range(800)
    ]
    lines = (" ".join(draw.choice(words) for _ in range(12)) for _ in range(6000))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_labelled(path: Path) -> None:
    """Write texts of generated words, labelled by one of their words."""
    draw = random.Random(2)
    words = ["".join(draw.choice("abcdefghij") for _ in range(5)) for _ in range(400)]
    rows = [[draw.choice(words) for _ in range(10)] for _ in range(4000)]
    lines = (f"{' '.join(row)}\t{words.index(row[0]) % 4}" for row in rows)
    path.write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")


def write_table(path: Path) -> None:
    """Write rows of ten numbers and a number that follows from three of them."""
    draw = random.Random(3)
    rows = [[draw.gauss(0, 1) for _ in range(10)] for _ in range(8000)]
    lines = [[*row, row[0] + row[1] * row[2] + 0.3 * draw.gauss(0, 1)] for row in rows]
    names = [f"x{number}" for number in range(10)] + ["y"]
    text = [",".join(names), *(",".join(f"{value:.5f}" for value in line) for line in lines)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


TASKS: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "language": (
        "text.txt",
        write_text,
        [f"model.{field}" for field in MODEL] + ["train.batch=2048"],
    ),
    "classify": ("texts.tsv", write_labelled, []),
    "table": ("rows.csv", write_table, []),
}
"""Of each task: the name of its file, the function that writes it, and its settings."""
MIXED = (
    ("language", "a load on and off, 10 s each"),
    ("classify", "a load that starts after half the time"),
    ("table", "a load that ends after half the time"),
    ("language", "a load that starts after half the time"),
    ("classify", "a load on and off, 10 s each"),
    ("table", "a load on and off, 10 s each"),
)
"""Task and load of the runs of the part `mixed`."""


def environment() -> dict[str, str]:
    """Return the environment without a number of threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT")
    return {name: value for name, value in os.environ.items() if name not in names}


class CpuOfOthers:
    """A context that measures the cores that processes of others use, and those that are stolen."""

    def __enter__(self) -> "CpuOfOthers":
        self.start = self._now()
        return self

    def __exit__(self, *failure: object) -> None:
        clock, busy, own = (b - a for a, b in zip(self.start, self._now(), strict=True))
        self.cores = max(0.0, busy - own) / clock

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return the clock, the CPU time of all processes, and that of this one's ended ones."""
        ticks = [int(each) for each in Path("/proc/stat").read_text().split()[1:9]]
        busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")  # without idle and iowait
        usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(u.ru_utime + u.ru_stime for u in usages)


def run_budget(task: str, data: Path, out: Path, minutes: float) -> dict[str, float]:
    """Train with the command line for a time; return what became of it."""
    words = ["train", task, str(data), "--out", str(out), "--minutes", str(minutes)]
    words += ["--target", "y"] if task == "table" else []
    words += [word for setting in TASKS[task][2] for word in ("--set", setting)]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "addnorm", *words, "--json"],
        env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    wall = time.monotonic() - start
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    saved = newest(out, [])
    assert saved is not None
    state = saved.plain["state"]
    segment = Segment(**state["segments"][-1]) if state["segments"] else None
    changes = [row["change"] for row in rows if "change" in row]
    return {
        "ratio": wall / (60 * minutes),
        "before": summary["seconds"],
        "steps": summary["steps"],
        "schedule": 1.0 if segment is None else segment.position(state["step"]) / segment.end,
        "refits": changes.count("refit"),
        "threads": changes.count("threads"),
        "evaluations": sum("valid_loss" in row for row in rows),
    }


SCRIPT = """
import json, sys, addnorm
text, out, minutes, threads, model = json.loads(sys.argv[1])
fields = dict(field.split("=") for field in model)
settings = {f"model.{name}": float(v) if "." in v else int(v) for name, v in fields.items()}
settings |= {"train.batch": 2048} | ({"run.threads": threads} if threads else {})
run = addnorm.train("language", text, out=out, minutes=minutes, progress=False, set=settings)
rows = [(row["step"], row["seconds"]) for row in run.history if "rate" in row]
from addnorm.training.checkpoint import newest
used = newest(run.path, []).plain["state"]["threads"]
used = " ".join(f"{each['threads']}@{each['step']}" for each in used)
print(json.dumps([rows[-1][0] - rows[0][0], rows[-1][1] - rows[0][1], used]))
"""


def run_threads(text: Path, out: Path, minutes: float, threads: int) -> tuple[float, str]:
    """Train through the Python API; return steps per second, and the numbers of threads by step.

    0 threads: chosen by the run.
    """
    arguments = json.dumps([str(text), str(out), minutes, threads, MODEL])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    steps, seconds, changes = json.loads(done.stdout.splitlines()[-1])
    return float(steps) / max(float(seconds), 1e-9), changes


FIT = """
import json, sys, time, numpy
from addnorm.tabular import FTTransformerRegressor
jobs = json.loads(sys.argv[1])
draw = numpy.random.default_rng(0)
X = draw.normal(size=(3000, 10))
y = X[:, 0] + X[:, 1] * X[:, 2] + 0.3 * draw.normal(size=3000)
start = time.perf_counter()
model = FTTransformerRegressor(epochs=4, n_jobs=jobs, random_state=0).fit(X, y)
fit = time.perf_counter() - start
X = draw.normal(size=(60_000, 10))
start = time.perf_counter()
model.predict(X)
used = " ".join(f"{each['threads']}@{each['step']}" for each in model.report_["threads"])
print(json.dumps([fit, time.perf_counter() - start, used]))
"""


def show_estimators(rounds: int, names: list[str]) -> None:
    most = len(os.sched_getaffinity(0))
    print(
        "| load | round | n_jobs | fit, s | threads@step | predict 60,000 rows, s | CPU of others |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in names:
        for turn in range(rounds):
            for jobs in (None, 1, most):
                with CpuOfOthers() as others, BusyProcess(name, 60):
                    done = subprocess.run(
                        [sys.executable, "-c", FIT, json.dumps(jobs)],
                        env=environment(), check=True, capture_output=True, text=True,
                    )  # fmt: skip
                fit, predict, used = json.loads(done.stdout)
                print(
                    f"| {name} | {turn + 1} | {jobs} | {fit:.2f} | {used} | {predict:.2f} | "
                    f"{others.cores:.2f} |",
                    flush=True,
                )


def show_budget(folder: Path, runs: Sequence[tuple[str, str]], minutes: float) -> None:
    """Print a row for each run, of a task beside a load, then the median and range of all."""
    print(
        "| task | load of the bench | command / budget | s before the summary | steps | "
        "evaluations | schedule done | refits | thread changes | CPU of others |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios, shares = [], []
    for number, (task, name) in enumerate(runs):
        data = folder / TASKS[task][0]
        if not data.exists():
            TASKS[task][1](data)
        with CpuOfOthers() as others, BusyProcess(name, 60 * minutes):
            row = run_budget(task, data, folder / f"budget-{number}", minutes)
        ratios.append(row["ratio"])
        shares.append(row["schedule"])
        print(
            f"| {task} | {name} | {row['ratio']:.3f} | {row['before']:.0f} | {row['steps']} | "
            f"{row['evaluations']} | {row['schedule']:.3f} | {row['refits']} | {row['threads']} | "
            f"{others.cores:.2f} |",
            flush=True,
        )
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    print(
        f"\n{len(ratios)} runs: command / budget {statistics.median(ratios):.3f} "
        f"[{min(ratios):.3f}–{max(ratios):.3f}], {within} within 10 %; schedules done to "
        f"{min(shares):.3f} at least"
    )


def show_threads(folder: Path, text: Path, seconds: float, rounds: int, names: list[str]) -> None:
    most = len(os.sched_getaffinity(0))
    print(
        f"| load | round | chosen | 1 thread | {most} threads | chosen / the better one | "
        "threads@step | CPU of others, by run |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        ratios = []
        for turn in range(rounds):
            speeds, cpu, used = dict.fromkeys((0, 1, most), 0.0), {}, ""
            for threads in speeds if turn % 2 == 0 else reversed(speeds):
                out = folder / f"threads-{names.index(name)}-{turn}-{threads}"
                with CpuOfOthers() as others, BusyProcess(name, seconds):
                    speeds[threads], numbers = run_threads(text, out, seconds / 60, threads)
                cpu[threads], used = others.cores, used if threads else numbers
            ratios.append(speeds[0] / max(speeds[1], speeds[most]))
            cells = " | ".join(f"{speeds[threads]:.2f}" for threads in speeds)
            others_cpu = ", ".join(f"{cpu[threads]:.2f}" for threads in speeds)
            print(
                f"| {name} | {turn + 1} | {cells} | {ratios[-1]:.2f} | {used} | {others_cpu} |",
                flush=True,
            )
        print(f"{name}: median {statistics.median(ratios):.2f}, {min(ratios):.2f} at least")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="budget of a run")
    parser.add_argument(
        "--seconds", type=float, default=30, help="time of a run of the part on threads"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each number of threads")
    parser.add_argument(
        "--part", choices=["budget", "mixed", "threads", "estimators"], help="only this part"
    )
    parser.add_argument("--task", choices=TASKS, default="language", help="of the budgets")
    parser.add_argument("--load", action="append", choices=LOADS, help="only these loads")
    args = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), Path(name) / "text.txt"
        names = args.load or ["no load of ours", "one busy process"]
        if args.part in (None, "budget"):
            loads = args.load or list(LOADS)
            show_budget(folder, [(args.task, load) for load in loads], args.minutes)
        if args.part == "mixed":
            show_budget(folder, MIXED, args.minutes)
        if args.part in (None, "threads"):
            write_text(text)
            show_threads(folder, text, args.seconds, args.rounds, names)
        if args.part in (None, "estimators"):
            show_estimators(args.rounds, names)


if __name__ == "__main__":
    main()
