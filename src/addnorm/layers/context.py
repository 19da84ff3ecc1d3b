"""The inputs of a block besides the stream: masks, memory, positions, the key/value cache."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from addnorm.layers.cache import Cache
from addnorm.layers.masks import AttentionTable, Mask

if TYPE_CHECKING:
    from addnorm.layers.positions import Positions


@dataclass(kw_only=True)
class Context:
    """The inputs of a block besides the stream.

    Parameters
    ----------
    mask
        Mask of self-attention; every key is visible by default.
    memory
        Output of the encoder, for encoder-decoder attention, (batch, source, width).
    memory_mask
        Mask of encoder-decoder attention; every key is visible by default.
    positions
        The position scheme of the stack, which may act on queries, keys and scores.
    cache
        Keys and values of the positions decoded so far.
    maps
        If given, each attention stores its weights here, (batch, heads, query, key).
    output_length
        Number of leading positions that the stack returns, all by default; its last block computes
        only these.
    tables
        The (query, key) tables, which all layers share.
    """

    mask: Mask | None = None
    memory: Tensor | None = None
    memory_mask: Mask | None = None
    positions: "Positions | None" = None
    cache: Cache | None = None
    maps: dict[nn.Module, Tensor] | None = None
    output_length: int | None = None
    tables: dict[str, AttentionTable] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """Position of the first query: the number of positions decoded before."""
        return 0 if self.cache is None else self.cache.used

    def table(self, query: int, key: int, window: int | None = None) -> AttentionTable:
        """Return the table of self-attention, in layers with a window of their own with that."""
        name = "stream" if window is None else f"stream, window {window}"
        if name not in self.tables:
            mask = self.mask or Mask()
            mask = mask if window is None else mask & Mask.window(window)
            self.tables[name] = AttentionTable(mask, query, key, self.offset, self.positions)
        return self.tables[name]

    def memory_table(self, query: int, key: int) -> AttentionTable:
        """Return the table of encoder-decoder attention, which has no positions."""
        if "memory" not in self.tables:
            self.tables["memory"] = AttentionTable(self.memory_mask or Mask(), query, key)
        return self.tables["memory"]
