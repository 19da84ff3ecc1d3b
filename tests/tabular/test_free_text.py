"""Free text beside numbers: used, explained, saved, and equal after a resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import TableEncoder
from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, SavedError
from addnorm.tabular import FTTransformerClassifier, InstantClassifier
from addnorm.tabular.saved import load_estimator, save_estimator

WORDS = ["knee", "back", "pain", "none", "better", "worse", "swelling", "fever", "doctor"]
SMALL: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "epochs": 2, "random_state": 0}


def reports(rows: int) -> tuple[dict[str, list[Any]], Array]:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 5)) + f" case{i}" for i in range(rows)]
    target = np.array(["worse" in text for text in texts], dtype=np.int64)
    return {"report": texts, "age": rng.normal(size=rows).tolist()}, target


@pytest.mark.trains
def test_text_is_an_input_and_survives_saving(tmp_path: Path) -> None:
    table, target = reports(160)
    model = FTTransformerClassifier(**SMALL).fit(table, target)
    assert model.encoder_.names == ["report (score)", "age"]
    before = model.predict_proba(table)
    save_estimator(model, tmp_path / "model")
    again = load_estimator(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(table), before)  # type: ignore[attr-defined]
    stored = b"".join(path.read_bytes() for path in (tmp_path / "model").iterdir())
    assert not any(word.encode() in stored for word in ("swelling", "case7", "doctor"))


@pytest.mark.trains
def test_damaged_rules_are_refused(tmp_path: Path) -> None:
    table, target = reports(160)
    model = FTTransformerClassifier(**SMALL).fit(table, target)
    whole = model.encoder_
    short = [weights[:-1] for weights in whole.texts[0].weights]
    damages: dict[str, Any] = {"words": whole.texts[0].words[::-1], "idf": (1.0,), "weights": short}
    for field, value in damages.items():
        damaged = replace(whole.texts[0], **{field: value})
        model.encoder_ = replace(whole, texts=(damaged,))
        save_estimator(model, tmp_path / field)
        with pytest.raises(SavedError, match=rf"encoder.texts\[0\].{field} must be"):
            load_estimator(tmp_path / field)
    model.encoder_ = replace(whole, texts=())
    save_estimator(model, tmp_path / "none")
    with pytest.raises(SavedError, match=r"encoder\.numbers"):
        load_estimator(tmp_path / "none")


def test_text_helps_an_instant_model() -> None:
    table, target = reports(300)
    train = {name: column[:200] for name, column in table.items()}
    test = {name: column[200:] for name, column in table.items()}
    model = InstantClassifier().fit(train, target[:200])
    assert (model.predict(test) == target[200:]).mean() > 0.8


@pytest.mark.trains
def test_text_without_a_target_is_left_out() -> None:
    table, _ = reports(160)
    model = FTTransformerClassifier(**SMALL).pretrain(table, epochs=1)
    assert model.pretrained_.encoder.names == ["age"]


@pytest.mark.trains
def test_groups_too_few_for_folds_leave_text_out() -> None:
    table, target = reports(160)
    groups = np.arange(160) % 4
    model = FTTransformerClassifier(**SMALL).fit(table, target, groups=groups)
    assert model.encoder_.names == ["age"]
    assert any("'report' is left out" in note for note in model.report_["notes"])


def test_text_cannot_be_the_only_kind_asked_for() -> None:
    with pytest.raises(ConfigError, match="must be one of number, category, date, text, ignore"):
        FTTransformerClassifier(schema={"report": "words"}, **SMALL).fit(*reports(160))


def test_a_resumed_run_has_the_scores_of_the_first() -> None:
    """A resume passes the stored encoder: training rows must keep scores from other folds."""
    table, target = reports(160)
    model = FTTransformerClassifier(**SMALL)
    frame = model.check_rows(table, target)
    model.classes_ = np.array([0, 1])
    first = model.split_rows(frame, target, 2, np.ones(160))
    stored = TableEncoder.parse(json.loads(json.dumps(model.encoder_.dump())))
    second = model.split_rows(frame, target, 2, np.ones(160), encoder=stored)
    assert torch.equal(first.rows.table.numbers, second.rows.table.numbers)
    own = stored.encode(frame).numbers[: len(first.rows)]
    assert not torch.equal(first.rows.table.numbers, own)
