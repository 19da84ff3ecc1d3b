"""The command line: help, results, errors, exit codes."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from addnorm import presets
from addnorm.cli.main import COMMANDS, main, make_parser, parse
from addnorm.config import Config
from addnorm.layers.addnorm import ADDNORMS
from addnorm.tasks import TASKS

HELP = {"--help", "-h"}
ALWAYS = (
    "--help -h --config --source --out --from --minutes --seed --set --dry-run --board "
    "--clinic --json"
)
TRAIN = {
    "translate": "--target --valid-source --valid-target --text --label --size --lora --rank",
    "language": "--valid-source --text --size --lora --rank",
    "masked": "--valid-source --text --size --lora --rank",
    "classify": "--valid-source --text --label --size --lora --rank",
    "images": "--valid-source --size",
    "label": "--valid-source --text --label --size --lora --rank",
    "table": "--target --task --model --schema --groups --split --test --compare --unlabelled "
    "--pretrain --effort --folds --class-weight --metric",
}
"""Options of `train TASK`, besides those of every task."""
FLAGS = {
    "train": HELP | {"--resume", "--minutes", "--steps", "--board", "--clinic", "--json"},
    "evaluate": HELP | {"--int8", "--source", "--target", "--beam", "--json"},
    "translate": HELP
    | {"--int8", "--beam", "--nbest", "--penalty", "--alpha", "--workers", "--scores", "--json"}
    | {"--stream", "--engine"},
    "generate": HELP
    | {"--int8", "--prompt", "--tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json"}
    | {"--engine"},
    "classify": HELP | {"--stream", "--engine", "--examples", "--json"},
    "label": HELP | {"--stream", "--engine", "--json"},
    "schema": HELP | {"-o", "--out", "--target", "--json"},
    "predict": HELP
    | {"-o", "--out", "--proba", "--intervals", "--quantiles", "--point", "--engine", "--json"},
    "explain": HELP | {"--row", "--report", "--memory", "--json"},
    "import": HELP | {"--adapter", "--json"},
    "export": HELP | {"--to", "--architecture", "--precision", "--json"},
    "embed": HELP | {"-o", "--out", "--json"},
    "clinic": HELP
    | {"--set", "--report", "--lr", "--warmup", "--quick", "--try", "--steps", "--jobs", "--json"}
    | {"--data", "--out", "--fail-on"},
    "race": HELP | {"--set", "--vary", "--seeds", "--minutes", "--out", "--jobs", "--json"},
    "tune": HELP | {"--target", "--minutes", "--out", "--seed", "--set", "--json"},
    "runs": HELP | {"--json"},
    "cost": HELP | {"--set", "--length", "--batch", "--json"},
    "draw": HELP | {"--set", "-o", "--out", "--length"},
    "show": HELP | {"--set", "--fields"},
    "list": HELP | {"--json"},
    "doctor": HELP | {"--json"},
    "demo": HELP | {"--to", "--minutes", "--steps", "--seed", "--out", "--json"},
    "completion": HELP,
}


def choices_of(parser: argparse.ArgumentParser) -> Any:
    return next(action.choices for action in parser._actions if action.choices)


def test_the_list_of_flags() -> None:
    # A flag never repeats a field of the configuration: there is one --set.
    verbs = choices_of(make_parser())
    assert {name: set(verb.flags()) for name, verb in verbs.items()} == FLAGS
    tasks = choices_of(verbs["train"])
    wanted = {name: {*ALWAYS.split(), *flags.split()} for name, flags in TRAIN.items()}
    assert {name: set(task.flags()) for name, task in tasks.items()} == wanted
    assert tasks.keys() == TASKS.keys()


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys; from addnorm.cli.main import main\ntry: main(['--help'])\n"
    code += "except SystemExit: assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cost" in done.stdout and not done.stderr


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_help_ends_with_example_commands(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    examples = list(COMMANDS[verb].examples)
    last = capsys.readouterr().out.strip().splitlines()[-len(examples) :]
    assert [line.strip() for line in last] == examples and len(examples) >= 2


@pytest.mark.parametrize(
    "command", [line for verb in ("cost", "show", "list") for line in COMMANDS[verb].examples]
)
def test_example_commands_work_as_pasted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()[1:]) == 0
    output = capsys.readouterr()
    assert output.out and not output.err


@pytest.mark.parametrize(
    "command",
    [
        *(line for verb in COMMANDS for line in COMMANDS[verb].examples),
        *(line for task in TASKS for line in TASKS[task].examples),
    ],
)
def test_example_commands_are_parsed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[run]\ntask = 'language'\n")
    words = shlex.split(command.split("| ")[-1])
    args = parse(words[1:])
    assert args.action == COMMANDS[words[1]].action


def test_cost_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "gpt2", "--json", "--length", "64"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["parameters"] == 124_439_808 and table["length"] == 64
    assert main(["cost", "gpt2", "--set", "model.window=64"]) == 0
    assert "scores never cost more than the rest" in capsys.readouterr().out


def test_show_prints_a_configuration_that_loads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", "gpt2", "--set", "model.depth=3"]) == 0
    text = capsys.readouterr().out
    assert Config.parse(text) == presets.gpt2(depth=3)
    (tmp_path / "run.toml").write_text(text)
    assert main(["show", str(tmp_path / "run.toml"), "--fields"]) == 0
    explained = capsys.readouterr().out
    assert "# Numbers per position in the stream." in explained
    assert Config.parse(explained) == presets.gpt2(depth=3)


def test_list_names_every_arrangement_with_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert set(rows) == set(ADDNORMS)
    assert all("←" in formula for formula in rows.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost", "gpt3"], "there is no preset or file 'gpt3'. Did you mean 'gpt2'?"),
        (["cost", "gpt2", "--set", "model.dept=3"], "model has no field 'dept'. Did you mean"),
        (["cost", "gpt2", "--set", "depth=3"], "a setting must read section.field=value"),
        (["cost", "gpt2", "--set", "model.heads=7"], "model.heads must divide width"),
        (["cost", "gpt2", "--set", "model.addnorm=prelayer"], "model.addnorm has no choice"),
        (["cost", "gpt2", "--length", "0"], "length and batch must be positive"),
        (["show", "no/such/file.toml"], "there is no file 'no/such/file.toml'"),
        (["show", "no/such/model"], "there is no file or directory 'no/such/model'"),
        (["costs"], "there is no verb 'costs'. Did you mean 'cost'?"),
        (["list", "norm"], "there is no kind 'norm'. Did you mean 'norms'?"),
        (["cost", "gpt2", "--lenght", "3"], "cost has no option '--lenght'. Did you mean '--len"),
        (["train", "langauge", "x"], "there is no task 'langauge'. Did you mean 'language'?"),
        (["train", "table", "--taget=y"], "train table has no option '--taget'. Did you mean '--"),
        (["list", "norms", "more"], "list takes no argument 'more'. See addnorm list -h"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"addnorm: {message}") and output.err.count("\n") == 1
    assert not output.out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "cost", "gpt3"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.process
def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m addnorm list presets | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert "base" in done.stdout and not done.stderr


@pytest.mark.parametrize("arguments", [["costs"], [], ["cost"], ["cost", "gpt2", "--batch", "x"]])
def test_invalid_arguments_are_misuse(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("addnorm: ")


def test_the_task_is_the_first_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\ntask = 'language'\n")
    args = parse(["--debug", "train", str(path), "--out", "x"])
    assert (args.task, args.config, args.out, args.debug) == ("language", str(path), "x", True)
    path.write_text("[run]\ntask = 'langauge'\n")
    assert main(["train", str(path)]) == 2
    assert "got 'langauge'. Did you mean 'language'?\n" in capsys.readouterr().err
    assert main(["train", "--out", "x", "language", "book.txt"]) == 2
    assert "or --resume RUN as its first argument." in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_every_task_explains_its_own_options(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", task, "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert all(flag in output for flag in TRAIN[task].split())
    others = {flag for flags in TRAIN.values() for flag in flags.split()} - set(TRAIN[task].split())
    assert not others & set(output.replace(",", " ").split())
    assert all(example in output for example in TASKS[task].examples)
