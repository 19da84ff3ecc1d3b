"""Tokenizers of Hugging Face directories as ours.

tokenizer.json                     read by the tokenizers library
vocab.txt                          WordPiece (BERT), made into a tokenizer.json
vocab.json + merges.txt            BPE of bytes (GPT-2, RoBERTa, BART), likewise
source.spm + target.spm            sentencepiece with numbers in vocab.json (Marian)
spiece.model, tokenizer.model      sentencepiece (T5, Llama)
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from addnorm.data.text.pretrained import SentencePieceFile, TokenizerFile, load_tokenizer_json
from addnorm.data.text.special_tokens import SpecialIds
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import SavedError, require
from addnorm.files import read_bytes
from addnorm.interop.directory import inside, read_json_object
from addnorm.interop.mapping import ConfigJson

MAX_FILE = 256 * 2**20
"""Bytes that a file of a tokenizer may have."""
PIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "bos": ("<s>",),
    "eos": ("</s>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Special tokens and their usual names, where the files do not say."""
NAMES = tuple(USUAL)
LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
"""Their classes that decide about a leading space by `add_prefix_space`, not by the file."""
LANGUAGE_CODES = ("mbart",)
"""Architectures whose texts carry a code of their language, which our tasks have no place for."""


def read_tokenizers(
    directory: str | Path,
    settings: ConfigJson,
    mode: str,
    vocab: int,
    target_vocab: int | None = None,
) -> dict[str, Tokenizer]:
    """Return the tokenizer of a directory under "text", or two under "source" and "target".

    Parameters
    ----------
    directory : the directory.
    settings : its config.json.
    mode : encoder, decoder or encoder-decoder.
    vocab, target_vocab : numbers of ids of the model.
    """
    directory = Path(directory)
    if settings.get("model_type") in LANGUAGE_CODES:
        raise SavedError(
            f"{str(directory)!r} marks texts with codes of their languages, which no task of "
            "addnorm does. Read the model alone: addnorm.interop.huggingface.read_model."
        )
    reader = _Reader(directory, settings, mode)
    try:
        if reader.has("source.spm"):
            return reader.read_marian(vocab, target_vocab)
        return {"text": reader.read(vocab)}
    except ValueError as error:
        raise SavedError(f"the tokenizer in {str(directory)!r} is not valid: {error}.") from None


Find = Callable[[str], Any]
"""The id of a token by its name, None if there is none."""


class _Reader:
    """Reads the files of one directory."""

    def __init__(self, directory: Path, settings: ConfigJson, mode: str) -> None:
        self.directory, self.settings, self.mode = directory, settings, mode
        self.options = self._json("tokenizer_config.json")
        self.options = {**self._json("special_tokens_map.json"), **self.options}

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _json(self, name: str) -> dict[str, Any]:
        return read_json_object(self.directory, name) if self.has(name) else {}

    def _bytes(self, name: str) -> bytes:
        return read_bytes(inside(self.directory, name), MAX_FILE)

    def read(self, vocab: int) -> Tokenizer:
        if self.has("tokenizer.json"):
            return self._from_json(self._bytes("tokenizer.json"), vocab)
        if self.has("vocab.txt"):
            return self._from_json(self._wordpiece(), vocab)
        if self.has("vocab.json") and self.has("merges.txt"):
            return self._from_json(self._byte_pairs(), vocab)
        for name in PIECE_FILES:
            if self.has(name):
                return self._from_pieces(self._bytes(name), vocab)
        raise SavedError(
            f"there is no tokenizer in {str(self.directory)!r}: none of tokenizer.json, vocab.txt, "
            f"vocab.json with merges.txt, source.spm, {', '.join(PIECE_FILES)}."
        )

    # ── tokenizer.json ────────────────────────────────────────────────────────────────────────────

    def _from_json(self, model: bytes, vocab: int) -> Tokenizer:
        processor = load_tokenizer_json(model)
        before, after = template(processor)
        known = {name: self._id(name, processor.token_to_id) for name in NAMES}
        if self.mode == "encoder":  # what the template does is what the model was trained with
            known |= {"cls": before[0]} if before else {}
            known |= {"sep": after[-1]} if after else {}
        special = self._special(known, before)
        return Tokenizer("huggingface", TokenizerFile(model, vocab, special))

    def _wordpiece(self) -> bytes:
        """Return WordPiece (Schuster, Nakajima 2012; Devlin et al. 2019) as a tokenizer.json."""
        t = require("tokenizers", "huggingface")
        lines = self._bytes("vocab.txt").decode().splitlines()
        ids = {line.rstrip("\n"): number for number, line in enumerate(lines)}
        lower = self.options.get("do_lower_case", True) is not False
        strip = self.options.get("strip_accents")
        chinese = self.options.get("tokenize_chinese_chars", True) is not False
        tokenizer = t.Tokenizer(
            t.models.WordPiece(
                ids, unk_token=self._name("unk", "[UNK]"), max_input_chars_per_word=100
            )
        )
        tokenizer.normalizer = t.normalizers.BertNormalizer(
            lowercase=lower, strip_accents=strip, handle_chinese_chars=chinese
        )
        tokenizer.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = t.decoders.WordPiece()
        cls, sep = self._name("cls", "[CLS]"), self._name("sep", "[SEP]")
        if cls in ids and sep in ids:
            tokenizer.post_processor = t.processors.BertProcessing((sep, ids[sep]), (cls, ids[cls]))
        usual = {"pad": "[PAD]", "unk": "[UNK]", "cls": cls, "sep": sep, "mask": "[MASK]"}
        return _with_special(tokenizer, [self._name(name, text) for name, text in usual.items()])

    def _byte_pairs(self) -> bytes:
        """Return BPE of bytes (Radford et al. 2019, §2.2) as a tokenizer.json."""
        t = require("tokenizers", "huggingface")
        ids = json.loads(self._bytes("vocab.json").decode())
        lines = self._bytes("merges.txt").decode().splitlines()
        merges = [
            tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")
        ]
        if not isinstance(ids, dict) or any(len(pair) != 2 for pair in merges):
            raise ValueError("vocab.json and merges.txt must hold ids and pairs")
        tokenizer = t.Tokenizer(t.models.BPE(ids, merges))
        space = self.options.get("add_prefix_space", False) is True
        tokenizer.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=space)
        tokenizer.decoder = t.decoders.ByteLevel()
        gpt = self.settings.get("model_type") in ("gpt2", "opt", "gpt_neox", "gptj", "phi")
        usual = ["<|endoftext|>"] if gpt else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        begin, end = self._name("bos", "<s>"), self._name("eos", "</s>")
        if not gpt and begin in ids and end in ids:
            tokenizer.post_processor = t.processors.RobertaProcessing(
                (end, ids[end]), (begin, ids[begin]), add_prefix_space=space
            )
        return _with_special(tokenizer, [*usual, *(self._name(name, "") for name in NAMES)])

    # ── sentencepiece ─────────────────────────────────────────────────────────────────────────────

    def _from_pieces(self, model: bytes, vocab: int) -> Tokenizer:
        probe = SentencePieceFile(model, vocab, SpecialIds(0, 0, 0, 0, None))
        processor = probe.processor

        def find(name: str) -> int | None:
            number = processor.piece_to_id(name)
            return number if number != processor.unk_id() or name == "<unk>" else None

        known = {name: self._id(name, find) for name in NAMES}
        llama = self.settings.get("model_type") == "llama"
        adds = self.options.get("add_bos_token", llama)
        opening = (known["bos"],) if adds and known["bos"] is not None else ()
        prefix = None
        if self.options.get("tokenizer_class", LLAMA_CLASSES[0] if llama else "") in LLAMA_CLASSES:
            prefix = self.options.get("add_prefix_space") is not False
        special = self._special(known, opening)
        return Tokenizer("sentencepiece", SentencePieceFile(model, vocab, special, prefix=prefix))

    def read_marian(self, vocab: int, target_vocab: int | None) -> dict[str, Tokenizer]:
        """Return the two tokenizers of a Marian directory, which number pieces by vocab.json."""
        table = read_json_object(self.directory, "vocab.json")
        other = self._json("target_vocab.json") or table
        sides = {"source": ("source.spm", table, vocab)}
        sides["target"] = ("target.spm", other, target_vocab or vocab)
        tokenizers = {}
        for side, (file, names, size) in sides.items():
            if not all(isinstance(n, int) and 0 <= n < size for n in names.values()):
                raise SavedError(
                    f"vocab.json in {str(self.directory)!r} must hold ids of the model."
                )
            known = {name: self._id(name, names.get) for name in NAMES}
            special = self._special(known, ())
            try:
                vocabulary = SentencePieceFile(self._bytes(file), size, special, names)
            except ValueError as error:
                raise SavedError(f"{file!r} in {str(self.directory)!r}: {error}.") from None
            tokenizers[side] = Tokenizer("sentencepiece", vocabulary)
        return tokenizers

    # ── Special tokens ────────────────────────────────────────────────────────────────────────────

    def _name(self, name: str, default: str) -> str:
        """Return the text of a special token."""
        value = self.options.get(f"{name}_token")
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else default

    def _id(self, name: str, find: Find) -> int | None:
        """Return the id of a special token: as named by the files, by config.json, or as usual."""
        stated = self.settings.get(f"{name}_token_id")
        stated = stated[0] if isinstance(stated, list) and stated else stated
        numbers = [find(self._name(name, "")), stated, *map(find, USUAL[name])]
        known = (number for number in numbers if isinstance(number, int) and number >= 0)
        return next(known, None)

    def _special(self, known: Mapping[str, int | None], opening: tuple[int, ...]) -> SpecialIds:
        """Return the special ids in the roles that our tasks give them."""
        encoder = self.mode == "encoder"
        end = known["sep"] if encoder and known["sep"] is not None else known["eos"]
        if end is None:
            raise ValueError("no token of it ends a text (sep_token, eos_token)")
        pad = end if known["pad"] is None else known["pad"]
        begin = known["cls"] if encoder and known["cls"] is not None else known["bos"]
        if self.mode == "encoder-decoder":
            stated = self.settings.get("decoder_start_token_id")
            begin = stated if isinstance(stated, int) else pad
        return SpecialIds(
            pad=pad,
            begin=end if begin is None else begin,
            end=end,
            unknown=known["unk"],
            mask=known["mask"],
            opening=() if encoder else opening,
        )


def template(processor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer.json puts before and after a text.

    The ids of two different texts share what the template adds.
    """
    sides = []
    for text in ("a", "b c"):
        bare = processor.encode(text, add_special_tokens=False).ids
        full = processor.encode(text, add_special_tokens=True).ids
        start = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), len(full))
        sides.append((tuple(full[:start]), tuple(full[start + len(bare) :])))
    return sides[0] if sides[0] == sides[1] else ((), ())


def _with_special(tokenizer: Any, names: list[str]) -> bytes:
    """Return a tokenizer as JSON, with those of its tokens that are special marked as such."""
    known = [
        name for name in dict.fromkeys(names) if name and tokenizer.token_to_id(name) is not None
    ]
    tokenizer.add_special_tokens(known)
    return str(tokenizer.to_str()).encode()
