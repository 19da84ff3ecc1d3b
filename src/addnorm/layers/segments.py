"""Segment recurrence: what attention layers read in earlier segments of a long text."""

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.layers.masks import check_shape


class SegmentMemory:
    """What each self-attention read at the last `length` positions before the present segment.

    Transformer-XL: Dai et al. 2019 (1901.02860), §3.2: keys and values are computed from the
    memory and the segment, queries from the segment alone, and no gradient flows into the memory.
    The model reads it and then adds the segment, so calls in order read a text of any length; each
    layer reaches `length` positions further back than the one below.

    Parameters
    ----------
    length
        Positions to remember; 0 remembers nothing.

    Examples
    --------
    >>> from addnorm import build, presets
    >>> changes = {"vocab": 20, "width": 16, "depth": 1, "heads": 2, "positions": "relative"}
    >>> model = build(presets.gpt2(**changes)).eval()
    >>> ids, segments = torch.arange(12)[None], model.segments(length=12)
    >>> parts = [model(part, segments=segments) for part in ids.split(4, dim=1)]
    >>> segments.used, torch.allclose(torch.cat(parts, dim=1), model(ids), atol=1e-5)
    (12, True)
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise InputError(f"a memory must have 0 positions or more: got {length}. Try 128.")
        self.length = length
        self.layers: dict[int, Tensor] = {}
        self.real: Tensor | None = None
        self.used = 0
        self._next: dict[int, Tensor] = {}
        self._next_real: Tensor | None = None

    def join(self, layer: int, x: Tensor) -> Tensor:
        """Return the memory of a layer followed by x, (batch, used + length, width)."""
        joined = torch.cat((self.layers[layer], x), dim=1) if self.used else x
        self._next[layer] = joined[:, max(0, joined.shape[1] - self.length) :].detach()
        return joined

    def extend_padding(self, real: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Return which positions of memory and segment are real, (batch, all); None if all are.

        `real` marks the positions of the segment, (batch, length).
        """
        check_shape(real, "a padding mask", (batch, length))
        if self.used and next(iter(self.layers.values())).shape[0] != batch:
            rows = next(iter(self.layers.values())).shape[0]
            raise InputError(
                f"the memory is of {rows} texts: got a batch of {batch}. Read the same texts on, "
                "or create another memory."
            )
        self._next_real = None
        if real is None and self.real is None:
            return None
        device = (real if real is not None else self.real).device  # type: ignore[union-attr]
        before = torch.ones(batch, self.used, dtype=torch.bool, device=device)
        newest = torch.ones(batch, length, dtype=torch.bool, device=device)
        before = before if self.real is None else self.real
        joined = torch.cat((before, newest if real is None else real), dim=1)
        self._next_real = joined[:, max(0, joined.shape[1] - self.length) :]
        return joined

    def advance(self, length: int) -> None:
        """Make the segment part of the memory, after all layers have read it."""
        self.layers, self.real = self._next, self._next_real
        self.used = min(self.length, self.used + length)
        self._next, self._next_real = {}, None
