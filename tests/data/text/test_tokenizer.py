"""Tokenizers: decoding inverts encoding, training is reproducible, a loaded one is equal."""

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from addnorm.data.text import special_tokens as special
from addnorm.data.text.special_tokens import FIRST, IGNORE, SPECIAL_NAMES, UNKNOWN
from addnorm.data.text.tokenizer import TOKENIZERS, Tokenizer, train_tokenizer
from addnorm.errors import AddnormError, ConfigError, InputError, SavedError
from addnorm.files import TOKENIZER, read_document, write_document
from addnorm.training import loss

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "the quick red fox does not jump over the dog",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Ein Fuchs, ein Hund, zwei Füchse: 1234567890!",
    "ἐν ἀρχῇ ἦν ὁ λόγος",
] * 4
KINDS = tuple(TOKENIZERS)
WHOLE = ("bpe", "unigram", "bytes")
"""Kinds without unknown characters."""
ODD = (
    "",
    " ",
    "   two  spaces   ",
    "\ttabs\t",
    "<pad><begin><end><unknown><mask>",
    "<0x41><unk><s></s> ⁇ ",
    "▁▁a▁ b▁",
    "▅",
    "\N{REPLACEMENT CHARACTER}",
    "👩‍👩‍👧 e\u0301 \u200b\ufeff",
    "\0 nul \0\0",
    "漢字 \U0010ffff \ue000",
    "one\ntwo\n\n  three\n",
    "\n",
    "a\r\nb\rc\u2028d\x85e",
)


@cache
def tokenizer(kind: str, lower: bool = False) -> Tokenizer:
    return train_tokenizer(LINES, kind, 400, lower=lower)


def refuse(message: str, run: Callable[[], object], kind: type[AddnormError]) -> None:
    with pytest.raises(kind, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


# ── Text in, text out ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("text", ODD)
def test_unusual_text_round_trips(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text)
    assert all(FIRST <= number < tokenizer(kind).size for number in ids)
    assert tokenizer(kind).decode(ids) == text


@given(text=st.text(), kind=st.sampled_from(WHOLE))
@example(text="a ▁\n▁ b", kind="bpe")
def test_text_round_trips(text: str, kind: str) -> None:
    ids = tokenizer(kind).encode(text)
    assert tokenizer(kind).decode(ids) == text
    assert min(ids, default=FIRST) >= FIRST


@given(st.text(alphabet="".join({*"".join(LINES), "\n"})))
def test_known_characters_round_trip(text: str) -> None:
    ids = tokenizer("characters").encode(text)
    assert len(ids) == len(text)
    assert tokenizer("characters").decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_lower_case_is_all_that_changes(kind: str) -> None:
    small, large = tokenizer(kind, lower=True), tokenizer(kind)
    text = "The Fuchs over the Hund"
    assert small.decode(small.encode(text)) == text.lower()
    assert large.decode(large.encode(text)) == text
    assert small.encode(text) == small.encode(text.lower()) != large.encode(text)
    ordinary = range(FIRST + 256 * (kind != "characters"), small.size)
    assert not any("T" in small.piece(number) for number in ordinary), "learnt in lower case"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.text(alphabet="abFox ▁\n<pad>")))
def test_encode_many_equals_encode(kind: str, texts: list[str]) -> None:
    one = tokenizer(kind)
    assert one.encode_many(texts) == [one.encode(text) for text in texts]
    assert one.encode_many(iter(texts)) == one.encode_many(texts)


def test_a_word_has_the_same_ids_at_the_start_of_every_line() -> None:
    one = tokenizer("bpe")
    assert one.encode("the fox\nthe fox") == [
        *one.encode("the fox"),
        *tokenizer("bytes").encode("\n"),
        *one.encode("the fox"),
    ]


# ── Special ids ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_the_same_everywhere_and_skipped(kind: str) -> None:
    one = tokenizer(kind)
    assert (one.pad, one.begin, one.end, one.unknown, one.mask) == (0, 1, 2, 3, 4)
    assert tuple(one.piece(number) for number in range(FIRST)) == SPECIAL_NAMES
    ids = one.encode("the fox")
    assert one.decode([1, *ids[:1], 4, *ids[1:], 2, 0, 0]) == "the fox"
    assert one.decode([0, 1, 2, 4]) == one.decode([]) == ""
    assert one.decode([*ids, UNKNOWN]) == "the fox�"


def test_unknown_characters_are_displayed() -> None:
    one = tokenizer("characters")
    assert one.encode("a漢b") == [one.encode("a")[0], UNKNOWN, one.encode("b")[0]]
    assert one.decode(one.encode("a漢b")) == "a�b"


def test_invalid_utf8_is_displayed() -> None:
    for kind in WHOLE:
        assert tokenizer(kind).decode([FIRST + 0xC3]).endswith("�")


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    (
        ("bytes", "a ü\n", ["a", "▁", "<0xC3>", "<0xBC>", "<0x0A>"]),
        ("characters", "a ü\n", ["a", "▁", "ü", "<U+000A>"]),
        ("bpe", "the\n", ["▁the", "<0x0A>"]),
    ),
)
def test_every_id_can_be_displayed(kind: str, text: str, pieces: list[str]) -> None:
    one = tokenizer(kind)
    assert [one.piece(number) for number in one.encode(text)] == pieces
    assert all(one.piece(number).strip() for number in range(one.size))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_refused(kind: str) -> None:
    one = tokenizer(kind)
    refuse(
        f"must be 0 to {one.size - 1}: got {one.size}",
        lambda: one.decode([5, one.size]),
        InputError,
    )
    refuse("got -1", lambda: one.decode([-1]), InputError)
    refuse("got 99999", lambda: one.piece(99999), InputError)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_ids_are_decoded(kind: str) -> None:
    one = tokenizer(kind)
    assert one.decode(torch.tensor(one.encode("the dog"))) == "the dog"


def test_the_loss_ignores_the_same_targets() -> None:
    assert loss.IGNORE == IGNORE


def test_special_ids_come_before_all_others() -> None:
    named = (special.PAD, special.BEGIN, special.END, special.UNKNOWN, special.MASK)
    assert named == tuple(range(FIRST)) and len(SPECIAL_NAMES) == FIRST


# ── Training ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_on_every_run(kind: str) -> None:
    again = train_tokenizer(iter(LINES), kind, 400)
    assert again == tokenizer(kind) and hash(again) == hash(tokenizer(kind))
    assert again.digest == tokenizer(kind).digest


def test_tokenizers_that_differ_are_not_equal() -> None:
    all_kinds = [tokenizer(kind) for kind in KINDS] + [tokenizer("bpe", lower=True)]
    all_kinds += [train_tokenizer(LINES, "bpe", 401), train_tokenizer(LINES[1:3], "bpe", 400)]
    assert len({one.digest for one in all_kinds}) == len(set(all_kinds)) == len(all_kinds)
    assert tokenizer("bpe") != "bpe"


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(
    "lines",
    (
        ["a"],
        LINES[:1],
        LINES[:5],
        ["   "],
        ["▅"],
        ["▁"],
        ["\0"],
        ["<mask>"] * 9,
        ["<0x41> <pad>"],
        ["x" * 5000],
        ["\U0010ffff"],
    ),
    ids=lambda lines: ascii(lines[0][:9]),
)
@pytest.mark.parametrize("size", (262, 263, 266, 290, 20_000))
def test_tiny_and_unusual_texts_make_a_tokenizer(kind: str, lines: list[str], size: int) -> None:
    one = train_tokenizer(lines, kind, size)
    assert one.size <= size
    assert bool(one.notes) or one.size == size
    for text in (*lines, "something else ☃"):
        assert one.decode(one.encode(text)) == text


def test_a_small_text_gives_a_small_vocabulary_with_a_note() -> None:
    one = train_tokenizer(LINES, "bpe", 9000)
    assert one.size < 900
    assert one.notes == [
        f"the vocabulary has {one.size} ids, not 9000: the text has no more pieces."
    ]
    assert tokenizer("bpe").size == 400


def test_rare_characters_leave_room_for_words() -> None:
    rare = "".join(chr(0x4E00 + n) for n in range(200))
    one = train_tokenizer([*LINES, rare], "bpe", 340)
    count = len({*"".join(LINES), *rare})
    assert one.size == 340
    # Of the room for 79 pieces, half is for single characters.
    assert one.notes[0].startswith(
        f"{count - 39} of the {count} distinct characters are encoded as bytes"
    )
    the, fox = (one.piece(one.encode(word)[0]) for word in ("the", "Fuchs"))
    assert the == "▁the" and fox.startswith("▁F")
    assert one.decode(one.encode(rare)) == rare


def test_the_rarest_characters_are_left_out_first() -> None:
    one = train_tokenizer(["aaa bbb c"], "characters", FIRST + 2)
    assert one.decode(one.encode("abc ")) == "ab��"
    assert one.notes == [
        "3 of the 5 distinct characters have no id and are unknown: the vocabulary has room for 2."
    ]


def test_bytes_have_a_fixed_size_and_a_note() -> None:
    assert train_tokenizer(LINES, "bytes", 261).notes == []
    (note,) = train_tokenizer(LINES, "bytes", 8000).notes
    assert note == "the vocabulary has 261 ids, not 8000: there are 256 bytes."


def test_long_lines_are_used_for_training() -> None:
    for word in ("hippopotamus", "漢字仮名"):
        one = train_tokenizer(["y " * 3000 + f"{word} " * 2800], "bpe", 300)
        assert len(one.encode(word)) == 1


def test_many_lines_are_sampled() -> None:
    lines = [chr(ord("a") + n % 26) for n in range(2600)]
    few = [train_tokenizer(lines, "characters", 99, most=9, seed=seed) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert few[0].size <= FIRST + 10
    assert few[0].notes[0] == "the vocabulary was trained on 9 of the 2600 lines."
    drawn = {
        character
        for one in few
        for character in "abcdefghijklmnopqrstuvwxyz"
        if UNKNOWN not in one.encode(character)
    }
    assert len(drawn) > 10, "not only the first lines"


def test_lines_are_sampled_uniformly() -> None:
    lines = [chr(0x4E00 + n) for n in range(1000)]
    places = []
    for seed in range(20):
        one = train_tokenizer(lines, "characters", 999, most=100, seed=seed)
        places += [n for n, line in enumerate(lines) if UNKNOWN not in one.encode(line)]
    assert len(places) == 2000
    # The mean of 2000 places has a standard deviation of 6.5.
    assert abs(sum(places) / 2000 - 499.5) < 30


def test_a_text_with_line_ends_is_split_into_lines() -> None:
    assert train_tokenizer(["\n".join(LINES)], "bpe", 400) == tokenizer("bpe")


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for kind in ("bpe", "unigram"):
        train_tokenizer(LINES, kind, 300)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("message", "arguments", "kind"),
    (
        ("has no choice 'bpee'. Did you mean 'bpe'", (LINES, "bpee", 400), ConfigError),
        ("bpe vocabulary must have 262 ids or more .*: got 261", (LINES, "bpe", 261), ConfigError),
        ("unigram vocabulary must have 262", (LINES, "unigram", 0), ConfigError),
        ("characters vocabulary must have 6 .* got 5", (LINES, "characters", 5), ConfigError),
        ("must have text to train on", ([], "bpe", 400), InputError),
        ("must have text to train on", (["", "\n"], "bytes", 400), InputError),
        ("character 3 is half of a surrogate pair", (["ab\ud800"], "bpe", 400), InputError),
        ("must be a string: got bytes", ([b"ab"], "bpe", 400), InputError),
    ),
)
def test_training_refuses_invalid_arguments(message: str, arguments: Any, kind: Any) -> None:
    refuse(message, lambda: train_tokenizer(*arguments), kind)


def test_one_str_is_not_read_by_character() -> None:
    message = "needs a list of texts: got a str"
    refuse(f"encode_many {message}", lambda: tokenizer("bpe").encode_many("fox"), InputError)
    refuse(f"train_tokenizer {message}", lambda: train_tokenizer("fox"), InputError)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_texts_are_refused(kind: str) -> None:
    one = tokenizer(kind)
    refuse("character 1 is half of a surrogate pair", lambda: one.encode("\udfff"), InputError)
    refuse("must be a string: got int", lambda: one.encode_many(["a", 5]), InputError)  # type: ignore[list-item]
    refuse("must be a string: got NoneType", lambda: one.encode(None), InputError)  # type: ignore[arg-type]


# ── Saved and loaded ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lower", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_the_same(kind: str, lower: bool, tmp_path: Path) -> None:
    one = tokenizer(kind, lower)
    one.save(tmp_path / "deep" / "down")
    again = Tokenizer.load(str(tmp_path / "deep" / "down"))
    files = {path.name for path in (tmp_path / "deep" / "down").iterdir()}
    has_model = kind in ("bpe", "unigram")
    assert files == {"tokenizer.json"} | ({"tokenizer.model"} if has_model else set())
    assert again == one
    assert (again.kind, again.lower, again.size, again.notes) == (kind, lower, one.size, one.notes)
    assert again.encode("The Fox ▁\n") == one.encode("The Fox ▁\n")


def test_saving_replaces_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    for kind in ("bpe", "unigram", "characters"):
        tokenizer(kind).save(tmp_path)
        assert Tokenizer.load(tmp_path) == tokenizer(kind)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json"}


def edit_file(**changes: Any) -> Callable[[Path], None]:
    """Change the file as an editor does: its digest stays. None removes a key."""

    def edit(directory: Path) -> None:
        path = directory / "tokenizer.json"
        document = json.loads(path.read_text()) | changes
        document = {k: v for k, v in document.items() if v is not None}
        path.write_text(json.dumps(document, indent=1) + "\n")

    return edit


def edit_content(**changes: Any) -> Callable[[Path], None]:
    """Change the content as an editor does: its digest stays."""

    def edit(directory: Path) -> None:
        content = json.loads((directory / "tokenizer.json").read_text())["content"]
        edit_file(content=content | changes)(directory)

    return edit


def change(**changes: Any) -> Callable[[Path], None]:
    """Rewrite the file with other content and its digest. None removes a field."""

    def edit(directory: Path) -> None:
        path = directory / "tokenizer.json"
        content = read_document(path, *TOKENIZER) | changes
        content = {k: v for k, v in content.items() if v is not None}
        write_document(path, *TOKENIZER, content)

    return edit


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def take_model(content: bytes) -> Callable[[Path], None]:
    """Replace the model file, and its digest in the record."""

    def edit(directory: Path) -> None:
        write("tokenizer.model", content)(directory)
        change(model=hashlib.sha256(content).hexdigest())(directory)

    return edit


def take_other(**settings: Any) -> Callable[[Path], None]:
    """Replace the model by one of sentencepiece with other settings."""

    def edit(directory: Path) -> None:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=model, minloglevel=2, **settings
        )
        take_model(model.getvalue())(directory)

    return edit


SYMBOLS = {
    "bos_piece": SPECIAL_NAMES[1],
    "eos_piece": SPECIAL_NAMES[2],
    "unk_piece": SPECIAL_NAMES[3],
}
OURS = {
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "control_symbols": SPECIAL_NAMES[4],
} | SYMBOLS


@pytest.mark.parametrize(
    ("kind", "harm", "message"),
    (
        ("bpe", lambda d: (d / "tokenizer.json").unlink(), "no file .*tokenizer.json"),
        ("bpe", lambda d: (d / "tokenizer.model").unlink(), "no file .*tokenizer.model"),
        (
            "bpe",
            write("tokenizer.model", b""),
            "model' was changed after tokenizer.json was written",
        ),
        ("bpe", take_other(vocab_size=80), "other special ids"),
        ("bpe", take_other(vocab_size=80, **OURS), "other special ids"),
        (
            "bpe",
            take_other(vocab_size=330, byte_fallback=True, control_symbols="<a>,<b>"),
            "other special ids",
        ),
        ("bpe", take_model(b"no model"), "model file is not one of sentencepiece"),
        ("bpe", write("tokenizer.json", b'{"format": '), "damaged: it is not JSON"),
        ("bpe", write("tokenizer.json", b"\xff\xfe\x00"), "damaged: it is not JSON"),
        ("bpe", write("tokenizer.json", b"[" * 100_000), "damaged: it is nested too deeply"),
        ("bpe", write("tokenizer.json", b"[]"), "not written by addnorm"),
        ("bpe", write("tokenizer.json", b'{"version": "1.0"}'), "not written by addnorm"),
        (
            "bpe",
            write(
                "tokenizer.json", b'{"format": "addnorm tokenizer", "version": 1, "kind": "bpe"}'
            ),
            "is a tokenizer of format 1; this addnorm reads format 2. Train it again",
        ),
        ("bpe", edit_file(kind="run"), "must be a tokenizer: it is a run. Check the path"),
        ("bpe", edit_file(version=3), "is a tokenizer of format 3; this addnorm reads format 2"),
        ("bpe", edit_file(version=None), "not written by addnorm"),
        ("bpe", edit_file(digest="0" * 64), "was changed after it was written"),
        ("bpe", edit_file(digest=5), "was changed after it was written"),
        ("bpe", edit_content(kind="unigram"), "was changed after it was written"),
        ("bpe", edit_content(lower=True), "was changed after it was written"),
        ("characters", edit_content(settings={"characters": "ab"}), "was changed after it was"),
        ("bpe", edit_file(content=[]), "was changed after it was written"),
        ("bpe", change(kind="wordpiece"), "an unknown kind: 'wordpiece'. Update addnorm"),
        ("bpe", change(kind="bytes"), "not a valid bytes tokenizer: it must have neither"),
        (
            "bpe",
            change(kind="characters"),
            "not a valid characters tokenizer: it must have",
        ),
        ("bpe", change(lower=None), "'lower' is missing, unknown or of the wrong type"),
        ("bpe", change(lower=1), "'lower' is missing, unknown or of the wrong type"),
        ("bpe", change(extra=1), "'extra' is missing, unknown or of the wrong type"),
        ("bpe", change(model=""), "it must have a model file"),
        ("bpe", change(digest="0"), "'digest' is missing, unknown or of the wrong type"),
        ("characters", change(settings={}), "it must have characters"),
        ("characters", change(settings={"characters": 5}), "it must have characters"),
        ("characters", change(settings={"characters": "aa"}), "not distinct"),
        ("bytes", change(settings={"characters": "ab"}), "it must have neither"),
    ),
)
def test_changed_files_are_refused(
    kind: str, harm: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    tokenizer(kind).save(tmp_path)
    harm(tmp_path)
    refuse(message, lambda: Tokenizer.load(tmp_path), SavedError)


def test_a_tokenizer_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuse("cannot be created", lambda: tokenizer("bytes").save(tmp_path / "file"), SavedError)
    (tmp_path / "tokenizer.json").mkdir()
    refuse("cannot be written", lambda: tokenizer("bytes").save(tmp_path), SavedError)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer("bpe").save(tmp_path)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refuse("No space left", lambda: tokenizer("unigram").save(tmp_path), SavedError)
    assert Tokenizer.load(tmp_path) == tokenizer("bpe")
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer.model"}


@pytest.mark.process
def test_another_process_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer("unigram").save(tmp_path)
    code = (
        "import sys; from addnorm.data.text.tokenizer import Tokenizer, train_tokenizer\n"
        "one = Tokenizer.load(sys.argv[1]); print(one.digest, one.encode('the Fuchs'))\n"
        "print(train_tokenizer(['the old man and the sea'], 'characters', 99).digest)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    one = tokenizer("unigram")
    again = train_tokenizer(["the old man and the sea"], "characters", 99)
    assert done.stdout.split("\n")[:2] == [
        f"{one.digest} {one.encode('the Fuchs')}",
        again.digest,
    ]
