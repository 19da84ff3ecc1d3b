"""Errors of the system and of input are one line with a hint; a traceback only with --debug."""

import csv
from typing import Any

import pytest

from addnorm.cli import main as cli
from addnorm.data.text.files import limits
from addnorm.errors import InputError
from addnorm.generate.settings import Decoding

ArrowInvalid = type("ArrowInvalid", (ValueError,), {"__module__": "pyarrow.lib"})


@pytest.mark.parametrize(
    ("error", "code", "message"),
    (
        (
            OSError(30, "Read-only file system", "x/y"),
            1,
            "'x/y': Read-only file system. Check the permissions and the free disk space.",
        ),
        (FileNotFoundError(2, "No such file", "x"), 2, "'x': No such file. Check the path."),
        (MemoryError(), 1, "there is not enough memory (MemoryError). Try a smaller batch"),
        (RuntimeError("[x] can't allocate memory: 9 bytes"), 1, "there is not enough memory ("),
        (
            UnicodeEncodeError("ascii", "bé", 1, 2, "ordinal not in range"),
            1,
            "the output has 'é', which ascii cannot express. Set the environment variable PYTHON",
        ),
        (RecursionError("depth"), 2, "the input is nested too deeply. Simplify it."),
        (csv.Error("new-line"), 2, "the table cannot be read: new-line. Check its quotes"),
        (ArrowInvalid("bad magic"), 2, "the table cannot be read: bad magic. Save it as CSV."),
    ),
)
def test_the_last_net(
    error: Exception,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: Any) -> None:
        raise error

    monkeypatch.setattr("addnorm.cli.inspect.list_variants", fail)
    assert cli.main(["list"]) == code
    output = capsys.readouterr().err
    assert output.startswith(f"addnorm: {message}") and output.count("\n") == 1
    assert cli.main(["--debug", "list"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("addnorm.cli.inspect.list_variants", fail)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["list"])


def test_impossible_settings_of_decoding() -> None:
    with pytest.raises(InputError, match=r"temperature must be 1e-06 or more.*: got 9\.\d+e-321\."):
        Decoding(sampler="sample", temperature=1e-320)
    with pytest.raises(InputError, match="max_tokens must be at most 1,000,000: got 100,000,000"):
        Decoding(max_tokens=100_000_000)


@pytest.mark.parametrize(
    "words", (["--unpacked-limit", "4096"], ["--unpacked-limit=4096"], ["--unpacked", "4096"])
)
def test_the_unpacked_limit_holds_for_one_command(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    within: list[int | None] = []

    def note(args: Any) -> None:
        within.append(limits.unpacked)

    monkeypatch.setattr("addnorm.cli.predict.classify", note)
    assert cli.main([*words, "--debug", "classify", "run", "file"]) == 0
    assert cli.main(["--debug", *words, "classify", "run", "file"]) == 0
    assert within == [4096, 4096] and limits.unpacked is None


@pytest.mark.parametrize("value", ("-1", "0", "1e9", "many", "9" * 5000))
def test_the_unpacked_limit_is_a_number_of_bytes(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([f"--unpacked-limit={value}", "list"]) == 2
    message = f"--unpacked-limit: it must be a number of bytes above 0: got {value!r:.40}. See "
    assert message in capsys.readouterr().err
