"""Runs as Hugging Face directories: model, tokenizer, generation settings and a model card.

What is written is read again and compared: with `transformers` if it is installed, else by our own
reader. A difference above the limit is an error, and the directory is removed.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm import __version__
from addnorm.data.text.pretrained import SentencePieceFile, TokenizerFile
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, SavedError
from addnorm.files import new_directory, require_empty, to_json, write_whole
from addnorm.interop.huggingface import choose_architecture, read_model, write_model
from addnorm.interop.mapping import Architecture
from addnorm.interop.real_texts import RealTexts, where
from addnorm.layers.masks import Mask
from addnorm.models.build import Model
from addnorm.models.transformer import EncoderDecoder

EXPORT_TOLERANCE = 1e-4
"""Largest difference of an output that is accepted in float32."""


def export_huggingface(
    model: Model,
    tokenizers: Mapping[str, Tokenizer],
    directory: str | Path,
    *,
    task: str,
    labels: Sequence[str] = (),
    architecture: str | None = None,
    texts: RealTexts | None = None,
) -> list[str]:
    """Write a model with its tokenizer, verify it, and return sentences about it.

    Parameters
    ----------
    model : the network.
    tokenizers : one under "text", or two under "source" and "target".
    directory : where to write; it must not exist, or be empty.
    task : what it was trained for.
    labels : names of the classes.
    architecture : a model_type; the first that can express the model by default.
    texts : real texts to compare it on besides random ones.
    """
    directory = require_empty(directory)
    chosen = choose_architecture(model.config, architecture)
    files = tokenizer_files(tokenizers, chosen)  # what cannot be expressed is refused first
    with new_directory(directory):
        settings = special_settings(tokenizers, model, labels)
        write_model(model, directory, architecture=chosen.model_type, settings=settings)
        for name, content in files.items():
            write_whole(directory / name, content)
        if model.config.head == "token":
            write_whole(directory / "generation_config.json", _generation(tokenizers, model))
        write_whole(directory / "README.md", _card(model, chosen, task).encode())
        note = verify(model, directory, texts)
    return [f"written as {chosen.class_of(model.config)} ({chosen.model_type}).", note]


# ── Files besides weights ─────────────────────────────────────────────────────────────────────────


def special_settings(
    tokenizers: Mapping[str, Tokenizer], model: Model, labels: Sequence[str]
) -> dict[str, Any]:
    """Return the keys of config.json that name special tokens and labels."""
    special = _target(tokenizers).special
    settings: dict[str, Any] = {"pad_token_id": special.pad, "eos_token_id": special.end}
    if model.config.mode == "encoder-decoder":
        settings["decoder_start_token_id"] = special.begin
        settings["is_encoder_decoder"] = True
    if special.opening or model.config.mode == "encoder":
        settings["bos_token_id"] = special.opening[0] if special.opening else special.begin
    if labels and model.config.head == "class":
        settings["id2label"] = {str(number): label for number, label in enumerate(labels)}
        settings["label2id"] = {label: number for number, label in enumerate(labels)}
    return settings


def tokenizer_files(
    tokenizers: Mapping[str, Tokenizer], architecture: Architecture
) -> dict[str, bytes]:
    """Return the files of the tokenizers by name; ConfigError if they cannot be expressed."""
    if "source" in tokenizers:
        return _marian_files(tokenizers, architecture)
    tokenizer = tokenizers["text"]
    vocabulary = tokenizer.vocabulary
    if isinstance(vocabulary, TokenizerFile):
        options = {"tokenizer_class": "PreTrainedTokenizerFast", **_special_token_names(tokenizer)}
        return {"tokenizer.json": vocabulary.model, "tokenizer_config.json": _json(options)}
    if isinstance(vocabulary, SentencePieceFile):
        name = "spiece.model" if architecture.model_type in ("t5", "mt5") else "tokenizer.model"
        return {
            name: vocabulary.model,
            "tokenizer_config.json": _json(_special_token_names(tokenizer)),
        }
    if tokenizer.kind == "characters":
        return _character_files(tokenizer)
    raise ConfigError(
        f"a tokenizer of kind {tokenizer.kind} has no form in Hugging Face that gives the same "
        "ids. Train with data.tokenizer=characters, or start from an imported model."
    )


def _marian_files(
    tokenizers: Mapping[str, Tokenizer], architecture: Architecture
) -> dict[str, bytes]:
    sides = {side: tokenizers[side].vocabulary for side in ("source", "target")}
    names = [part.names for part in sides.values() if isinstance(part, SentencePieceFile)]
    if architecture.model_type != "marian" or len(names) < 2 or None in names:
        raise ConfigError(
            "tokenizers of two sides have a form in Hugging Face only if they came from Marian."
        )
    files = {f"{side}.spm": part.model or b"" for side, part in sides.items()}
    files["vocab.json"] = _json(names[0])
    if names[0] != names[1]:
        files["target_vocab.json"] = _json(names[1])
    options = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": names[0] != names[1]}
    return {**files, "tokenizer_config.json": _json(options)}


def _character_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return one id for each character as a tokenizer.json: a word of one character each."""
    ids = {tokenizer.piece(number): number for number in range(5)}
    ids |= dict(tokenizer.vocabulary.ids)  # type: ignore[attr-defined]
    special = [
        {
            "id": number,
            "content": tokenizer.piece(number),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number in range(5)
    ]
    every = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated"}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Lowercase"} if tokenizer.lower else None,
        "pre_tokenizer": every | {"invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": tokenizer.piece(3)},
    }
    options = {"tokenizer_class": "PreTrainedTokenizerFast", **_special_token_names(tokenizer)}
    return {"tokenizer.json": _json(content), "tokenizer_config.json": _json(options)}


def _special_token_names(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the names of special tokens, as tokenizer_config.json has them."""
    special = tokenizer.special
    numbers = {"pad": special.pad, "eos": special.end, "unk": special.unknown}
    numbers |= {"mask": special.mask, "bos": special.begin, "cls": special.begin}
    numbers |= {"sep": special.end}
    return {
        f"{name}_token": tokenizer.piece(number)
        for name, number in numbers.items()
        if number is not None
    }


def _generation(tokenizers: Mapping[str, Tokenizer], model: Model) -> bytes:
    special = _target(tokenizers).special
    settings = {"pad_token_id": special.pad, "eos_token_id": special.end}
    if isinstance(model, EncoderDecoder):
        settings["decoder_start_token_id"] = special.begin
    if special.opening:
        settings["bos_token_id"] = special.opening[0]
    return _json(settings)


def _card(model: Model, architecture: Architecture, task: str) -> str:
    c = model.config
    return (
        "---\nlibrary_name: transformers\n---\n\n"
        f"# A {architecture.model_type} model for {task}\n\n"
        f"Trained with addnorm {__version__}: {c.mode}, width {c.width}, depth {c.depth}, "
        f"{c.heads} heads, {c.addnorm}-norm, {model.count():,} parameters.\n"
    )


def _target(tokenizers: Mapping[str, Tokenizer]) -> Tokenizer:
    return tokenizers.get("target") or tokenizers["text"]


def _json(content: Any) -> bytes:
    return f"{to_json(content)}\n".encode()


# ── Verification ──────────────────────────────────────────────────────────────────────────────────


def verify(model: Model, directory: Path, texts: RealTexts | None = None) -> str:
    """Compare a directory with the model it was written from; return a sentence, or raise."""
    c = model.config
    batches = [_random_batch(model)]
    if texts is not None:
        batches.append(texts.batch(min(c.vocab, c.output_vocab), 0 if c.pad is None else c.pad))
    again = read_model(directory).model
    expected = [_ours(model, *batch) for batch in batches]
    answers = [[_ours(again, *batch) for batch in batches]]
    by = "addnorm (transformers is not installed)"
    if importlib.util.find_spec("transformers") is not None:
        theirs, by = _open_theirs(directory), "transformers"
        answers.append([_theirs(theirs, model, *batch) for batch in batches])
    difference = max(
        _largest_difference(one, other)
        for answer in answers
        for one, other in zip(expected, answer, strict=True)
    )
    if not difference <= EXPORT_TOLERANCE:
        raise SavedError(
            f"{str(directory)!r} does not compute what the model does, as read by {by}: the "
            f"largest difference is {difference:.2g}, above {EXPORT_TOLERANCE:g}."
        )
    return (
        f"verified by {by}: the largest difference of an output is {difference:.2g} "
        f"({where(texts)})."
    )


def _random_batch(model: Model) -> tuple[Tensor, Tensor]:
    c = model.config
    length = min(12, c.length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(c.vocab, c.output_vocab), (3, length), generator=generator)
    real = torch.arange(length) < torch.tensor(
        [[length], [max(1, length - 3)], [max(1, length // 2)]]
    )
    pad = 0 if c.pad is None else c.pad
    ids = torch.where((ids == pad) & (c.vocab > 1), (pad + 1) % c.vocab, ids)
    return torch.where(real, ids, pad), real


@torch.no_grad()
def _ours(model: Model, ids: Tensor, real: Tensor) -> Tensor:
    mask, was = Mask.padding(real), model.training
    model.eval()
    if isinstance(model, EncoderDecoder):
        result = model(ids, ids, source_mask=mask, target_mask=mask)
    else:
        result = model(ids, mask=mask)
    model.train(was)
    return result[real] if result.ndim == 3 else result


def _open_theirs(directory: Path) -> Any:
    """Return the model that transformers reads."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def _theirs(theirs: Any, model: Model, ids: Tensor, real: Tensor) -> Tensor:
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": real.long()}
    if isinstance(model, EncoderDecoder):
        options |= {"decoder_input_ids": ids, "decoder_attention_mask": real.long()}
    output = theirs(**options)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result[real] if result.ndim == 3 else result


def _largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())
