"""The ids that stand for no text: the same numbers in every tokenizer, so no one need ask."""

PAD = 0
"""Fills short rows."""
BEGIN = 1
"""Comes before a sequence: what a decoder reads first, and what sums up a text to be classified."""
END = 2
"""Comes after a sequence."""
UNKNOWN = 3
"""Stands for a character that the tokenizer has no id for."""
MASK = 4
"""Stands for a token that is hidden and to be guessed; reserved in every vocabulary."""
FIRST = 5
"""The first id of ordinary text; all below it are special."""

NAMES = ("<pad>", "<begin>", "<end>", "<unknown>", "<mask>")
"""How the special ids are written in pictures. Text that looks so is ordinary text."""

IGNORE = -100
"""The target of a position that has none, such as padding."""
