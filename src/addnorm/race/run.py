"""Running a race: each runner is a run of its own, in a process of its own.

Runners share seed, data and order of batches, and take equally many steps. A race that was stopped
goes on where it was: runs that are finished are left alone, those that are not are resumed.
"""

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from addnorm.config import Config
from addnorm.disk import read_text, write_whole
from addnorm.errors import AddnormError, ConfigError, SavedError
from addnorm.race.entries import Entry
from addnorm.runs.directory import FACTS, Run
from addnorm.runs.recipe import Wish
from addnorm.runs.train import plan, resume, start
from addnorm.train.loop import DivergedError, Observer

Say = Callable[[str], None]
RESULT = "race.json"
SHARE = 0.9
"""Of a time budget: the rest is for starting processes and evaluating."""


BETTER = 0.05
"""By how much of its loss a patient must improve to have recovered."""


@dataclass(frozen=True)
class Result:
    """One runner with one seed."""

    name: str
    seed: int
    loss: float
    """Best held-out loss; infinite if it diverged before its first evaluation."""
    steps: int
    seconds: float
    diverged: bool
    curve: tuple[tuple[float, float], ...]
    """Step and held-out loss."""


@dataclass(frozen=True)
class Race:
    """How it went."""

    results: tuple[Result, ...]

    def names(self) -> list[str]:
        return list(dict.fromkeys(result.name for result in self.results))

    def of(self, name: str) -> list[Result]:
        return [result for result in self.results if result.name == name]

    def standing(self) -> list[tuple[str, float, float, int]]:
        """Name, mean and standard deviation of the loss, how many diverged; the best first."""
        rows = []
        for name in self.names():
            found = self.of(name)
            values = [result.loss for result in found if math.isfinite(result.loss)]
            mean = sum(values) / len(values) if values else math.inf
            spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
            bad = sum(result.diverged for result in found)
            rows.append((name, mean, spread if len(values) > 1 else 0.0, bad))
        return sorted(rows, key=lambda row: (row[3] > 0, row[1]))

    def text(self) -> str:
        """A line a runner, the best first."""
        from addnorm.report import sparkline

        rows = self.standing()
        width = max(len(name) for name, *_ in rows)
        lines = [f"{'runner':<{width}}  held-out loss   diverged"]
        for name, mean, spread, bad in rows:
            each = [y for _, y in self.of(name)[0].curve]
            of = f"{bad} of {len(self.of(name))}"
            value = f"{mean:.4f} ± {spread:.4f}" if math.isfinite(mean) else "        –      "
            lines.append(f"{name:<{width}}  {value}   {of:<7}  {sparkline(each, 30)}")
        return "\n".join(lines)

    def recovery(self, patient: str = "as it is") -> str:
        """Who did clearly better than the patient, in words: by a twentieth of its loss."""
        means = {name: (mean, bad) for name, mean, _, bad in self.standing()}
        loss, bad = means[patient]
        limit = math.inf if bad else (1 - BETTER) * loss
        better = [n for n, (mean, bad) in means.items() if not bad and mean < limit]
        better = [name for name in better if name != patient]
        if not better:
            return "recovered: nobody"
        return "recovered: " + ", ".join(f"{name} ({means[name][0]:.4f})" for name in better)

    def json(self) -> str:
        """Everything, as JSON; what is not finite is null."""
        plain = asdict(self)
        for result in plain["results"]:
            result["loss"] = result["loss"] if math.isfinite(result["loss"]) else None
            result["curve"] = [p for p in result["curve"] if math.isfinite(p[1])]
        return json.dumps(plain, indent=1, ensure_ascii=False)


def race(
    wish: Wish,
    entries: Sequence[Entry],
    out: str | Path,
    *,
    seeds: int = 1,
    minutes: float | None = None,
    jobs: int | None = None,
    say: Say = print,
) -> Race:
    """Train every entry with every seed; `minutes` is for all of them together."""
    if not entries or seeds < 1:
        raise ConfigError(f"a race needs runners and a seed: got {len(entries)} and {seeds}.")
    out = Path(out)
    cores = os.cpu_count() or 1
    jobs = max(1, min(jobs or cores, len(entries) * seeds))
    steps = _steps(wish, out, entries, seeds, minutes, jobs, say)
    first = wish.over(Config()).run.seed
    threads = max(1, min(torch.get_num_threads(), cores // jobs))
    settings = tuple(wish.settings) + (() if steps is None else (f"train.steps={steps}",))
    todo = [
        (dict(wish.table), (*settings, *entry.settings, f"run.seed={first + k}"), entry.name,
         first + k, str(out / entry.folder / f"seed-{first + k}"), threads)
        for k in range(seeds)
        for entry in entries
    ]  # fmt: skip
    results = []
    if jobs == 1:
        for task in todo:
            results.append(_run(*task))
            say(_said(results[-1], len(results), len(todo)))
        return _ordered(results, entries)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in as_completed([pool.submit(_run, *task) for task in todo]):
            results.append(done.result())
            say(_said(results[-1], len(results), len(todo)))
    return _ordered(results, entries)


def _ordered(results: list[Result], entries: Sequence[Entry]) -> Race:
    place = {entry.name: i for i, entry in enumerate(entries)}
    return Race(tuple(sorted(results, key=lambda r: (place[r.name], r.seed))))


def _said(result: Result, done: int, every: int) -> str:
    end = "diverged" if result.diverged else f"loss {result.loss:.4f}"
    return f"{done} of {every}: {result.name}, seed {result.seed}: {end}, {result.seconds:.0f} s"


def _steps(
    wish: Wish,
    out: Path,
    entries: Sequence[Entry],
    seeds: int,
    minutes: float | None,
    jobs: int,
    say: Say,
) -> int | None:
    """Steps that all runners can take in the time, measured on the first; kept for going on."""
    if minutes is None:
        return None
    kept = out / "steps.json"
    if kept.is_file():
        return int(json.loads(read_text(kept))["steps"])
    slowest = 0.0
    for entry in entries:
        trial = Wish(wish.table, (*wish.settings, *entry.settings))
        pace = plan(trial, measure=True, say=lambda text: None).pace
        assert pace is not None
        slowest += pace.step / len(entries)
    rounds = math.ceil(len(entries) * seeds / jobs)
    steps = max(1, int(SHARE * 60 * minutes / rounds / slowest))
    say(f"{steps:,} steps for each of {len(entries) * seeds} runs, {jobs} at a time.")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(kept, json.dumps({"steps": steps}).encode())
    return steps


def _run(
    table: dict[str, Any], settings: tuple[str, ...], name: str, seed: int, path: str, threads: int
) -> Result:
    """One run, in this process."""
    from addnorm.runs.progress import Journal

    torch.set_num_threads(threads)
    folder = Path(path)
    if (folder / RESULT).is_file():
        return _read(folder)
    diverged = False

    def watch(run: Path) -> list[Observer]:
        return [Journal(run / "metrics.jsonl")]

    def talk(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr)

    try:
        if (folder / FACTS).is_file():
            outcome = resume(folder, watch=watch, say=talk)
        else:
            outcome = start(Wish(table, settings), folder, watch=watch, say=lambda text: None)
        if not outcome.progress.finished:
            raise KeyboardInterrupt  # asked to stop: it goes on next time, and so does the race
    except DivergedError:
        diverged = True
    run = Run.open(folder)
    curve = tuple(
        (float(row["step"]), float(row["valid_loss"]))
        for row in run.metrics()
        if "valid_loss" in row
    )
    finite = [loss for _, loss in curve if math.isfinite(loss)]
    rows = run.metrics()
    result = Result(
        name=name,
        seed=seed,
        loss=min(finite, default=math.inf),
        steps=int(rows[-1]["step"]) if rows else 0,
        seconds=float(next((r["seconds"] for r in reversed(rows) if "seconds" in r), 0.0)),
        diverged=diverged or not finite or _lost(finite),
        curve=curve,
    )
    write_whole(folder / RESULT, json.dumps(asdict(result)).encode())
    return result


def _lost(losses: Sequence[float]) -> bool:
    """Whether it ended far above its best: trained once, and then no more."""
    return len(losses) > 1 and losses[-1] > 1.5 * min(losses)


def _read(folder: Path) -> Result:
    try:
        plain = json.loads(read_text(folder / RESULT))
        plain["curve"] = tuple((float(a), float(b)) for a, b in plain["curve"])
        return Result(**plain)
    except (ValueError, TypeError, KeyError, AddnormError) as error:
        raise SavedError(f"{str(folder / RESULT)!r} is damaged: {error}. Delete it.") from None
