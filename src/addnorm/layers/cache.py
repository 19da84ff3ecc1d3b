"""The key/value cache of decoding."""

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.layers.embeddings import has_values
from addnorm.layers.masks import check_shape


class Cache:
    """Keys and values of the positions decoded so far, in memory that is allocated once.

    The model writes to it while it decodes. `reorder` makes row i a copy of row index[i], as beam
    search needs; rows may be dropped or repeated. Keys and values of the encoder's memory are
    stored separately: they are computed in the first step, and one row of them may serve several
    rows of the batch; `select_memory` keeps some of their rows.

    Parameters
    ----------
    depth
        Blocks of the decoder.
    batch
        Sequences decoded at once.
    heads, head_width
        Key/value heads and their width.
    length
        Positions to allocate.
    dtype, device
        Type and device of the keys and values.
    owner
        `cache_key` of the model that may use it; None for the model that uses it first.

    Examples
    --------
    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).eval()
    >>> cache = model.cache(batch=1, length=8)
    >>> for token in (1, 2, 3):
    ...     logits = model(torch.tensor([[token]]), cache=cache)
    >>> cache.used, torch.allclose(logits, model(torch.tensor([[1, 2, 3]]))[:, -1:], atol=1e-5)
    (3, True)
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
        owner: str | None = None,
    ) -> None:
        for name, count in (("batch", batch), ("length", length)):
            if not isinstance(count, int) or count < 1:
                raise InputError(
                    f"the {name} of a cache must be a whole number above 0: got {count!r}."
                )
        self.owner = owner
        shape = (depth, 2, batch, heads, length, head_width)
        self.store = torch.empty(shape, dtype=dtype, device=device)
        self.buffer = self.store  # `store` is its first rows, after rows have been dropped
        self.spare: Tensor | None = None
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.real: Tensor | None = None
        self.next_real: Tensor | None = None  # `real` after the step in progress
        self.used = 0

    @property
    def length(self) -> int:
        """Number of positions allocated."""
        return self.store.shape[4]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.store.shape[2]

    def require_owner(self, key: str, depth: int) -> None:
        """Raise InputError unless the cache belongs to the model with this key, or to none yet.

        Keys and values of another model can have the same shapes, and would be used in silence.
        """
        if self.store.shape[0] != depth:
            raise InputError(
                f"the cache is of another model: it has {self.store.shape[0]} layers, this model "
                f"has {depth}. Create it with the model's own cache()."
            )
        if self.owner is not None and self.owner != key:
            raise InputError(
                "the cache is of another model: only the model that created it, and copies of "
                "that model, can use it. Create it with the model's own cache()."
            )
        self.owner = key

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the newest keys and values of one layer; return all of that layer so far.

        Shapes are (batch, heads, length, head_width).
        """
        self._check(key.shape[0], key.shape[2])
        depth, _, _, heads, _, width = self.store.shape
        if layer >= depth or key.shape[1] != heads or key.shape[3] != width:
            raise InputError(
                f"the cache is of another model: it has {depth} layers with {heads} heads of width "
                f"{width}; layer {layer} here has {key.shape[1]} heads of width {key.shape[3]}. "
                "Create it with the model's own cache()."
            )
        stop = self.used + key.shape[2]
        self.store[layer, 0, :, :, self.used : stop] = key
        self.store[layer, 1, :, :, self.used : stop] = value
        return self.store[layer, 0, :, :, :stop], self.store[layer, 1, :, :, :stop]

    def _check(self, batch: int, length: int) -> None:
        """Raise InputError if the batch differs or `length` more positions do not fit."""
        if self.used + length > self.length:
            raise InputError(
                f"the cache has room for {self.length} positions: got {self.used + length}. "
                f"Create it with length={self.used + length} or more."
            )
        if batch != self.batch:
            raise InputError(
                f"the cache is for a batch of {self.batch}: got {batch}. "
                "Create a cache for this batch."
            )

    def extend_padding(self, real: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Return which positions so far and newest are real, (batch, all); None if all are.

        `real` marks the newest positions, (batch, length). `advance` makes the result permanent.
        """
        self._check(batch, length)
        check_shape(real, "a padding mask", (batch, length))
        self.next_real = None
        if real is None and self.real is None:
            return None
        device = self.store.device
        before = torch.ones(batch, self.used, dtype=torch.bool, device=device)
        newest = torch.ones(batch, length, dtype=torch.bool, device=device)
        before = before if self.real is None else self.real
        self.next_real = torch.cat((before, newest if real is None else real), dim=1)
        return self.next_real

    def advance(self, length: int) -> None:
        """Count positions as decoded, after all layers have written them."""
        self.used += length
        self.real = self.next_real

    def reorder(self, index: Tensor) -> None:
        """Make row i a copy of row index[i]; the new batch has as many rows as indices."""
        self._check_index(index)
        if index.shape[0] == self.batch and torch.equal(index[index], index):
            # No row that is copied is overwritten, so they can be copied one by one, in place.
            with torch.no_grad():
                used = self.store[..., : self.used, :]
                for target, source in enumerate(index.tolist()):
                    if target != source:
                        used[:, :, target] = used[:, :, source]
        else:
            self._gather(index)
        if self.real is not None:
            self.real = self.real.index_select(0, index)

    def _check_index(self, index: Tensor) -> None:
        """Raise InputError unless the indices are integers from 0 to the last row, (rows,)."""
        is_integers = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        if not is_integers or index.ndim != 1 or not len(index):
            shown = f"{index.dtype} of shape {tuple(index.shape)}" if is_integers else f"{index!r}"
            raise InputError(
                f"the rows of a cache are reordered by integers of shape (rows,): got {shown}. Try "
                "torch.tensor([0, 0, 1])."
            )
        if index.device.type != self.store.device.type:
            raise InputError(
                f"the indices must be on the device of the cache, {self.store.device}: got "
                f"{index.device}. Try .to({str(self.store.device)!r})."
            )
        if not has_values(index):
            return
        low, high = (int(end) for end in index.aminmax())
        if low < 0 or high >= self.batch:
            raise InputError(
                f"the rows of this cache are 0 to {self.batch - 1}: got "
                f"{low if low < 0 else high}. Check the indices."
            )

    def _gather(self, index: Tensor) -> None:
        """Copy the used part of the rows to the spare buffer, then swap the two buffers."""
        rows = index.shape[0]
        if self.spare is None or self.spare.shape[2] < rows:
            shape = (*self.store.shape[:2], rows, *self.store.shape[3:])
            self.spare = torch.empty(shape, dtype=self.store.dtype, device=self.store.device)
        store = self.spare[:, :, :rows]
        with torch.no_grad():
            used = self.store[..., : self.used, :]
            torch.index_select(used, 2, index, out=store[..., : self.used, :])
        self.spare, self.buffer, self.store = self.buffer, self.spare, store

    def select_memory(self, rows: Tensor) -> None:
        """Keep only these rows of the encoder's keys and values: the unfinished sentences."""
        for layer, (key, value) in self.memory.items():
            self.memory[layer] = key.index_select(0, rows), value.index_select(0, rows)
