"""Search for settings of FT-Transformer on a table, then train a run with the best ones.

All trials have the same training rows and the same held-out rows (or folds), on which they are
ranked. The folder `tune` of the run's directory holds the finished trials: the same call continues
a search that was interrupted.
"""

import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from addnorm.config import Config
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import make_directory, read_json, require_empty, to_json, write_whole
from addnorm.races.halving import (
    MAX_TRIALS,
    Trial,
    TrialFit,
    TrialSettings,
    TuneResult,
    format_score,
    halve,
)
from addnorm.races.tune_page import tune_page
from addnorm.runs.loggers import make_observers
from addnorm.runs.request import RunRequest, as_settings, make_request
from addnorm.runs.resolve import resolve
from addnorm.runs.run import RECORD, TRIALS, Run, require_unused
from addnorm.runs.train import find_device, lock_run, resume_run, start_run
from addnorm.tabular.choices import is_recommended
from addnorm.tabular.fitting import FitLogger, run_loop
from addnorm.tasks.base import DataFacts, Say, say_nothing
from addnorm.tasks.table import Table
from addnorm.training.loop import DivergedError

TRACE_FILE, SEARCH_FILE, TUNE_PAGE = "trace.jsonl", "tune.json", "tune.html"
TIME_MARGIN = 1.2
"""Factor on the time that the final run is expected to take."""
NETWORKS = ((32, 2), (64, 1), (64, 3), (96, 3), (128, 2), (128, 3))
"""Width and depth."""


@dataclass(frozen=True)
class TuneData:
    """A table that was read once, and the default settings for it."""

    request: RunRequest
    table: Table
    facts: DataFacts
    config: Config
    """The configuration of the defaults."""

    @staticmethod
    def read(request: RunRequest, say: Say) -> "TuneData":
        """Return the rows of a request; ConfigError or InputError if they cannot be tuned on."""
        asked = request.over(Config())
        if not is_recommended(asked.table.model, asked.table.effort):
            raise ConfigError(
                "tune is for table.model=ft, without effort=published: got "
                f"{asked.table.model}, {asked.table.effort}. Leave them out."
            )
        if asked.train.steps is not None:
            raise ConfigError("tune chooses the epochs: leave out train.steps.")
        table = Table.read(asked)
        for note in table.notes:
            say(note)
        facts = table.facts()
        if not facts.details["held_out"]:
            raise InputError(
                f"tune needs held-out rows to compare settings on: {facts.size} rows are too few. "
                "Try --set table.folds=3."
            )
        config = resolve(request, facts)
        table.bind(config)  # checks the metric before anything is written
        return TuneData(request, table, facts, config)

    def epochs_of(self, config: Config) -> float:
        """Return the epochs of a whole training with a resolved configuration."""
        assert config.train.steps is not None
        return config.train.steps / self.facts.batches(config)


def tune(
    data: str | Path,
    *,
    target: str,
    out: str | Path,
    minutes: float = 30.0,
    seed: int | None = None,
    set: Mapping[str, Any] | Sequence[str] = (),
    progress: bool = True,
) -> TuneResult:
    """Search for settings on a table, train a run with the best ones, and return all trials.

    Parameters
    ----------
    data : the table, a file.
    target : column to predict.
    out : directory for the run, and for the trials in its folder `tune`; one that holds an
        interrupted search of the same table continues it.
    minutes : time for all trials and the final run.
    seed : seed of the settings, the split and the training.
    set : settings of all trials, as {"table.groups": "patient"} or ["table.groups=patient"]; they
        are not searched.
    progress : show lines on stderr; False for silence.

    Examples
    --------
    >>> addnorm.tune("adult.csv", target="income", out="runs/adult")  # doctest: +SKIP
    round trial       loss  epochs       s  settings
        3     7     0.2811    12.0    31.0  lr=0.001, swap_cells=0.1
        3     0     0.2835    12.0    30.2  defaults
    """
    options = {"source": str(data), "target": target, "seed": seed}
    request = make_request("table", options, as_settings(set))
    say = partial(print, file=sys.stderr, flush=True) if progress else say_nothing
    return tune_request(request, out, minutes=minutes, progress=progress, say=say)


def tune_request(
    request: RunRequest, out: str | Path, *, minutes: float, progress: bool, say: Say
) -> TuneResult:
    """Search, train the final run and write the page.

    Parameters
    ----------
    request : table, target and settings of all trials.
    out : directory for the run.
    minutes : time for all trials and the final run.
    progress : show the progress of the final run.
    say : receives messages.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes must be above 0: got {minutes:g}. Try --minutes 30.")
    folder = _open_folder(out)
    data = TuneData.read(request, say)
    known = {
        "request": {"table": dict(request.table), "settings": list(request.settings)},
        "minutes": minutes,
        "data": data.table.fingerprint(),
    }
    with lock_run(make_directory(folder), say):
        finished = read_trace(folder, known)
        if finished:
            say(f"continuing after {len(finished)} finished trials.")
        trials = _search(data, folder, 60 * minutes, finished, say)
        training = data.table.bind(data.config).training
        result = TuneResult(tuple(trials), training.metric, training.higher_is_better)
        say(result.verdict())
        left = 60 * minutes - sum(trial.seconds for trial in trials)
        run = _train_best(data, result.best, Path(out), left, progress, say)
        result = replace(result, run=str(run.path))
        say(f"page: {tune_page(result, run.path.name).write(folder / TUNE_PAGE)}")
    return result


def _open_folder(out: str | Path) -> Path:
    """Return the folder of the trials; SavedError if the directory holds anything else."""
    folder = Path(out) / TRIALS
    if out == "" or not (folder / SEARCH_FILE).is_file():
        require_unused(out)
        require_empty(folder)
    return folder


def read_trace(folder: Path, known: Mapping[str, Any]) -> list[Trial]:
    """Return the finished trials of a search, or begin one by writing what it is about.

    Parameters
    ----------
    folder : folder of the trials.
    known : request, minutes and digest of the data, which must be those of the search.
    """
    path = folder / SEARCH_FILE
    if not path.is_file():
        write_whole(path, to_json(known).encode())
        return []
    saved = read_json(path)
    if not isinstance(saved, dict):
        raise SavedError(f"{str(path)!r} is damaged: it must have one object. Delete the folder.")
    for name, value in known.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{str(folder)!r} holds a search with another {name}. Give the same command again "
                "to continue it, or choose another --out."
            )
    trace = folder / TRACE_FILE
    if not trace.is_file():
        return []
    try:
        lines = trace.read_text(encoding="utf-8").splitlines()
        return [Trial(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise SavedError(f"{str(trace)!r} is damaged: {error}. Delete it.") from None


def make_candidates(config: Config, epochs: float, fixed: set[str], seed: int) -> list[Any]:
    """Return settings to try: the defaults, then random changes of about half of the fields.

    Parameters
    ----------
    config : the defaults.
    epochs : their epochs.
    fixed : fields that the user set, which stay as they are.
    seed : seed of the random choice.
    """
    rate, batch = config.train.lr or 0.0, config.train.batch or 1
    choices: list[list[dict[str, Any]]] = [
        [{"train.lr": rate * factor} for factor in (0.25, 0.5, 2.0)],
        [{"model.width": w, "model.ffn_width": 2 * w, "model.depth": d} for w, d in NETWORKS],
        [{"model.ffn_dropout": share} for share in (0.0, 0.1, 0.2, 0.4)],
        [{"table.swap_cells": share} for share in (0.0, 0.02, 0.05, 0.1, 0.2)],
        [{"table.drop_cells": share} for share in (0.0, 0.02, 0.1)],
        [{"train.epochs": float(max(1, round(epochs * factor)))} for factor in (0.5, 2.0)],
        [{"train.batch": max(1, round(batch * factor))} for factor in (0.5, 2.0)],
    ]
    groups = [
        [_changes(config, choice) for choice in group]
        for group in choices
        if not fixed & {*group[0]}
    ]
    allowed = [[choice for choice in group if choice] for group in groups]
    rng, found = random.Random(seed), list[dict[str, Any]]([{}])
    for _ in range(100 * MAX_TRIALS):
        changes: dict[str, Any] = {}
        for group in allowed:
            if rng.random() < 0.5:
                changes |= rng.choice(group)
        if changes not in found:
            found.append(changes)
        if len(found) == MAX_TRIALS:
            break
    return found


def _changes(config: Config, choice: TrialSettings) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    changes = {}
    for path, value in choice.items():
        section, _, name = path.partition(".")
        if getattr(getattr(config, section), name) != value:
            changes[path] = value
    return changes


def _search(
    data: TuneData, folder: Path, seconds: float, finished: list[Trial], say: Say
) -> list[Trial]:
    """Run the trials that are not finished; each is written to the trace when it ends."""
    fixed = {text.partition("=")[0].strip() for text in data.request.settings}
    if any(path.startswith("model.") for path in fixed):  # widths and heads go together
        fixed |= {"model.width"}
    seed = data.config.run.seed
    candidates = make_candidates(data.config, data.epochs_of(data.config), fixed, seed)

    def record(trials: list[Trial]) -> None:
        lines = (to_json(asdict(trial), indent=None) for trial in trials)
        write_whole(folder / TRACE_FILE, "".join(f"{line}\n" for line in lines).encode())
        last = trials[-1]
        text = f"{last.describe()}: {format_score(last.score)}, {last.seconds:.1f} s"
        say(f"round {last.round}, trial {last.number}: {text}")

    higher = data.table.bind(data.config).training.higher_is_better
    return halve(
        candidates,
        partial(fit_trial, data),
        seconds=seconds,
        finished=finished,
        record=record,
        higher_is_better=higher,
    )


def fit_trial(data: TuneData, settings: TrialSettings, share: float, seconds: float) -> TrialFit:
    """Train settings with a share of their epochs and return the score on held-out rows.

    Parameters
    ----------
    data : the table.
    settings : what differs from the defaults.
    share : share of the epochs.
    seconds : the time; the schedule is shortened if the epochs do not fit.
    """
    began = time.perf_counter()
    config = resolve(data.request.with_settings(*as_settings(settings)), data.facts)
    task, train = data.table.bind(config), config.train
    model = task.make_model(None, say_nothing).to(find_device(config))
    assert train.steps is not None
    spent = time.perf_counter() - began
    fit_settings = replace(
        task.training.settings,
        epochs=max(1, round(share * data.epochs_of(config))),
        schedule=train.schedule,
        warmup=(train.warmup or 0) / train.steps,
        patience=train.patience,
        ema=train.ema,
        clip=train.clip,
        minutes=max(seconds - spent, seconds / 4) / 60,
    )
    groups = model.parameter_groups(train.weight_decay)
    score, epochs = None, 0.0
    with suppress(DivergedError):
        state, stopped = run_loop(
            model,
            groups,
            task.training,
            fit_settings,
            rows=data.facts.size,
            held_out=True,
            logger=FitLogger(False),
        )
        if stopped:
            raise KeyboardInterrupt  # the trial is not finished: the next call runs it again
        score, epochs = state.best, state.step / data.facts.batches(config)
    if score is not None and not math.isfinite(score):
        score = None
    return TrialFit(score, round(epochs, 3), round(time.perf_counter() - began, 3))


def _train_best(
    data: TuneData, best: Trial, out: Path, seconds: float, progress: bool, say: Say
) -> Run:
    """Train an ordinary run with the best settings, resume it, or return it if it is finished."""
    observers = partial(make_observers, progress=progress)
    if (out / RECORD).is_file():
        run = Run.open(out)
        if run.summary.get("finished"):
            return run
        outcome = resume_run(out, observers=observers, say=say)
    else:
        settings = dict(best.settings)
        request = data.request.with_settings(*as_settings(settings))
        whole = data.epochs_of(resolve(request, data.facts))
        expected = TIME_MARGIN * best.seconds * whole / max(best.epochs, 1e-3)
        if expected > seconds:
            settings.pop("train.epochs", None)
            limit = max(seconds, best.seconds) / 60
            request = data.request.with_settings(*as_settings(settings), f"run.minutes={limit:.4g}")
        outcome = start_run(request, out, observers=observers, say=say)
    if not outcome.progress.finished:
        raise KeyboardInterrupt  # stopped by the user: the next call resumes it
    return outcome.run
