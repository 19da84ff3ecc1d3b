"""Adaptive attention span: each head learns how far back it looks."""

import math

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError


class AdaptiveSpan(nn.Module):
    """a_ij ∝ m_z(|i − j|) exp score_ij,   m_z(x) = min(max((R + z − x) / R, 0), 1), z learned

    Sukhbaatar et al. 2019 (1905.07799), eq. 4–6: keys up to z positions away have their full
    weight, then it falls to 0 over R more. Here log m is added to the scores, which is the same.
    z = `largest` · `size`, one `size` from 0 to 1 for each head; training clamps it to that range
    before each pass, and `mean_span` is what its penalty multiplies (§3: the L1 norm of z).

    Parameters
    ----------
    heads
        Number of heads.
    largest
        Largest z, in positions.
    ramp
        R, in positions.
    """

    def __init__(self, heads: int, largest: int, ramp: int) -> None:
        super().__init__()
        for name, value in (("span", largest), ("span_ramp", ramp)):
            if value < 1:
                raise ConfigError(f"model.{name} must be positive: got {value}. Try 32.")
        self.largest, self.ramp = largest, ramp
        self.size = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def clamp_(self) -> None:
        """Set sizes that an optimizer moved out of range to 0 or 1."""
        if bool(((self.size < 0) | (self.size > 1)).any()):
            self.size.clamp_(0, 1)

    def spans(self) -> Tensor:
        """Return z of each head, (heads,)."""
        return self.largest * self.size.clamp(0, 1)

    def window(self) -> int:
        """Return the distance from which no head sees a key."""
        if torch.compiler.is_compiling() or self.size.device.type == "meta":
            return self.largest + self.ramp
        return math.ceil(float(self.spans().detach().max()) + self.ramp)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return log m_z of each distance, (1, heads, query, key); −∞ beyond the span.

        `queries` and `keys` are their positions.
        """
        distance = (queries[:, None] - keys[None, :]).abs()
        m = (self.ramp + self.spans()[:, None, None] - distance) / self.ramp
        inside = m > 0
        # The logarithm is taken of 1 outside, whose gradient is 0 and not 0 · ∞.
        log = torch.where(inside, m.clamp(max=1), 1.0).log()
        return log.masked_fill(~inside, float("-inf"))[None]

    def extra_repr(self) -> str:
        return f"{len(self.size)} heads, up to {self.largest} + {self.ramp}"


def mean_span(model: nn.Module) -> Tensor:
    """Return the mean z over all heads of a model, in positions; 0 if it has no adaptive spans.

    >>> mean_span(AdaptiveSpan(4, 64, 8)).item()
    0.0
    """
    spans = [part.spans() for part in model.modules() if isinstance(part, AdaptiveSpan)]
    return torch.cat(spans).mean() if spans else torch.zeros(())
