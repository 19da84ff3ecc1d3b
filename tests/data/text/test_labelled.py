"""Labelled texts, splits without leaks, and masked tokens."""

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from addnorm.data.text.labelled import read_labelled, read_text_column
from addnorm.data.text.masking import mask_tokens
from addnorm.data.text.special_tokens import FIRST, IGNORE, MASK
from addnorm.data.text.split import overlap, split_by_source, split_document
from addnorm.errors import AddnormError, ConfigError, InputError

Put = Callable[[str], str]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Write a table; tabs make it a .tsv."""
    monkeypatch.chdir(tmp_path)

    def write(content: str) -> str:
        name = "a.tsv" if "\t" in content else "a.csv"
        Path(name).write_bytes(content.encode())
        return name

    return write


def refuse(message: str, run: Callable[[], object], kind: type[AddnormError] = InputError) -> None:
    with pytest.raises(kind, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────

ROWS = "a joy\t1\na bore\t0\nfun , fun\t1\nnot for me .\t0\n"
TEXTS = ["a joy", "a bore", "fun , fun", "not for me ."]


@pytest.mark.parametrize(
    ("content", "arguments", "note"),
    (
        (ROWS, {}, "no header line: the text is column 1, the label column 2."),
        (ROWS, {"text": "1", "label": "2"}, "no header line: the text is column 1, the label"),
        (ROWS, {"label": "2"}, "no header line: the text is column 1, the label column 2."),
        (f"text\tlabel\n{ROWS}", {}, "by the header line, the text is 'text', the label 'label'."),
        (f"sentence\tstars\n{ROWS}", {"text": "sentence"}, "'sentence', the label 'stars'"),
        (f"what was said\tso\n{ROWS}", {}, "by the header line, the text is 'what was said'"),
        (f"5\t6\n{ROWS}", {"text": "1"}, "no header line"),
        (
            "id\tlang\treview\tstars\tseen\n"
            "1\ten\ta joy\t1\t3\n2\ten\ta bore\t0\t4\n"
            "3\ten\tfun , fun\t1\t5\n4\ten\tnot for me .\t0\t6\n",
            {},
            "the text is 'review', the label 'stars'",
        ),
        (
            'stars,review\n1,a joy\n0,"a bore"\n1,"fun , fun"\n0,not for me .\n',
            {},
            "the text is 'review', the label 'stars'",
        ),
        (
            "1\ten\ta joy\n0\ten\ta bore\n1\ten\tfun , fun\n0\ten\tnot for me .\n",
            {},
            "no header line: the text is column 3, the label column 1.",
        ),
        (
            "1;7;a joy\n0;8;a bore\n1;9;fun , fun\n0;5;not for me .\n",
            {},
            "no header line: the text is column 3, the label column 1.",
        ),
    ),
)
def test_columns_of_texts_and_labels_are_inferred(
    content: str, arguments: dict[str, str], note: str, put: Put
) -> None:
    if content.startswith("5"):  # a first row of numbers is a row
        table = read_labelled(put(content), rare="drop", **arguments)
    else:
        table = read_labelled(put(content), **arguments)
    assert table.texts == TEXTS
    assert (table.labels, table.targets, table.names) == (["1", "0"] * 2, [1, 0] * 2, ("0", "1"))
    assert note in table.report.lines()[-1 if not content.startswith("5") else 1]
    assert len(table) == 4 and table.take([3]).texts == ["not for me ."]


@pytest.mark.parametrize(
    ("content", "texts"),
    (
        ('text\nthe cat\n"multi\nline dog"\nhouse\n', ["the cat", "multi\nline dog", "house"]),
        ("Review,Stars\nfine,5\n", ["fine"]),
        ("class\nfine\n", ["class", "fine"]),  # names of labels alone are no header
    ),
)
def test_usual_names_are_a_header(put: Put, content: str, texts: list[str]) -> None:
    assert read_text_column(put(content))[0] == texts


def test_a_header_alone_has_no_texts(put: Put) -> None:
    with pytest.raises(InputError, match="it has only a header"):
        read_text_column(put("text,label\n"))


def test_words_as_labels_are_not_a_header(put: Put) -> None:
    table = read_labelled(put("a joy\tgood\na bore\tbad\nfun\tgood\nno\tbad\n"))
    assert table.texts == ["a joy", "a bore", "fun", "no"]
    assert table.names == ("bad", "good")


def test_quoted_texts_may_hold_anything(put: Put) -> None:
    name = put('text,label\n"two\nlines, ""so""",yes\nb,no\n\n"c\n",yes\nd,no\n')
    table = read_labelled(name, "text", "label")
    assert table.texts == ['two\nlines, "so"', "b", "c\n", "d"]
    assert table.lines == [2, 4, 6, 8]
    assert table.report.issues["empty"].lines == (5,)
    Path("a.csv.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    assert read_labelled("a.csv.gz").texts == table.texts


@pytest.mark.parametrize(
    ("labels", "names"),
    (
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["b", "a", "10"], ("10", "a", "b")),
        (["1.0", "1", "0.5"], ("0.5", "1", "1.0")),
        (["nan", "1", "2"], ("1", "2", "nan")),
    ),
)
def test_labels_have_a_fixed_order(labels: list[str], names: tuple[str, ...], put: Put) -> None:
    rows = "".join(f"a text, number {n}!\t{label} \n" for n, label in enumerate(labels * 2))
    assert read_labelled(put(rows)).names == names
    assert read_labelled(put("".join(rows.splitlines(True)[::-1]))).names == names


def test_issues_of_texts_are_reported(put: Put) -> None:
    rows = "a\t1\na\t1\n \t1\nb\t\na\t0\nlong one\t0\nc\t0\n"
    table = read_labelled(put(rows), longest=4)
    assert table.report.lines() == [
        "a.tsv: 7 texts read, 5 kept.",
        "no header line: the text is column 1, the label column 2.",
        "1 text has no text (line 3): left out.",
        "1 text has more than 4 characters (line 6): cut.",
        "1 text repeats an earlier one (line 2): kept.",
        "1 text has no label (line 4): left out.",
        "1 text has another label than the same text before (line 5): kept.",
    ]
    assert table.texts == ["a", "a", "a", "long", "c"]
    drop: dict[str, Any] = {"repeated": "drop", "long": "drop", "rare": "keep"}
    assert read_labelled(put(rows), longest=4, **drop).lines == [1, 5, 7]


def test_a_label_that_occurs_once_is_refused_by_default(put: Put) -> None:
    rows = f"{ROWS}odd\t2\nodder\t3\n"
    name = put(rows)
    refuse(
        r"occur twice, once to train on and once to validate: 'a.tsv' has '2' only in line 5 "
        r"\(and 1 more labels\). Correct it, or drop it with data.on_rare_label=drop",
        lambda: read_labelled(name),
    )
    assert read_labelled(name, rare="drop").names == ("0", "1")
    assert "2 texts have a label that occurs only once (lines 5, 6): left out." in (
        read_labelled(name, rare="drop").report.lines()
    )
    assert read_labelled(name, rare="keep").names == ("0", "1", "2", "3")


def test_labels_must_be_those_of_the_model(put: Put) -> None:
    name = put("good film!\tgood\nbad film!\tbad\n")
    assert read_labelled(name, names=("bad", "good", "so-so")).targets == [1, 0]
    refuse(
        "line 1 of 'a.tsv' has a label that is not one of the model's: 'good'. Did you mean 'god'",
        lambda: read_labelled(name, names=("bad", "god")),
    )


@pytest.mark.parametrize(
    ("message", "content", "arguments"),
    (
        ("a column of texts and one of labels: it has one column", "text\none\ntwo\n", {}),
        ("no column 'txt'. Did you mean 'text'", f"text\tlabel\n{ROWS}", {"text": "txt"}),
        ("no column '3'. Known: label, text", f"text\tlabel\n{ROWS}", {"text": "3"}),
        ("no header line, so no column 'txt'. Give a number: 1, 2", ROWS, {"text": "txt"}),
        ("no header line, so no column '0'. Give a number: 1, 2", ROWS, {"label": "0"}),
        ("must be two columns: both are '2'", ROWS, {"text": "2", "label": "2"}),
        ("two distinct labels or more: 'a.tsv' has only '1'", "a b c\t1\nd e f\t1\n", {}),
        ("no row has both", "a\t\n\t1\n", {}),
        ("it has only a header", "text\tlabel\n", {"text": "text"}),
        (
            "labels must repeat: 'a.tsv' has 40 distinct labels in 40 rows. Is it the right column",
            "".join(f"text number {n}\t{n / 7}\n" for n in range(40)),
            {},
        ),
        ("line 2 has 1, line 1 has 2. Quote the fields", "a,b\nc\n", {}),
        ("must have a column of texts: all its columns are numbers", "1.5\t0\n2.5\t1\n" * 2, {}),
    ),
)
def test_invalid_tables_are_refused(
    message: str, content: str, arguments: dict[str, str], put: Put
) -> None:
    name = put(content)
    refuse(message, lambda: read_labelled(name, **arguments))


def test_other_mistakes_are_refused(put: Put) -> None:
    name = put(ROWS)
    refuse("must be a table: give a .tsv or .csv", lambda: read_labelled("a.xlsx"))
    refuse("rare must be one of", lambda: read_labelled(name, rare="no"), ConfigError)
    refuse("empty must be one of", lambda: read_labelled(name, empty="no"), ConfigError)


# ── Splits ────────────────────────────────────────────────────────────────────────────────────────


def test_a_document_is_split_by_position() -> None:
    text = "".join(str(n % 10) for n in range(1000))
    assert split_document(text) == (text[:900], text[900:])
    assert split_document("0123456789") == ("012345678", "9")
    assert split_document("0123456789", 0.29) == ("0123456", "789")
    assert split_document("0123456789", 0.9) == ("0", "123456789"), "1 − 0.9 is a little below 0.1"
    for short in ("", "a"):
        refuse("long enough for two parts", lambda short=short: split_document(short))
    for share in (0.0, 1.0, -1, float("nan")):
        refuse("between 0 and 1", lambda share=share: split_document(text, share), ConfigError)


SOURCES = st.lists(st.text(alphabet="aAbB \t", max_size=4), min_size=2, max_size=60)


def same(source: str) -> str:
    return " ".join(source.lower().split())


@given(sources=SOURCES, share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_a_split_leaks_nothing(sources: list[str], share: float, seed: int) -> None:
    distinct = {same(source) for source in sources}
    if len(distinct) < 2:
        refuse("two distinct sources or more", lambda: split_by_source(sources, share))
        return
    split = split_by_source(sources, share, seed=seed)
    assert sorted(split.train + split.valid) == list(range(len(sources)))
    assert split.train == sorted(split.train) and split.valid == sorted(split.valid)
    train, valid = ({same(sources[row]) for row in rows} for rows in (split.train, split.valid))
    assert train and valid and not train & valid
    assert len(valid) == min(max(1, round(share * len(distinct))), len(distinct) - 1)
    assert overlap([sources[n] for n in split.train], [sources[n] for n in split.valid]) == []
    assert f"{len(split.valid)} row" in split.note and f"({len(valid)})" in split.note


def test_a_split_is_decided_by_text_and_seed() -> None:
    sources = [f"sentence {n}" for n in range(1000)]
    split = split_by_source(sources)
    assert len(split.valid) == 100 and split == split_by_source(sources)
    chosen = {sources[row] for row in split.valid}
    back = sources[::-1]
    assert {back[row] for row in split_by_source(back).valid} == chosen
    other = {sources[row] for row in split_by_source(sources, seed=1).valid}
    assert 0 < len(other & chosen) < 30, "about a tenth, by chance"
    assert max(split.valid) > 900 and min(split.valid) < 100, "from everywhere"


def test_a_split_is_at_most_as_large_as_requested() -> None:
    sources = [f"sentence {n}" for n in range(1000)]
    assert len(split_by_source(sources, most=7).valid) == 7
    assert len(split_by_source(sources, most=700).valid) == 100


def test_every_label_has_its_share() -> None:
    labels = ["common"] * 800 + ["rarer"] * 190 + ["rare"] * 8 + ["twice"] * 2
    sources = [f"text {n}" for n in range(1000)]
    split = split_by_source(sources, labels=labels)
    valid = Counter(labels[row] for row in split.valid)
    assert sum(valid.values()) == 100
    assert abs(valid["common"] - 80) <= 1 and abs(valid["rarer"] - 19) <= 1
    for share in (0.5, 0.9):
        train = split_by_source(sources, share, labels=labels).train
        assert {labels[row] for row in train} == set(labels)


@pytest.mark.parametrize("share", (0.0, 1.0, 5))
def test_a_share_must_leave_something(share: float) -> None:
    refuse("between 0 and 1: got", lambda: split_by_source(["a", "b"], share), ConfigError)


def test_leaks_of_a_given_split_are_found() -> None:
    assert overlap(["a cat", "b"], ["c", "A  Cat", "b ", "d"]) == [1, 2]


# ── Hidden tokens ─────────────────────────────────────────────────────────────────────────────────


def draw(seed: int = 0, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 100, (200, 500), generator=torch.Generator().manual_seed(5))
    settings: dict[str, Any] = {"vocab": 100} | changes
    generator = torch.Generator().manual_seed(seed)
    return ids, *mask_tokens(ids, generator=generator, **settings)


@pytest.mark.parametrize("rate", (0.15, 0.4, 1.0))
def test_masks_follow_bert(rate: float) -> None:
    ids, inputs, targets = draw(rate=rate)
    chosen = targets != IGNORE
    ordinary = ids >= FIRST
    assert not (chosen & ~ordinary).any(), "special ids are never chosen"
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    count = int(chosen.sum())
    # Five standard deviations of a binomial count: 1 in 1.7 million by chance.
    assert_share(count, int(ordinary.sum()), rate)
    hidden, kept = inputs[chosen] == MASK, inputs[chosen] == ids[chosen]
    assert_share(int(hidden.sum()), count, 0.8)
    assert_share(int(kept.sum()), count, 0.1 + 0.1 / 95)
    others = inputs[chosen][~hidden & ~kept]
    assert int(others.min()) == FIRST and int(others.max()) == 99, "random ones are ordinary"
    assert len(others.unique()) == 95
    per_row = chosen.float().mean(dim=1)
    assert per_row.std() < 0.03 and per_row.min() > rate - 0.1


def assert_share(count: int, total: int, share: float) -> None:
    spread = (total * share * (1 - share)) ** 0.5
    assert abs(count - total * share) <= 5 * spread


def test_masks_depend_on_the_generator_alone() -> None:
    one, again, other = draw(0), draw(0), draw(1)
    assert torch.equal(one[1], again[1]) and torch.equal(one[2], again[2])
    assert not torch.equal(one[2], other[2])


def test_texts_without_ordinary_tokens_are_not_masked() -> None:
    inputs, targets = mask_tokens(torch.tensor([[0, 1, 2, 3, 4]]), vocab=9, rate=1.0)
    assert inputs.tolist() == [[0, 1, 2, 3, 4]] and set(targets.tolist()[0]) == {IGNORE}
    assert mask_tokens(torch.zeros(0, 3, dtype=torch.long), vocab=9)[0].shape == (0, 3)


@pytest.mark.parametrize("rate", (0, -0.1, 1.1))
def test_a_rate_must_be_a_share(rate: float) -> None:
    refuse("rate must be above 0 and at most 1: got", lambda: draw(rate=rate), ConfigError)


def test_a_vocabulary_must_have_ordinary_tokens() -> None:
    refuse(
        "vocab must hold ordinary tokens, 6 ids or more: got 5", lambda: draw(vocab=5), ConfigError
    )
