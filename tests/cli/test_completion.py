"""Shell completion: generated from the parser, and run in bash (in zsh and fish if installed)."""

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from addnorm.cli.completion import (
    INSTALL,
    CommandPlace,
    bash_script,
    fish_script,
    iter_places,
    zsh_script,
)
from addnorm.cli.main import COMMANDS, main, make_parser
from addnorm.tasks import TASKS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete_in_bash(text: str, *words: str) -> set[str]:
    """Return what bash offers for the last of the words of a command line."""
    quoted = " ".join(f"'{word}'" for word in words)
    line = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}"
    code = f'{text}\n{line}; _addnorm; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


def test_places_are_those_of_the_parser() -> None:
    places = {place.path: place for place in iter_places(make_parser())}
    assert places.keys() == {(), *((verb,) for verb in COMMANDS), *(("train", t) for t in TASKS)}
    assert places[()].words.keys() == COMMANDS.keys()
    assert places[("train",)].words == {name: entry.help for name, entry in TASKS.items()}
    assert {"--size", "--label", "--set"} <= places[("train", "classify")].options.keys()
    assert list(places[("completion",)].words) == list(INSTALL)
    assert next(iter(places[("list",)].words)) == "addnorms"


@pytest.fixture
def toy() -> list[CommandPlace]:
    """The places of a parser with an option that has choices."""
    parser = argparse.ArgumentParser()
    verb = parser.add_subparsers().add_parser("bake", help="bake: it's 100%% done")
    verb.add_argument("--heat", choices=("low", "high"), help="how hot")
    return list(iter_places(parser))


@pytest.mark.process
def test_bash_completes(capsys: pytest.CaptureFixture[str], toy: list[CommandPlace]) -> None:
    text = script("bash", capsys)
    assert INSTALL["bash"] in text.splitlines()[0]
    assert complete_in_bash(text, "addnorm", "cl") == {"classify", "clinic"}
    assert complete_in_bash(text, "addnorm", "train", "") == set(TASKS)
    assert complete_in_bash(text, "addnorm", "train", "classify", "--la") == {"--label"}
    assert complete_in_bash(text, "addnorm", "--debug", "translate", "--str") == {"--stream"}
    assert complete_in_bash(text, "addnorm", "list", "p") == {"positions", "presets"}
    # Nothing is offered where a file is expected, so that bash completes file names.
    assert complete_in_bash(text, "addnorm", "classify", "run") == set()
    assert complete_in_bash(bash_script(toy), "addnorm", "bake", "--heat", "") == {"low", "high"}
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_zsh_and_fish_scripts_have_every_word(
    capsys: pytest.CaptureFixture[str], toy: list[CommandPlace]
) -> None:
    zsh, fish = script("zsh", capsys), script("fish", capsys)
    assert zsh.splitlines()[0] == "#compdef addnorm" and INSTALL["zsh"] in zsh.splitlines()[1]
    assert INSTALL["fish"] in fish.splitlines()[0]
    for place in iter_places(make_parser()):
        case_start = f"    {shlex.quote(place.name)}) names=("
        (case,) = [line for line in zsh.splitlines() if line.startswith(case_start)]
        start = f"complete -c addnorm -n '__addnorm_at {place.name or '-'}' "
        lines = [line for line in fish.splitlines() if line.startswith(start)]
        assert len(lines) == len(place.words) + len(place.options)
        for word in place.words:
            assert f"{word}:" in case and any(f" -a {word} -d '" in line for line in lines)
        for flag in place.options:
            assert f"{flag}:" in case
            name = f" -l {flag[2:]} " if flag[:2] == "--" else f" -s {flag[1:]} "
            assert any(name in line for line in lines)
    assert "    bake:--heat) names=(low high); flags=() ;;" in zsh_script(toy)
    assert " -l heat -x -a 'low high' -d 'how hot'" in fish_script(toy)
    assert r"-a bake -d 'bake – it\'s 100% done'" in fish_script(toy)


@pytest.mark.process
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_read_by_its_shell(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script(shell, capsys), encoding="utf-8")
    subprocess.run([shell, "-n", str(path)], check=True)
    if shell == "fish":
        code = f"source {path}; complete -C 'addnorm train classify --la'"
        done = subprocess.run([shell, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("--label\t")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err == ("addnorm: there is no shell 'bsh'. Did you mean 'bash'?\n")
