"""The ids of special tokens, the same in every tokenizer."""

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
