"""Real texts that exports are compared on: read from the data of a run, cut, never an error."""

import gzip
from pathlib import Path

import pytest

from addnorm.config import DataConfig, ModelConfig
from addnorm.data.text.tokenizer import Tokenizer, train_tokenizer
from addnorm.interop.real_texts import TEXTS, TOKENS_OF_A_TEXT, RealTexts, read_real_texts, where

LINES = [f"a line of {number} words" for number in range(20)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES, "characters")


def model(tokenizer: Tokenizer, mode: str, **fields: object) -> ModelConfig:
    return ModelConfig(vocab=tokenizer.size).replace(mode=mode, **fields)


@pytest.mark.parametrize("mode", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_texts_of_a_file(
    mode: str, packed: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / ("texts.txt.gz" if packed else "texts.txt")
    content = "\n \n".join(LINES).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    data = DataConfig().replace(source=str(path), target=str(path))
    texts = read_real_texts(data, model(tokenizer, mode), {"text": tokenizer})
    assert texts is not None and len(texts.sources) == TEXTS
    assert where(texts) == f"random sequences and {TEXTS} texts of the data"
    special = tokenizer.special
    ends = {"encoder": (special.begin, special.end), "decoder": (None, None)}
    begin, end = ends.get(mode, (None, special.end))
    ids = [*([] if begin is None else [begin]), *tokenizer.encode(LINES[1])]
    assert list(texts.sources[1]) == [*ids, *([] if end is None else [end])]
    inputs = texts.inputs(model(tokenizer, mode))
    assert [len(part) for part in inputs] == [TEXTS] * len(inputs)
    if mode == "encoder-decoder":
        assert list(texts.targets[1]) == tokenizer.encode(LINES[1])


def test_long_texts_are_cut_and_learned_positions_are_kept(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "long").write_text("a line of words " * 1000 + "\n" + LINES[0])
    data = DataConfig().replace(valid_source=str(tmp_path / "long"))
    texts = read_real_texts(data, model(tokenizer, "encoder"), {"text": tokenizer})
    assert texts is not None and len(texts.sources[0]) == TOKENS_OF_A_TEXT + 2
    few = model(tokenizer, "encoder", positions="learned", length=12)
    texts = read_real_texts(data, few, {"text": tokenizer})
    assert texts is not None and len(texts.sources[0]) == 12


@pytest.mark.parametrize("content", [None, b"", b"one line", b"\xff\xfe\n\x00", b"\n\n\n"])
def test_what_cannot_be_read_gives_no_texts(
    content: bytes | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "texts.txt"
    if content is not None:
        path.write_bytes(content)
    data = DataConfig().replace(source=str(path))
    assert read_real_texts(data, model(tokenizer, "encoder"), {"text": tokenizer}) is None
    assert where(None) == "random sequences"


def test_ids_of_a_batch_are_padded_and_within_the_vocabulary() -> None:
    ids, real = RealTexts(((1, 90), (2, 3, 4))).batch(50)
    assert ids.tolist() == [[1, 49, 0], [2, 3, 4]]
    assert real.tolist() == [[True, True, False], [True, True, True]]
