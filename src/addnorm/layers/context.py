"""What travels beside the stream: who may see whom, the memory, the positions, the key/value cache.

One polarity everywhere: True means *may be seen*. A mask is a record of simple conditions that must
all hold; it becomes a tensor only when a kernel needs one, and then only for the part it needs.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from addnorm.errors import InputError

if TYPE_CHECKING:
    from addnorm.layers.positions import Positions


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """Which keys each query may see: the conditions that are set must all hold.

    >>> mask = Mask.causal() & Mask.padding(torch.tensor([[True, True, False]]))
    >>> mask.dense(3, 3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]
    """

    hides_future: bool = False
    """A key after the query is hidden ..."""
    prefix: Tensor | None = None
    """... unless it stands before this position: (batch,) or a single number."""
    reach: int | None = None
    """A key this many or more positions away is hidden."""
    real: Tensor | None = None
    """(batch, key): a key marked False (padding) is hidden."""
    groups: tuple[Tensor, Tensor] | None = None
    """(batch, query) and (batch, key): a key of another group than the query's is hidden."""
    pairs: Tensor | None = None
    """(batch or 1, query, key): a pair marked False is hidden."""

    @classmethod
    def visible(cls) -> "Mask":
        """Every query sees every key."""
        return cls()

    @classmethod
    def causal(cls, prefix: int | Tensor | None = None) -> "Mask":
        """A query sees itself and what came before; with a prefix, also all of the prefix."""
        if prefix is not None and not isinstance(prefix, Tensor):
            prefix = torch.tensor(prefix)
        if prefix is not None and (prefix.is_floating_point() or prefix.ndim > 1):
            raise InputError(
                "a prefix must be whole numbers of shape (batch,): "
                f"got {prefix.dtype} of shape {tuple(prefix.shape)}."
            )
        return cls(hides_future=True, prefix=prefix)

    @classmethod
    def window(cls, reach: int) -> "Mask":
        """A query sees only keys fewer than `reach` positions away."""
        if reach < 1:
            raise InputError(f"a window must reach at least 1 position: got {reach}. Try 128.")
        return cls(reach=reach)

    @classmethod
    def padding(cls, real: Tensor) -> "Mask":
        """Keys marked False in `real`, (batch, key), are hidden."""
        _need_boolean(real, "a padding mask", 2, "(batch, key)", "tokens != pad")
        return cls(real=real)

    @classmethod
    def grouped(cls, query: Tensor, key: Tensor | None = None) -> "Mask":
        """A query sees only keys with its own group number: sequences packed into one row."""
        key = query if key is None else key
        for numbers in (query, key):
            if numbers.is_floating_point() or numbers.ndim != 2:
                raise InputError(
                    "groups must be whole numbers of shape (batch, length): "
                    f"got {numbers.dtype} of shape {tuple(numbers.shape)}."
                )
        return cls(groups=(query, key))

    @classmethod
    def pattern(cls, seen: Tensor) -> "Mask":
        """Any pattern: (query, key) or (batch, query, key), True where the key may be seen."""
        if seen.ndim == 2:
            seen = seen[None]
        _need_boolean(seen, "a mask pattern", 3, "(query, key) or (batch, query, key)", "seen == 1")
        return cls(pairs=seen)

    def __and__(self, other: "Mask") -> "Mask":
        """Both masks at once: a key is seen only if each of them shows it."""
        if self.groups is not None and other.groups is not None:
            raise InputError("two grouped masks cannot be joined. Number the groups once.")
        return Mask(
            hides_future=self.hides_future or other.hides_future,
            prefix=_both_prefixes(self, other),
            reach=_shorter(self.reach, other.reach),
            real=_both(self.real, other.real),
            groups=self.groups or other.groups,
            pairs=_both(self.pairs, other.pairs),
        )

    def after_summary(self) -> "Mask":
        """The same mask when one more position, seen by all, comes first."""
        if self.groups is not None or self.pairs is not None or self.reach is not None:
            raise InputError("a summary token goes with padding masks only.")
        if self.real is None:
            return self
        return replace(self, real=nn.functional.pad(self.real, (1, 0), value=True))

    @property
    def only_future(self) -> bool:
        """Whether causality is the one condition left for a kernel, padding aside."""
        rest = (self.prefix, self.reach, self.groups, self.pairs)
        return self.hides_future and all(part is None for part in rest)

    @property
    def only_padding(self) -> bool:
        """Whether at most padding is hidden."""
        rest = (self.reach, self.groups, self.pairs)
        return not self.hides_future and all(part is None for part in rest)

    def check(self, batch: int, query: int, key: int) -> None:
        """Raise InputError where the parts do not fit tensors of these sizes."""
        _need_shape(self.real, "a padding mask", (batch, key))
        if self.prefix is not None and self.prefix.ndim == 1:
            _need_shape(self.prefix, "a prefix", (batch,))
        if self.groups is not None:
            _need_shape(self.groups[0], "the groups of the queries", (batch, query))
            _need_shape(self.groups[1], "the groups of the keys", (batch, key))
        if self.pairs is not None:
            rows = batch if self.pairs.shape[0] != 1 else 1
            _need_shape(self.pairs, "a mask pattern", (rows, query, key))

    def keys(self, start: int, stop: int, offset: int, key: int) -> tuple[int, int]:
        """The range of keys that queries start..stop can possibly see."""
        first, last = 0, key
        if self.hides_future and self.prefix is None:
            last = min(key, offset + stop)
        if self.reach is not None:
            first = max(0, offset + start - self.reach + 1)
            last = min(last, offset + stop + self.reach - 1)
        return first, max(first, last)

    def dense(
        self,
        query: int,
        key: int,
        offset: int = 0,
        part: tuple[int, int] | None = None,
        among: tuple[int, int] | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask as booleans, (batch or 1, 1, query, key), or the given part of queries and keys.

        `offset` is the position of the first query: the number of keys already in a cache.
        """
        start, stop = part or (0, query)
        first, last = among or (0, key)
        queries = torch.arange(offset + start, offset + stop, device=device)[:, None]
        keys = torch.arange(first, last, device=device)[None, :]
        seen = torch.ones(1, stop - start, last - first, dtype=torch.bool, device=device)
        if self.hides_future:
            past = (keys <= queries)[None]
            if self.prefix is not None:
                past = past | (keys < self.prefix.to(keys.device).view(-1, 1, 1))
            seen = seen & past
        if self.reach is not None:
            seen = seen & ((queries - keys).abs() < self.reach)
        if self.real is not None:
            seen = seen & self.real[:, None, first:last]
        if self.groups is not None:
            of_query, of_key = self.groups
            seen = seen & (of_query[:, start:stop, None] == of_key[:, None, first:last])
        if self.pairs is not None:
            seen = seen & self.pairs[:, start:stop, first:last]
        return seen[:, None]

    def places(self, batch: int, length: int, offset: int, device: torch.device) -> Tensor:
        """Position of each query in its own sequence: (length,), or (batch, length) with padding.

        Padding does not count, on whichever side it is, and each group starts at 0.
        """
        if self.groups is not None:
            numbers = self.groups[1]
            fresh = torch.ones_like(numbers, dtype=torch.bool)
            fresh[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            slots = torch.arange(numbers.shape[1], device=device).expand_as(numbers)
            places = slots - torch.where(fresh, slots, 0).cummax(dim=1).values
            return places[:, offset : offset + length]
        if self.real is not None:
            return (self.real.cumsum(dim=1) - 1).clamp(min=0)[:, offset : offset + length]
        return torch.arange(offset, offset + length, device=device)


@dataclass
class Table:
    """The (query, key) table of one attention, not yet made: who is seen, what is added to a score.

    `offset` is the position of query 0. `part` and `among` are the queries and keys it is about.
    """

    mask: Mask
    query: int
    key: int
    offset: int = 0
    positions: "Positions | None" = None
    part: tuple[int, int] = (0, 0)
    among: tuple[int, int] = (0, 0)
    made: dict[str, Tensor | None] = field(default_factory=dict)
    """What was made for the first layer and serves the others."""

    def __post_init__(self) -> None:
        self.part = self.part if self.part[1] else (0, self.query)
        self.among = self.among if self.among[1] else (0, self.key)

    def seen(self, device: torch.device) -> Tensor:
        """Booleans, (batch or 1, 1, query, key)."""
        if "seen" not in self.made:
            sizes = (self.query, self.key, self.offset, self.part, self.among)
            self.made["seen"] = self.mask.dense(*sizes, device)
        seen = self.made["seen"]
        assert seen is not None
        return seen

    def bias(self, q: Tensor, local: nn.Module, scale: float) -> Tensor | None:
        """What positions add to the scores, (batch or 1, heads, query, key)."""
        if self.positions is None:
            return None
        if "bias" in self.made:
            return self.made["bias"]
        queries = torch.arange(self.part[0], self.part[1], device=q.device) + self.offset
        keys = torch.arange(*self.among, device=q.device)
        bias = self.positions.bias(q, queries, keys, local, scale)
        if not self.positions.per_layer:
            self.made["bias"] = bias
        return bias

    def piece(self, start: int, stop: int) -> "Table":
        """The same for some of the queries, and the keys they could possibly see."""
        among = self.mask.keys(start, stop, self.offset, self.key)
        return replace(self, part=(start, stop), among=among, made={})

    def fresh(self) -> "Table":
        """The same, with nothing made yet: for use without gradients."""
        return replace(self, made={})

    @property
    def square(self) -> bool:
        whole = self.part == (0, self.query) and self.among == (0, self.key)
        return whole and self.offset == 0 and self.query == self.key

    def light(self, device: torch.device, dropout: float) -> bool:
        """Whether the kernel can do without a table: its causal flag, a padding row, or nothing.

        The CPU kernel takes the flag and a padding row together, if nothing is dropped; no other
        kernel does.
        """
        if self.positions is not None and self.positions.biased:
            return False
        together = device.type == "cpu" and dropout == 0 and not torch.compiler.is_compiling()
        triangle = self.mask.only_future and self.square and (self.mask.real is None or together)
        newest = self.mask.only_future and self.query == 1 and self.offset + 1 == self.key
        return self.mask.only_padding or triangle or newest


class Cache:
    """Keys and values of the positions already decoded, in memory set aside once.

    The model writes into it as it decodes; `reorder` makes row i a copy of row index[i], which is
    what beam search needs, and may leave rows out or repeat them. Keys and values of the encoder's
    memory are kept apart: they are computed on the first step, and each row of them may serve
    several rows of the batch; `keep_memory_of` leaves rows of them out.
    """

    def __init__(
        self,
        *,
        depth: int,
        batch: int,
        heads: int,
        length: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (depth, 2, batch, heads, length, head_width)
        self.store = torch.empty(shape, dtype=dtype, device=device)
        self.whole = self.store  # `store` is its first rows, once rows have been left out
        self.spare: Tensor | None = None
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.real: Tensor | None = None
        self.coming: Tensor | None = None  # `real`, once the step at work is done
        self.used = 0

    @property
    def length(self) -> int:
        """Positions there is room for."""
        return self.store.shape[4]

    @property
    def batch(self) -> int:
        return self.store.shape[2]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest keys and values of one layer; returns all of that layer's so far.

        Shapes are (batch, heads, length, head_width).
        """
        self._check(key.shape[0], key.shape[2])
        stop = self.used + key.shape[2]
        self.store[layer, 0, :, :, self.used : stop] = key
        self.store[layer, 1, :, :, self.used : stop] = value
        return self.store[layer, 0, :, :, :stop], self.store[layer, 1, :, :, :stop]

    def _check(self, batch: int, length: int) -> None:
        """Raise InputError if so many rows or positions have no room."""
        if self.used + length > self.length:
            raise InputError(
                f"the cache has room for {self.length} positions: got {self.used + length}. "
                f"Make it with length={self.used + length} or more."
            )
        if batch != self.batch:
            raise InputError(
                f"the cache was made for a batch of {self.batch}: got {batch}. "
                "Make a cache for this batch."
            )

    def remember(self, real: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Which of all positions so far are real, given which of the newest are: (batch, all)."""
        self._check(batch, length)
        _need_shape(real, "a padding mask", (batch, length))
        self.coming = None
        if real is None and self.real is None:
            return None
        device = self.store.device
        before = torch.ones(batch, self.used, dtype=torch.bool, device=device)
        newest = torch.ones(batch, length, dtype=torch.bool, device=device)
        before = before if self.real is None else self.real
        self.coming = torch.cat((before, newest if real is None else real), dim=1)
        return self.coming

    def advance(self, length: int) -> None:
        """Count positions as decoded, once all layers have written them."""
        self.used += length
        self.real = self.coming

    def reorder(self, index: Tensor) -> None:
        """Make row i of the batch a copy of row index[i]; there are then as many as indices."""
        if index.shape[0] == self.batch and torch.equal(index[index], index):
            # Every row that is copied stays itself: so they can be copied one by one, in place.
            with torch.no_grad():
                used = self.store[..., : self.used, :]
                for target, source in enumerate(index.tolist()):
                    if target != source:
                        used[:, :, target] = used[:, :, source]
        else:
            self.exchange(index)
        if self.real is not None:
            self.real = self.real.index_select(0, index)

    def exchange(self, index: Tensor) -> None:
        """Copy rows to the spare buffer, only what is used of them; the two then swap roles."""
        rows = index.shape[0]
        if self.spare is None or self.spare.shape[2] < rows:
            shape = (*self.store.shape[:2], rows, *self.store.shape[3:])
            self.spare = torch.empty(shape, dtype=self.store.dtype, device=self.store.device)
        taken = self.spare[:, :, :rows]
        with torch.no_grad():
            used = self.store[..., : self.used, :]
            torch.index_select(used, 2, index, out=taken[..., : self.used, :])
        self.spare, self.whole, self.store = self.whole, self.spare, taken

    def keep_memory_of(self, rows: Tensor) -> None:
        """Leave out the encoder's keys and values of all but these rows: the sentences at work."""
        for layer, (key, value) in self.memory.items():
            self.memory[layer] = key.index_select(0, rows), value.index_select(0, rows)


@dataclass(kw_only=True)
class Context:
    """All that a block may look at besides its stream."""

    mask: Mask | None = None
    """Who sees whom in self-attention; all see all if there is none."""
    memory: Tensor | None = None
    """(batch, source, width): the encoder's output, for encoder-decoder attention."""
    memory_mask: Mask | None = None
    """Which of the memory may be seen; all of it if there is none."""
    positions: "Positions | None" = None
    """The stack's position scheme, for what it does to queries, keys and scores."""
    cache: Cache | None = None
    """Where keys and values are kept while decoding."""
    maps: dict[nn.Module, Tensor] | None = None
    """If given, each attention puts its weights here, (batch, heads, query, key)."""
    tables: dict[str, Table] = field(default_factory=dict)
    """The (query, key) tables, which all layers share."""

    @property
    def offset(self) -> int:
        """Position of the first query: how many were decoded before."""
        return 0 if self.cache is None else self.cache.used

    def table(self, query: int, key: int) -> Table:
        """The table of self-attention."""
        if "stream" not in self.tables:
            table = Table(self.mask or Mask(), query, key, self.offset, self.positions)
            self.tables["stream"] = table
        return self.tables["stream"]

    def memory_table(self, query: int, key: int) -> Table:
        """The table of attention to the memory, where positions play no part."""
        if "memory" not in self.tables:
            self.tables["memory"] = Table(self.memory_mask or Mask(), query, key)
        return self.tables["memory"]


def _need_boolean(mask: Tensor, name: str, dims: int, shape: str, advice: str) -> None:
    if mask.dtype != torch.bool:
        raise InputError(
            f"{name} must be boolean, True where a key may be seen: got {mask.dtype}. Try {advice}."
        )
    if mask.ndim != dims:
        raise InputError(f"{name} must have shape {shape}: got {tuple(mask.shape)}.")


def _need_shape(part: Tensor | None, name: str, shape: tuple[int, ...]) -> None:
    if part is not None and tuple(part.shape) != shape:
        raise InputError(f"{name} must have shape {shape} here: got {tuple(part.shape)}.")


def _shorter(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _both_prefixes(one: Mask, other: Mask) -> Tensor | None:
    """A plain causal mask leaves no prefix of the other; two prefixes leave the shorter."""
    causal = [mask for mask in (one, other) if mask.hides_future]
    prefixes = [mask.prefix for mask in causal]
    if not prefixes or any(prefix is None for prefix in prefixes):
        return None
    shortest = prefixes[0]
    for prefix in prefixes[1:]:
        assert shortest is not None and prefix is not None
        shortest = torch.minimum(shortest, prefix)
    return shortest
