"""Run a race: train every entry with every seed, each in a process of its own.

All entries have the same seeds, data and order of batches, and the same number of steps. A race
that was interrupted can be run again: finished runs are kept, unfinished ones are resumed.
"""

import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from addnorm.config import Config
from addnorm.errors import AddnormError, ConfigError, SavedError
from addnorm.files import make_directory, read_json, require_writable, to_json, write_whole
from addnorm.races.entries import UNCHANGED, Entry, entries_of
from addnorm.runs.request import RunRequest, as_settings, make_request
from addnorm.runs.run import RECORD, Run
from addnorm.runs.train import plan_run, resume_run, start_run
from addnorm.tasks.base import say_nothing
from addnorm.training.loop import DivergedError, Observer

RESULT_FILE, STEPS_FILE = "race.json", "steps.json"
TRAINING_SHARE = 0.9
"""Share of a time budget for training; the rest is for starting processes and evaluating."""
MIN_IMPROVEMENT = 0.05
"""By what share of the subject's loss a remedy must improve on it to count as a recovery."""


class Standing(NamedTuple):
    """One entry over all seeds."""

    name: str
    mean: float
    """Mean of the finite losses; infinite if there is none."""
    deviation: float
    diverged: int
    """How many of its runs diverged."""

    def loss_text(self) -> str:
        """Return mean ± deviation, or a dash if no loss is finite."""
        return f"{self.mean:.4f} ± {self.deviation:.4f}" if math.isfinite(self.mean) else "–"


@dataclass(frozen=True)
class EntryResult:
    """One entry with one seed."""

    name: str
    seed: int
    loss: float
    """Best held-out loss; infinite if it diverged before its first evaluation."""
    steps: int
    seconds: float
    diverged: bool
    curve: tuple[tuple[float, float], ...]
    """Step and held-out loss."""


@dataclass(frozen=True, repr=False)
class RaceResult:
    """The results of all entries and seeds."""

    results: tuple[EntryResult, ...]

    def entry_names(self) -> list[str]:
        """Return the names of the entries, in their order."""
        return list(dict.fromkeys(result.name for result in self.results))

    def results_of(self, name: str) -> list[EntryResult]:
        """Return the results of one entry, one for each seed."""
        return [result for result in self.results if result.name == name]

    def standings(self) -> list[Standing]:
        """Return mean and standard deviation of the loss of each entry, the best first."""
        rows = []
        for name in self.entry_names():
            results = self.results_of(name)
            values = [result.loss for result in results if math.isfinite(result.loss)]
            mean = sum(values) / len(values) if values else math.inf
            spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
            diverged = sum(result.diverged for result in results)
            rows.append(Standing(name, mean, spread if len(values) > 1 else 0.0, diverged))
        return sorted(rows, key=lambda row: (row.diverged > 0, row.mean))

    def text(self) -> str:
        """Return one line for each entry, the best first."""
        from addnorm.report import sparkline

        rows = self.standings()
        width = max(len(row.name) for row in rows)
        lines = [f"{'entry':<{width}}  held-out loss     diverged"]
        for row in rows:
            results = self.results_of(row.name)
            count = f"{row.diverged} of {len(results)}"
            curve = sparkline([loss for _, loss in results[0].curve], 30)
            lines.append(f"{row.name:<{width}}  {row.loss_text():<15}   {count:<8}  {curve}")
        return "\n".join(lines)

    def recovery(self, subject: str = UNCHANGED) -> str:
        """Return which entries improved on the subject by a twentieth of its loss, in words."""
        standings = {row.name: row for row in self.standings()}
        own = standings[subject]
        limit = math.inf if own.diverged else (1 - MIN_IMPROVEMENT) * own.mean
        better = [
            row
            for row in standings.values()
            if row.name != subject and not row.diverged and row.mean < limit
        ]
        names = ", ".join(f"{row.name} ({row.mean:.4f})" for row in better)
        return f"recovered: {names or 'none'}"

    def json(self) -> str:
        """Return everything as JSON; values that are not finite are null."""
        return to_json(asdict(self))

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from addnorm.races.page import race_fragment

        return race_fragment(self)


def race(
    config: str | Path | RunRequest,
    *,
    vary: Mapping[str, Sequence[Any]] | Sequence[str],
    set: Mapping[str, Any] | Sequence[str] = (),
    out: str | Path | None = None,
    seeds: int = 1,
    minutes: float | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> RaceResult:
    """Train variants of a configuration side by side and return the results, to be ranked.

    Parameters
    ----------
    config : a TOML file with task and data, or the request that it stands for.
    vary : the values to compare, as {"model.addnorm": ["post", "pre"]} or
        ["model.addnorm=post,pre"]; every combination is an entry.
    set : settings of all entries, as {"train.steps": 100} or ["train.steps=100"].
    out : folder for the runs; one that holds an interrupted race continues it. A temporary one,
        deleted at the end, if None.
    seeds : number of seeds for each entry.
    minutes : time for all runs together; by default each takes its configured steps.
    jobs : runs at the same time, by default one for each core.
    progress : show a line on stderr after each run; False for silence.

    Examples
    --------
    >>> race("run.toml", vary={"model.addnorm": ["post", "pre"]}, seeds=3)  # doctest: +SKIP
    entry         held-out loss     diverged
    addnorm=pre   2.1034 ± 0.0121   0 of 3    ▇▅▃▂▁
    addnorm=post  2.2519 ± 0.0450   0 of 3    ▇▆▄▃▂
    """
    request = config if isinstance(config, RunRequest) else make_request(str(config), {})
    request = request.with_settings(*as_settings(set))
    entries = entries_of(as_settings(vary))
    say = _print_progress if progress else say_nothing
    with nullcontext(out) if out is not None else TemporaryDirectory(prefix="addnorm-") as folder:
        return run_entries(
            request, entries, folder, seeds=seeds, minutes=minutes, jobs=jobs, say=say
        )


def run_entries(
    request: RunRequest,
    entries: Sequence[Entry],
    out: str | Path,
    *,
    seeds: int = 1,
    minutes: float | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> RaceResult:
    """Train every entry with every seed and return the results.

    Parameters
    ----------
    request : the run that all entries share
    entries : what they change in it
    out : folder for the runs; one that holds an interrupted race continues it
    seeds : number of seeds for each entry
    minutes : time for all runs together; by default each takes its configured steps
    jobs : runs at the same time, by default one for each core
    say : called with a line of progress after each run
    """
    if not entries or seeds < 1:
        raise ConfigError(
            f"a race needs at least one entry and one seed: got {len(entries)} and {seeds}."
        )
    out = require_writable(out)
    cores = os.cpu_count() or 1
    count = len(entries) * seeds
    jobs = max(1, min(jobs or cores, count))
    steps = _steps_for(request, out, entries, minutes, math.ceil(count / jobs))
    settings = tuple(request.settings)
    if steps is not None:
        say(f"{steps:,} steps for each of {count} runs, {jobs} at the same time.")
        settings += (f"train.steps={steps}",)
    first = request.over(Config()).run.seed
    threads = max(1, min(torch.get_num_threads(), cores // jobs))
    arguments = [
        (dict(request.table), (*settings, *entry.settings, f"run.seed={first + k}"), entry.name,
         first + k, str(out / entry.folder / f"seed-{first + k}"), threads)
        for k in range(seeds)
        for entry in entries
    ]  # fmt: skip
    results = []
    for result in _train_all(arguments, jobs):
        results.append(result)
        end = "diverged" if result.diverged else f"loss {result.loss:.4f}"
        run = f"{result.name}, seed {result.seed}"
        say(f"{len(results)} of {count}: {run}: {end}, {result.seconds:.0f} s")
    order = {entry.name: i for i, entry in enumerate(entries)}
    return RaceResult(tuple(sorted(results, key=lambda r: (order[r.name], r.seed))))


def _train_all(arguments: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[EntryResult]:
    """Yield the results of all runs as they finish, in this process if there is one job."""
    if jobs == 1:
        yield from (_train_entry(*each) for each in arguments)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(_train_entry, *each) for each in arguments]):
            yield future.result()


def _steps_for(
    request: RunRequest, out: Path, entries: Sequence[Entry], minutes: float | None, rounds: int
) -> int | None:
    """Return the steps that every entry can take in the time; saved for when a race continues."""
    if minutes is None:
        return None
    path = out / STEPS_FILE
    if path.is_file():
        return _read_steps(path)
    seconds = 0.0
    for entry in entries:
        trial = RunRequest(request.table, (*request.settings, *entry.settings))
        times = plan_run(trial, measure=True, say=lambda text: None).times
        assert times is not None
        seconds += times.step / len(entries)
    steps = max(1, int(TRAINING_SHARE * 60 * minutes / rounds / seconds))
    make_directory(out)
    write_whole(path, to_json({"steps": steps}).encode())
    return steps


def _read_steps(path: Path) -> int:
    plain = read_json(path)
    steps = plain.get("steps") if isinstance(plain, dict) else None
    if type(steps) is not int or steps < 1:
        raise SavedError(f"{str(path)!r} is damaged: steps must be 1 or more. Delete it.")
    return steps


def _train_entry(
    table: dict[str, Any], settings: tuple[str, ...], name: str, seed: int, path: str, threads: int
) -> EntryResult:
    """Train one entry with one seed in this process, or read its result."""
    from addnorm.runs.loggers import Journal

    torch.set_num_threads(threads)
    folder = Path(path)
    if (folder / RESULT_FILE).is_file():
        return _read_result(folder)
    diverged = False

    def observers(run: Path) -> list[Observer]:
        return [Journal(run / "metrics.jsonl")]

    def print_progress(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr)

    try:
        if (folder / RECORD).is_file():
            outcome = resume_run(folder, observers=observers, say=print_progress)
        else:
            outcome = start_run(
                RunRequest(table, settings).with_settings(f"run.threads={threads}"),
                folder,
                observers=observers,
                say=lambda text: None,
            )
        if not outcome.progress.finished:
            raise KeyboardInterrupt  # the run was stopped: so is the race, to be continued later
    except DivergedError:
        diverged = True
    rows = Run.open(folder).history
    curve = tuple(
        (float(row["step"]), _number(row["valid_loss"])) for row in rows if "valid_loss" in row
    )
    finite = [loss for _, loss in curve if math.isfinite(loss)]
    result = EntryResult(
        name=name,
        seed=seed,
        loss=min(finite, default=math.inf),
        steps=int(rows[-1]["step"]) if rows else 0,
        seconds=float(next((r["seconds"] for r in reversed(rows) if "seconds" in r), 0.0)),
        diverged=diverged or not finite or _ends_far_above_best(finite),
        curve=curve,
    )
    write_whole(folder / RESULT_FILE, to_json(asdict(result)).encode())
    return result


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ends_far_above_best(losses: Sequence[float]) -> bool:
    return len(losses) > 1 and losses[-1] > 1.5 * min(losses)


def _number(value: float | None) -> float:
    """Return a number from JSON, which has null in place of NaN."""
    return math.nan if value is None else float(value)


def _read_result(folder: Path) -> EntryResult:
    path = folder / RESULT_FILE
    plain = read_json(path)
    try:
        plain["loss"] = math.inf if plain["loss"] is None else plain["loss"]
        plain["curve"] = tuple((float(step), _number(loss)) for step, loss in plain["curve"])
        return EntryResult(**plain)
    except (ValueError, TypeError, KeyError, AddnormError) as error:
        raise SavedError(f"{str(path)!r} is damaged: {error}. Delete it.") from None
