"""The command line as a user meets it: help, results, errors, exit codes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from addnorm import presets
from addnorm.cli.main import COMMANDS, main, make_parser
from addnorm.config import Config
from addnorm.layers.addnorm import ADDNORMS

HELP = {"--help", "-h"}
TRAIN = (
    "--source --target --valid-source --valid-target --text --label --out --from --resume --size "
    "--minutes --set --dry-run --board --clinic --json "
    "--model --test --compare --schema --unlabelled --pretrain --groups --split --seed"
)
FLAGS = {
    "train": HELP | set(TRAIN.split()),
    "evaluate": HELP | {"--int8", "--source", "--target", "--beam", "--json"},
    "translate": HELP
    | {"--int8", "--beam", "--nbest", "--penalty", "--alpha", "--workers", "--scores", "--json"},
    "generate": HELP
    | {"--int8", "--prompt", "--tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json"},
    "classify": HELP | {"--json"},
    "schema": HELP | {"-o", "--out", "--target", "--json"},
    "predict": HELP | {"-o", "--out", "--proba", "--json"},
    "explain": HELP | {"--row", "--out", "--json"},
    "clinic": HELP
    | {"--set", "--report", "--lr", "--warmup", "--quick", "--try", "--steps", "--jobs", "--json"}
    | {"--data", "--out"},
    "race": HELP | {"--set", "--vary", "--seeds", "--minutes", "--out", "--jobs", "--json"},
    "runs": HELP | {"--json"},
    "cost": HELP | {"--set", "--length", "--batch", "--json"},
    "show": HELP | {"--set", "--fields"},
    "list": HELP | {"--json"},
    "demo": HELP | {"--to", "--minutes", "--seed", "--out", "--json"},
}


def test_the_list_of_flags_is_held() -> None:
    # A flag never repeats a field of the configuration: there is one --set.
    verbs = next(action for action in make_parser()._actions if action.choices)
    assert isinstance(verbs.choices, dict)
    found = {
        name: {flag for action in verb._actions for flag in action.option_strings}
        for name, verb in verbs.choices.items()
    }
    assert found == FLAGS


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys; from addnorm.cli.main import main\ntry: main(['--help'])\n"
    code += "except SystemExit: assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cost" in done.stdout and not done.stderr


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_ends_its_help_with_commands_to_try(
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
def test_the_commands_to_try_work_as_pasted(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()[1:]) == 0
    said = capsys.readouterr()
    assert said.out and not said.err


@pytest.mark.parametrize(
    "command",
    [line for verb in COMMANDS for line in COMMANDS[verb].examples],
)
def test_the_commands_that_need_files_are_understood(command: str) -> None:
    words = shlex.split(command.split("| ")[-1])
    args = make_parser().parse_args(words[1:])
    assert args.action == COMMANDS[words[1]].action


def test_cost_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "gpt2", "--json", "--length", "64"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["parameters"] == 124_439_808 and table["length"] == 64
    assert main(["cost", "gpt2", "--set", "model.window=64"]) == 0
    assert "scores never overtake the rest" in capsys.readouterr().out


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
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"addnorm: {message}") and said.err.count("\n") == 1
    assert not said.out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "cost", "gpt3"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.process
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m addnorm list presets | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert "base" in done.stdout and not done.stderr


def test_an_unknown_verb_is_misuse() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["costs"])
    assert stop.value.code == 2
