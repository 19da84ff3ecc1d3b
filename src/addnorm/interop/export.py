"""Runs as Hugging Face directories: model, tokenizer, generation settings and a model card.

What is written is read again and compared: with `transformers` if it is installed, else by our own
reader. A difference above the limit is an error, and the directory is removed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from addnorm import __version__
from addnorm.data.text.pretrained import SentencePieceFile, TokenizerFile
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError
from addnorm.files import new_directory, require_empty, to_json, write_whole
from addnorm.interop.huggingface import choose_architecture, write_model
from addnorm.interop.imported import PREPROCESSOR
from addnorm.interop.mapping import Architecture
from addnorm.interop.real_texts import RealTexts
from addnorm.interop.verify import verify, verify_tokenizers
from addnorm.models.build import Model
from addnorm.models.transformer import EncoderDecoder

PIECE_TOKENIZERS = {
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer"),
}
"""Their classes for models of sentencepiece, by model_type; LlamaTokenizer for the others."""
SENTINELS = 100
"""Ids that T5Tokenizer adds after the pieces, if the model has them."""


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
        verify_tokenizers(tokenizers, directory, model.config.mode, texts)
    return [f"written as {chosen.class_of(model.config)} ({chosen.model_type}).", note]


def export_image_classifier(
    model: Model,
    scales: Mapping[str, Sequence[float]],
    directory: str | Path,
    *,
    labels: Sequence[str] = (),
    architecture: str | None = None,
) -> list[str]:
    """Write a classifier of images with its preprocessing, verify it, and return sentences.

    Parameters
    ----------
    model : the network.
    scales : mean and scale of each channel, of pixels from 0 to 255.
    directory : where to write; it must not exist, or be empty.
    labels : names of the classes.
    architecture : a model_type; the first that can express the model by default.
    """
    directory = require_empty(directory)
    chosen = choose_architecture(model.config, architecture)
    side = model.config.image
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [value / 255 for value in scales["mean"]],
        "image_std": [value / 255 for value in scales["scale"]],
    }
    with new_directory(directory):
        settings = _label_settings(labels)
        write_model(model, directory, architecture=chosen.model_type, settings=settings)
        write_whole(directory / PREPROCESSOR, _json(preprocessor))
        write_whole(directory / "README.md", _card(model, chosen, "images").encode())
        note = verify(model, directory)
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
    return settings | (_label_settings(labels) if model.config.head == "class" else {})


def _label_settings(labels: Sequence[str]) -> dict[str, Any]:
    if not labels:
        return {}
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


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
        return _piece_files(tokenizer, vocabulary, architecture)
    if tokenizer.kind == "characters":
        return _character_files(tokenizer, str(architecture.fixed["mode"]))
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


def _piece_files(
    tokenizer: Tokenizer, vocabulary: SentencePieceFile, architecture: Architecture
) -> dict[str, bytes]:
    kind = PIECE_TOKENIZERS.get(architecture.model_type, "LlamaTokenizer")
    options: dict[str, Any] = {"tokenizer_class": kind, **_special_token_names(tokenizer)}
    if kind == "T5Tokenizer":
        has_sentinels = vocabulary.size >= vocabulary.processor.vocab_size() + SENTINELS
        options["extra_ids"] = SENTINELS if has_sentinels else 0
    else:
        options |= {"add_bos_token": bool(tokenizer.special.opening), "add_eos_token": False}
        if vocabulary.prefix is not None:
            options["add_prefix_space"] = vocabulary.prefix
    name = "spiece.model" if kind == "T5Tokenizer" else "tokenizer.model"
    return {name: vocabulary.model or b"", "tokenizer_config.json": _json(options)}


def _character_files(tokenizer: Tokenizer, mode: str) -> dict[str, bytes]:
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
        "post_processor": _template(tokenizer, mode),
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": tokenizer.piece(3)},
    }
    options = {"tokenizer_class": "PreTrainedTokenizerFast", **_special_token_names(tokenizer)}
    return {"tokenizer.json": _json(content), "tokenizer_config.json": _json(options)}


def _template(tokenizer: Tokenizer, mode: str) -> dict[str, Any] | None:
    """Return what encloses a text, as tokenizer.json has it; None for a decoder."""
    special = tokenizer.special
    if mode == "decoder":
        return None
    ids = {tokenizer.piece(number): number for number in (special.begin, special.end)}
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ids)
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [begin, text, end] if mode == "encoder" else [text, end]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}, end],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()
        },
    }


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
