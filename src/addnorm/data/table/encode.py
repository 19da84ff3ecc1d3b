"""The encoder of a table: from columns to the scaled numbers and integer codes of a model.

An encoder is fitted on the training rows: quantiles, medians, values of categories. It is plain
data, so that reading a saved one executes nothing.

    number     scaled; NaN where missing; infinities are clipped to the finite values
    category   0 missing, 1 rare or unknown, from 2 the values, sorted
    date       days since 1970 (number), day, month, weekday, hour (those that vary)
    text       scores that its words predict (text.py), as numbers
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.data.table.parse import (
    MAX_NON_NUMERIC,
    detect_date_form,
    detect_form,
    first_non_date,
    to_dates,
    to_numbers,
    without_missing,
)
from addnorm.data.table.scaling import SCALINGS
from addnorm.data.table.schema import Column, Schema, list_names
from addnorm.data.table.text import FittedText, TextRule, parse_texts, without_texts
from addnorm.errors import InputError, SavedError, choose

MISSING, OTHER, FIRST_VALUE = 0, 1, 2
"""Codes of a category: missing, rare or unknown, and the first of its values."""
MAX_VALUES = 2000
"""Values of one category that have their own code; the rarest share the code OTHER."""
MAX_NUMBER = 1e150
"""Numbers are clipped to ± this, so that their differences stay finite."""

UnknownCounts = dict[str, tuple[int, list[str]]]
"""By column: how many rows have an unknown value, and some of these values."""
DATE_PARTS: dict[str, Callable[[Array], Array]] = {
    "": lambda when: when.astype("datetime64[s]").astype(np.float64) / 86400,
    "day": lambda when: (when.astype("datetime64[D]") - when.astype("datetime64[M]")).astype(float),
    "month": lambda when: when.astype("datetime64[M]").astype(float) % 12,
    "weekday": lambda when: (when.astype("datetime64[D]").astype(float) + 3) % 7,
    "hour": lambda when: (when.astype("datetime64[h]").astype(float)) % 24,
}
"""The numbers that a date is split into; the first is the date itself."""


@dataclass(frozen=True, kw_only=True)
class NumberRule:
    """How one number is computed: its column, the part of a date, and the scaling."""

    column: str
    part: str | None
    """None for a column of numbers; otherwise a part of a date, or a score of a text."""
    scaling: str
    knots: tuple[float, ...]
    """The fitted parameters of the scaling: quantiles, or centre and scale (and bounds)."""
    low: float
    high: float
    """The finite range, to which infinities are clipped."""
    fill: float | None = None
    """What replaces a missing value, after scaling; None leaves it missing."""
    form: str = ""
    """How the numbers are written; see parse.py."""
    quantiles: tuple[float, ...] = ()
    """Quantiles of the training values; empty for scaling quantile, whose knots they are."""
    missing: float | None = None
    """The share of training rows without a value; None if it is not known."""

    @property
    def name(self) -> str:
        return f"{self.column} ({self.part})" if self.part else self.column


@dataclass(frozen=True, kw_only=True)
class CategoryRule:
    """How one code is computed: its column, and the values that have codes."""

    column: str
    values: tuple[str, ...]
    shares: tuple[float, ...] = ()
    """The share of training rows that have each code; empty if they are not known."""

    @property
    def size(self) -> int:
        return FIRST_VALUE + len(self.values)


@dataclass(frozen=True)
class EncodedTable:
    """Rows of a table as tensors."""

    numbers: torch.Tensor
    """(rows, numbers) float32, NaN where missing."""
    codes: torch.Tensor
    """(rows, categories) int64."""

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: torch.Tensor) -> "EncodedTable":
        return EncodedTable(self.numbers[rows], self.codes[rows])


@dataclass(frozen=True, kw_only=True)
class TableEncoder:
    """The fitted conversion of the columns of a table to numbers and codes."""

    schema: Schema
    numbers: tuple[NumberRule, ...]
    categories: tuple[CategoryRule, ...]
    texts: tuple[TextRule, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rule.size for rule in self.categories)

    @property
    def names(self) -> list[str]:
        """The names of the tokens of a row: numbers, then categories."""
        return [rule.name for rule in self.numbers] + [rule.column for rule in self.categories]

    def encode(self, frame: Frame, scores: Mapping[str, Array] | None = None) -> EncodedTable:
        """Return the numbers and codes of rows; columns are matched by name.

        `scores` are those of texts, where they were computed from other rows.
        """
        rows, parsed = len(frame), self.parse_columns(frame) | dict(scores or {})
        numbers = np.empty((rows, len(self.numbers)), dtype=np.float32)
        for i, rule in enumerate(self.numbers):
            numbers[:, i] = scale(self._part(parsed[rule.column], rule), rule)
        codes = np.empty((rows, len(self.categories)), dtype=np.int64)
        for i, category in enumerate(self.categories):
            known = {value: FIRST_VALUE + n for n, value in enumerate(category.values)}
            codes[:, i] = [
                MISSING if text is None else known.get(text, OTHER)
                for text in parsed[category.column].tolist()
            ]
        return EncodedTable(torch.from_numpy(numbers), torch.from_numpy(codes))

    def _part(self, values: Array, rule: NumberRule) -> Array:
        """Return the numbers of a rule: a column, a part of a date, or a score of a text."""
        for text in self.texts:
            if text.column == rule.column:
                return np.asarray(values[:, text.parts.index(str(rule.part))])
        return _date_part(values, rule.part)

    def parse_columns(self, frame: Frame) -> dict[str, Array]:
        """Return the columns that are used, by name, before they are scaled and numbered.

        A number is float64 with NaN where missing, a date datetime64, a category text or None; a
        text is its scores.
        """
        self.schema.check(frame)
        parsed = {rule.column: rule.scores(frame.columns[rule.column]) for rule in self.texts}
        for rule in self.numbers:
            if rule.column not in parsed:
                parsed[rule.column] = _parse_column_values(frame.columns[rule.column], rule)
        for category in self.categories:
            parsed[category.column] = to_texts(frame.columns[category.column])
        return parsed

    def unknown_values(self, frame: Frame) -> UnknownCounts:
        """Return values that training did not have or had too rarely, or that are not numeric."""
        counts: UnknownCounts = {}
        for rule in self.categories:
            known, texts = set(rule.values), to_texts(frame.columns[rule.column])
            unknown = Counter(text for text in texts if text is not None and text not in known)
            counts[rule.column] = unknown.total(), [value for value, _ in unknown.most_common(3)]
        for number in self.numbers:
            if number.part is None:
                _, strings = to_numbers(frame.columns[number.column], number.form)
                non_numeric = without_missing(strings)
                counts[number.column] = len(non_numeric), list(dict.fromkeys(non_numeric))[:3]
        return {name: count for name, count in counts.items() if count[0]}

    def unknown_notes(self, frame: Frame) -> list[str]:
        """Return sentences on the unknown values of rows."""
        return self.describe_unknown(self.unknown_values(frame))

    def describe_unknown(self, counts: UnknownCounts) -> list[str]:
        """Return sentences on unknown values, also those of several parts of a file together."""
        categories = {rule.column for rule in self.categories}
        notes = []
        for name, (rows, values) in counts.items():
            examples = list_names(values)
            notes.append(
                f"{name}: {rows} values are unknown or were rare in training (for example "
                f"{examples}); they share one code."
                if name in categories
                else f"{name}: {rows} values are not numeric (for example {examples}); treated as "
                "missing."
            )
        return notes

    def dump(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "schema": self.schema.dump(),
            "numbers": [asdict(rule) for rule in self.numbers],
            "categories": [asdict(rule) for rule in self.categories],
            **({"texts": [asdict(rule) for rule in self.texts]} if self.texts else {}),
        }

    @classmethod
    def parse(cls, plain: dict[str, Any]) -> "TableEncoder":
        """Return the encoder that `dump` wrote."""
        try:
            numbers = tuple(
                NumberRule(**_with_tuples(rule, "knots", "quantiles")) for rule in plain["numbers"]
            )
            categories = tuple(
                CategoryRule(**_with_tuples(rule, "values", "shares"))
                for rule in plain["categories"]
            )
            texts = parse_texts(plain.get("texts", ()))
            schema = Schema.parse(plain["schema"])
        except (KeyError, TypeError) as error:
            raise SavedError(f"the saved encoder is damaged: {error}.") from None
        return cls(schema=schema, numbers=numbers, categories=categories, texts=texts)


def _with_tuples(rule: dict[str, Any], needed: str, optional: str) -> dict[str, Any]:
    """Return the fields of a saved rule, with lists as tuples."""
    return {**rule, needed: tuple(rule[needed]), optional: tuple(rule.get(optional, ()))}


def fit_encoder(
    frame: Frame,
    schema: Schema,
    *,
    scaling: str = "quantile",
    rare: int | None = None,
    impute: str = "none",
    texts: Mapping[str, FittedText] | None = None,
) -> TableEncoder:
    """Return an encoder fitted on training rows.

    Parameters
    ----------
    frame
        The training rows.
    schema
        The kind of each column.
    scaling
        How numbers are scaled: one of `SCALINGS`.
    rare
        How often a value must occur to have its own code; by default 1, or 5 from 1,000 rows on.
    impute
        What replaces a missing number: ``median``, ``mean``, or ``none``, which leaves it missing
        for the model to learn from.
    texts
        By column, the fitted columns of free text; without them, these columns are not used.
    """
    choose("scaling", scaling, SCALINGS)
    choose("impute", impute, {"none": 0, "median": 0, "mean": 0})
    rare = rare if rare is not None else (5 if len(frame) >= 1000 else 1)
    numbers: list[NumberRule] = []
    categories: list[CategoryRule] = []
    schema = _with_forms(schema if texts else without_texts(schema), frame)
    for column in schema.used:
        values = frame.column(column.name)
        if column.kind == "category":
            categories.append(_fit_category(column.name, values, rare))
            continue
        blank = NumberRule(
            column=column.name,
            part=None,
            scaling=scaling,
            knots=(),
            low=0.0,
            high=0.0,
            form=column.form,
        )
        if column.kind == "text":
            fitted_text = (texts or {})[column.name]
            parts = zip(fitted_text.rule.parts, fitted_text.out_of_fold.T, strict=True)
            rules = [_fit_number(replace(blank, part=p), scores, impute) for p, scores in parts]
        else:
            wanted: list[str | None] = [None] if column.kind == "number" else [*DATE_PARTS]
            unfitted = [replace(blank, part=part) for part in wanted]
            parsed = _parse_column_values(values, unfitted[0])
            rules = [_fit_number(r, _date_part(parsed, r.part), impute) for r in unfitted]
        numbers += [rule for rule in rules if rule is not None]
    if not numbers and not categories:
        raise InputError(
            f"{frame.name} must have a column to learn from: all are ignored. "
            f"{_reasons(schema.columns)}"
        )
    return TableEncoder(
        schema=schema,
        numbers=tuple(numbers),
        categories=tuple(categories),
        texts=tuple(fitted.rule for fitted in (texts or {}).values()),
    )


def _with_forms(schema: Schema, frame: Frame) -> Schema:
    """Detect the forms of numbers and dates whose kind was given without one."""
    columns = []
    for column in schema.columns:
        if not column.form and column.kind in ("number", "date"):
            values = frame.column(column.name)
            if column.kind == "date":
                column = replace(column, form=detect_date_form(values) or "")
            elif values.dtype == object:
                texts = without_missing([text for text in values.tolist() if text is not None])
                column = replace(column, form=detect_form(texts))
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def _reasons(columns: Sequence[Column]) -> str:
    notes = [f"{column.name!r}: {column.note}" for column in columns[:3] if column.note]
    return "; ".join(notes) + "." if notes else "Change the schema."


def _fit_number(rule: NumberRule, values: Array, impute: str) -> NumberRule | None:
    """Return the rule with a fitted scaling; None for a part of a date that never varies."""
    finite = values[np.isfinite(values)]
    if rule.part and (not len(finite) or finite.min() == finite.max()):
        return None
    if not len(finite):
        finite = np.zeros(1)
    low, high = float(finite.min()), float(finite.max())
    rule = replace(rule, low=low, high=high)
    clipped = np.clip(values[~np.isnan(values)], low, high)
    clipped = clipped if len(clipped) else finite
    rule = replace(
        rule,
        knots=SCALINGS[rule.scaling][0](clipped),
        quantiles=() if rule.scaling == "quantile" else SCALINGS["quantile"][0](clipped),
        missing=float(np.isnan(values).mean()) if len(values) else 0.0,
    )
    if impute != "none":
        middle = float(np.median(clipped) if impute == "median" else clipped.mean())
        rule = replace(rule, fill=float(scale(np.array([middle]), rule)[0]))
    return rule


def _fit_category(name: str, values: Array, rare: int) -> CategoryRule:
    counts = Counter(text for text in to_texts(values) if text is not None)
    frequent = sorted(v for v, count in counts.most_common(MAX_VALUES) if count >= rare)
    rows, known = [counts[value] for value in frequent], counts.total()
    by_code = (len(values) - known, known - sum(rows), *rows)
    return CategoryRule(
        column=name,
        values=tuple(frequent),
        shares=tuple(count / len(values) for count in by_code) if len(values) else (),
    )


def _parse_column_values(values: Array, rule: NumberRule) -> Array:
    """Return a column as numbers, or as dates if the rule is for a part of a date."""
    if rule.part is None:
        numbers, texts = to_numbers(values, rule.form)
        if len(non_numeric := without_missing(texts)) > MAX_NON_NUMERIC * len(values):
            warnings.warn(
                f"column {rule.column!r}: {len(non_numeric)} of {len(values)} values are not "
                f"numeric (for example {non_numeric[0]!r}); treated as missing.",
                stacklevel=2,
            )
        # Infinities are kept here, and clipped to the finite range of their column by `scale`.
        return np.where(np.isinf(numbers), numbers, np.clip(numbers, -MAX_NUMBER, MAX_NUMBER))
    dates = to_dates(values, rule.form)
    if dates is None:
        form = f" or of the form {rule.form}" if rule.form else ""
        raise InputError(
            f"column {rule.column!r} must hold dates such as 2024-05-31{form}: got "
            f"{first_non_date(values, rule.form)!r}. Write them as year-month-day, or leave them "
            "empty."
        )
    return dates


def _date_part(values: Array, part: str | None) -> Array:
    if part is None:
        return values
    return np.where(np.isnat(values), np.nan, DATE_PARTS[part](values))


def scale(values: Array, rule: NumberRule) -> Array:
    """Return scaled numbers; missing ones are imputed if the rule says so."""
    clipped = np.where(np.isinf(values), np.clip(values, rule.low, rule.high), values)
    scaled = SCALINGS[rule.scaling][1](clipped, rule.knots)
    return scaled if rule.fill is None else np.where(np.isnan(scaled), rule.fill, scaled)
