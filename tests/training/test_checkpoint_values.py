"""The plain values of a checkpoint are checked, also if their digest is right."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm.errors import SavedError
from addnorm.files import CHECKPOINT_MODEL, CHECKPOINT_STATE
from addnorm.models.saved import write_tensors
from addnorm.training.checkpoint import STATE_FILE, WEIGHTS_FILE, Checkpoint, read
from addnorm.training.loop import TrainingState


def write(path: Path, values: Any, step: Any = 3) -> None:
    tensors = {"w": torch.ones(2)}
    write_tensors(path / WEIGHTS_FILE, tensors, *CHECKPOINT_MODEL, {"step": 3})
    write_tensors(path / STATE_FILE, tensors, *CHECKPOINT_STATE, {"step": step, "values": values})


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ("[]", r"its values must be an object with groups\. Use a backup\."),
        ('{"step": 3, "groups": [1]}', "its values must be an object with groups"),
        ("[" * 100_000, r"its values are nested too deeply\. Use a backup\."),
        ("{", "its values are not JSON"),
        (None, "its values are not JSON"),
        ('{"step": 1, "groups": []}', "its values are of step 1, the file is of step 3"),
    ),
)
def test_damaged_values_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, values)
    with pytest.raises(SavedError, match=rf"state\.safetensors' is damaged: {message}"):
        read(tmp_path)


def test_the_files_must_be_of_one_step(tmp_path: Path) -> None:
    write(tmp_path, '{"step": 4, "groups": []}', step=4)
    with pytest.raises(SavedError, match=r"must be of one step: weights.* is of step 3, .*step 4"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"step": "1"}, r"step cannot be '1'\. Use a backup\."),
        ({"segments": [{"steps": 1.5, "end": 1.0}]}, r"steps cannot be 1\.5\. Use a backup\."),
        ({"segments": [{"steps": 1}]}, r"end is missing\. Use a backup\."),
        ({"pace": {"speed": []}}, r"speed is not known\. Use a backup\."),
        ({"pace": {"saves": ["1"]}}, r"saves cannot be '1'\. Use a backup\."),
        ({"threads": [{"step": None}]}, r"threads cannot be None\. Use a backup\."),
        ({"history": None}, "history cannot be None"),
        ({"step": 1}, "must be of step 3: it is of step 1"),
        ({"more": 1}, "must have the fields of this addnorm"),
    ),
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    saved = Checkpoint(Path("step"), {"step": 3}, {}, {})
    plain = json.loads(json.dumps(asdict(TrainingState(step=3))))
    assert TrainingState.parse(plain, saved) == TrainingState(step=3)
    plain["history"] = [{"step": 3, "loss": 0.5}]
    again = asdict(TrainingState.parse(plain, saved))
    assert json.dumps(again) == json.dumps(plain), "an integer stays one, so that bytes are equal"
    with pytest.raises(SavedError, match=message):
        TrainingState.parse(plain | change, saved)
