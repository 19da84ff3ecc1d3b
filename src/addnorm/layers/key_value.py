"""Learned keys and values: in attention besides the sequence, or as a sublayer of their own.

A feed-forward network U σ(V x) is attention of x to the rows of V as keys and the columns of U as
values, with σ in place of the softmax (Sukhbaatar et al. 2019, §3.1; Geva et al. 2021, 2012.14913).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import ConfigError
from addnorm.layers.context import Context
from addnorm.layers.norms import BatchNorm


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


class ProductKeyMemory(nn.Module):
    """F(x) = Σ_h Σ_i softmax(top_k q_h·K_h)_i v_i, over n² keys that are pairs of sub-keys

    Lample et al. 2019 (1907.05242), §3: the query q_h = W_h x is cut in halves, key (i, j) has the
    score q′·a_i + q″·b_j, and the k best of n² pairs are among the k × k best of each half. So a
    position costs O(n + k²) and reads k values for each head, of n² that all heads share. Queries
    have a batch norm (§3.3, table 4). Sub-keys start uniform up to 1/√key_width, values as
    N(0, 1/width), as in the authors' code.

    Parameters
    ----------
    width
        Width of the stream, and of the values.
    bias
        Whether the projection to the queries has a bias.
    subkeys
        n; there are n² values (the paper has 512).
    best
        k.
    heads
        Number of queries of each position.
    key_width
        Width of a query; a sub-key has half of it.
    batch_norm
        Whether queries are normalised over the batch.
    """

    def __init__(
        self,
        width: int,
        *,
        bias: bool = True,
        subkeys: int = 128,
        best: int = 32,
        heads: int = 4,
        key_width: int = 256,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        _check_ffn_option(subkeys > 0, "subkeys", "1 or more", subkeys)
        _check_ffn_option(0 < best <= subkeys, "best", f"from 1 to subkeys={subkeys}", best)
        _check_ffn_option(heads > 0, "heads", "1 or more", heads)
        even = key_width > 0 and key_width % 2 == 0
        _check_ffn_option(even, "key_width", "an even number above 0", key_width)
        self.heads, self.best = heads, best
        self.input = nn.Linear(width, heads * key_width, bias=bias)
        self.norm = BatchNorm(heads * key_width, 1e-5, True) if batch_norm else nn.Identity()
        keys = torch.empty(heads, 2, subkeys, key_width // 2)
        self.key = nn.Parameter(keys.uniform_(-(key_width**-0.5), key_width**-0.5))
        self.output = nn.EmbeddingBag(subkeys**2, width, mode="sum")
        nn.init.normal_(self.output.weight, std=width**-0.5)
        self.inner = nn.Identity()

    @property
    def subkeys(self) -> int:
        """n: there are n² values."""
        return self.key.shape[2]

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen values, (batch, length, heads, best).

        The number of pair (i, j) is n i + j.
        """
        q = self.norm(self.input(x)).unflatten(-1, (self.heads, 2, -1))
        scores = torch.einsum("blhsw,hsnw->blhsn", q, self.key)
        top, rows = scores.topk(self.best, dim=-1)  # (batch, length, heads, 2, best)
        sums = (top[..., 0, :, None] + top[..., 1, None, :]).flatten(-2)
        numbers = (rows[..., 0, :, None] * self.subkeys + rows[..., 1, None, :]).flatten(-2)
        chosen, places = sums.topk(self.best, dim=-1)
        return chosen.softmax(dim=-1), numbers.gather(-1, places)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weights, numbers = (part.flatten(2) for part in self.choose(x))
        bags = numbers.flatten(0, 1)  # (batch · length, heads · best)
        read = F.embedding_bag(
            bags, self.output.weight, per_sample_weights=weights.flatten(0, 1), mode="sum"
        )
        return read.view(*x.shape[:2], -1)

    def matrices(self) -> dict[str, Tensor]:
        """Return the weight of the projection to the queries."""
        return {"input": self.input.weight}

    @torch.no_grad()
    def scale_(self, gain: float) -> None:
        """Multiply the values by gain², as the two matrices of a feed-forward do together."""
        self.output.weight.mul_(gain**2)


def _check_ffn_option(holds: bool, option: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"model.ffn_options.{option} must be {rule}: got {value!r}.")
