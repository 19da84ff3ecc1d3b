"""Sentences of words with a tag each, for token labelling: CoNLL files and JSON lines.

CoNLL          a word a line, its columns separated by spaces or tabs; a blank line ends a
               sentence; -DOCSTART- lines and lines that begin with "# " are skipped
.jsonl         a sentence a line: {"tokens": ["EU", ...], "tags": ["B-ORG", ...]}
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from addnorm.data.text.files import read_lines
from addnorm.data.text.reading_report import ReadingReport
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import InputError, nearest

TOKEN_FIELDS = ("tokens", "words")
TAG_FIELDS = ("tags", "labels", "ner_tags", "pos_tags")
"""Names of the fields of JSON lines, unless the caller names them."""
_WORD = re.compile(r"\w+(?:[-'’.]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences as words and tags, with the line where each begins."""

    words: list[list[str]]
    tags: list[list[str]]
    """As many as words; none in a file without tags."""
    lines: list[int]
    names: tuple[str, ...]
    """All distinct tags, sorted."""
    report: ReadingReport

    def __len__(self) -> int:
        return len(self.words)

    def take(self, rows: Iterable[int]) -> "TaggedSentences":
        """Return some of the sentences, in the order of `rows`, with all `names`."""
        rows = list(rows)
        words, tags = ([column[row] for row in rows] for column in (self.words, self.tags))
        return replace(self, words=words, tags=tags, lines=[self.lines[row] for row in rows])


def words_of_text(text: str) -> list[str]:
    """Return the words and punctuation marks of a text.

    >>> words_of_text("Mr. O'Neill left, finally.")
    ['Mr', '.', "O'Neill", 'left', ',', 'finally', '.']
    """
    return _WORD.findall(text)


def is_tagged_file(path: str | Path) -> bool:
    """Return whether a file has words rather than texts, by its ending.

    >>> is_tagged_file("train.conll"), is_tagged_file("texts.txt.gz")
    (True, False)
    """
    return Path(str(path).removesuffix(".gz")).suffix in (".conll", ".jsonl", ".iob", ".bio")


def read_tagged(
    path: str | Path,
    text: str | None = None,
    label: str | None = None,
    *,
    names: Sequence[str] | None = None,
    limit: int | None = None,
    tagged: bool = True,
) -> TaggedSentences:
    """Return the sentences of a file.

    Parameters
    ----------
    path
        A .jsonl file; any other is read as CoNLL. Each may be gzipped.
    text, label
        Where words and tags are: numbers of columns from 1 (the first and the last by default),
        or names of fields.
    names
        The tags of a trained model: any other tag is an error.
    limit
        Sentences to read; None for all.
    tagged
        Whether every word must have a tag; otherwise only words are read.

    Examples
    --------
    >>> _ = Path("few.conll").write_text("EU NNP B-ORG\\nsleeps VBZ O\\n\\nPeter NNP B-PER\\n")
    >>> few = read_tagged("few.conll")
    >>> few.words, few.tags[0], few.names
    ([['EU', 'sleeps'], ['Peter']], ['B-ORG', 'O'], ('B-ORG', 'B-PER', 'O'))
    """
    as_json = str(path).removesuffix(".gz").endswith(".jsonl")
    read = _read_json_lines if as_json else _read_columns
    rows = read(Path(path), text, label, tagged)
    kept = [row for row in rows if row[1]][:limit]
    if not kept:
        raise InputError(f"{str(path)!r} must have sentences of words: it has none.")
    found = sorted({tag for _, _, tags in kept for tag in tags})
    if names is not None:
        _check_tags(kept, names, str(path))
    report = ReadingReport(
        name=str(path), row_name="sentence", read=len(rows[:limit]), kept=len(kept)
    )
    lines, words, tags = (list(column) for column in zip(*kept, strict=True))
    return TaggedSentences(words, tags, lines, tuple(found if names is None else names), report)


TaggedRow = tuple[int, list[str], list[str]]
"""Line, words, tags."""


def _read_columns(path: Path, text: str | None, label: str | None, tagged: bool) -> list[TaggedRow]:
    word_at, tag_at = _column(text, 0, "text"), _column(label, -1, "label")
    rows: list[TaggedRow] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*read_lines(path), ""], start=1):
        cells = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                rows.append((number - len(words), words, tags))
            words, tags = [], []
            continue
        if line.startswith("# ") and len(cells) != 2:
            continue
        needed = max(word_at, tag_at, 1 if tagged else 0)
        if len(cells) <= needed:
            raise InputError(
                f"line {number} of {str(path)!r} must have {needed + 1} columns or more, a word "
                f"and its label: it is {line!r}. Sentences are separated by blank lines."
            )
        words.append(cells[word_at])
        if tagged:
            tags.append(cells[tag_at].strip())
    return rows


def _column(name: str | None, default: int, option: str) -> int:
    if name is None:
        return default
    if not name.isdecimal() or int(name) < 1:
        raise InputError(f"{option} must be the number of a column, from 1: got {name!r}.")
    return int(name) - 1


def _read_json_lines(
    path: Path, text: str | None, label: str | None, tagged: bool
) -> list[TaggedRow]:
    rows: list[TaggedRow] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {str(path)!r}"
        try:
            sentence = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where} must be one JSON object: it is not.") from None
        words = _field(sentence, TOKEN_FIELDS if text is None else (text,), where)
        tags = _field(sentence, TAG_FIELDS if label is None else (label,), where) if tagged else []
        if tagged and len(words) != len(tags):
            raise InputError(
                f"{where} must have one label for each word: got {len(tags)} for {len(words)}."
            )
        rows.append((number, words, tags))
    return rows


def _field(sentence: Any, names: Sequence[str], where: str) -> list[str]:
    value = None
    if isinstance(sentence, dict):
        value = next((sentence[name] for name in names if name in sentence), None)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where} must have a list of texts named {' or '.join(names)}.")
    return value


def _check_tags(rows: Sequence[TaggedRow], names: Sequence[str], file: str) -> None:
    known = set(names)
    for line, words, tags in rows:
        for word, tag in zip(words, tags, strict=True):
            if tag not in known:
                raise InputError(
                    f"the sentence in line {line} of {file!r} has a label that is not one of the "
                    f"model's: {tag!r} of {word!r}. {nearest(tag, names)}"
                )


def encode_words(tokenizer: Tokenizer, sentences: Iterable[Sequence[str]]) -> list[list[list[int]]]:
    """Return the ids of each word of each sentence, at least one for every word.

    The ids of a sentence, concatenated, are those of its words separated by spaces, where the
    vocabulary allows it: vocabularies that keep the space as a part of the next word get it there.
    """
    sentences = [list(words) for words in sentences]
    spaced = tokenizer.encode("a b") != [*tokenizer.encode("a"), *tokenizer.encode("b")]
    flat = [
        f" {word}" if spaced and place else word
        for words in sentences
        for place, word in enumerate(words)
    ]
    unknown = tokenizer.end if tokenizer.unknown is None else tokenizer.unknown
    ids = iter([row or [unknown] for row in tokenizer.encode_many(flat)])
    return [[next(ids) for _ in words] for words in sentences]


def split_sentence(words: Sequence[Sequence[int]], longest: int) -> list[tuple[int, int]]:
    """Return ranges of words with at most `longest` ids each; a longer word is alone.

    >>> split_sentence([[5], [6, 7], [8]], 3)
    [(0, 2), (2, 3)]
    """
    ranges, first, count = [], 0, 0
    for place, ids in enumerate(words):
        if count and count + len(ids) > longest:
            ranges.append((first, place))
            first, count = place, 0
        count += len(ids)
    return [*ranges, (first, len(words))] if words else []
