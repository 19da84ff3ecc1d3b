"""Successive halving picks, keeps to its time and resumes; tuning refuses bad input."""

import json
import random
from pathlib import Path

import pytest

import addnorm
from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.errors import AddnormError, ConfigError, InputError, SavedError
from addnorm.races.halving import (
    EPOCH_SHARES,
    ROUND_SHARES,
    Trial,
    TrialFit,
    TrialSettings,
    TuneResult,
    halve,
)
from addnorm.races.tune import TRACE_FILE, make_candidates, read_trace
from addnorm.races.tune_page import tune_page
from addnorm.runs.run import TRIALS, Run

CANDIDATES: list[TrialSettings] = [{}, *({"train.lr": k / 10} for k in range(1, 20))]


class Fits:
    """A supplied score for each trial: 1 for the defaults, otherwise |lr - 0.7|.

    A trial takes some seconds in the first round, twice as many in the next ones, or those it gets.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.calls: list[tuple[TrialSettings, float, float]] = []

    def __call__(self, settings: TrialSettings, share: float, seconds: float) -> TrialFit:
        self.calls.append((settings, share, seconds))
        score = abs(settings["train.lr"] - 0.7) if settings else 1.0
        return TrialFit(score, 10 * share, min(4 * share * self.seconds, seconds))


def numbers_of(trials: list[Trial], round: int) -> set[int]:
    return {trial.number for trial in trials if trial.round == round}


def test_halving_keeps_the_better_half_and_the_defaults() -> None:
    fits = Fits()
    trials = halve(CANDIDATES, fits, seconds=24.0)
    assert numbers_of(trials, 1) == set(range(8))  # a third of the time, 1 s each
    assert numbers_of(trials, 2) == {0, 6, 7}  # of the better half those that fit into the time
    assert numbers_of(trials, 3) == {0, 7}
    assert TuneResult(tuple(trials)).best.settings == {"train.lr": 0.7}
    assert {share for _, share, _ in fits.calls} == {*EPOCH_SHARES}


def test_a_higher_score_can_be_better() -> None:
    trials = halve(CANDIDATES, Fits(), seconds=24.0, higher_is_better=True)
    result = TuneResult(tuple(trials), "auc", higher_is_better=True)
    assert result.best.number == 0 and "No settings were better" in result.verdict()


def test_defaults_alone_are_no_comparison() -> None:
    """No other settings were tried, so none can have been worse."""
    only = [Trial(0, number, {}, 0.4, 5.0, 2.0) for number in (1, 2, 3)]
    result = TuneResult(tuple(only))
    assert "enough for the defaults only" in result.verdict()


def test_the_time_is_divided_among_the_rounds() -> None:
    fits = Fits(seconds=2.0)
    trials = halve(CANDIDATES, fits, seconds=24.0)
    for index, share in enumerate(ROUND_SHARES):
        spent = sum(trial.seconds for trial in trials if trial.round == index + 1)
        assert 0 < spent <= 24.0 * share + 1e-9
    assert fits.calls[0][2] == pytest.approx(24.0 / 3 / 4)
    assert sum(ROUND_SHARES) < 1


def test_the_better_half_goes_on_if_there_is_time() -> None:
    trials = halve(CANDIDATES[:8], Fits(), seconds=240.0)
    assert numbers_of(trials, 2) == {0, 4, 5, 6, 7} and numbers_of(trials, 3) == {0, 6, 7}


def test_a_round_without_time_ends() -> None:
    def fit(settings: TrialSettings, share: float, seconds: float) -> TrialFit:
        return TrialFit(1.0, 1.0, 50.0)  # slower than it may be

    trials = halve(CANDIDATES, fit, seconds=60.0)
    assert [(trial.round, trial.number) for trial in trials] == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("finished", [1, 5, 8, 10, 12])
def test_a_search_continues_after_its_finished_trials(finished: int) -> None:
    whole = halve(CANDIDATES, Fits(), seconds=24.0)
    fits, recorded = Fits(), list[int]()
    again = halve(
        CANDIDATES,
        fits,
        seconds=24.0,
        finished=whole[:finished],
        record=lambda trials: recorded.append(len(trials)),
    )
    assert again == whole
    assert recorded == list(range(finished + 1, len(whole) + 1)) and len(fits.calls) < len(whole)


def test_trials_that_diverge_do_not_go_on() -> None:
    def fit(settings: TrialSettings, share: float, seconds: float) -> TrialFit:
        return TrialFit(None if settings else 1.0, 1.0, 1.0)

    trials = halve(CANDIDATES, fit, seconds=24.0)
    assert numbers_of(trials, 2) == {0} and "diverged" in TuneResult(tuple(trials)).text()
    with pytest.raises(InputError, match="every trial diverged"):
        halve(CANDIDATES, lambda *_: TrialFit(None, 0.0, 1.0), seconds=24.0)


def test_candidates_begin_with_the_defaults_and_leave_fixed_fields() -> None:
    config = Config().override("train.lr=0.002", "train.batch=64", "model.width=64")
    candidates = make_candidates(config, 12.0, {"train.lr"}, seed=1)
    assert candidates[0] == {} and len(candidates) == 64
    assert candidates == make_candidates(config, 12.0, {"train.lr"}, seed=1)
    assert not any("train.lr" in each or each.get("model.width") == 64 for each in candidates)
    assert all(each not in candidates[:i] for i, each in enumerate(candidates))
    assert {12.0 * f for f in (0.5, 2)} == {c["train.epochs"] for c in candidates if
                                            "train.epochs" in c}  # fmt: skip


def test_a_trace_belongs_to_one_search(tmp_path: Path) -> None:
    known = {"request": {"settings": []}, "minutes": 1.0, "data": "abc"}
    assert read_trace(tmp_path, known) == []
    line = {"number": 0, "round": 1, "settings": {}, "score": 0.5, "epochs": 3, "seconds": 1.0}
    (tmp_path / TRACE_FILE).write_text(json.dumps(line) + "\n")
    assert read_trace(tmp_path, known) == [Trial(0, 1, {}, 0.5, 3, 1.0)]
    with pytest.raises(ConfigError, match="search with another minutes"):
        read_trace(tmp_path, known | {"minutes": 2.0})
    (tmp_path / TRACE_FILE).write_text('{"number": 0}\n')
    with pytest.raises(SavedError, match="is damaged"):
        read_trace(tmp_path, known)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = random.Random(0)
    rows = [(rng.gauss(0, 1), rng.choice("pqr")) for _ in range(60)]
    lines = [f"{a:.3f},{c},{'yes' if a + (c == 'p') > 0 else 'no'}" for a, c in rows]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["a,c,y", *lines]) + "\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "y", "--minutes", "0"], "--minutes must be above 0: got 0"),
        (["--target", "y", "--minutes", "nan"], "--minutes must be above 0: got nan"),
        (["--target", "z"], "column 'z'"),
        (["--target", "y", "--set", "table.model=saint"], "tune is for table.model=ft"),
        (["--target", "y", "--set", "train.steps=5"], "tune chooses the epochs"),
        (["--target", "y", "--set", "data.valid_fraction=0"], "tune needs held-out rows"),
        (["--target", "y", "--set", "train.metric=bleu"], "metric"),
        ([], "the following arguments are required: --target"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str], message: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = table.parent / "out"
    assert main(["tune", str(table), "--out", str(out), *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err.splitlines()[-1] and not output.out and not out.exists()


@pytest.mark.parametrize("name", ["notes.txt", "tune/notes.txt", "run.json"])
def test_a_directory_with_other_files_is_refused(name: str, table: Path) -> None:
    out = table.parent / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with pytest.raises(AddnormError, match=r"is not empty|already has a run"):
        addnorm.tune(table, target="y", out=out, progress=False)
    assert (out / name).read_text() == "mine"


@pytest.mark.slow
@pytest.mark.trains
def test_a_search_ends_in_a_run(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = table.parent / "out"
    command = ["tune", str(table), "--target", "y", "--minutes", "0.1", "--out", str(out), "--json"]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    trace = (out / TRIALS / TRACE_FILE).read_text().splitlines()
    assert [json.loads(line) for line in trace] == shown["trials"]
    assert {trial["round"] for trial in shown["trials"] if trial["number"] == 0} == {1, 2, 3}
    run = Run.open(out)
    assert run.summary["finished"] and len(run.predict(table)) == 60
    assert "Score by round" in (out / TRIALS / "tune.html").read_text()
    assert main(command) == 0  # finished: nothing is trained again
    assert json.loads(capsys.readouterr().out) == shown


def test_the_page_says_whether_tuning_helped() -> None:
    trials = halve(CANDIDATES, Fits(), seconds=24.0)
    html = tune_page(TuneResult(tuple(trials)), "adult").html()
    assert "Best: lr=0.7. Held-out loss 0.0000; with the defaults 1.0000." in html
