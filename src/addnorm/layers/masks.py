"""Attention masks: which keys each query may attend to.

One convention everywhere: True means *visible*. A mask is a set of simple conditions that must all
hold; it becomes a tensor only when a kernel needs one, and then only for the part it needs.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.embeddings import INTEGERS, check_tensor, has_values

if TYPE_CHECKING:
    from addnorm.layers.positions import Positions
    from addnorm.layers.span import AdaptiveSpan

Range = tuple[int, int]
"""First position, and the one after the last."""

GRID = 32
"""Largest number of queries and keys that the notebook view of a mask draws."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """Which keys each query may attend to: a key is visible if every condition that is set holds.

    Create masks with the class methods and combine them with `&`.

    Parameters
    ----------
    hides_future
        Hide keys after the query.
    prefix
        Exception to `hides_future`: keys before this position are visible, (batch,) or one number.
    window_size
        Hide keys this many or more positions away from the query.
    real
        Hide keys marked False (padding), (batch, key).
    groups
        Group numbers of the queries, (batch, query), and of the keys, (batch, key): hide keys of
        another group than the query's.
    pairs
        Hide (query, key) pairs marked False, (batch or 1, query, key).

    Examples
    --------
    >>> mask = Mask.causal() & Mask.padding(torch.tensor([[True, True, False]]))
    >>> mask.dense(3, 3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]]
    >>> mask
    Mask(causal; padding: 1 of 3 keys hidden)
    """

    hides_future: bool = False
    prefix: Tensor | None = None
    window_size: int | None = None
    real: Tensor | None = None
    groups: tuple[Tensor, Tensor] | None = None
    pairs: Tensor | None = None

    @classmethod
    def visible(cls) -> "Mask":
        """Return a mask in which every query sees every key."""
        return cls()

    @classmethod
    def causal(cls, prefix: int | Tensor | None = None) -> "Mask":
        """Return a causal mask: a query sees itself, earlier keys and all keys of the prefix."""
        if isinstance(prefix, int | float):
            prefix = torch.tensor(prefix)
        if prefix is not None:
            check_tensor(prefix, "a prefix", "Mask.causal(3)")
        if prefix is not None and (prefix.dtype not in INTEGERS or prefix.ndim > 1):
            raise InputError(
                "a prefix must be integers of shape (batch,): "
                f"got {prefix.dtype} of shape {tuple(prefix.shape)}."
            )
        if prefix is not None and has_values(prefix) and bool((prefix < 0).any()):
            raise InputError(f"a prefix must be 0 or more: got {int(prefix.min())}. Try 0.")
        return cls(hides_future=True, prefix=prefix)

    @classmethod
    def window(cls, size: int) -> "Mask":
        """Return a mask in which a query sees only keys fewer than `size` positions away."""
        given: object = size
        if not isinstance(given, Integral) or int(given) < 1:
            raise InputError(f"a window must span at least 1 position: got {size!r}. Try 128.")
        return cls(window_size=int(given))

    @classmethod
    def padding(cls, real: Tensor) -> "Mask":
        """Return a mask that hides the keys marked False in `real`, (batch, key)."""
        _require_boolean(real, "a padding mask", 2, "(batch, key)", "tokens != pad")
        return cls(real=real)

    @classmethod
    def grouped(cls, query: Tensor, key: Tensor | None = None) -> "Mask":
        """Return a mask in which a query sees only keys with its own group number.

        For several sequences packed into one row. Both are (batch, length); `key` defaults to
        `query`.
        """
        key = query if key is None else key
        for numbers in (query, key):
            check_tensor(numbers, "groups", "torch.tensor([[0, 0, 1]])")
            if numbers.is_floating_point() or numbers.ndim != 2:
                raise InputError(
                    "groups must be integers of shape (batch, length): "
                    f"got {numbers.dtype} of shape {tuple(numbers.shape)}."
                )
        return cls(groups=(query, key))

    @classmethod
    def pattern(cls, pairs: Tensor) -> "Mask":
        """Return any mask: (query, key) or (batch, query, key), True where the key is visible."""
        check_tensor(pairs, "a mask pattern", "torch.tensor(pairs) == 1")
        if pairs.ndim == 2:
            pairs = pairs[None]
        shape = "(query, key) or (batch, query, key)"
        _require_boolean(pairs, "a mask pattern", 3, shape, "pairs == 1")
        return cls(pairs=pairs)

    def __and__(self, other: "Mask") -> "Mask":
        """Return both masks combined: a key is visible only if it is visible in each of them."""
        if not isinstance(other, Mask):
            raise InputError(
                f"a mask is combined with another addnorm.Mask: got {type(other).__name__}. Try "
                "mask & Mask.padding(tokens != pad)."
            )
        if self.groups is not None and other.groups is not None:
            raise InputError("two grouped masks cannot be combined. Number the groups once.")
        return Mask(
            hides_future=self.hides_future or other.hides_future,
            prefix=_shorter_prefix(self, other),
            window_size=_smaller(self.window_size, other.window_size),
            real=_both(self.real, other.real),
            groups=self.groups or other.groups,
            pairs=_both(self.pairs, other.pairs),
        )

    def with_summary(self) -> "Mask":
        """Return the mask after one position that is always visible is put first."""
        if self.groups is not None or self.pairs is not None or self.window_size is not None:
            raise InputError("a summary token can be combined with padding masks only.")
        if self.real is None:
            return self
        return replace(self, real=nn.functional.pad(self.real, (1, 0), value=True))

    @property
    def only_causal(self) -> bool:
        """Whether causality is the only condition, apart from padding."""
        rest = (self.prefix, self.window_size, self.groups, self.pairs)
        return self.hides_future and all(part is None for part in rest)

    @property
    def only_padding(self) -> bool:
        """Whether there is no condition but padding, or none at all."""
        rest = (self.window_size, self.groups, self.pairs)
        return not self.hides_future and all(part is None for part in rest)

    def check_device(self, device: torch.device) -> None:
        """Raise InputError unless the tensors of the mask are on a device; a prefix is moved."""
        for part in (self.real, *(self.groups or ()), self.pairs):
            if part is not None and part.device.type != device.type:
                raise InputError(
                    f"a mask must be on the device of the input, {device}: got {part.device}. "
                    f"Make it of tensors on {str(device)!r}."
                )

    def check(self, batch: int, query: int, key: int) -> None:
        """Raise InputError if the tensors of the mask do not fit these numbers."""
        check_shape(self.real, "a padding mask", (batch, key))
        if self.prefix is not None and self.prefix.ndim == 1:
            check_shape(self.prefix, "a prefix", (batch,))
        if self.groups is not None:
            check_shape(self.groups[0], "the groups of the queries", (batch, query))
            check_shape(self.groups[1], "the groups of the keys", (batch, key))
        if self.pairs is not None:
            rows = batch if self.pairs.shape[0] != 1 else 1
            check_shape(self.pairs, "a mask pattern", (rows, query, key))

    def reachable_keys(self, start: int, stop: int, offset: int, key: int) -> Range:
        """Return the range of keys that some queries can possibly see.

        Parameters
        ----------
        start, stop
            The first query, and the one after the last.
        offset
            Position of query 0.
        key
            Number of keys.
        """
        first, last = 0, key
        if self.hides_future and self.prefix is None:
            last = min(key, offset + stop)
        if self.window_size is not None:
            first = max(0, offset + start - self.window_size + 1)
            last = min(last, offset + stop + self.window_size - 1)
        return first, max(first, last)

    def dense(
        self,
        query: int,
        key: int,
        offset: int = 0,
        query_range: Range | None = None,
        key_range: Range | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the mask as booleans, (batch or 1, 1, query, key).

        Parameters
        ----------
        query, key
            Numbers of queries and keys.
        offset
            Position of the first query: the number of keys that are already in a cache.
        query_range, key_range
            The part of the table to return; all of it by default.
        device
            Device of the result.
        """
        start, stop = query_range or (0, query)
        first, last = key_range or (0, key)
        queries = torch.arange(offset + start, offset + stop, device=device)[:, None]
        keys = torch.arange(first, last, device=device)[None, :]
        visible = torch.ones(1, stop - start, last - first, dtype=torch.bool, device=device)
        if self.hides_future:
            past = (keys <= queries)[None]
            if self.prefix is not None:
                past = past | (keys < self.prefix.to(keys.device).view(-1, 1, 1))
            visible = visible & past
        if self.window_size is not None:
            visible = visible & ((queries - keys).abs() < self.window_size)
        if self.real is not None:
            visible = visible & self.real[:, None, first:last]
        if self.groups is not None:
            query_groups, key_groups = self.groups
            same = query_groups[:, start:stop, None] == key_groups[:, None, first:last]
            visible = visible & same
        if self.pairs is not None:
            visible = visible & self.pairs[:, start:stop, first:last]
        return visible[:, None]

    def position_ids(self, length: int, offset: int, device: torch.device) -> Tensor:
        """Return each query's position in its own sequence: (length,), or (batch, length).

        Padding is not counted, on whichever side it is, and each group starts at 0.
        """
        if self.groups is not None:
            numbers = self.groups[1]
            starts = torch.ones_like(numbers, dtype=torch.bool)
            starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
            indices = torch.arange(numbers.shape[1], device=device).expand_as(numbers)
            ids = indices - torch.where(starts, indices, 0).cummax(dim=1).values
            return ids[:, offset : offset + length]
        if self.real is not None:
            return (self.real.cumsum(dim=1) - 1).clamp(min=0)[:, offset : offset + length]
        return torch.arange(offset, offset + length, device=device)

    def __repr__(self) -> str:
        return f"Mask({'; '.join(self._conditions()) or 'every key is visible'})"

    def _repr_html_(self) -> str:
        """Return the conditions and, where the sizes fit, a grid: a filled cell is visible."""
        grid = ""
        with suppress(InputError):
            grid = self._draw()
        return f"<div><div>{escape(repr(self))}</div>{grid}</div>"

    def _conditions(self) -> list[str]:
        conditions = ["causal"] if self.hides_future else []
        if self.prefix is not None:
            size = int(self.prefix) if self.prefix.ndim == 0 else f"{self.prefix.tolist()}"
            conditions.append(f"prefix: {size}")
        if self.window_size is not None:
            conditions.append(f"window: {self.window_size}")
        if self.real is not None:
            hidden = int((~self.real).sum())
            conditions.append(f"padding: {hidden} of {self.real.numel()} keys hidden")
        if self.groups is not None:
            conditions.append(f"groups: {' × '.join(str(tuple(g.shape)) for g in self.groups)}")
        if self.pairs is not None:
            hidden = int((~self.pairs).sum())
            conditions.append(f"pattern: {hidden} of {self.pairs.numel()} pairs hidden")
        return conditions

    def _draw(self) -> str:
        """Return an SVG of the first sequence: rows are queries, columns are keys.

        If no condition fixes a size, 8 positions are drawn as an example.
        """
        batch, query, key = 1, 0, 0
        device = None
        for part in (self.pairs, *(self.groups or ()), self.real, self.prefix):
            if part is not None and part.ndim:
                batch, device = max(batch, part.shape[0]), part.device
        if self.real is not None:
            key = self.real.shape[1]
        if self.groups is not None:
            query, key = self.groups[0].shape[1], self.groups[1].shape[1]
        if self.pairs is not None:
            query, key = self.pairs.shape[1:]
        key = key or query or 8
        query = query or key
        self.check(batch, query, key)
        rows, columns = min(query, GRID), min(key, GRID)
        table = self.dense(query, key, 0, (0, rows), (0, columns), device)[0, 0].tolist()
        cells = "".join(
            f"M{column} {row}h1v1h-1z"
            for row, line in enumerate(table)
            for column, visible in enumerate(line)
            if visible
        )
        drawn = "" if (rows, columns) == (query, key) else f", the first {rows} × {columns}"
        rest = "" if batch == 1 else f"; sequence 1 of {batch}"
        caption = f"{query} queries (rows) × {key} keys (columns){drawn}{rest}; filled: visible"
        return (
            f'<svg viewBox="0 0 {columns} {rows}" width="{8 * columns}" height="{8 * rows}" '
            f'role="img" style="outline:1px solid #888;margin:4px 0">'
            f'<path d="{cells}" fill="#3b6ea5" stroke="#fff" stroke-width="0.08"/></svg>'
            f"<div><small>{escape(caption)}</small></div>"
        )


@dataclass
class AttentionTable:
    """The (query, key) table of one attention, computed on demand: its mask and its score bias.

    Parameters
    ----------
    mask, query, key
        The mask, and the numbers of queries and keys.
    offset
        Position of query 0.
    positions
        The position scheme, if it adds to the scores.
    query_range, key_range
        The part of the table that is needed; all of it by default.
    extra
        Number of further keys after these, which every query sees at no position.
    span
        What the layer adds to the scores by distance, if it has adaptive spans.
    computed
        What was computed for the first layer and is reused by the others.
    """

    mask: Mask
    query: int
    key: int
    offset: int = 0
    positions: "Positions | None" = None
    query_range: Range = (0, 0)
    key_range: Range = (0, 0)
    extra: int = 0
    span: "AdaptiveSpan | None" = None
    computed: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.query_range = self.query_range if self.query_range[1] else (0, self.query)
        self.key_range = self.key_range if self.key_range[1] else (0, self.key)

    def visible(self, device: torch.device) -> Tensor:
        """Return the mask as booleans, (batch or 1, 1, query, key + extra)."""
        if "visible" not in self.computed:
            sizes = (self.query, self.key, self.offset, self.query_range, self.key_range)
            table = self.mask.dense(*sizes, device)
            if self.extra:
                table = nn.functional.pad(table, (0, self.extra), value=True)
            self.computed["visible"] = table
        visible = self.computed["visible"]
        assert visible is not None
        return visible

    def bias(self, q: Tensor, local: nn.Module, scale: float) -> Tensor | None:
        """Return what positions and spans add to the scores, (batch or 1, heads, query, ...).

        The last dimension is key + extra.
        """
        queries = torch.arange(*self.query_range, device=q.device) + self.offset
        keys = torch.arange(*self.key_range, device=q.device)
        bias = self._position_bias(q, queries, keys, local, scale)
        if self.span is None:
            return bias
        span = nn.functional.pad(self.span.bias(queries, keys).to(q.dtype), (0, self.extra))
        return span if bias is None else bias + span

    def _position_bias(
        self, q: Tensor, queries: Tensor, keys: Tensor, local: nn.Module, scale: float
    ) -> Tensor | None:
        if self.positions is None:
            return None
        if "bias" in self.computed:
            return self.computed["bias"]
        bias = self.positions.bias(q, queries, keys, local, scale)
        if bias is not None and self.extra:
            bias = nn.functional.pad(bias, (0, self.extra))
        if not self.positions.bias_per_layer:
            self.computed["bias"] = bias
        return bias

    def take_keys(self, x: Tensor) -> Tensor:
        """Return the keys or values of the table's range, and the further ones after them."""
        part = x[:, :, slice(*self.key_range)]
        return torch.cat((part, x[:, :, self.key :]), dim=2) if self.extra else part

    def chunk(self, start: int, stop: int) -> "AttentionTable":
        """Return the table of queries start..stop and the keys that they can possibly see."""
        key_range = self.mask.reachable_keys(start, stop, self.offset, self.key)
        return replace(self, query_range=(start, stop), key_range=key_range, computed={})

    def fresh(self) -> "AttentionTable":
        """Return a copy with nothing computed yet: for use without gradients."""
        return replace(self, computed={})

    @property
    def is_square(self) -> bool:
        """Whether this is a whole table of as many queries as keys, without an offset."""
        whole = self.query_range == (0, self.query) and self.key_range == (0, self.key)
        return whole and self.offset == 0 and self.query == self.key

    def fits_kernel(self, device: torch.device, dropout: float) -> bool:
        """Whether the fused kernel needs no table: its causal flag, a padding row or nothing does.

        The CPU kernel accepts the flag and a padding row together if there is no dropout; no other
        kernel does.
        """
        if self.span is not None or (self.positions is not None and self.positions.has_bias):
            return False
        if self.extra and self.mask.real is not None:
            return False
        together = device.type == "cpu" and dropout == 0 and not torch.compiler.is_compiling()
        square = self.is_square and not self.extra
        causal = self.mask.only_causal and square and (self.mask.real is None or together)
        newest = self.mask.only_causal and self.query == 1 and self.offset + 1 == self.key
        return self.mask.only_padding or causal or newest


def check_shape(tensor: Tensor | None, name: str, shape: tuple[int, ...]) -> None:
    """Raise InputError if the tensor, where there is one, does not have this shape."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise InputError(f"{name} must have shape {shape} here: got {tuple(tensor.shape)}.")


def _require_boolean(mask: Tensor, name: str, dims: int, shape: str, advice: str) -> None:
    check_tensor(mask, name, advice)
    if mask.dtype != torch.bool:
        raise InputError(
            f"{name} must be boolean, True where a key is visible: got {mask.dtype}. Try {advice}."
        )
    if mask.ndim != dims:
        raise InputError(f"{name} must have shape {shape}: got {tuple(mask.shape)}.")


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _shorter_prefix(one: Mask, other: Mask) -> Tensor | None:
    """Return the prefix of two masks combined: none if one is plainly causal, or the shorter."""
    prefixes = [mask.prefix for mask in (one, other) if mask.hides_future]
    if not prefixes or any(prefix is None for prefix in prefixes):
        return None
    shortest = prefixes[0]
    for prefix in prefixes[1:]:
        assert shortest is not None and prefix is not None
        shortest = torch.minimum(shortest, prefix)
    return shortest


def require_padding_only(mask: Mask | None, what: str) -> Tensor | None:
    """Return which positions are real; raise InputError for conditions that `what` cannot follow.

    Causality is not among them: what has no attention hides the future by how it is built.
    """
    if mask is None:
        return None
    others = (mask.prefix, mask.window_size, mask.groups, mask.pairs)
    if any(part is not None for part in others):
        raise InputError(
            f"{what} hides padding only: got a mask with a prefix, window, groups or pairs. "
            "Build with mixing=attention."
        )
    return mask.real
