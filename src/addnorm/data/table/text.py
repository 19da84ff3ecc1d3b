"""Columns of free text: one or a few numbers for each text, learnt from words and targets.

    x_w = idf_w [w occurs in the text],   x ← x / ‖x‖          words that occur in several rows
    S = X (XᵀX + λI)⁻¹ Xᵀ Y                                     ridge regression of the targets

A text becomes its scores S, which the model reads as numbers beside the other columns. The scores
of training rows are out of fold: each is predicted from the rows of other folds, otherwise the
model would trust them more than it should (stacking, Wolpert 1992). A column whose scores do not
predict the held-out folds better than the mean is left out.

No text is stored. Words are stored as numbers that are computed from them (CRC-32), and only those
that occur in several rows.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.data.table.schema import Schema

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
MAX_TEXT_WORDS = 2048
"""Words of one column that are used: the most frequent."""
MIN_WORD_ROWS = 3
"""Rows in which a word must occur to be used."""
MIN_SHARE = 0.5
"""Share of the texts that must hold a recurring word: others, such as names or codes, are not
free text."""
TEXT_ROWS = 40
"""Fewest rows from which a column of free text is used."""
PART_ROWS = 4096
"""Rows whose features are computed at once."""
RIDGES = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Values of λ to choose from, by the error out of fold."""
MAX_SCORES = 10
"""Scores of one column; of more classes, those of the most frequent."""
STANDARD_ERRORS = 2.0
"""A column is used if its scores reduce the error out of fold by this many standard errors."""


@dataclass(frozen=True, kw_only=True)
class TextRule:
    """How the scores of one column of free text are computed."""

    column: str
    words: tuple[int, ...]
    """Numbers of the words, ascending."""
    idf: tuple[float, ...]
    """Inverse document frequency of each word."""
    weights: tuple[tuple[float, ...], ...]
    """For each score, the weight of each word."""

    @property
    def parts(self) -> list[str]:
        """The names of the scores."""
        count = len(self.weights)
        return ["score"] if count == 1 else [f"score {i + 1}" for i in range(count)]

    def scores(self, values: Array) -> Array:
        """Return the scores of texts, (rows, scores); NaN where the text is missing."""
        texts = to_texts(values)
        found = WordRows.of(texts, self.words, np.array(self.idf))
        scores = found.predict(np.arange(len(texts)), np.array(self.weights).T)
        scores[np.array([text is None for text in texts], dtype=bool)] = np.nan
        return np.asarray(scores)


@dataclass(frozen=True)
class FittedText:
    """A rule, and the scores of the training rows, each computed from other rows."""

    rule: TextRule
    out_of_fold: Array


def word_numbers(text: str) -> set[int]:
    """Return the numbers of the words of a text, in lower case.

    >>> word_numbers("A cat, a CAT") == {zlib.crc32(b"a"), zlib.crc32(b"cat")}
    True
    """
    return {zlib.crc32(word.encode("utf-8", "replace")) for word in WORD.findall(text.lower())}


def is_free_text(texts: Sequence[str | None]) -> bool:
    """Return whether most of the texts hold words that also occur in other rows.

    >>> is_free_text(["no pain today", "pain in the knee", "the knee is fine"] * 20)
    True
    >>> is_free_text([f"A-{i:03}" for i in range(50)])
    False
    """
    present = [text for text in texts if text is not None]
    if len(present) < TEXT_ROWS:
        return False
    words = [[word for word in WORD.findall(text.lower()) if word.isalpha()] for text in present]
    if np.median([len(row) for row in words]) < 2:
        return False
    rows = Counter(word for row in words for word in set(row) if len(word) > 1)
    recurring = {word for word, count in rows.items() if count >= MIN_WORD_ROWS}
    with_recurring = sum(not recurring.isdisjoint(row) for row in words)
    return with_recurring >= MIN_SHARE * len(present)


@dataclass(frozen=True)
class WordRows:
    """The words of each text, and the features of rows, computed a part at a time."""

    found: list[list[int]]
    """For each text, the indices of its words."""
    idf: Array

    @classmethod
    def of(
        cls, texts: Sequence[str | None] | Array, words: Sequence[int], idf: Array
    ) -> "WordRows":
        index = {word: i for i, word in enumerate(words)}
        found = [
            [] if text is None else [index[word] for word in word_numbers(text) if word in index]
            for text in texts
        ]
        return cls(found, idf)

    def features(self, rows: Array) -> Array:
        """Return x of rows, (rows, words)."""
        features = np.zeros((len(rows), len(self.idf)))
        for i, row in enumerate(rows.tolist()):
            known = self.found[row]
            features[i, known] = self.idf[known]
        length = np.linalg.norm(features, axis=1, keepdims=True)
        return np.asarray(features / np.where(length > 0, length, 1.0))

    def parts(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        """Yield rows and their features, a few thousand rows at a time."""
        for start in range(0, len(rows), PART_ROWS):
            part = rows[start : start + PART_ROWS]
            yield part, self.features(part)

    def predict(self, rows: Array, weights: Array) -> Array:
        """Return x W of rows."""
        outputs = [features @ weights for _, features in self.parts(rows)]
        return np.concatenate(outputs) if outputs else np.empty((0, weights.shape[1]))

    def ridge(self, rows: Array, targets: Array) -> list[Array]:
        """Return (XᵀX + λI)⁻¹ Xᵀ Y for each λ, by the eigenvectors of the smaller Gram matrix."""
        words = len(self.idf)
        if len(rows) < words:
            x = self.features(rows)
            solved = _solve(x @ x.T, targets)
            return [x.T @ part for part in solved]
        gram, right = np.zeros((words, words)), np.zeros((words, targets.shape[1]))
        start = 0
        for part, x in self.parts(rows):
            gram += x.T @ x
            right += x.T @ targets[start : start + len(part)]
            start += len(part)
        return _solve(gram, right)


def _solve(gram: Array, right: Array) -> list[Array]:
    """Return (G + λI)⁻¹ R for each λ."""
    values, vectors = np.linalg.eigh(gram)
    turned = vectors.T @ right
    return [vectors @ (turned / (np.maximum(values, 0) + ridge)[:, None]) for ridge in RIDGES]


def fit_texts(
    frame: Frame, schema: Schema, targets: Array, fold: Array
) -> tuple[Schema, dict[str, FittedText]]:
    """Fit the columns of free text, and leave out those that do not help.

    Parameters
    ----------
    frame : the training rows.
    schema : the kind of each column.
    targets : what the scores predict, (rows, scores).
    fold : the fold of each row.

    Returns
    -------
    schema : the schema, in which columns that do not help are ignored, with a note.
    fitted : by column, its rule and the scores of the training rows.
    """
    fitted: dict[str, FittedText] = {}
    columns = []
    for column in schema.columns:
        if column.kind == "text":
            found = _fit_text(column.name, to_texts(frame.column(column.name)), targets, fold)
            if found is None:
                note = "free text whose words do not predict the target on held-out rows"
                column = replace(column, kind="ignore", note=note)
            else:
                fitted[column.name] = found
        columns.append(column)
    return replace(schema, columns=tuple(columns)), fitted


def without_texts(schema: Schema) -> Schema:
    """Return the schema without its columns of free text: they need a target to learn from."""
    note = "free text, which is used only where the target is known"
    return replace(
        schema,
        columns=tuple(
            replace(column, kind="ignore", note=note) if column.kind == "text" else column
            for column in schema.columns
        ),
    )


def _fit_text(name: str, texts: Array, targets: Array, fold: Array) -> FittedText | None:
    """Return the rule of a column; None if it does not predict the targets of held-out folds."""
    rows = Counter(number for text in texts if text is not None for number in word_numbers(text))
    frequent = [word for word, count in rows.most_common(MAX_TEXT_WORDS) if count >= MIN_WORD_ROWS]
    words = tuple(sorted(frequent))
    if not words or len(texts) < TEXT_ROWS:
        return None
    idf = np.log((1 + len(texts)) / (1 + np.array([rows[word] for word in words]))) + 1
    found = WordRows.of(texts, words, idf)
    constant, predicted = np.empty_like(targets), np.empty((len(RIDGES), *targets.shape))
    for k in np.unique(fold):
        inside, outside = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        constant[outside] = mean = targets[inside].mean(axis=0)
        weights = found.ridge(inside, targets[inside] - mean)
        predicted[:, outside] = [found.predict(outside, each) + mean for each in weights]
    errors = ((predicted - targets) ** 2).sum(axis=-1)
    best = int(errors.mean(axis=1).argmin())
    gain = ((constant - targets) ** 2).sum(axis=-1) - errors[best]
    if not gain.mean() > STANDARD_ERRORS * gain.std() / np.sqrt(len(gain)):
        return None
    everything = np.arange(len(texts))
    final = found.ridge(everything, targets - targets.mean(axis=0))[best]
    rounded = [[float(f"{value:.4g}") for value in column] for column in final.T]
    rule = TextRule(
        column=name,
        words=words,
        idf=tuple(float(f"{value:.6g}") for value in idf),
        weights=tuple(tuple(column) for column in rounded),
    )
    scores = predicted[best] - constant
    scores[np.array([text is None for text in texts], dtype=bool)] = np.nan
    return FittedText(rule, scores)


def target_scores(target: Array, classes: int, ordered: bool = False) -> Array:
    """Return what the scores of texts predict: a number, or one indicator for each class.

    Numbers are standardised and cut off at ± 3, so that a few rows do not decide.

    >>> target_scores(np.array([0, 1, 1]), 2).tolist()
    [[0.0], [1.0], [1.0]]
    """
    if classes and not ordered:
        if classes == 2:
            return np.asarray((target == 1).astype(np.float64)[:, None])
        frequent = [k for k, _ in Counter(target.tolist()).most_common(MAX_SCORES)]
        return np.asarray((target[:, None] == np.sort(frequent)).astype(np.float64))
    centred = target - target.mean()
    deviation = centred.std() or 1.0
    return np.asarray(np.clip(centred / deviation, -3, 3)[:, None])


def parse_texts(plain: Sequence[Mapping[str, Any]]) -> tuple[TextRule, ...]:
    """Return rules from plain values."""
    return tuple(
        TextRule(
            column=rule["column"],
            words=tuple(rule["words"]),
            idf=tuple(rule["idf"]),
            weights=tuple(tuple(column) for column in rule["weights"]),
        )
        for rule in plain
    )
