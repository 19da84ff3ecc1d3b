"""A few texts of the data of a run as token ids: an export is compared on them, too."""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from addnorm.config import DataConfig, ModelConfig
from addnorm.data.text.collate import delimit_source, pad
from addnorm.data.text.tokenizer import Tokenizer

TEXTS = 8
"""Texts that an export is compared on."""
TOKENS_OF_A_TEXT = 60
"""Longer texts are cut: most of a comparison's time is that of its longest text."""
MAX_LETTERS = 2000
"""Letters of a line that are read."""
IdRow = tuple[int, ...]


@dataclass(frozen=True)
class RealTexts:
    """Texts as a model reads them, with special tokens; of an encoder-decoder, targets without."""

    sources: tuple[IdRow, ...]
    targets: tuple[IdRow, ...] = ()

    def batch(self, vocab: int, filler: int = 0) -> tuple[Tensor, Tensor]:
        """Return the sources as one batch, and which of its ids are real."""
        ids = pad([[min(i, vocab - 1) for i in row] for row in self.sources], filler)
        lengths = torch.tensor([[len(row)] for row in self.sources])
        return ids, torch.arange(ids.shape[1]) < lengths

    def inputs(self, c: ModelConfig) -> tuple[Tensor, ...]:
        """Return the inputs of a whole graph (`interop/graphs.py`)."""
        ids, real = self.batch(c.vocab)
        if c.mode == "encoder":
            return ids, real
        if c.mode == "decoder":  # which has no mask: all rows are as long as the shortest
            return (ids[:, : max(2, int(real.sum(dim=1).min()))],)
        shortest = max(2, min(map(len, self.targets)))
        return ids, real, torch.tensor([row[:shortest] for row in self.targets])

    def __str__(self) -> str:
        return f"random sequences and {len(self.sources)} texts of the data"


def where(texts: RealTexts | None, inputs: str = "tokens") -> str:
    """Return what the export of a model was compared on; `inputs` are those of the model."""
    if texts is not None:
        return str(texts)
    return "random images" if inputs == "patches" else "random sequences"


def read_real_texts(
    data: DataConfig, model: ModelConfig, tokenizers: Mapping[str, Tokenizer]
) -> RealTexts | None:
    """Return the first texts of the files of a run; None if they are no longer there."""
    name = data.valid_source or data.source
    lines = list(_first_lines(name))
    if len(lines) < 2:
        return None
    target = tokenizers.get("target") or tokenizers["text"]
    source = tokenizers.get("source") or target
    most = min(
        TOKENS_OF_A_TEXT, model.length - 2 if model.positions == "learned" else TOKENS_OF_A_TEXT
    )
    ids = [row[:most] for row in source.encode_many(lines)]
    special = source.special
    if model.mode == "encoder":
        return RealTexts(tuple((special.begin, *row, special.end) for row in ids))
    if model.mode == "decoder":
        return RealTexts(tuple(tuple(row) for row in ids if len(row) > 1)) if any(ids) else None
    others = list(_first_lines(data.valid_target or data.target))[: len(ids)]
    outputs = target.encode_many(others if len(others) == len(ids) else lines)
    pairs = [
        (tuple(delimit_source(row, special)), tuple(output[:most]))
        for row, output in zip(ids, outputs, strict=True)
        if len(output) > 1
    ]
    return RealTexts(*zip(*pairs, strict=True)) if pairs else None


def _first_lines(name: str | None) -> Iterator[str]:
    """Yield the first lines of a text file that are not blank; none of what cannot be read."""
    if name is None or not Path(name).is_file():
        return
    opener = gzip.open if name.endswith(".gz") else open
    try:
        with opener(name, "rt", encoding="utf-8") as file:
            lines = (file.readline(MAX_LETTERS) for _ in range(10 * TEXTS))
            yield from islice((line.strip() for line in lines if line.strip()), TEXTS)
    except (OSError, ValueError, EOFError):
        return


def rows_of(texts: RealTexts | None) -> tuple[Sequence[IdRow], Sequence[IdRow]]:
    """Return sources and targets, none without texts."""
    return ((), ()) if texts is None else (texts.sources, texts.targets)
