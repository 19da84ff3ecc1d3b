"""What an export wrote, read again and compared: by transformers if installed, else by addnorm."""

import importlib
import importlib.util
import warnings
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm.data.text.collate import delimit_source
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import SavedError
from addnorm.interop.graphs import draw_images
from addnorm.interop.huggingface import read_model
from addnorm.interop.real_texts import RealTexts, where
from addnorm.layers.masks import Mask
from addnorm.models.build import Model
from addnorm.models.transformer import EncoderDecoder

EXPORT_TOLERANCE = 1e-4
"""Largest difference of an output that is accepted in float32."""
PROBES = ("Hello, world! This is a text of 42 words.", "a b c")
"""Texts that every exported tokenizer is compared on."""


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
    if has_transformers():
        by = "transformers"
        answers.append(_answers_of_transformers(model, directory, batches))
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
        f"({where(texts, c.input)})."
    )


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _random_batch(model: Model) -> tuple[Tensor, Tensor]:
    c = model.config
    if c.input == "patches":
        return draw_images(c, 3), torch.ones(3, 1, dtype=torch.bool)
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
    if model.config.input == "patches":
        result = model(ids)
    elif isinstance(model, EncoderDecoder):
        result = model(ids, ids, source_mask=mask, target_mask=mask)
    else:
        result = model(ids, mask=mask)
    model.train(was)
    return result[real] if result.ndim == 3 else result


def _answers_of_transformers(
    model: Model, directory: Path, batches: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Return the outputs of the model that transformers reads."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        kind = getattr(transformers, config.architectures[0])
        theirs = kind.from_pretrained(directory, dtype=torch.float32).eval()
        return [_theirs(theirs, model, *batch) for batch in batches]
    except Exception as error:  # whatever that library raises
        raise _unreadable(directory, error) from None


def _unreadable(directory: Path, error: Exception) -> SavedError:
    lines = str(error).strip().splitlines() or [""]
    return SavedError(
        f"{str(directory)!r} must be read by transformers, which fails: {type(error).__name__}: "
        f"{lines[0]}"
    )


@torch.no_grad()
def _theirs(theirs: Any, model: Model, ids: Tensor, real: Tensor) -> Tensor:
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": real.long()}
    if model.config.input == "patches":
        options = {"pixel_values": ids}
    elif isinstance(model, EncoderDecoder):
        options |= {"decoder_input_ids": ids, "decoder_attention_mask": real.long()}
    output = theirs(**options)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result[real] if result.ndim == 3 else result


def _largest_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


# ── Tokenizers ────────────────────────────────────────────────────────────────────────────────────


def verify_tokenizers(
    tokenizers: Mapping[str, Tokenizer], directory: Path, mode: str, texts: RealTexts | None = None
) -> None:
    """Raise SavedError if transformers, where it is installed, gives other ids than ours.

    Parameters
    ----------
    tokenizers : one under "text", or two under "source" and "target".
    directory : what was written.
    mode : mode of the model, which decides what encloses a text.
    texts : real texts to compare on besides others.
    """
    if not has_transformers():
        return
    source = tokenizers.get("source") or tokenizers["text"]
    real = [] if texts is None else [source.decode(row) for row in texts.sources]
    try:
        transformers: Any = importlib.import_module("transformers")
        with warnings.catch_warnings(action="ignore"):
            theirs = transformers.AutoTokenizer.from_pretrained(directory)
        rows = [(text, list(theirs(text)["input_ids"])) for text in (*PROBES, *real)]
    except Exception as error:  # whatever that library raises
        raise _unreadable(directory, error) from None
    for text, actual in rows:
        expected = _enclosed(source, text, mode)
        if source.special.unknown in expected:
            continue  # libraries differ in how many unknown tokens unknown letters are
        # What follows a prompt is generated: a decoder's template may end it otherwise.
        compared = actual[: len(expected)] if mode == "decoder" else actual
        if compared != expected:
            pairs = zip_longest(actual, expected)
            place, (other, own) = next((n, ids) for n, ids in enumerate(pairs) if ids[0] != ids[1])
            raise SavedError(
                f"the tokenizer in {str(directory)!r} must give the ids of ours, as read by "
                f"transformers: of {text[:60]!r}, id {place + 1} is {own} here and {other} there. "
                "Export the model alone: addnorm.interop.huggingface.write_model."
            )


def _enclosed(tokenizer: Tokenizer, text: str, mode: str) -> list[int]:
    """Return a text as the model reads it."""
    ids, special = tokenizer.encode(text), tokenizer.special
    if mode == "encoder":
        return [special.begin, *ids, special.end]
    return delimit_source(ids, special) if mode == "encoder-decoder" else [*special.opening, *ids]
