"""Learned keys and values: vectors that attention reads besides the sequence.

A feed-forward network U σ(V x) is attention of x to the rows of V as keys and the columns of U as
values, with σ in place of the softmax (Sukhbaatar et al. 2019, §3.1; Geva et al. 2021, 2012.14913).
"""

import torch
from torch import Tensor, nn


class PersistentVectors(nn.Module):
    """N keys and values of each head that are learned and belong to no position

    All-attention: Sukhbaatar et al. 2019 (1907.01470), eq. 7–9. They join the sequence in one
    softmax, get no position term, and replace the feed-forward network: with N = ffn_width they
    have as many weights as one. Stored keys ~ N(0, 1/head_width) are used times √head_width and
    values ~ N(0, 1/N) times √N, as in the authors' code, so that both start with unit variance and
    are still learned at the rate of the other weights.

    Parameters
    ----------
    kv_heads, head_width
        Key/value heads and their width.
    count
        N.
    """

    def __init__(self, kv_heads: int, head_width: int, count: int) -> None:
        super().__init__()
        shape = (kv_heads, count, head_width)
        self.key = nn.Parameter(torch.empty(shape).normal_(std=head_width**-0.5))
        self.value = nn.Parameter(torch.empty(shape).normal_(std=count**-0.5))

    @property
    def count(self) -> int:
        """N, the number of vectors of each head."""
        return self.key.shape[1]

    def forward(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (batch, kv_heads, N, head_width)."""
        _, count, width = self.key.shape
        keys, values = width**0.5 * self.key, count**0.5 * self.value
        return keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1)

    @torch.no_grad()
    def scale_(self, gain: float) -> None:
        """Multiply the values, as arrangements do with the weights along a branch."""
        self.value.mul_(gain)

    def extra_repr(self) -> str:
        heads, count, width = self.key.shape
        return f"{count} vectors of {heads} heads of width {width}"
