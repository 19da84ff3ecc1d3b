"""Temperature scaling: closed forms, limits, and few rows."""

import math
from pathlib import Path

import pytest
import torch

from addnorm.errors import SavedError
from addnorm.files import write_document
from addnorm.training.calibration import (
    CALIBRATION,
    CALIBRATION_FILE,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    fit_temperature,
    load_temperature,
    logits_of,
    probabilities_of,
    remove_temperature,
    save_temperature,
)


def test_one_output_is_the_log_odds_of_the_second_class() -> None:
    outputs = torch.tensor([[0.0], [2.0], [-1.5]])
    result = probabilities_of(outputs, 0.5)
    for row, z in enumerate((0.0, 2.0, -1.5)):
        second = 1 / (1 + math.exp(-z / 0.5))
        assert result[row].tolist() == pytest.approx([1 - second, second], rel=1e-12)
    many = torch.randn(4, 3)
    assert logits_of(many) is many and result.dtype == torch.float64


@pytest.mark.parametrize("rows", (1, 2, 40))
def test_probabilities_of_several_classes(rows: int) -> None:
    outputs = 3 * torch.randn(rows, 4)
    result = probabilities_of(outputs, 1.7)
    for row in range(rows):
        each = [math.exp(float(z) / 1.7) for z in outputs[row]]
        assert result[row].tolist() == pytest.approx([e / sum(each) for e in each], rel=1e-5)


def test_always_right_or_wrong_logits_give_the_limits() -> None:
    """If every row is right, smaller is better; if every row is wrong, larger is better."""
    target = torch.arange(40) % 3
    confident = torch.nn.functional.one_hot(target, 3).float()
    assert fit_temperature(confident, target, torch.ones(40)) == MIN_TEMPERATURE
    assert fit_temperature(-confident, target, torch.ones(40)) == MAX_TEMPERATURE
    assert MIN_TEMPERATURE < 1 < MAX_TEMPERATURE


@pytest.mark.parametrize(("rows", "fitted"), ((19, False), (20, True)))
def test_fewer_than_twenty_rows_are_not_calibrated(rows: int, fitted: bool) -> None:
    """Logits three times too large: at odds of 3, one in four is wrong."""
    target = (torch.arange(rows) % 4 > 0).long()
    outputs = torch.full((rows, 1), 3 * math.log(3))
    result = fit_temperature(outputs, target, torch.ones(rows))
    assert result == pytest.approx(3.0, rel=1e-6) if fitted else result == 1.0


def test_the_temperature_equals_the_closed_form() -> None:
    """All rows with logit z, a share p of the second class: z / T = log p / (1 − p)."""
    for wrong, z in ((1, 0.3), (3, 2.0), (9, 4.0)):
        target = (torch.arange(40) >= wrong).long()
        result = fit_temperature(torch.full((40, 1), z), target, torch.ones(40))
        assert result == pytest.approx(z / math.log((40 - wrong) / wrong), rel=1e-6)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    save_temperature(tmp_path, 1.5)
    return tmp_path


def test_a_temperature_is_saved_with_its_weights(saved: Path) -> None:
    assert load_temperature(saved) == 1.5
    first = (saved / CALIBRATION_FILE).read_bytes()
    save_temperature(saved, 1.5)
    assert (saved / CALIBRATION_FILE).read_bytes() == first
    (saved / "model.safetensors").write_bytes(b"other")
    message = "was fitted to other weights than those of model.safetensors. Delete it to use"
    with pytest.raises(SavedError, match=message):
        load_temperature(saved)
    remove_temperature(saved)
    remove_temperature(saved)
    assert load_temperature(saved) == 1.0


def test_a_changed_temperature_is_refused(saved: Path) -> None:
    path = saved / CALIBRATION_FILE
    path.write_text(path.read_text().replace("1.5", "1.7"))
    with pytest.raises(SavedError, match="changed"):
        load_temperature(saved)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, "1", None, True, 0.01])
def test_an_impossible_temperature_is_refused(value: object, saved: Path) -> None:
    write_document(saved / CALIBRATION_FILE, *CALIBRATION, {"temperature": value, "weights": ""})
    message = r"temperature must be a number from 0\.05 to 20: got .*\. Use a backup\."
    with pytest.raises(SavedError, match=message):
        load_temperature(saved)
