"""Tokenizers against those of transformers, over files that are trained here."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from addnorm.data.text.tokenizer import IMPORTED, Tokenizer
from addnorm.errors import ConfigError, SavedError
from addnorm.interop.tokenizers import read_tokenizers

hf: Any = pytest.importorskip("transformers", minversion="5.0")
library: Any = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.parity

LINES = [
    "The old man sat in the boat, and the boy was not with him.",
    "He didn't know that 1,234 people had seen the Café (naïve) before!",
    "Der alte Mann saß im Boot; größer als je zuvor – 東京 and Привет.",
    "It was a fine day.  Two spaces,\ttabs and 🙂 as well.",
] * 8
TEXTS = [
    "The old man sat in the boat.",
    "unbelievable Café 東京, don't!",
    "größer  and\ttabs 🙂 1,234",
    "A",
    "",
]
PLAIN = ["the old man sat in the boat", "two boats and 1,234 people", "a"]


def files(directory: Path, **content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    for name, value in content.items():
        stem, _, ending = name.rpartition("_")
        (directory / f"{stem}.{ending}").write_text(json.dumps(value))
    return directory


def wordpiece(directory: Path) -> int:
    trained = library.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(LINES, vocab_size=150, min_frequency=1)
    names = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (directory / "vocab.txt").write_text("".join(f"{name}\n" for name, _ in names))
    return len(names)


def byte_pairs(directory: Path, special: list[str]) -> int:
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES, vocab_size=300, min_frequency=1, special_tokens=special)
    trained.save_model(str(directory))
    return int(trained.get_vocab_size())


def pieces(path: Path, **options: Any) -> int:
    options = {"vocab_size": 150, "hard_vocab_limit": False, "minloglevel": 2, **options}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=file, **options
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()


def same(ours: Tokenizer, theirs: Any, texts: list[str], tmp_path: Path) -> None:
    """Ids without special tokens, and decoding, also after saving and loading."""
    ours.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again == ours
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == again.encode(text) == expected, text
        decoded = theirs.decode(expected, skip_special_tokens=True)
        assert ours.decode(expected) == decoded


def test_wordpiece(tmp_path: Path) -> None:
    size = wordpiece(tmp_path)
    ours = read_tokenizers(tmp_path, {"model_type": "bert"}, "encoder", size)["text"]
    theirs = hf.BertTokenizer(str(tmp_path / "vocab.txt"))
    same(ours, theirs, TEXTS, tmp_path)
    whole = theirs.encode("the boat")
    assert [ours.begin, *ours.encode("the boat"), ours.end] == whole
    assert (ours.pad, ours.mask) == (theirs.pad_token_id, theirs.mask_token_id)
    assert ours.unknown == theirs.unk_token_id


def test_wordpiece_with_case(tmp_path: Path) -> None:
    size = wordpiece(tmp_path)
    files(tmp_path, tokenizer_config_json={"do_lower_case": False})
    ours = read_tokenizers(tmp_path, {}, "encoder", size)["text"]
    theirs = hf.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=False)
    same(ours, theirs, TEXTS, tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "roberta", "bart"])
def test_byte_pairs(kind: str, tmp_path: Path) -> None:
    names = ["<|endoftext|>"] if kind == "gpt2" else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    size = byte_pairs(tmp_path, names)
    modes = {"gpt2": "decoder", "roberta": "encoder", "bart": "encoder-decoder"}
    settings = {"model_type": kind, "eos_token_id": 0 if kind == "gpt2" else 2}
    ours = read_tokenizers(tmp_path, settings, modes[kind], size)["text"]
    classes = {"gpt2": hf.GPT2Tokenizer, "roberta": hf.RobertaTokenizer, "bart": hf.BartTokenizer}
    theirs = classes[kind](str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    same(ours, theirs, TEXTS, tmp_path)
    if kind == "roberta":
        assert [ours.begin, *ours.encode("the boat"), ours.end] == theirs.encode("the boat")
    if kind == "bart":
        whole = [*ours.special.opening, *ours.encode("the boat"), ours.end]
        assert whole == theirs.encode("the boat")
    if kind == "gpt2":
        assert ours.special.opening == () and ours.mask is None


def test_tokenizer_json_with_a_template(tmp_path: Path) -> None:
    """A Llama-like file: begin before each text."""
    size = byte_pairs(tmp_path, ["<unk>", "<s>", "</s>"])
    made = hf.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    backend = made.backend_tokenizer
    backend.post_processor = library.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    files(tmp_path, tokenizer_config_json={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    ours = read_tokenizers(tmp_path, {"model_type": "llama"}, "decoder", size + 10)["text"]
    file = str(tmp_path / "tokenizer.json")
    theirs = hf.PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")
    same(ours, theirs, TEXTS, tmp_path)
    assert [*ours.special.opening, *ours.encode("the boat")] == theirs.encode("the boat")
    assert ours.size == size + 10 and (ours.begin, ours.end, ours.pad) == (1, 2, 2)


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    size = wordpiece(tmp_path)
    ours = read_tokenizers(tmp_path, {}, "encoder", size)["text"]
    assert ours.mask not in ours.encode("a [MASK] b") and ours.end not in ours.encode("[SEP]")


def test_sentencepiece_of_t5(tmp_path: Path) -> None:
    size = pieces(
        tmp_path / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, model_type="unigram"
    )
    settings = {"model_type": "t5", "decoder_start_token_id": 0}
    ours = read_tokenizers(tmp_path, settings, "encoder-decoder", size + 100)["text"]
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    for text in PLAIN:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode([0, *theirs.encode(text), 1]) == theirs.decode(theirs.encode(text))
    assert (ours.pad, ours.begin, ours.end, ours.unknown) == (0, 0, 1, 2)
    ours.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved") == ours


def test_sentencepiece_of_llama(tmp_path: Path) -> None:
    size = pieces(
        tmp_path / "tokenizer.model", model_type="bpe", byte_fallback=True, vocab_size=400
    )
    ours = read_tokenizers(tmp_path, {"model_type": "llama"}, "decoder", size)["text"]
    assert (ours.unknown, ours.begin, ours.end, ours.special.opening) == (0, 1, 2, (1,))
    assert ours.decode([1, *ours.encode("two boats"), 2]) == "two boats"


SPACED = ["the cat", " the cat", "  two", "boats  and ", " ", "   ", "", "A", "▁the", "\n the"]


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_spaces_before_a_text_as_in_llama(
    prefix: bool, stated: bool | None, tmp_path: Path
) -> None:
    """The code of Llama decides about a leading space, whatever the file of pieces says."""
    bare = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    size = pieces(
        tmp_path / "tokenizer.model",
        model_type="bpe",
        byte_fallback=True,
        vocab_size=400,
        add_dummy_prefix=prefix,
        **bare,
    )
    options = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": stated}
    if stated is None:
        del options["add_prefix_space"]
    files(tmp_path, tokenizer_config_json=options, config_json={"model_type": "llama"})
    ours = read_tokenizers(tmp_path, {"model_type": "llama"}, "decoder", size)["text"]
    same(ours, hf.AutoTokenizer.from_pretrained(tmp_path), [*SPACED, *TEXTS], tmp_path)
    settings = dict(ours.vocabulary.settings) | {"prefix": "yes"}
    with pytest.raises(ValueError, match="prefix must be true or false"):
        type(ours.vocabulary).restore(settings, (tmp_path / "tokenizer.model").read_bytes())


@pytest.mark.filterwarnings("ignore:Recommended")  # sacremoses, which changes punctuation
def test_marian(tmp_path: Path) -> None:
    pieces(tmp_path / "source.spm")
    pieces(tmp_path / "target.spm", model_type="bpe")
    names = ["</s>", "<unk>"]
    for side in ("source", "target"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{side}.spm"))
        names += [model.id_to_piece(number) for number in range(model.vocab_size())]
    names = [*dict.fromkeys(names), "<pad>"]
    files(tmp_path, vocab_json={name: number for number, name in enumerate(names)})
    settings = {"model_type": "marian", "decoder_start_token_id": len(names) - 1}
    ours = read_tokenizers(tmp_path, settings, "encoder-decoder", len(names))
    theirs = hf.MarianTokenizer(
        str(tmp_path / "source.spm"), str(tmp_path / "target.spm"), str(tmp_path / "vocab.json")
    )
    for text in PLAIN:
        assert [*ours["source"].encode(text), ours["source"].end] == theirs.encode(text)
        target = theirs(text_target=text)["input_ids"]
        assert [*ours["target"].encode(text), ours["target"].end] == target
        assert ours["target"].decode(target) == theirs.decode(target, skip_special_tokens=True)
    assert ours["target"].begin == ours["target"].pad == theirs.pad_token_id
    ours["target"].save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved") == ours["target"]


# ── Refused ───────────────────────────────────────────────────────────────────────────────────────


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no tokenizer in .* none of tokenizer\.json"):
        read_tokenizers(tmp_path, {}, "encoder", 100)


@pytest.mark.parametrize("text", ["", "{}", "[", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(SavedError, match=r"not valid: its file is not a tokenizer\.json"):
        read_tokenizers(tmp_path, {}, "encoder", 100)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model", "source.spm"]
)
def test_a_tokenizer_that_is_a_link_out_of_the_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / name).write_text("{}")
    if name == "source.spm":
        (tmp_path / "model" / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "<pad>": 2}')
    (tmp_path / "model" / name).symlink_to(tmp_path / name)
    with pytest.raises(SavedError, match="it is a link to another place"):
        read_tokenizers(tmp_path / "model", {}, "encoder", 100)


def test_a_marian_vocabulary_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "source.spm").write_text("")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(SavedError, match="not valid: no token of it ends a text"):
        read_tokenizers(tmp_path, {}, "encoder-decoder", 100)


def test_a_damaged_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"\x80\x04junk")
    with pytest.raises(SavedError, match="not valid: its model file is not one of sentencepiece"):
        read_tokenizers(tmp_path, {}, "decoder", 100)


def test_ids_that_the_model_does_not_have(tmp_path: Path) -> None:
    size = wordpiece(tmp_path)
    with pytest.raises(SavedError, match=rf"it has the id {size - 1}, and the model only 50"):
        read_tokenizers(tmp_path, {}, "encoder", 50)


def test_language_codes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="codes of their languages"):
        read_tokenizers(tmp_path, {"model_type": "mbart"}, "encoder-decoder", 100)


def test_imported_kinds_are_not_trained() -> None:
    from addnorm.data.text.tokenizer import train_tokenizer

    with pytest.raises(ConfigError, match="the tokenizer has no choice 'huggingface'"):
        train_tokenizer(["a"], "huggingface")
    with pytest.raises(ConfigError, match="comes with an imported model and is not trained"):
        IMPORTED["huggingface"].train(["a"], 10)
