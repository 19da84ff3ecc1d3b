"""The programs in examples/ run as they are, and say what they promise."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "translate": ("fünf", "five old books →"),
    "classify": ("from pretrained weights:", "from nothing:", "from its vectors:", "witty →"),
    "table": ("'accuracy'", "malignant", "when it is shuffled", "instant:"),
    "clinic": ("arrangement     pre", "initial weights too large", "learning rate 10: "),
    "circuits": ("step 400", "induction: decoder.1", "what it reads of decoder.0"),
}
"""What each program prints, among other things."""


def test_every_example_is_tested() -> None:
    assert sorted(PRINTED) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", PRINTED)
def test_examples_are_short_and_in_cells(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 90 and sum(line.startswith("# %%") for line in lines) >= 3
    assert f"    python examples/{name}.py" in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.filterwarnings("default")
def test_examples_run(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert [words for words in PRINTED[name] if words not in shown] == []
