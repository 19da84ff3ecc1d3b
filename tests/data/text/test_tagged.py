"""CoNLL files and JSON lines, and the ids of words."""

from pathlib import Path

import pytest

from addnorm.data.text.tagged import encode_words, read_tagged, split_sentence
from addnorm.data.text.tokenizer import train_tokenizer
from addnorm.errors import InputError


def test_both_formats_read_the_same(tmp_path: Path) -> None:
    conll, lines = tmp_path / "a.conll", tmp_path / "a.jsonl"
    conll.write_text(
        "-DOCSTART- -X- O\n\n# a comment line\nEU\tNNP\tB-ORG\nacts\tVB\tO\n\n\nIt\tP\tO"
    )
    lines.write_text(
        '{"tokens": ["EU", "acts"], "tags": ["B-ORG", "O"]}\n\n{"words": ["It"], "labels": ["O"]}\n'
    )
    one, other = read_tagged(conll), read_tagged(lines)
    assert one.words == other.words == [["EU", "acts"], ["It"]]
    assert one.tags == other.tags and one.names == ("B-ORG", "O")
    assert one.lines == [4, 8] and other.lines == [1, 3]
    assert one.report.lines() == [f"{conll}: 2 sentences read, 2 kept."]
    assert read_tagged(conll, label="2").tags[0] == ["NNP", "VB"]
    assert read_tagged(conll, limit=1).words == [["EU", "acts"]]
    assert one.take([1]).words == [["It"]] and one.take([1]).names == one.names
    assert read_tagged(conll, tagged=False).words == one.words


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "word\n", r"line 1 .* must have 2 columns or more"),
        ("a.conll", "\n \n", "must hold some text: it is empty"),
        ("a.conll", "-DOCSTART- O\n", "must have sentences of words: it has none"),
        ("a.jsonl", "[1]\n", "must have a list of texts named tokens or words"),
        ("a.jsonl", "{\n", "line 1 .* must be one JSON object"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}\n', "one label for each word: got 0 for 1"),
        ("a.jsonl", '{"tokens": [1], "tags": ["O"]}\n', "must have a list of texts"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_tagged(path)


def test_unknown_labels_and_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("EU B-ORG\n")
    with pytest.raises(InputError, match=r"line 1 .*: 'B-ORG' of 'EU'. Did you mean 'B-ORGS'"):
        read_tagged(path, names=("O", "B-ORGS"))
    with pytest.raises(InputError, match="label must be the number of a column, from 1: got 'tag'"):
        read_tagged(path, label="tag")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "bytes"])
def test_words_have_the_ids_that_they_have_in_the_text(kind: str) -> None:
    words = ["the", "old", "man", "slept", "."]
    tokenizer = train_tokenizer([" ".join(words)] * 9, kind, size=270)
    (ids,) = encode_words(tokenizer, [words])
    assert [token for word in ids for token in word] == tokenizer.encode(" ".join(words))
    assert len(ids) == len(words) and all(ids)


def test_a_word_without_ids_has_the_unknown_one() -> None:
    tokenizer = train_tokenizer(["a b"], "characters", size=20)
    assert encode_words(tokenizer, [["a", ""]])[0][1]


def test_sentences_are_split_between_words() -> None:
    assert split_sentence([], 3) == []
    assert split_sentence([[1] * 5, [2]], 3) == [(0, 1), (1, 2)]
