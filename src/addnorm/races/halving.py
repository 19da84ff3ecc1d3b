"""Successive halving: many settings for few epochs, the better half of them for twice as many.

Jamieson & Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization".
Nothing here trains: `halve` calls the function that does, and continues a list of finished trials.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from addnorm.errors import InputError
from addnorm.files import to_json

ROUND_SHARES = (1 / 3, 1 / 4, 1 / 4)
"""Share of the time for each round; the rest is for the final run."""
EPOCH_SHARES = (0.25, 0.5, 1.0)
"""Share of its epochs that a trial takes in each round."""
MIN_TRIALS, MAX_TRIALS = 4, 64
"""Fewest and most trials of the first round."""

TrialSettings = Mapping[str, Any]
"""{"section.field": value}; empty for the defaults."""


class TrialFit(NamedTuple):
    """What training a trial returns."""

    score: float | None
    """None if it diverged."""
    epochs: float
    """Epochs that it took, which are fewer than planned if the time was over."""
    seconds: float


@dataclass(frozen=True)
class Trial:
    """One setting in one round. Number 0 is the default settings, in every round."""

    number: int
    round: int
    settings: TrialSettings
    score: float | None
    epochs: float
    seconds: float

    def describe(self) -> str:
        """Return the settings in short.

        >>> Trial(1, 1, {"train.lr": 0.001, "model.depth": 3}, 0.4, 5, 2.0).describe()
        'lr=0.001, depth=3'
        """
        parts = (f"{path.partition('.')[2]}={value:g}" for path, value in self.settings.items())
        return ", ".join(parts) or "defaults"


@dataclass(frozen=True, repr=False)
class TuneResult:
    """All trials of a search.

    Parameters
    ----------
    trials : finished trials, in their order.
    metric : name of the score.
    higher_is_better : whether a higher score is better.
    run : directory of the run that was trained with the best settings; empty before that.
    """

    trials: tuple[Trial, ...]
    metric: str = "loss"
    higher_is_better: bool = False
    run: str = ""

    def ranked(self, number: int) -> list[Trial]:
        """Return the trials of a round, the best first; those that diverged are last."""
        trials = [trial for trial in self.trials if trial.round == number]
        return sorted(trials, key=lambda trial: rank_key(trial, self.higher_is_better))

    @property
    def last_round(self) -> int:
        return max(trial.round for trial in self.trials)

    @property
    def best(self) -> Trial:
        """The best trial of the last round."""
        return self.ranked(self.last_round)[0]

    @property
    def default(self) -> Trial:
        """The default settings in the last round."""
        return next(t for t in self.ranked(self.last_round) if t.number == 0)

    def verdict(self) -> str:
        """Return whether tuning helped, in a sentence."""
        best, default = self.best, self.default
        if best.number == 0:
            score = f"{self.metric} {format_score(best.score)}"
            if len({trial.number for trial in self.trials}) == 1:
                return f"The time was enough for the defaults only ({score}). Try more minutes."
            return f"No settings were better than the defaults ({score})."
        return (
            f"Best: {best.describe()}. Held-out {self.metric} {format_score(best.score)}; with the "
            f"defaults {format_score(default.score)}."
        )

    def text(self) -> str:
        """Return a line for each trial, by round, the best first, and the verdict."""
        lines = [f"{'round':>5} {'trial':>5} {self.metric:>10} {'epochs':>7} {'s':>7}  settings"]
        for number in range(self.last_round, 0, -1):
            lines += [
                f"{t.round:5} {t.number:5} {format_score(t.score):>10} {t.epochs:7.1f} "
                f"{t.seconds:7.1f}  {t.describe()}"
                for t in self.ranked(number)
            ]
        return "\n".join([*lines, self.verdict()])

    def json(self) -> str:
        """Return the trials, the best settings and the verdict as JSON."""
        best = {"best": dict(self.best.settings), "verdict": self.verdict()}
        return to_json({**asdict(self), **best})

    def __repr__(self) -> str:
        return self.text()


def format_score(score: float | None) -> str:
    """Return a score with four decimals, or a word for a trial that has none."""
    return "diverged" if score is None else f"{score:.4f}"


def rank_key(trial: Trial, higher_is_better: bool) -> tuple[float, int]:
    """Return the sort key of a trial: smaller is better; of equal ones, the earlier trial."""
    if trial.score is None:
        return math.inf, trial.number
    return (-trial.score if higher_is_better else trial.score), trial.number


def count_trials(budget: float, seconds: Sequence[float]) -> int:
    """Return the number of trials in the first round.

    Parameters
    ----------
    budget : seconds of the round.
    seconds : those of the finished trials. The mean leaves out the first one, unless it is alone:
        it also waits for torch to start.

    >>> count_trials(100.0, []), count_trials(100.0, [20.0]), count_trials(100.0, [20.0, 10.0])
    (4, 5, 9)
    """
    counted = seconds[1:] or seconds
    if not counted:
        return MIN_TRIALS
    mean = max(sum(counted) / len(counted), 1e-6)
    left = max(0, int((budget - sum(seconds)) / mean))
    return max(MIN_TRIALS, min(MAX_TRIALS, len(seconds) + left))


def survivors(trials: Sequence[Trial], budget: float, higher_is_better: bool) -> list[int]:
    """Return the defaults, 0, and the numbers of the better half of the others.

    Parameters
    ----------
    trials : the trials of the round.
    budget : seconds of the next round, in which each takes twice as long: at least two trials go
        on, and no more than fit.
    higher_is_better : whether a higher score is better.
    """
    ranked = sorted(trials, key=lambda trial: rank_key(trial, higher_is_better))
    mean = max(sum(trial.seconds for trial in trials) / len(trials), 1e-6)
    others = [trial for trial in ranked if trial.number]
    half = others[: math.ceil(len(others) / 2)]
    kept = [trial.number for trial in half if trial.score is not None]
    return [0, *kept[: max(2, int(budget / (2 * mean))) - 1]]


def halve(
    candidates: Sequence[TrialSettings],
    fit: Callable[[TrialSettings, float, float], TrialFit],
    *,
    seconds: float,
    finished: Sequence[Trial] = (),
    record: Callable[[list[Trial]], None] = lambda trials: None,
    higher_is_better: bool = False,
) -> list[Trial]:
    """Run all rounds and return all trials.

    Parameters
    ----------
    candidates : the settings; the first ones are the defaults.
    fit : trains settings with a share of their epochs, in at most some seconds.
    seconds : the whole budget, the final run included.
    finished : trials of a search that was interrupted; they are not run again.
    record : called with all trials after each one.
    higher_is_better : whether a higher score is better.
    """
    trials = list(finished)
    for index, (share, part) in enumerate(zip(EPOCH_SHARES, ROUND_SHARES, strict=True)):
        done = {trial.number: trial for trial in trials if trial.round == index + 1}
        before = [trial for trial in trials if trial.round == index]
        budget = seconds * part
        while True:
            if index:
                numbers = survivors(before, budget, higher_is_better)
            else:
                count = count_trials(budget, [trial.seconds for trial in done.values()])
                numbers = list(range(min(count, len(candidates))))
            left = [number for number in numbers if number not in done]
            available = budget - sum(trial.seconds for trial in done.values())
            if not left or (done and available <= 0):
                break
            number = left[0]
            fitted = fit(candidates[number], share, available / len(left))
            done[number] = Trial(number, index + 1, candidates[number], *fitted)
            trials.append(done[number])
            record(trials)
    if all(trial.score is None for trial in trials if trial.round == len(EPOCH_SHARES)):
        raise InputError("every trial diverged. Look at the columns: addnorm schema FILE.")
    return trials
