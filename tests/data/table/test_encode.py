"""Schemas, encoders and bins: fitted on training rows, applied to any rows."""

import json
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.bins import make_edges, quantile_edges, tree_edges
from addnorm.data.table.encode import TableEncoder, fit_encoder
from addnorm.data.table.frame import Frame, to_frame
from addnorm.data.table.infer import infer, infer_task
from addnorm.data.table.parse import detect_form, parse_form, to_dates, to_numbers
from addnorm.data.table.schema import Column, Schema
from addnorm.errors import ConfigError, InputError, SavedError


def frame(**columns: list[Any]) -> Frame:
    return to_frame(columns)


def kinds(table: Frame, target: str | None = None) -> dict[str, str]:
    return infer(table, target).kinds()


def note(table: Frame, name: str, target: str | None = None) -> str:
    return next(c.note for c in infer(table, target).columns if c.name == name)


# ── Schemas ───────────────────────────────────────────────────────────────────────────────────────

N = 120
TABLE = frame(
    number=[i % 7 / 2 for i in range(N)],
    text_number=[str(i % 9) for i in range(N)],
    stray=[*(str(i % 11) for i in range(N - 1)), "many"],
    category=["abc"[i % 3] for i in range(N)],
    flag=[i % 2 == 0 for i in range(N)],
    date=[f"2024-{1 + i % 12:02}-0{1 + i % 9}" for i in range(N)],
    words=[f"note {i}" for i in range(N)],
    row=list(range(N)),
    customer_id=[i * 7 + 3 for i in range(N)],
    paid=[i * i for i in range(N)],
    constant=["x"] * N,
    nothing=[None] * N,
    again=["abc"[i % 3] for i in range(N)],
    often=["x"] * (N - 1) + [None],
    infinite=[math.inf] * N,
)


def test_kinds_are_inferred() -> None:
    assert kinds(TABLE) == {
        "number": "number",
        "text_number": "number",
        "stray": "number",
        "category": "category",
        "flag": "category",
        "date": "date",
        "words": "ignore",
        "row": "ignore",
        "customer_id": "ignore",
        "paid": "number",
        "constant": "ignore",
        "nothing": "ignore",
        "again": "ignore",
        "often": "category",
        "infinite": "ignore",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("number", "7 values from 0 to 3"),
        ("stray", "1 values are not numeric ('many'); treated as missing"),
        ("words", "texts: 120 distinct values in 120 rows"),
        ("row", "it looks like an identifier"),
        ("constant", "constant: always 'x'"),
        ("nothing", "all values are missing"),
        ("again", "equal to 'category' in every row"),
        ("often", "1 values, 1 of 120 missing"),
    ),
)
def test_notes_give_the_reasons(name: str, message: str) -> None:
    assert message in note(TABLE, name)


def test_a_copy_of_the_target_is_noted() -> None:
    table = frame(
        y=["no", "yes"] * 50, copy=[0, 1] * 50, x=list(range(100)), z=["a", "b", "b", "a"] * 25
    )
    assert "determines 'y' exactly" in note(table, "copy", "y")
    assert infer(table, "y").kinds()["copy"] == "number"
    assert "determines" not in note(table, "z", "y")


def test_distinct_numbers_are_a_leak_only_if_linear() -> None:
    y = [math.sin(i) for i in range(50)]
    table = frame(y=y, free=[math.cos(i) for i in range(50)], unit=[3 * v - 1 for v in y])
    near = frame(y=y, near=[v + math.cos(i) / 10 for i, v in enumerate(y)])
    assert "determines" not in note(table, "free", "y") and "determines" not in note(
        near, "near", "y"
    )
    assert "determines 'y' exactly" in note(table, "unit", "y")


@pytest.mark.parametrize(
    ("values", "task"),
    (
        (["a", "b"], "classes"),
        ([0, 1, 1], "classes"),
        ([True, False], "classes"),
        (list(range(100)), "number"),
        ([0.5, 1.0], "number"),
    ),
)
def test_tasks_are_inferred(values: list[Any], task: str) -> None:
    assert infer_task(frame(y=values).columns["y"]) == task


def test_a_schema_survives_toml() -> None:
    columns = (
        Column(name='odd "name"\n', kind="number", note="ü \\"),
        Column(name="b", kind="ignore"),
    )
    schema = Schema(columns=columns, target="y", task="number")
    assert Schema.parse(schema.dump()) == schema


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("x = [", "is not TOML"),
        ("targett = 'y'", "has no field 'targett'. Did you mean 'target'"),
        ("version = 9", "has version 9; this addnorm reads 1"),
        ("task = 'rank'", "task must be classes, number or ordinal: got 'rank'"),
        ("[[columns]]\nkind = 'number'", "every .* must have a name"),
        ("[[columns]]\nname = 'a'\nkind = 'numbr'", "got 'numbr'. Did you mean 'number'"),
        ("[[columns]]\nname = 'a'\nkind = 'date'\nhow = 1", "'a' has no field 'how'"),
        ("[[columns]]\nname='a'\nkind='date'\n[[columns]]\nname='a'\nkind='date'", "'a' twice"),
    ),
)
def test_bad_schemas_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schema.parse(text)


def test_kinds_can_be_changed() -> None:
    schema = infer(TABLE).change({"row": "number"})
    assert schema.kinds()["row"] == "number"
    with pytest.raises(ConfigError, match=r"has no column 'rwo'\. Did you mean 'row'"):
        schema.change({"rwo": "number"})
    with pytest.raises(ConfigError, match="must be one of number, category, date, text, ignore"):
        schema.change({"row": "x"})


def test_numbers_and_dates_are_read_strictly() -> None:
    parsed, non_numeric = to_numbers(np.array(["1", "1_000", None, "2e3", "nine"], dtype=object))
    assert parsed[[0, 3]].tolist() == [1.0, 2000.0] and non_numeric == ["1_000", "nine"]
    good = np.array(["2024-2-3", "2024-02-03T04:05:06.7Z", None], dtype=object)
    dates = to_dates(good)
    assert dates is not None and str(dates[1]) == "2024-02-03T04:05:06" and np.isnat(dates[2])
    for bad in ("03/04/2024", "2024-13-01", "today"):
        assert to_dates(np.array([bad], dtype=object)) is None


# ── As people write ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cells", "form", "numbers"),
    (
        (["1,5", "1.234,25", "-2"], "1.234,5", [1.5, 1234.25, -2]),
        (["1,234", "999", "1,234,567.5"], "1,234.5", [1234, 999, 1234567.5]),
        (["$1,200.00", "-$5", "$-7.5"], "$1,234.5", [1200, -5, -7.5]),
        (["1.200,50 €", "3 €", "−4 €"], "1.234,5 €", [1200.5, 3, -4]),
        (["12%", "3.5 %", "0.1%"], "1,234.5 %", [12, 3.5, 0.1]),
        (["1 234,5", "10\u00a0000,5", "2,5"], "1.234,5", [1234.5, 10000.5, 2.5]),
        (["1'234.5", "2’000", "7"], "1,234.5", [1234.5, 2000, 7]),
    ),
)
def test_numbers_in_common_formats(cells: list[str], form: str, numbers: list[float]) -> None:
    table = frame(c=[*cells, None] * 20, d=list(range(80)))
    column = infer(table).columns[0]
    assert (column.kind, column.form) == ("number", form)
    assert f"numbers are read in the form {form}" in column.note
    parsed, non_numeric = to_numbers(table.columns["c"][:3], form)
    assert parsed.tolist() == numbers and not non_numeric
    encoder = fit_encoder(table, infer(table), scaling="none")
    assert encoder.encode(table).numbers[:3, 0].tolist() == pytest.approx(
        [min(number, 1e6) for number in numbers]
    )
    assert TableEncoder.parse(json.loads(json.dumps(encoder.dump()))) == encoder


def test_a_form_is_one_of_the_whole_column() -> None:
    """1.234 is over a thousand in a column with 2,5 and 3,75, and a decimal number otherwise."""
    assert detect_form(["1.234", "2,5", "3,75"]) == "1.234,5"
    assert to_numbers(np.array(["1.234"], dtype=object), "1.234,5")[0].tolist() == [1234.0]
    assert to_numbers(np.array(["1.234"], dtype=object))[0].tolist() == [1.234]
    assert detect_form(["1,234", "5,678"]) == "1,234.5"
    for cells in (["$5", "€7"], ["red", "1,5"], ["030 123 456", "1,2,3"], ["12% $5", "1% $7"]):
        assert detect_form(cells) == ""
    assert detect_form(["030 123 456", "040 999 888"]) == ""
    assert to_numbers(np.array(["5", "$5"], dtype=object), "$1,234.5")[1] == ["5"]
    strays = to_numbers(np.array(["1.5", "5 €", "1,2345,6"], dtype=object), "1.234,5")[1]
    assert strays == ["1.5", "5 €", "1,2345,6"]


def test_forms_are_checked_and_kept() -> None:
    text = "[[columns]]\nname = 'a'\nkind = 'number'\nform = '1.234,5 €'"
    schema = Schema.parse("form = '$1,234.5'\n" + text)
    assert schema.form == "$1,234.5" and schema.columns[0].form == "1.234,5 €"
    assert Schema.parse(schema.dump()) == schema
    with pytest.raises(ConfigError, match=r"column 'a': the form of a number must be 1,234.5 or"):
        Schema.parse(text.replace("1.234,5", "1234"))
    for bad in ("", "1,234.5 EUR", "x1.234,5"):
        with pytest.raises(ConfigError, match="the form of a number must be"):
            parse_form(bad)


def test_digits_with_leading_zeros_are_codes() -> None:
    table = frame(
        post=["01067", "80331", "20095"] * 40,
        phone=["030", "0171", "5"] * 40,
        slip=[*(str(i) for i in range(1, 120)), "07"],
    )
    assert kinds(table) == {"post": "category", "phone": "category", "slip": "number"}
    assert "digits with leading zeros are treated as codes" in note(table, "post")


def test_missing_markers_in_numbers_and_dates() -> None:
    table = frame(
        n=["1", "2", "3", "-", "Unknown"] * 20,
        d=["2024-01-02", "2024-03-04", "n.a.", "-", "?"] * 20,
        c=["a", "b", "-", "?", "c"] * 20,
        only=["-", "?"] * 50,
    )
    assert kinds(table) == {"n": "number", "d": "date", "c": "category", "only": "ignore"}
    assert "40 values are not numeric ('-', 'Unknown'); treated as missing" in note(table, "n")
    assert "60 values are not dates ('-', '?', 'n.a.'); treated as missing" in note(table, "d")


@pytest.mark.parametrize(
    ("texts", "form", "second"),
    (
        (["1/2/2024", "12/31/2024"], "month/day/year", "2024-12-31T00:00:00"),
        (["1/2/2024", "31/12/2024"], "day/month/year", "2024-12-31T00:00:00"),
        (["01.02.2024", "03.04.2024"], "day/month/year", "2024-04-03T00:00:00"),
        (["01-02-2024", "03-04-2024"], "month/day/year", "2024-03-04T00:00:00"),
        (["1/1/2024", "1/2/2024", "1/3/2024"], "day/month/year", "2024-02-01T00:00:00"),
        (["1/1/2024", "2/1/2024", "3/1/2024"], "month/day/year", "2024-02-01T00:00:00"),
        (["1/31/99", "1/31/11 1:30 PM"], "month/day/year", "2011-01-31T13:30:00"),
        (["31 Jan 2024", "1-Feb-2024"], "", "2024-02-01T00:00:00"),
        (["January 31, 2024", "Sept 1 2024 12:05 am"], "", "2024-09-01T00:05:00"),
        (["2024/01/31", "2024/2/1"], "", "2024-02-01T00:00:00"),
        (["1970-01-02", "1970-01-01"], "", "1970-01-01T00:00:00"),
    ),
)
def test_the_whole_column_decides_how_dates_are_read(
    texts: list[str], form: str, second: str
) -> None:
    table = frame(when=texts * 20)
    column = infer(table).columns[0]
    assert (column.kind, column.form) == ("date", form)
    assert ("read as " + form in column.note) == bool(form)
    dates = to_dates(table.columns["when"], form)
    assert dates is not None and str(dates[1]) == second


@pytest.mark.parametrize(
    "texts",
    (
        ["1/31/2024", "31/1/2024"],  # no order suits both
        ["10.12.14", "1.2.3"],  # versions
        ["1/32/2024", "1/2/2024"],
        ["13:30", "2024"],
        ["31 Foo 2024", "1 Bar 2024"],
        ["1/2-2024", "3/4-2024"],
        ["1/2/2024 13:30 PM", "1/2/2024 1:30 PM"],
    ),
)
def test_other_texts_are_no_dates(texts: list[str]) -> None:
    assert kinds(frame(when=texts * 20)) == {"when": "category"}


def test_an_ambiguous_order_is_a_guess_that_is_reported() -> None:
    table = frame(clear=["1/2/2024", "12/31/2024"] * 40, guess=["1/2/2024", "3/4/2024"] * 40)
    assert "the order is a guess: set its form in the schema" in note(table, "guess")
    assert "guess" not in note(table, "clear")


def test_the_form_of_dates_is_saved_and_may_be_chosen() -> None:
    table = frame(when=["1/2/2024", "3/4/2024"] * 40)
    schema = Schema.parse(infer(table).dump().replace('month/day/year"', 'day/month/year"'))
    assert schema.columns[0].form == "day/month/year"
    encoder = fit_encoder(table, schema, scaling="none")
    numbers = dict(zip(encoder.names, encoder.encode(table).numbers.T.tolist(), strict=True))
    assert numbers["when (month)"][:2] == [1, 3]  # February and April, counted from 0
    assert TableEncoder.parse(encoder.dump()) == encoder
    with pytest.raises(InputError, match="or of the form day/month/year: got '12/31/2024'"):
        encoder.encode(frame(when=["12/31/2024"]))
    with pytest.raises(ConfigError, match="the form of a date must be month/day/year or day/month"):
        Schema.parse('[[columns]]\nname = "when"\nkind = "date"\nform = "1,234.5"\n')


def test_the_form_of_a_kind_that_was_given_is_detected() -> None:
    table = frame(when=["31.01.2011", "01.02.2011"], price=["1.200,50 €", "(3,5 €)"])
    schema = infer(table).change({"when": "date", "price": "number"})
    schema = replace(schema, columns=tuple(replace(each, form="") for each in schema.columns))
    encoder = fit_encoder(table, schema, scaling="none")
    assert [each.form for each in encoder.schema.columns] == ["day/month/year", "1.234,5 €"]
    assert encoder.encode(table).numbers[:, -1].tolist() == [1200.5, -3.5]


@pytest.mark.parametrize(
    ("texts", "numbers"),
    (
        (["12.5", "(623.79)", "7"], [12.5, -623.79, 7.0]),
        (["$1,234.50", "($2,000.25)", "$ 3"], [1234.5, -2000.25, 3.0]),
        (["1.234,5", "(2,25)", "7"], [1234.5, -2.25, 7.0]),
    ),
)
def test_negative_numbers_of_accounting(texts: list[str], numbers: list[float]) -> None:
    table = frame(amount=texts * 20)
    column = infer(table).columns[0]
    assert column.kind == "number"
    assert to_numbers(table.columns["amount"], column.form)[0][:3].tolist() == numbers


def test_parentheses_around_other_texts_are_no_numbers() -> None:
    assert to_numbers(frame(a=["(-3)", "()", "(a)", "(1", "((2))"]).columns["a"], "1,234.5")[1] == [
        *("(-3)", "()", "(a)", "(1"),
        "((2))",
    ]


def test_integers_of_many_digits_are_codes() -> None:
    ids = [f"{10**30 + i % 4}" for i in range(80)]
    table = frame(account=ids, unique=[f"{10**20 + i}" for i in range(80)], short=["12", "34"] * 40)
    assert kinds(table) == {"account": "category", "unique": "ignore", "short": "number"}
    assert "more than 15 digits are treated as codes" in note(table, "account")


def test_dates_with_an_offset_are_converted_to_utc() -> None:
    texts = [
        "2024-01-01T00:30:00+02:00",
        "2024-01-01 10:00-0530",
        "2024-01-01T10:00Z",
        "2024-01-01",
    ]
    dates = to_dates(np.array(texts, dtype=object))
    assert dates is not None and [str(when) for when in dates] == [
        "2023-12-31T22:30:00",
        "2024-01-01T15:30:00",
        "2024-01-01T10:00:00",
        "2024-01-01T00:00:00",
    ]


def test_targets_are_read_in_their_form() -> None:
    table = frame(y=[f"{i},5 €" for i in range(60)], x=list(range(60)))
    schema = infer(table, "y")
    assert schema.task == "number" and schema.form == "1.234,5 €"
    assert infer_task(frame(y=["1,0", "2,0"]).columns["y"]) == "classes"


# ── Encoders ──────────────────────────────────────────────────────────────────────────────────────


def test_quantiles_become_normal() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 1.0, 8.0, 7.0]
    table = frame(x=values)
    rule = fit_encoder(table, infer(table)).numbers[0]
    knots = [float(np.quantile(values, t)) for t in np.linspace(0, 1, 10)]
    assert rule.knots == pytest.approx(knots)
    encoded = fit_encoder(table, infer(table)).encode(frame(x=[1.0, knots[4], 100.0, -5.0]))
    ties = (0 + knots.count(1.0) - 1) / 9 / 2
    wanted = [NormalDist().inv_cdf(p) for p in (ties, 4 / 9, 1 - 1e-7, 1e-7)]
    assert encoded.numbers[:, 0].tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("scaling", ("quantile", "robust", "standard", "none"))
def test_scalings_accept_any_values(scaling: str) -> None:
    values = [0.0, 1.0, 2.0, math.inf, -math.inf, 1e300, -1e300, None, 5e-324] * 4
    table = frame(x=values, y=list(range(36)))
    encoder = fit_encoder(table, infer(table), scaling=scaling)
    scaled = encoder.encode(table).numbers[:, 0]
    assert scaled.isnan().tolist() == [value is None for value in values]
    assert bool(scaled[~scaled.isnan()].isfinite().all())
    assert float(scaled[3]) == float(scaled[5]) > float(scaled[4])


def test_robust_and_standard_scaling() -> None:
    table = frame(x=[0.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    z = [(x - 2.5) / 2.5 for x in (0.0, 100.0)]
    robust = fit_encoder(table, infer(table), scaling="robust").encode(table).numbers[[0, 5], 0]
    assert robust.tolist() == pytest.approx([v / math.sqrt(1 + (v / 3) ** 2) for v in z])
    plain = fit_encoder(table, infer(table), scaling="standard").encode(table).numbers[:, 0]
    assert float(plain.mean()) == pytest.approx(0, abs=1e-6)
    assert float(plain.std(correction=0)) == pytest.approx(1)


def test_codes() -> None:
    table = frame(c=["b", "a", "b", None, "rare", "a", "b"])
    encoder = fit_encoder(table, infer(table), rare=2)
    assert encoder.categories[0].values == ("a", "b") and encoder.sizes == (4,)
    encoded = encoder.encode(frame(c=["a", "b", "rare", "new", None]))
    assert encoded.codes[:, 0].tolist() == [2, 3, 1, 1, 0]
    (message,) = encoder.unknown_notes(frame(c=["a", "new", "new", None]))
    assert encoder.unknown_values(frame(c=["a", "new", "new", None])) == {"c": (2, ["new"])}
    assert message.startswith(
        "c: 2 values are unknown or were rare in training (for example 'new')"
    )


def test_rare_depends_on_the_rows() -> None:
    small = frame(c=["a"] * 10 + ["b"])
    large = frame(c=["a"] * 1000 + ["b"] * 4 + ["d"] * 5)
    assert fit_encoder(small, infer(small)).categories[0].values == ("a", "b")
    assert fit_encoder(large, infer(large)).categories[0].values == ("a", "d")


def test_numbers_taken_as_categories_match_texts() -> None:
    table = frame(c=[1, 2, 1, None])
    encoder = fit_encoder(table, infer(table).change({"c": "category"}))
    assert encoder.encode(frame(c=["2", "1", "1.0"])).codes[:, 0].tolist() == [3, 2, 1]


def test_dates_are_split_into_parts() -> None:
    days = ["2024-01-01", "2024-02-29 13:00", "2025-12-31", None]
    table = frame(d=days)
    encoder = fit_encoder(table, infer(table), scaling="none")
    names = ["d", "d (day)", "d (month)", "d (weekday)", "d (hour)"]
    assert encoder.names == names
    numbers = encoder.encode(table).numbers
    assert numbers[0].tolist() == [19723.0, 0.0, 0.0, 0.0, 0.0]
    assert numbers[1, 1:].tolist() == [28.0, 1.0, 3.0, 13.0]
    assert numbers[2, 1:].tolist() == [30.0, 11.0, 2.0, 0.0]
    assert bool(numbers[3].isnan().all())
    same_hour = frame(d=["2024-01-01", "2024-02-03"])
    assert "d (hour)" not in fit_encoder(same_hour, infer(same_hour)).names
    with pytest.raises(InputError, match=r"dates such as 2024-05-31: got 'yesterday'\."):
        encoder.encode(frame(d=["yesterday"]))


@pytest.mark.parametrize(("impute", "middle"), (("median", 1.0), ("mean", 3.0)))
def test_missing_numbers_can_be_imputed(impute: str, middle: float) -> None:
    table = frame(x=[0.0, 1.0, 8.0, None])
    encoder = fit_encoder(table, infer(table), impute=impute, scaling="none")
    assert encoder.encode(table).numbers[:, 0].tolist() == [0.0, 1.0, 8.0, middle]


def test_statistics_come_from_the_training_rows_alone() -> None:
    table = frame(x=[float(i) for i in range(50)], c=["a", "b"] * 25)
    part = table.take(np.arange(20))
    other = frame(x=[1e9] * 30, c=["z"] * 30)
    before = fit_encoder(part, infer(part))
    before.encode(other)
    assert before == fit_encoder(part, infer(part))
    assert before.numbers[0].high == 19.0


def test_order_of_columns_does_not_matter_and_names_do() -> None:
    table = frame(a=[1.0, 2.0, 4.0], b=["x", "y", "x"], c=["q"] * 3)
    encoder = fit_encoder(table, infer(table))
    turned = Frame("t", dict(reversed(table.columns.items())))
    assert torch.equal(encoder.encode(turned).numbers, encoder.encode(table).numbers)
    encoder.encode(table.without("c"))  # an ignored column may be absent
    message = "it lacks 'b' and has 'z', which training did not have"
    with pytest.raises(InputError, match=message):
        encoder.encode(frame(a=[1.0], z=[1.0]))


def test_an_encoder_survives_json() -> None:
    encoder = fit_encoder(TABLE, infer(TABLE))
    again = TableEncoder.parse(json.loads(json.dumps(encoder.dump())))
    assert again == encoder
    with pytest.raises(SavedError, match="the saved encoder is damaged"):
        TableEncoder.parse({"numbers": []})


def test_tables_without_usable_columns() -> None:
    table = frame(a=["x"] * 3, b=[None] * 3)
    with pytest.raises(InputError, match=r"all are ignored\. 'a': constant"):
        fit_encoder(table, infer(table))
    with pytest.raises(ConfigError, match="scaling has no choice 'log'"):
        fit_encoder(TABLE, infer(TABLE), scaling="log")


# ── Bins ──────────────────────────────────────────────────────────────────────────────────────────


def test_quantile_edges() -> None:
    assert quantile_edges(np.array([0.0, 0.0, 0.0, 1.0, 2.0]), bins=4) == [0.0, 1.0, 2.0]
    assert quantile_edges(np.array([3.0, 3.0]), bins=4) == [2.5, 3.5]


def test_tree_edges_are_where_the_target_jumps() -> None:
    x = np.linspace(0, 10, 500)
    y = (x > 3.33).astype(float) + 5 * (x > 7)
    edges = tree_edges(x, y, classes=False, bins=3, seed=0)
    assert edges[0] == 0 and edges[-1] == 10
    assert edges[1:-1] == pytest.approx([3.33, 7.0], abs=0.05)


def test_missing_values_make_no_edges() -> None:
    numbers = np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]], dtype=np.float32)
    settings: dict[str, Any] = {"classes": True, "bins": 2, "seed": 0}
    edges = make_edges(numbers, np.array([0, 1, 1]), kind="quantile", **settings)
    assert edges == [[1.0, 1.5, 2.0], [-1.0, 1.0]]
    with pytest.raises(ConfigError, match="bins has no choice 'tree'"):
        make_edges(numbers, np.array([0, 1, 1]), kind="tree", **settings)
