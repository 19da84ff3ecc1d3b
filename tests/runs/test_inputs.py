"""Data in memory: one str is never read character by character."""

from pathlib import Path
from typing import Any

import pytest

from addnorm.errors import InputError
from addnorm.runs.inputs import files_of

TEXTS = ["ba", "be"]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("translate", {"source": TEXTS, "target": "BA"}, "target must be a list of str, as the so"),
        ("translate", {"source": TEXTS, "target": Path("a.de")}, "target must be a list of str"),
        ("translate", {"source": "a.en", "target": TEXTS}, "target is a list: pass source as a li"),
        (
            "translate",
            {"source": TEXTS, "target": TEXTS, "valid_source": TEXTS, "valid_target": "BE"},
            "valid_target must be a list of str",
        ),
        ("classify", {"source": TEXTS, "label": "no"}, "label must be a list, as the texts are a"),
        ("classify", {"text": TEXTS, "label": "no"}, "label must be a list, as the texts are a"),
        ("masked", {"source": ["ba", 3]}, "source must be a list of str: item 2 is int"),
        ("language", {"text": ["ba", b"be"]}, "text must be a list of str: item 2 is bytes"),
        ("language", {"source": 3}, "source must be a list or the name of a file or column: got 3"),
        ("language", {"text": b"book.txt"}, "or column: got b'book.txt'. Try text=['one', 'two']."),
        ("classify", {"source": TEXTS, "label": 3}, "label must be a list or the name of a file"),
        ("translate", {"source": TEXTS, "target": 3}, "target must be a list or the name of a fil"),
        ("label", {"source": [["ba"]], "label": 3}, "label must be a list or the name of a file"),
        ("table", {"source": {"a": "xy", "b": [1, 2]}}, "a sequence for each column: 'a' is not"),
    ],
)
def test_one_str_is_not_a_list(
    task: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        files_of(task, options, tmp_path / "inputs")
    assert message in str(caught.value)


@pytest.mark.parametrize("task", ["translate", "language", "masked", "classify", "table"])
def test_one_str_is_a_path(task: str, tmp_path: Path) -> None:
    options = {"source": "some/file", "target": "other"}
    assert files_of(task, dict(options), tmp_path / "inputs") == options
    assert not (tmp_path / "inputs").exists()


def test_lists_are_columns_of_a_file(tmp_path: Path) -> None:
    options = {"source": TEXTS, "target": ["BA, so", 'BE "x"'], "valid_source": TEXTS}
    options["valid_target"] = ["BA", "BE"]
    files = files_of("translate", options, tmp_path)
    assert (files["text"], files["label"]) == ("text", "label") and "target" not in files
    assert Path(files["source"]).read_text() == 'text,label\nba,"BA, so"\nbe,"BE ""x"""\n'
    assert Path(files["valid_source"]).read_text() == "text,label\nba,BA\nbe,BE\n"
