"""Text files and sentence pairs: exact content, and errors with the position in the file."""

import bz2
import errno
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from addnorm.data.text.files import read_lines, read_text_file
from addnorm.data.text.pairs import limit_tokens, read_pairs
from addnorm.errors import AddnormError, ConfigError, InputError, SavedError

Put = Callable[..., str]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Write files into one folder; return the name of the last."""
    monkeypatch.chdir(tmp_path)

    def write(**files: bytes | str) -> str:
        name = ""
        for key, content in files.items():
            name = key.replace("_", ".")
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def refuse(message: str, run: Callable[[], object], kind: type[AddnormError] = InputError) -> None:
    with pytest.raises(kind, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


# ── Lines ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "lines"),
    (
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\rtwo\r", ["one", "two"]),
        (b"one\rmore\ntwo\n", ["one\rmore", "two"]),
        (b"one\n\ntwo\n\n", ["one", "", "two", ""]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        ("a\u2028b\x85c\x0bd\x1ce\n".encode(), ["a\u2028b\x85c\x0bd\x1ce"]),
        (b" spaces \t\n", [" spaces \t"]),
    ),
)
def test_lines_end_where_they_should(content: bytes, lines: list[str], put: Put) -> None:
    name = put(a_txt=content)
    assert read_lines(name) == read_lines(Path(name)) == lines
    assert read_lines(put(b_txt_gz=gzip.compress(content))) == lines
    assert read_lines(put(packed=gzip.compress(content))) == lines, "known by its contents"


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\0\r\n", codec="utf-8")), min_size=1)
)
def test_lines_round_trip(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(text.encode())
    if text.strip() and not text.startswith(("\ufeff", "%PDF", "PAR1", "BZh")):
        assert read_lines(path) == lines
        assert read_text_file(path) == text


def test_a_document_is_all_of_the_text(put: Put) -> None:
    assert read_text_file(put(book_txt="one\r\n\r\ntwo\n\n")) == "one\n\ntwo\n\n"


@pytest.mark.parametrize(
    ("message", "content", "kind"),
    (
        (
            r"'a.txt' must be UTF-8 text: byte 4 of line 2 is 0xe9. .*iconv -f LATIN1",
            b"fine\ncaf\xe9\n",
            SavedError,
        ),
        ("byte 1 of line 1 is 0xff", b"\xff", SavedError),
        ("byte 3 of line 3 is 0xe2", b"\n\nab\xe2\x82", SavedError),
        ("'a.txt' is not text: byte 2 of line 2 is 0", b"ab\nc\0d", SavedError),
        ("it is UTF-16 text. Convert it: iconv -f UTF-16", "ab".encode("utf-16"), SavedError),
        ("is not text: byte 2 of line 1 is 0", "ab".encode("utf-16-le"), SavedError),
        ("a zip archive or an office document", b"PK\x03\x04abc", SavedError),
        ("it is a PDF", b"%PDF-1.7", SavedError),
        ("compressed with bzip2", bz2.compress(b"a"), SavedError),
        ("compressed with xz", lzma.compress(b"a"), SavedError),
        ("Parquet", b"PAR1abc", SavedError),
        (
            "is damaged: its gzip data is truncated",
            gzip.compress(b"abc" * 99, mtime=0)[:-9],
            SavedError,
        ),
        ("is damaged: its gzip data is truncated", b"\x1f\x8bnot gzip at all", SavedError),
        ("'a.txt' must hold some text: it is empty", b"", InputError),
        ("it is empty", b" \r\n\t\n", InputError),
        ("it is empty", b"\xef\xbb\xbf", InputError),
        ("it is empty", gzip.compress(b"", mtime=0), InputError),
    ),
)
def test_other_files_are_refused(
    message: str, content: bytes, kind: type[AddnormError], put: Put
) -> None:
    name = put(a_txt=content)
    refuse(message, lambda: read_lines(name), kind)
    refuse(message, lambda: read_text_file(name), kind)


def test_a_missing_file_is_an_error(put: Put) -> None:
    put(train_en="a", train_de="b")
    refuse(
        r"no file 'train.ne'. Did you mean 'train.en'", lambda: read_lines("train.ne"), SavedError
    )
    refuse(r"no file 'no/where'. Check the path", lambda: read_lines("no/where"), SavedError)
    refuse("no file 'zzz'. Check", lambda: read_lines("zzz"), SavedError)


def test_a_directory_is_refused(put: Put) -> None:
    Path("folder").mkdir()
    refuse(
        r"'folder' is a directory. Name a file in it\.", lambda: read_lines("folder"), SavedError
    )
    Path("folder/b.txt").write_text("b")
    refuse(r"in it, such as 'folder/b.txt'", lambda: read_lines("folder"), SavedError)


def test_an_uncompressed_file_named_gz_is_refused(put: Put) -> None:
    name = put(a_gz=b"plain")
    refuse(
        "'a.gz' is not compressed with gzip. Name it without .gz",
        lambda: read_lines(name),
        SavedError,
    )


def test_an_unreadable_file_is_an_error(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(a_txt="a")

    def forbid(path: Path, mode: str) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", forbid)
    refuse("'a.txt' cannot be read: Permission denied", lambda: read_lines(name), SavedError)


# ── Pairs ─────────────────────────────────────────────────────────────────────────────────────────


def test_aligned_files_are_pairs(put: Put) -> None:
    put(a_en="a cat\na dog\n", a_de="eine Katze\nein Hund\n")
    pairs = read_pairs("a.en", "a.de")
    assert (pairs.source, pairs.target) == (["a cat", "a dog"], ["eine Katze", "ein Hund"])
    assert (len(pairs), pairs.lines) == (2, [1, 2])
    assert pairs.report.lines() == ["a.en, a.de: 2 pairs read, 2 kept."]
    assert pairs.take([1]).target == ["ein Hund"] and pairs.take([1]).lines == [2]


@pytest.mark.parametrize(
    ("name", "content", "pairs", "note"),
    (
        ("a.tsv", "a\tA\nb\tB\n", [("a", "A"), ("b", "B")], ""),
        ("a.csv", 'a,A\n"b, c","B\nC"\n', [("a", "A"), ("b, c", "B\nC")], ""),
        ("a.csv", "a;A\nb;B, C\n", [("a", "A"), ("b", "B, C")], "separated by semicolons"),
        ("a.csv", "a\tA\nb\tB\n", [("a", "A"), ("b", "B")], "separated by tabs"),
        ("a.csv", "a|A\nb|B\n", [("a", "A"), ("b", "B")], "separated by bars"),
        ("a.tsv", 'so "a"\t"A\n"\tB\n', [('so "a"', '"A'), ('"', "B")], ""),
        ("a.tsv", '"a\nb"\tA\nc\t"C ""d"""\n', [("a\nb", "A"), ("c", 'C "d"')], "quoted"),
        ("a.tsv", "English\tGerman\na\tA\n", [("a", "A")], "line 1 is read as the header"),
        ("a.csv", "source,target\na,A\n", [("a", "A")], "the header: source, target"),
        ("a.tsv", "a\rb\tA\nb\tB\n", [("a\rb", "A"), ("b", "B")], ""),
    ),
)
@pytest.mark.parametrize("packed", (False, True))
def test_a_table_of_two_columns_is_pairs(
    name: str, content: str, pairs: list[Any], note: str, packed: bool, put: Put
) -> None:
    path = Path(f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    read = read_pairs(path)
    assert list(zip(read.source, read.target, strict=True)) == pairs
    assert note in " ".join(read.report.notes) and bool(note) == bool(read.report.notes)


def test_columns_are_chosen_by_name_or_number(put: Put) -> None:
    name = put(a_tsv="id\ten\tde\n1\tcat\tKatze\n2\tdog\tHund\n")
    by_name = read_pairs(name, columns=("de", "en"))
    assert (by_name.source, by_name.target) == (["Katze", "Hund"], ["cat", "dog"])
    assert by_name.lines == [2, 3]
    by_number = read_pairs(name, columns=("2", "3"))
    assert by_number.source == ["en", "cat", "dog"], (
        "with numbers alone, a header is not guessed at"
    )
    refuse("must have 2 columns: 'a.tsv' has 3. Name two", lambda: read_pairs(name))
    refuse("no column 'dee'. Did you mean 'de'", lambda: read_pairs(name, columns=("en", "dee")))
    refuse("has no column|no header line", lambda: read_pairs(name, columns=("1", "4")))


def test_two_files_have_no_columns(put: Put) -> None:
    refuse(
        r"columns are for one table: got \('1', '2'\) and two files",
        lambda: read_pairs("a.en", "a.de", columns=("1", "2")),
        ConfigError,
    )


def test_unequal_files_are_refused_with_both_counts(put: Put) -> None:
    put(a_en="a\nb\nc\n", a_de="A\nB\n")
    refuse(
        r"same number of lines: 'a.en' has 3, 'a.de' has 2. Line n of one must translate line n",
        lambda: read_pairs("a.en", "a.de"),
    )


SOURCE = "a\n\nb\na\nlonger than it\n \nb\n"
TARGET = "A\nB\nB\nA\nso\nB\nother\n"


@pytest.mark.parametrize(
    ("choices", "kept", "notes"),
    (
        (
            {},
            [1, 3, 4, 5, 7],
            [
                "2 pairs have an empty side (lines 2, 6): left out.",
                "1 pair repeats an earlier one (line 4): kept.",
            ],
        ),
        (
            {"empty": "keep"},
            [1, 2, 3, 4, 5, 6, 7],
            [
                "2 pairs have an empty side (lines 2, 6): kept.",
                "1 pair repeats an earlier one (line 4): kept.",
            ],
        ),
        (
            {"repeated": "drop"},
            [1, 3, 5, 7],
            [
                "2 pairs have an empty side (lines 2, 6): left out.",
                "1 pair repeats an earlier one (line 4): left out.",
            ],
        ),
        (
            {"longest": 5},
            [1, 3, 4, 7],
            [
                "2 pairs have an empty side (lines 2, 6): left out.",
                "1 pair has more than 5 characters (line 5): left out.",
                "1 pair repeats an earlier one (line 4): kept.",
            ],
        ),
        (
            {"longest": 5, "long": "keep"},
            [1, 3, 4, 5, 7],
            [
                "2 pairs have an empty side (lines 2, 6): left out.",
                "1 pair has more than 5 characters (line 5): kept.",
                "1 pair repeats an earlier one (line 4): kept.",
            ],
        ),
        (
            {"limit": 3},
            [1, 3],
            [
                "only the first 3 of 7 pairs are read.",
                "1 pair has an empty side (line 2): left out.",
            ],
        ),
    ),
)
def test_issues_of_pairs_are_reported(
    choices: dict[str, Any], kept: list[int], notes: list[str], put: Put
) -> None:
    put(a_en=SOURCE, a_de=TARGET)
    pairs = read_pairs("a.en", "a.de", **choices)
    first, *rest = pairs.report.lines()
    assert pairs.lines == kept and rest == notes
    assert first == f"a.en, a.de: {pairs.report.read} pairs read, {len(kept)} kept."
    assert len(pairs.source) == len(pairs.target) == len(pairs) == pairs.report.kept


def test_long_pairs_can_be_cut(put: Put) -> None:
    put(a_en=SOURCE, a_de=TARGET)
    pairs = read_pairs("a.en", "a.de", longest=5, long="cut")
    assert (pairs.source[3], pairs.target[3]) == ("longe", "so")
    assert pairs.report.issues["long"].describe("pair").endswith("(line 5): cut.")
    assert pairs.report.issues["long"].count == 1


def test_many_issues_are_counted_and_a_few_lines_named(put: Put) -> None:
    put(a_en="x\n" * 9, a_de="y\n" * 9)
    report = read_pairs("a.en", "a.de").report
    assert report.lines()[1] == "8 pairs repeat an earlier one (lines 2, 3, 4, 5, 6, …): kept."


def test_empty_lines_of_tables_are_counted(put: Put) -> None:
    pairs = read_pairs(put(a_tsv="a\tA\n\nb\tB\n\n"))
    assert pairs.report.read == 4 and pairs.report.issues["empty"].lines == (2, 4)
    pairs = read_pairs(put(a_csv='a,"A\n\nA"\n\nb,B\n'))
    assert pairs.report.issues["empty"].lines == (4,) and pairs.lines == [1, 5]


def test_a_long_field_is_read(put: Put) -> None:
    assert len(read_pairs(put(a_csv=f"{'a' * 300_000},b\n")).source[0]) == 300_000


@pytest.mark.parametrize(
    ("message", "files", "run", "kind"),
    (
        (
            "got only 'a.txt'. Give a second file",
            {"a_txt": "a"},
            lambda: read_pairs("a.txt"),
            InputError,
        ),
        (
            "same number of columns .*: line 2 has 3, line 1 has 2. Quote the fields that hold co",
            {"a_csv": "a,b\na,b,c\n"},
            lambda: read_pairs("a.csv"),
            InputError,
        ),
        (
            "line 3 has 1, line 1 has 2. Quote the fields that hold tabs",
            {"a_tsv": "a\tb\n\nc\n"},
            lambda: read_pairs("a.tsv"),
            InputError,
        ),
        (
            "line 2 cannot be read .*Double the quotes",
            {"a_csv": 'a,b\n"a,b\nc,d\n'},
            lambda: read_pairs("a.csv"),
            InputError,
        ),
        (
            "line 2 cannot be read",
            {"a_csv": 'a,b\n"a"x,b\n'},
            lambda: read_pairs("a.csv"),
            InputError,
        ),
        (
            "must have 2 columns: 'a.csv' has 1",
            {"a_csv": "a\nb\n"},
            lambda: read_pairs("a.csv"),
            InputError,
        ),
        (
            "must be a pair to learn from: a.tsv: 2 pairs read, 0 kept. 2 pairs have an empty",
            {"a_tsv": "a\t\n\tb\n"},
            lambda: read_pairs("a.tsv"),
            InputError,
        ),
        ("longest must be 1 or more: got 0", {}, lambda: read_pairs("a", longest=0), ConfigError),
        ("limit must be 1 or more: got -1", {}, lambda: read_pairs("a", limit=-1), ConfigError),
        (
            "empty must be one of drop, keep: got 'skip'",
            {},
            lambda: read_pairs("a", empty="skip"),
            ConfigError,
        ),
        (
            "long must be one of drop, cut, keep: got 'ct'. Did you mean 'cut'",
            {},
            lambda: read_pairs("a", long="ct"),
            ConfigError,
        ),
        ("repeated must be one of", {}, lambda: read_pairs("a", repeated="cut"), ConfigError),
    ),
)
def test_invalid_pairs_are_refused(
    message: str,
    files: dict[str, str],
    run: Callable[[], object],
    kind: type[AddnormError],
    put: Put,
) -> None:
    put(**files)
    refuse(message, run, kind)


# ── Tokens ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("long", "sides", "kept", "done"),
    (
        ("cut", [[[5, 6], [7], [8, 8]], [[9], [9, 9], [9]]], [0, 1, 2], "cut"),
        ("drop", [[[7]], [[9, 9]]], [1], "left out"),
        ("keep", [[[5, 6, 6], [7], [8, 8]], [[9], [9, 9], [9, 9, 9, 9]]], [0, 1, 2], "kept"),
    ),
)
def test_tokens_are_limited_in_length(long: str, sides: Any, kept: list[int], done: str) -> None:
    token_ids = [[[5, 6, 6], [7], [8, 8]], [[9], [9, 9], [9, 9, 9, 9]]]
    if long == "cut":
        sides[1][2] = [9, 9]
    held, rows, issue = limit_tokens(token_ids, 2, long=long, lines=[11, 12, 13])
    assert (held, rows) == (sides, kept)
    assert issue.describe("pair") == f"2 pairs have more than 2 tokens (lines 11, 13): {done}."
    assert limit_tokens(token_ids, 2)[2].lines == (1, 3)
    refuse("longest must be 1", lambda: limit_tokens(token_ids, 0), ConfigError)
    refuse("long must be one of", lambda: limit_tokens(token_ids, 1, long="no"), ConfigError)
