"""From the columns of a table to the numbers and codes that a model takes, and the same ever after.

Everything a recipe knows, it learnt from the rows it was fitted on: quantiles, medians, values of
categories. It is plain data, so that it can be saved without running anything when it is read.

    number     scaled; NaN where missing; infinities are drawn to the ends of the finite values
    category   0 missing, 1 rare or never seen, 2 and on the values, by alphabet
    date       days since 1970 (number), day, month, weekday, hour (those that vary)
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from addnorm.data.frame import Array, Frame, as_text
from addnorm.data.scaling import SCALINGS
from addnorm.data.schema import Column, Schema, list_names
from addnorm.data.written import STRAY, first_no_date, to_dates, to_numbers, without_gaps
from addnorm.errors import InputError, SavedError, choose

MISSING, OTHER, FIRST = 0, 1, 2
"""Codes of a category: missing, rare or unseen, and the first of its values."""
MOST_VALUES = 2000
"""Values of one category that have a code of their own; the rarer ones share one."""
HUGE = 1e150
"""Numbers are drawn inside ± this, so that their differences stay finite."""

Strange = dict[str, tuple[int, list[str]]]
"""By column: how many rows have a value that is not known, and some of the values."""
PARTS: dict[str, Callable[[Array], Array]] = {
    "": lambda when: when.astype("datetime64[s]").astype(np.float64) / 86400,
    "day": lambda when: (when.astype("datetime64[D]") - when.astype("datetime64[M]")).astype(float),
    "month": lambda when: when.astype("datetime64[M]").astype(float) % 12,
    "weekday": lambda when: (when.astype("datetime64[D]").astype(float) + 3) % 7,
    "hour": lambda when: (when.astype("datetime64[h]").astype(float)) % 24,
}
"""What a date is taken apart into; the first is when it was."""


@dataclass(frozen=True, kw_only=True)
class NumberRule:
    """How one number is made: from which column, which part of a date, and scaled how."""

    column: str
    part: str | None
    """None for a column of numbers; a part of a date otherwise."""
    scaling: str
    knots: tuple[float, ...]
    """Quantiles, or centre and scale: what the scaling needs."""
    low: float
    high: float
    """The finite ends, to which infinities are drawn."""
    fill: float | None = None
    """What a missing value is replaced by, after scaling; None leaves it missing."""
    form: str = ""
    """How the numbers are written; see written.py."""

    @property
    def name(self) -> str:
        return f"{self.column} ({self.part})" if self.part else self.column


@dataclass(frozen=True, kw_only=True)
class CategoryRule:
    """How one code is made: from which column, and which values have codes."""

    column: str
    values: tuple[str, ...]

    @property
    def size(self) -> int:
        return FIRST + len(self.values)


@dataclass(frozen=True)
class Encoded:
    """Rows as a model takes them."""

    numbers: torch.Tensor
    """(rows, numbers) float32, NaN where missing."""
    codes: torch.Tensor
    """(rows, categories) int64."""

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: torch.Tensor) -> "Encoded":
        return Encoded(self.numbers[rows], self.codes[rows])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the columns of a table become numbers and codes."""

    schema: Schema
    numbers: tuple[NumberRule, ...]
    categories: tuple[CategoryRule, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rule.size for rule in self.categories)

    @property
    def names(self) -> list[str]:
        """The tokens of a row, in order: numbers, then categories."""
        return [rule.name for rule in self.numbers] + [rule.column for rule in self.categories]

    def encode(self, frame: Frame) -> Encoded:
        """Numbers and codes of rows, by the columns' names."""
        self.schema.check(frame)
        rows = len(frame)
        numbers = np.empty((rows, len(self.numbers)), dtype=np.float32)
        raw: dict[str, Array] = {}
        for i, rule in enumerate(self.numbers):
            if rule.column not in raw:
                raw[rule.column] = _raw(frame.columns[rule.column], rule)
            numbers[:, i] = scale(_part(raw[rule.column], rule.part), rule)
        codes = np.empty((rows, len(self.categories)), dtype=np.int64)
        for i, category in enumerate(self.categories):
            places = {value: FIRST + n for n, value in enumerate(category.values)}
            texts = as_text(frame.columns[category.column])
            codes[:, i] = [
                MISSING if text is None else places.get(text, OTHER) for text in texts.tolist()
            ]
        return Encoded(torch.from_numpy(numbers), torch.from_numpy(codes))

    def strange(self, frame: Frame) -> "Strange":
        """Values that training did not have, had too seldom, or that are no numbers."""
        found: Strange = {}
        for rule in self.categories:
            known, texts = set(rule.values), as_text(frame.columns[rule.column])
            counts = Counter(text for text in texts if text is not None and text not in known)
            found[rule.column] = counts.total(), [value for value, _ in counts.most_common(3)]
        for number in self.numbers:
            if number.part is None:
                stray = without_gaps(to_numbers(frame.columns[number.column], number.form)[1])
                found[number.column] = len(stray), list(dict.fromkeys(stray))[:3]
        return {name: told for name, told in found.items() if told[0]}

    def unseen(self, frame: Frame) -> list[str]:
        """Sentences on what is strange in some rows."""
        return self.say_strange(self.strange(frame))

    def say_strange(self, found: "Strange") -> list[str]:
        """Sentences on what is strange, also in the parts of a file taken together."""
        categories = {rule.column for rule in self.categories}
        said = []
        for name, (rows, values) in found.items():
            shown = list_names(values)
            said.append(
                f"{name}: {rows} rows have values that training had not, or seldom ({shown}): they "
                "share one code."
                if name in categories
                else f"{name}: {rows} rows have texts that are no numbers ({shown}): they count as "
                "missing."
            )
        return said

    def dump(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "schema": self.schema.dump(),
            "numbers": [asdict(rule) for rule in self.numbers],
            "categories": [asdict(rule) for rule in self.categories],
        }

    @classmethod
    def parse(cls, plain: dict[str, Any]) -> "Recipe":
        """Undo `dump`."""
        try:
            numbers = tuple(
                NumberRule(**{**rule, "knots": tuple(rule["knots"])}) for rule in plain["numbers"]
            )
            categories = tuple(
                CategoryRule(column=rule["column"], values=tuple(rule["values"]))
                for rule in plain["categories"]
            )
            schema = Schema.parse(plain["schema"])
        except (KeyError, TypeError) as error:
            raise SavedError(f"the saved recipe is damaged: {error}.") from None
        return cls(schema=schema, numbers=numbers, categories=categories)


def fit_recipe(
    frame: Frame,
    schema: Schema,
    *,
    scaling: str = "quantile",
    rare: int | None = None,
    impute: str = "none",
) -> Recipe:
    """Learn a recipe from rows: those to train on, and no others.

    `rare` is how often a value must be met to have a code of its own; 1 in small tables and 5 from
    1,000 rows when left out. `impute` is none (a missing number stays missing, and the model learns
    what that means), median or mean.
    """
    choose("scaling", scaling, SCALINGS)
    choose("impute", impute, {"none": 0, "median": 0, "mean": 0})
    rare = rare if rare is not None else (5 if len(frame) >= 1000 else 1)
    numbers: list[NumberRule] = []
    categories: list[CategoryRule] = []
    for column in schema.used:
        values = frame.column(column.name)
        if column.kind == "category":
            categories.append(_fit_category(column.name, values, rare))
            continue
        parts: list[str | None] = [None] if column.kind == "number" else [*PARTS]
        for part in parts:
            rule = NumberRule(
                column=column.name,
                part=part,
                scaling=scaling,
                knots=(),
                low=0.0,
                high=0.0,
                form=column.form,
            )
            found = _fit_number(rule, _part(_raw(values, rule), rule.part), impute)
            if found is not None:
                numbers.append(found)
    if not numbers and not categories:
        raise InputError(
            f"{frame.name} must have a column to learn from: all are left out. "
            f"{_why(schema.columns)}"
        )
    return Recipe(schema=schema, numbers=tuple(numbers), categories=tuple(categories))


def _why(columns: Sequence[Column]) -> str:
    shown = [f"{column.name!r}: {column.note}" for column in columns[:3] if column.note]
    return "; ".join(shown) + "." if shown else "Change the schema."


def _fit_number(rule: NumberRule, values: Array, impute: str) -> NumberRule | None:
    """The rule with what its scaling needs; None for a part of a date that never varies."""
    finite = values[np.isfinite(values)]
    if rule.part and (not len(finite) or finite.min() == finite.max()):
        return None
    if not len(finite):
        finite = np.zeros(1)
    low, high = float(finite.min()), float(finite.max())
    rule = replace(rule, low=low, high=high)
    held = np.clip(values[~np.isnan(values)], low, high)
    held = held if len(held) else finite
    rule = replace(rule, knots=SCALINGS[rule.scaling][0](held))
    if impute != "none":
        middle = float(np.median(held) if impute == "median" else held.mean())
        rule = replace(rule, fill=float(scale(np.array([middle]), rule)[0]))
    return rule


def _fit_category(name: str, values: Array, rare: int) -> CategoryRule:
    counts = Counter(text for text in as_text(values) if text is not None)
    often = [value for value, count in counts.most_common(MOST_VALUES) if count >= rare]
    return CategoryRule(column=name, values=tuple(sorted(often)))


def _raw(values: Array, rule: NumberRule) -> Array:
    """A column as numbers, or as dates if the rule is for a part of one."""
    if rule.part is None:
        numbers, odd = to_numbers(values, rule.form)
        if len(stray := without_gaps(odd)) > STRAY * len(values):
            warnings.warn(
                f"column {rule.column!r}: {len(stray)} of {len(values)} values are no numbers "
                f"({stray[0]!r}) and count as missing.",
                stacklevel=2,
            )
        # Infinities stay, to be drawn to the ends of their own column.
        return np.where(np.isinf(numbers), numbers, np.clip(numbers, -HUGE, HUGE))
    dates = to_dates(values)
    if dates is None:
        raise InputError(
            f"column {rule.column!r} must hold dates such as 2024-05-31: got "
            f"{first_no_date(values)!r}. Write them as year-month-day, or leave them empty."
        )
    return dates


def _part(values: Array, part: str | None) -> Array:
    if part is None:
        return values
    return np.where(np.isnat(values), np.nan, PARTS[part](values))


def scale(values: Array, rule: NumberRule) -> Array:
    """Numbers as the model takes them."""
    held = np.where(np.isinf(values), np.clip(values, rule.low, rule.high), values)
    scaled = SCALINGS[rule.scaling][1](held, rule.knots)
    return scaled if rule.fill is None else np.where(np.isnan(scaled), rule.fill, scaled)
