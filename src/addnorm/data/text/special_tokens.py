"""The ids of special tokens: the same in every tokenizer that addnorm trains.

A tokenizer that was imported with a model has its own: see `SpecialIds`.
"""

from dataclasses import dataclass

PAD = 0
"""Pads short rows."""
BEGIN = 1
"""Precedes a sequence: the first input of a decoder, and the summary token of a classifier."""
END = 2
"""Ends a sequence."""
UNKNOWN = 3
"""Replaces a character that the tokenizer has no id for."""
MASK = 4
"""Replaces a masked token; reserved in every vocabulary."""
FIRST = 5
"""The first id of ordinary text; all below it are special."""

SPECIAL_NAMES = ("<pad>", "<begin>", "<end>", "<unknown>", "<mask>")
"""How the special ids are displayed. The same characters in a text are ordinary text."""

IGNORE = -100
"""The target of a position without one, such as padding."""


@dataclass(frozen=True)
class SpecialIds:
    """The ids of special tokens of one tokenizer; by default those of addnorm's own.

    Parameters
    ----------
    pad : pads short rows.
    begin : precedes a text of an encoder; the first input of a decoder.
    end : ends a sequence.
    unknown : replaces what the tokenizer has no id for; None if there is no such thing.
    mask : replaces a masked token; None if there is none.
    opening : ids before every source of an encoder-decoder, and before every prompt.
    """

    pad: int = PAD
    begin: int = BEGIN
    end: int = END
    unknown: int | None = UNKNOWN
    mask: int | None = MASK
    opening: tuple[int, ...] = ()

    def __contains__(self, number: int) -> bool:
        named = (self.pad, self.begin, self.end, self.unknown, self.mask)
        return number in named or number in self.opening


OURS = SpecialIds()
"""The special ids of the tokenizers that addnorm trains."""
