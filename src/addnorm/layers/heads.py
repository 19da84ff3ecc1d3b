"""Output heads: from the last (batch, length, width) to tokens, classes or numbers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.layers.feedforward import Activation
from addnorm.layers.norms import Norm


class TokenHead(nn.Module):
    """logits = W x (+ b), W the token embedding itself when tied.

    Press, Wolf 2017 (1608.05859).

    Parameters
    ----------
    width, vocab
        Sizes of W.
    tied
        Use the token embedding as W.
    bias
        Add b.
    scaled
        Multiply x by 1/√width first (T5 v1.0).
    cap
        Soft cap c on the logits z: c tanh(z / c) (Gemma 2, 2408.00118, §2).
    """

    def __init__(
        self,
        width: int,
        vocab: int,
        *,
        tied: bool,
        bias: bool,
        scaled: bool,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.cap = width**-0.5 if scaled else 1.0, cap
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, width))
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None

    def prepare(self, x: Tensor) -> Tensor:
        """Return what the output matrix is applied to."""
        return x if self.scale == 1.0 else x * self.scale

    def matrix(self, embedding: Tensor) -> Tensor:
        """Return the output matrix, (vocab, width)."""
        return embedding if self.weight is None else self.weight

    def finish(self, logits: Tensor) -> Tensor:
        """Return the logits after the soft cap, if there is one."""
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.finish(F.linear(self.prepare(x), self.matrix(embedding), self.bias))


class MaskedHead(TokenHead):
    """logits = W N(σ(V x + c)) + b: BERT's head for masked tokens.

    Devlin et al. 2019 (1810.04805), §3.1, as in the authors' code.

    Parameters
    ----------
    width, vocab, tied
        As for TokenHead.
    norm
        Makes N.
    embed_width
        Width of the embedding, where that is another (ELECTRA).
    activation
        σ, gelu in the paper.
    """

    def __init__(
        self,
        width: int,
        vocab: int,
        norm: Norm,
        *,
        tied: bool,
        embed_width: int | None = None,
        activation: Activation = F.gelu,
    ) -> None:
        inner = embed_width or width
        super().__init__(inner, vocab, tied=tied, bias=True, scaled=False)
        self.transform = nn.Linear(width, inner)
        self.norm, self.activation = norm(inner), activation

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.transform(x)))


class PooledHead(nn.Module):
    """y = W pool(x) + b: one vector for each sequence, then classes or numbers.

    With pool=none there is one y for each position, (batch, length, outputs).

    Parameters
    ----------
    width, outputs
        Sizes of W.
    pool
        How positions become one vector: first, mean or last; none to keep them apart.
    pooler
        What follows: none, tanh(V · + c) as in BERT, relu as in FT-Transformer, relu(V · + c) as
        in DistilBERT (dense-relu) or gelu(V · + c) as in ELECTRA (dense-gelu).
    dropout
        Module applied before W.
    """

    def __init__(
        self, width: int, outputs: int, *, pool: str, pooler: str, dropout: nn.Module
    ) -> None:
        super().__init__()
        self.pool = pool
        poolers: dict[str, Callable[[], nn.Module]] = {
            "none": nn.Identity,
            "tanh": lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
            "relu": nn.ReLU,
            "dense-relu": lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            "dense-gelu": lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
        }
        self.pooler = poolers[pooler]()
        self.dropout = dropout
        self.output = nn.Linear(width, outputs)

    def vector(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Return what W is applied to, before dropout: (batch, width)."""
        return self.pooler(POOLS[self.pool](x, real))

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        return self.classify(self.vector(x, real))

    def classify(self, vector: Tensor) -> Tensor:
        """Return classes or numbers from the vector of each sequence."""
        return self.output(self.dropout(vector))


def pool_first(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the first real position, (batch, width)."""
    if real is None:
        return x[:, 0]
    return x[torch.arange(x.shape[0], device=x.device), real.int().argmax(dim=1)]


def pool_mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean of the real positions, (batch, width)."""
    if real is None:
        return x.mean(dim=1)
    return (x * real[..., None]).sum(dim=1) / real.sum(dim=1, keepdim=True).clamp(min=1)


def pool_last(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the last real position, (batch, width)."""
    if real is None:
        return x[:, -1]
    # The running count of real positions first reaches its maximum at the last real position.
    return x[torch.arange(x.shape[0], device=x.device), real.cumsum(dim=1).argmax(dim=1)]


def pool_none(x: Tensor, real: Tensor | None) -> Tensor:
    """Return all positions, (batch, length, width)."""
    return x


POOLS = {"first": pool_first, "mean": pool_mean, "last": pool_last, "none": pool_none}
