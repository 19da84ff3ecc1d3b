"""Columns of free text: scores of their words, out of fold, and only where they help."""

import json
import zlib

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from addnorm.data.table.encode import TableEncoder, fit_encoder
from addnorm.data.table.frame import Array, Frame, to_frame
from addnorm.data.table.infer import infer
from addnorm.data.table.schema import Column, Schema
from addnorm.data.table.text import (
    MIN_WORD_ROWS,
    PART_ROWS,
    RIDGES,
    TEXT_ROWS,
    TextRule,
    WordRows,
    fit_texts,
    is_free_text,
    target_scores,
    word_numbers,
)

WORDS = ["knee", "back", "pain", "none", "better", "worse", "swelling", "fever", "doctor"]


def notes(rows: int, seed: int = 0) -> tuple[Frame, Array]:
    """Return reports, and whether they say worse."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 5)) + f" case{i}" for i in range(rows)]
    target = np.array(["worse" in text for text in texts], dtype=np.int64)
    return to_frame({"report": texts, "age": rng.normal(size=rows)}), target


def folds(rows: int) -> Array:
    return np.arange(rows) % 5


SCHEMA = Schema(columns=(Column(name="report", kind="text"), Column(name="age", kind="number")))


def test_free_text_is_inferred_and_codes_and_names_are_not() -> None:
    frame, _ = notes(80)
    assert infer(frame).kinds()["report"] == "text"
    names = [f"Ann{zlib.crc32(bytes([i])):x} Lee{i * 7919:x}" for i in range(80)]
    codes = [f"QX-{i:04}-{i * 37 % 91}" for i in range(80)]
    kinds = infer(to_frame({"name": names, "code": codes})).kinds()
    assert kinds == {"name": "ignore", "code": "ignore"}


def test_few_texts_are_not_free_text() -> None:
    frame, _ = notes(TEXT_ROWS)
    texts = frame.columns["report"].tolist()
    assert is_free_text(texts)
    assert not is_free_text(texts[:-1])


@pytest.mark.parametrize("rows", [30, PART_ROWS + 50])
def test_weights_equal_those_of_ridge_regression(rows: int) -> None:
    frame, target = notes(rows)
    words = sorted(number for word in WORDS for number in word_numbers(word))
    idf = np.linspace(1, 2, len(words))
    found = WordRows.of(frame.columns["report"], words, idf)
    y = target_scores(target, 2)
    everything = np.arange(rows)
    x = found.features(everything)
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1)
    for ridge, weights in zip(RIDGES, found.ridge(everything, y), strict=True):
        expected = Ridge(alpha=ridge, fit_intercept=False).fit(x, y).coef_.reshape(-1)
        np.testing.assert_allclose(weights[:, 0], expected, atol=1e-8)


def test_scores_of_training_rows_come_from_other_folds() -> None:
    frame, target = notes(200)
    y = target_scores(target, 2)
    _, before = fit_texts(frame, SCHEMA, y, folds(200))
    changed = y.copy()
    changed[0] = 1 - changed[0]
    _, after = fit_texts(frame, SCHEMA, changed, folds(200))
    one, other = before["report"].out_of_fold, after["report"].out_of_fold
    same_fold = folds(200) == 0
    np.testing.assert_array_equal(one[same_fold], other[same_fold])
    assert not np.array_equal(one[~same_fold], other[~same_fold])


def test_a_text_that_does_not_help_is_left_out_with_a_note() -> None:
    frame, target = notes(200)
    shuffled = np.random.default_rng(1).permutation(target)
    schema, fitted = fit_texts(frame, SCHEMA, target_scores(shuffled, 2), folds(200))
    assert not fitted
    assert schema.kinds()["report"] == "ignore"
    assert "do not predict the target" in schema.columns[0].note


def test_neither_texts_nor_rare_words_are_stored() -> None:
    frame, target = notes(200)
    schema, fitted = fit_texts(frame, SCHEMA, target_scores(target, 2), folds(200))
    encoder = fit_encoder(frame, schema, texts=fitted)
    written = json.dumps(encoder.dump())
    assert not any(word in written for word in WORDS)
    assert MIN_WORD_ROWS > 1
    assert zlib.crc32(b"case7") not in encoder.texts[0].words
    assert set(encoder.texts[0].words) == {zlib.crc32(word.encode()) for word in WORDS}
    assert TableEncoder.parse(json.loads(written)) == encoder


def test_new_texts_have_the_scores_of_their_words() -> None:
    frame, target = notes(300)
    schema, fitted = fit_texts(frame, SCHEMA, target_scores(target, 2), folds(300))
    encoder = fit_encoder(frame, schema, scaling="none", texts=fitted)
    assert encoder.names == ["report (score)", "age"]
    new = to_frame({"report": ["much worse", "better", "unseen words", None], "age": [0.0] * 4})
    worse, better, unseen, missing = encoder.encode(new).numbers[:, 0].tolist()
    assert worse > 0.2 > better
    assert unseen == 0
    assert np.isnan(missing)
    given = encoder.encode(frame, {"report": fitted["report"].out_of_fold}).numbers[:, 0]
    np.testing.assert_allclose(given, fitted["report"].out_of_fold[:, 0], rtol=1e-6)


def test_every_class_has_a_score() -> None:
    rule = TextRule(column="a", words=(1,), idf=(1.0,), weights=((1.0,), (2.0,)))
    assert rule.parts == ["score 1", "score 2"]
    assert target_scores(np.array([2, 0, 1, 2]), 3).tolist() == [
        [0, 0, 1],
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert target_scores(np.arange(100), 100).shape == (100, 10)
    assert np.abs(target_scores(np.array([0.0] * 99 + [1e6]), 0)).max() == 3
