"""addnorm train for text tasks: output, files, kills, interrupts, errors."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from addnorm.cli import train as cli_train
from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.runs.run import Run
from addnorm.training import checkpoint
from tests.runs.common import Trained, lines, write
from tests.runs.test_train import same_runs

SMALL = [
    *("--set", "model.width=16", "--set", "model.depth=1", "--set", "model.heads=2"),
    *("--set", "model.ffn_width=32", "--set", "data.tokenizer=characters"),
    *("--set", "train.batch=512", "--set", "train.lr=0.01"),
]


def command(task: str, data: Path, out: Path, *more: str) -> list[str]:
    files = {
        "translate": ["--source", str(data / "a.source"), "--target", str(data / "a.target")],
        "language": [str(data / "book.txt"), "--set", "model.length=32"],
        "masked": [str(data / "texts.txt")],
        "classify": [str(data / "labelled.csv"), "--text", "text", "--label", "label"],
        "table": [str(data / "table.csv"), "--target", "label", "--set", "train.patience=1000"],
    }
    return ["train", task, *files[task], "--out", str(out), *SMALL, *more]


def test_a_run_without_an_evaluation_names_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = SimpleNamespace(path=tmp_path, task="language", history=[])
    figures = {"best": {}, "finished": False, "steps": 1, "seconds": 1.0, "training_seconds": 0}
    cli_train._print_summary(run, figures)
    page = f"page: {tmp_path / 'summary.html'}"
    assert f"no model yet: there was no evaluation.   {page}" in capsys.readouterr().out
    (tmp_path / "best").mkdir()
    cli_train._print_summary(run, figures)
    assert f"model: {tmp_path / 'best'}   {page}" in capsys.readouterr().out


def test_labels_of_results_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"model": "a model with a name that is quite long", "on": "held-out texts", "f1": 0.5}]
    cli_train.print_results([*rows, {"model": "short", "on": "test", "f1": 0.25}])
    head, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a model with a name that is quite long · held-out texts ")
    assert len(head) == len(first) == len(second)


@pytest.mark.trains
def test_train_prints_notes_and_results(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    more = ["--set", "train.steps=6", "--set", "train.evaluate_every=3", "--size", "small"]
    assert main(command("translate", data, out, *more)) == 0
    output = capsys.readouterr()
    assert output.out.startswith("best at step ") and "trained after 6 steps, 0:0" in output.out
    assert f"model: {out / 'best'}   page: {out / 'summary.html'}" in output.out
    for text in (
        "a.target: 120 pairs read, 120 kept.",
        "split by source: 108 rows",
        "small encoder-decoder: width 16, depth 1, 2 heads, pre-norm;",
        "6 steps of 512 tokens (",
        "step      3  held out: loss ",
    ):
        assert text in output.err
    assert main(["train", "--resume", str(out), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["finished"] and json.loads(output.out)["run"] == str(out)
    assert "it is already finished." in output.err


@pytest.mark.trains
def test_settings_override_a_toml_file(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    text = f'[run]\ntask = "classify"\nseed = 5\n[data]\nsource = "{data / "labelled.csv"}"\n'
    path.write_text(text + "[train]\nsteps = 2\n")
    more = ["--set", "train.steps=1", "--label", "label", "--size", "tiny"]
    assert main(["train", str(path), "--out", str(tmp_path / "run"), *SMALL, *more]) == 0
    config = Run.open(tmp_path / "run").config
    assert config.run.seed == 5 and config.train.steps == 1 and config.data.label == "label"
    assert config.run.task == "classify"
    capsys.readouterr()


@pytest.mark.trains
def test_a_dry_run_writes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert main(command("language", data, out, "--dry-run")) == 0
    output = capsys.readouterr().out
    config = Config.parse(output)
    assert config.train.steps and config.run.task == "language"
    assert (
        " parameters; " in output
        and " s per step, " in output
        and "# expected duration: " in output
    )
    assert main(command("language", data, out, "--dry-run", "--json", "--minutes", "0.5")) == 0
    facts = json.loads(capsys.readouterr().out)
    config = Config.parse(facts.pop("config"))
    assert config.run.minutes == 0.5 and facts["parameters"] > 0 and facts["step_flops"] > 0
    assert 0 < facts["total_seconds"] <= 60 and facts["step_seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def begin(*arguments: str) -> "subprocess.Popen[str]":
    """Start a process whose output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, "-m", "addnorm", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: "subprocess.Popen[str]", holds: Callable[[str], bool]) -> str:
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if holds(line):
            return output
    raise AssertionError(f"it ended too early: {output}")


def kill_and_compare(task: str, data: Path, tmp_path: Path, moments: list[float]) -> None:
    """Kill a run at each moment after an evaluation, resume it, compare it to an unbroken one."""
    more = [
        "--set",
        "train.steps=120",
        "--set",
        "train.evaluate_every=5",
        "--set",
        "train.save_every=3",
    ]
    more += ["--set", "model.dropout=0.1"]
    with begin(*command(task, data, tmp_path / "whole", *more)) as process:
        process.communicate()
    assert process.returncode == 0
    out = tmp_path / "killed"
    arguments = command(task, data, out, *more)
    for moment in moments:
        with begin(*arguments) as process:
            wait_for(process, lambda line: "held out: " in line)
            time.sleep(moment)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        arguments = ["train", "--resume", str(out)]
    with begin(*arguments) as process:
        process.communicate()
    assert process.returncode == 0
    same_runs(tmp_path / "whole", out)
    steps = [row["step"] for row in Run.open(out).history if "valid_loss" in row]
    assert steps == list(range(5, 121, 5))
    left = [p for p in out.rglob(".*") if p.name.startswith(".")]
    assert left == [], "what a kill left half-written is cleared away"


@pytest.mark.slow
@pytest.mark.trains
def test_a_killed_run_ends_like_an_unbroken_one(data: Path, tmp_path: Path) -> None:
    kill_and_compare("translate", data, tmp_path, [0.0, 0.005])


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.parametrize("task", ["language", "masked", "classify", "table"])
def test_a_run_killed_at_any_moment(task: str, data: Path, tmp_path: Path) -> None:
    draw = random.Random(task)
    kill_and_compare(task, data, tmp_path, [draw.uniform(0, 0.06) for _ in range(5)])


@pytest.mark.slow
@pytest.mark.trains
def test_an_interrupt_saves_and_prints_how_to_resume(data: Path, tmp_path: Path) -> None:
    """The exit code is 130, so that a command after `&&` does not run."""
    out = tmp_path / "run"
    more = ["--set", "train.steps=100000", "--set", "train.evaluate_every=5"]
    more += ["--set", "train.save_every=100000"]
    with begin(*command("language", data, out, *more)) as process:
        wait_for(process, lambda line: "held out: " in line)
        process.send_signal(signal.SIGINT)
        result, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "stopping after this step; interrupt again to stop immediately." in errors
    assert f"resume with: addnorm train --resume {out}\n" in errors
    assert errors.endswith("addnorm: stopped.\n") and "Traceback" not in errors
    summary = Run.open(out).summary
    assert not summary["finished"] and f"stopped after {summary['steps']:,} steps" in result
    (saved,) = checkpoint.steps(out)
    assert saved.name == f"step-{summary['steps']:08d}"


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Files that cannot be used for training."""
    folder = write(tmp_path / "bad", 20)
    texts = lines(20)
    (folder / "binary.txt").write_bytes(b"text\n\x00\x01\x02")
    (folder / "latin.txt").write_bytes("ba\nbe\ncafé\n".encode("latin-1"))
    (folder / "short.target").write_text("BA\n")
    (folder / "one.csv").write_text("".join(text + "\n" for text in texts))
    once = "text,label\n" + "".join(f"{t},a\n" for t in texts[:9]) + f"{texts[9]},b\n"
    (folder / "once.csv").write_text(once + f"{texts[10]},c\n{texts[11]},c\n")
    (folder / "full").mkdir()
    (folder / "full" / "something").touch()
    (folder / "bad.toml").write_text("[run\n")
    (folder / "odd.toml").write_text("[runs]\nsize = 3\n")
    return folder


MISTAKES: dict[str, tuple[str, str]] = {
    "no file": ("language {bad}/none.txt", "there is no file '{bad}/none.txt'. "),
    "a near name": ("language {bad}/bok.txt", "there is no file '{bad}/bok.txt'. Did you mean"),
    "a directory": ("masked {bad}", "'{bad}' is a directory. Name a file in it"),
    "binary": ("language {bad}/binary.txt", "'{bad}/binary.txt' is not text: byte 1 of line 2"),
    "latin-1": ("masked {bad}/latin.txt", "'{bad}/latin.txt' must be UTF-8 text: byte 4 of line 3"),
    "unequal": (
        "translate --source {bad}/a.source --target {bad}/short.target",
        "source and target must have the same number of lines: '{bad}/a.source' has 20, ",
    ),
    "one file": ("translate --source {bad}/a.source", "pairs need a source and a target: got only"),
    "one column": ("classify {bad}/one.csv", "'{bad}/one.csv' must have a column of texts and one"),
    "no such column": ("classify {bad}/labelled.csv --label star", "'{bad}/labelled.csv' has no"),
    "seen once": ("classify {bad}/once.csv", "each label must occur twice, once to train on"),
    "no task": (
        "",
        "train needs a task (translate, language, masked, classify, label, table, images), a",
    ),
    "task": ("translat {bad}/a.source", "there is no task 'translat'. Did you mean 'translate'?"),
    "size": ("language {bad}/book.txt --size huge", "run.size must be one of tiny, small, base"),
    "minutes": ("language {bad}/book.txt --minutes 0", "run.minutes must be positive: got 0.0."),
    "key": ("language {bad}/book.txt --set train.stps=3", "train has no field 'stps'. Did you"),
    "section": ("language {bad}/book.txt --set trains.steps=3", "there is no section 'trains'. "),
    "setting": ("language {bad}/book.txt --set steps", "a setting must read section.field=value"),
    "metric": ("language {bad}/book.txt --set train.metric=f1", "train.metric must be one of loss"),
    "its metric": (
        "language {bad}/book.txt --set train.metric=bleu",
        "train.metric must be one of loss for language: got 'bleu'.",
    ),
    "heads": ("language {bad}/book.txt --set model.heads=7", "model.heads must divide width"),
    "two files": (
        "language {bad}/book.txt --source {bad}/a.source",
        "there must be one file to train on: got '{bad}/book.txt' and '{bad}/a.source'.",
    ),
    "nothing": ("language", "data.source must name a text to train on: it is not set."),
    "no TOML": ("{bad}/none.toml", "there is no file '{bad}/none.toml'. Check the path."),
    "bad TOML": ("{bad}/bad.toml", "{bad}/bad.toml is not TOML: "),
    "odd TOML": ("{bad}/odd.toml", "there is no section 'runs'. Did you mean 'run'?"),
    "start": (
        "classify {bad}/labelled.csv --from {bad}",
        "there is no run in '{bad}' to start from",
    ),
    "GPU": ("language {bad}/book.txt --set run.device=cuda", "run.device=cuda needs a GPU"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    name: str,
    bad: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, message = (text.replace("{bad}", str(bad)) for text in MISTAKES[name])
    out = tmp_path / "out"
    assert main(["train", *arguments.split(), "--out", str(out)]) == 2
    output = capsys.readouterr()
    *messages, last = output.err.splitlines()
    assert last.startswith(f"addnorm: {message}"), last
    assert not output.out and not out.exists() and "Traceback" not in output.err
    assert not any(line.startswith("addnorm:") for line in messages)


def test_bfloat16_is_refused_where_it_is_slow(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("addnorm.runs.train.is_slow", lambda device, dtype: True)
    out = tmp_path / "out"
    assert main(command("language", data, out, "--set", "run.precision=bfloat16")) == 2
    assert "addnorm: run.precision=bfloat16 is many times slower" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.trains
def test_directories_that_a_run_cannot_use(
    bad: Path, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, message in (
        (bad / "full", "is not empty. Choose another --out"),
        (bad / "a.source", "is a file. Choose another --out."),
        (bad / "a.source" / "run", "cannot be created: Not a directory."),
        (trained["language"], "already has a run. Choose another --out, or resume it:"),
    ):
        before = sorted(bad.rglob("*"))
        assert main(command("language", bad, out, "--set", "train.steps=1")) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"addnorm: {str(out)!r} {message}")
        assert sorted(bad.rglob("*")) == before
    unusable = command("language", bad, bad / "a.source" / "run")
    unusable[2] = str(bad / "none.txt")
    assert main(unusable) == 2
    assert "cannot be created: " in capsys.readouterr().err, "before the data are read"
    assert main(["train", "language", str(bad / "book.txt")]) == 2
    assert "--out must name a directory for the run." in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra",
    [
        "translate",
        "language book.txt",
        "--out other",
        "--set train.steps=3",
        "--size tiny",
        "--source a",
        "--target a",
        "--valid-source a",
        "--valid-target a",
        "--text a",
        "--label a",
        "--from other",
        "--dry-run",
    ],
)
def test_resume_takes_no_other_flags(extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *extra.split(), "--resume", "some/run"]) == 2
    assert capsys.readouterr().err == (
        "addnorm: --resume takes no other options than --minutes +N, --steps +N, --board, --clinic "
        "and --json. To start a new run with changes, use --from.\n"
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "--minutes 3",
            "with --resume, --minutes must be a number of further minutes, such as +3: got '3'. "
            "Try: addnorm train --resume some/run --minutes +3",
        ),
        (
            "--steps 500",
            "with --resume, --steps must be a number of further steps, such as +500: got '500'. "
            "Try: addnorm train --resume some/run --steps +500",
        ),
        (
            "--steps +many",
            "with --resume, --steps must be a number of further steps, such as +10: got '+many'. "
            "Try: addnorm train --resume some/run --steps +10",
        ),
        (
            "--minutes +1 --steps +3",
            "a run is extended by --minutes or by --steps: got both. Leave one out.",
        ),
    ],
)
def test_an_extension_is_a_further_time_or_number_of_steps(
    extra: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", "some/run", *extra.split()]) == 2
    assert capsys.readouterr().err == f"addnorm: {message}\n"


@pytest.mark.trains
def test_runs_that_cannot_be_resumed(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("addnorm: there is no run in ")
    facts = json.loads((trained["language"] / "run.json").read_text()) | {"version": 3}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "is a run of format 3; this addnorm reads format 2." in capsys.readouterr().err


@pytest.mark.trains
def test_a_diverged_run_exits_with_failure(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "train.lr=1e30", "--set", "train.steps=40", "--set", "train.clip=0"]
    assert main(command("language", data, tmp_path / "run", *more)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("addnorm: 20 steps in a row were not finite; the last: step ")
    assert Run.open(tmp_path / "run").history


@pytest.mark.slow
@pytest.mark.trains
def test_tensorboard_files(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboardX")
    more = ["--board", "--set", "train.steps=2"]
    assert main(command("language", data, tmp_path / "run", *more)) == 0
    assert len(list((tmp_path / "run" / "board").iterdir())) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    "flags",
    (
        *(["--compare"], ["--test", "t.csv"], ["--groups", "a"], ["--split", "time"]),
        *(["--model", "ft"], ["--schema", "s.toml"], ["--unlabelled", "u.csv"]),
        ["--pretrain", "masked"],
    ),
    ids=lambda flags: flags[0],
)
def test_a_text_task_has_no_table_options(
    data: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("language", data, tmp_path / "run", *flags)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"addnorm: train language has no option {flags[0]!r}. ")
    assert not (tmp_path / "run").exists()


@pytest.mark.trains
def test_seed_sets_run_seed(data: Path, tmp_path: Path) -> None:
    more = ["--seed", "7", "--set", "train.steps=1"]
    assert main(command("language", data, tmp_path / "run", *more)) == 0
    assert Config.load(tmp_path / "run" / "config.toml").run.seed == 7
