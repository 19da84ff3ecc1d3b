"""Attention that mixes along the wrong axis: softmax, heads, norms; and attention that may."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import addnorm
from addnorm.clinic import Examination
from tests.clinic.handwritten import VOCAB, WIDTH, LanguageOf

HEADS, LENGTH = 4, 16
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def weigh(q: Tensor, k: Tensor, dim: int) -> Tensor:
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -1e9).softmax(dim)


def by_softmax(dim: int, copy: bool = False) -> Mix:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = weigh(heads_of(q), heads_of(k), dim)
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if copy else weights
        return (weights @ heads_of(v)).transpose(1, 2).flatten(2)

    return mix


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Logits (batch, query, key, heads), as in code that came from TensorFlow."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    logits = torch.einsum("bihd,bjhd->bijh", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)[..., None]
    weights = logits.masked_fill(future, -1e9).softmax(dim=2)
    return torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2)


def by_talking_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Shazeer et al. 2020 (2003.02436): a matrix over the heads after the softmax."""
    weights = weigh(heads_of(q), heads_of(k), -1)
    weights = torch.einsum(
        "bhij,hg->bgij", weights, 0.5 * torch.ones(HEADS, HEADS).requires_grad_()
    )
    return (weights @ heads_of(v)).transpose(1, 2).flatten(2)


def by_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, length, width = q.shape
    q, k, v = (x.reshape(rows, HEADS, length, width // HEADS) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, width)


def by_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    band = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril().triu(-1)
    q, k, v = heads_of(q), heads_of(k), heads_of(v)
    return F.scaled_dot_product_attention(q, k, v, band).transpose(1, 2).flatten(2)


class OverBatch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Block(nn.Module):
    def __init__(self, mix: Mix, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.mix, self.norm, self.norm2 = mix, norm(WIDTH), norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(self.mix(q, k, v))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Language(LanguageOf):
    def __init__(self, mix: Mix, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__(Block(mix, norm) for _ in range(2))


def quick(model: nn.Module) -> Examination:
    ids = torch.randint(VOCAB, (6, LENGTH))
    return addnorm.examine(model, ids, causal=True, sharpness=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_softmax_over_rows_heads_or_queries_is_found(dim: int, copy: bool) -> None:
    assert "softmax over the wrong axis" in quick(Language(by_softmax(dim, copy))).names()


@pytest.mark.parametrize(
    "mix", [by_softmax(-1), by_softmax(-1, copy=True), by_einsum, by_talking_heads, by_window]
)
def test_attention_over_keys_in_any_order_of_axes_is_healthy(mix: Mix) -> None:
    result = quick(Language(mix))
    assert (result.verdict, [f.name for f in result.findings if f.severity != "note"]) == (
        "healthy",
        [],
    )


def test_heads_cut_out_of_the_sequence_are_found() -> None:
    result = quick(Language(by_view))
    assert result.names() == ["neighbour not read"]
    assert "position 4 does not depend on the token at 3" in result.findings[0].evidence


def test_branches_that_start_at_zero_read_no_neighbour_yet() -> None:
    model = Language(by_softmax(-1))
    for block in model.blocks:
        assert isinstance(block, Block)
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.out.bias)
    assert "neighbour not read" not in quick(model).names()


def test_batch_norm_shows_a_causal_model_the_future_while_it_trains() -> None:
    model = Language(by_softmax(-1), OverBatch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "future in batch statistics" in quick(model).names()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_answers_that_are_all_nan_are_examined_without_a_warning() -> None:
    model = Language(by_softmax(-1))
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    result = quick(model)
    assert result.names() == ["weights not finite"]
