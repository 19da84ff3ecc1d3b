"""The instant model as a teacher: when, of which rows, and what is learnt from it."""

from typing import Any

import numpy as np
import pytest

from addnorm.data.table.encode import fit_encoder
from addnorm.data.table.frame import Array, Frame
from addnorm.data.table.infer import infer
from addnorm.tabular import FTTransformerClassifier, FTTransformerOrdinal, FTTransformerRegressor
from addnorm.tabular import teacher as subject
from addnorm.tabular.base import TEACHER_NOTE
from addnorm.tabular.teacher import MIN_TAUGHT_ROWS, TEACHER_PARTS, teach, wants_teacher
from tests.tabular.data import QUICK, people

ROWS = MIN_TAUGHT_ROWS


def is_taught(kind: Any = FTTransformerClassifier, **changes: Any) -> bool:
    given: dict[str, Any] = {"target": np.arange(ROWS) % 2, "classes": 2, "weight": np.ones(ROWS)}
    given |= {name: changes.pop(name) for name in tuple(changes) if name in given}
    return wants_teacher(kind(**changes), **given)


def test_small_tables_of_classes_are_taught() -> None:
    assert is_taught()
    for changes in (
        {"target": np.arange(ROWS - 1) % 2},
        {"target": np.arange(2001) % 2},
        {"classes": 0, "kind": FTTransformerRegressor},
        {"kind": FTTransformerOrdinal},
        {"effort": "low"},
        {"effort": "published"},
        {"weight": np.arange(ROWS)},
        {"target": np.arange(ROWS) % 11, "classes": 11},
    ):
        assert not is_taught(**changes), changes


def test_a_row_is_predicted_from_rows_of_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the teacher always give the same answer, and look at what it was asked."""
    asked: list[tuple[Array, Array]] = []

    def answer(known: tuple[Frame, Array], unknown: Frame, schema: Any, *, members: int) -> Array:
        asked.append((known[0].columns["noise"], unknown.columns["noise"]))
        return np.full((len(unknown), 2), [0.25, 0.75])

    monkeypatch.setattr(subject, "_ask", answer)
    X, labels = people(120)
    target = (labels == "yes").astype(np.int64)
    encoder = fit_encoder(X, infer(X))
    rare = np.repeat([0, 1], [len(X) - TEACHER_PARTS + 1, TEACHER_PARTS - 1])
    assert teach(X, rare, 2, encoder, seed=3) is None and not asked
    lesson = teach(X, target, 2, encoder, seed=3)
    assert lesson is not None
    *crossed, (known, made_up) = asked
    assert len(crossed) == TEACHER_PARTS and all(not np.isin(b, a).any() for a, b in crossed)
    assert np.array_equal(np.sort(np.concatenate([b for _, b in crossed])), np.sort(known))
    own = np.eye(2)[target]
    np.testing.assert_allclose(lesson.soft.numpy(), own / 2 + [0.125, 0.375], atol=1e-6)
    changed = float((made_up != known).mean())
    assert 0.15 < changed < 0.45, "three of ten cells"
    assert lesson.second.numbers.shape[0] == len(lesson.second_soft) == 120


@pytest.mark.slow
@pytest.mark.trains
def test_a_fit_of_a_small_table_says_that_it_was_taught() -> None:
    X, y = people(ROWS + 100)
    model = FTTransformerClassifier(**QUICK | {"epochs": 2}).fit(X, y)
    assert TEACHER_NOTE in model.report_["notes"]
    again = FTTransformerClassifier(**QUICK | {"epochs": 2}).fit(X, y)
    assert np.array_equal(model.predict_proba(X), again.predict_proba(X))
    high = FTTransformerClassifier(**QUICK | {"epochs": 1}, effort="high").fit(X, y)
    assert TEACHER_NOTE in high.report_["notes"] and high.report_["folds"] == 1
    for changes in ({"effort": "low"}, {"folds": 2}):
        other = FTTransformerClassifier(**QUICK | {"epochs": 1} | changes).fit(X, y)
        assert TEACHER_NOTE not in other.report_["notes"]
    groups = np.arange(len(y)) // 4
    other = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, y, groups=groups)
    assert TEACHER_NOTE not in other.report_["notes"]
