"""Residual connections that are written in other ways than x + f(x)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import addnorm
from addnorm.clinic import Examination
from tests.clinic.handwritten import VOCAB, WIDTH, LanguageOf


@torch.library.custom_op("addnorm_tests::add_norm", mutates_args=())
def add_norm(x: Tensor, stream: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = x + stream
    return F.layer_norm(total, total.shape[-1:], gain), total.clone()


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], inputs[2])


def _backward(ctx: Any, normed: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, gain = (each.detach().requires_grad_() for each in ctx.saved_tensors)
    with torch.enable_grad():
        again = F.layer_norm(x, x.shape[-1:], gain)
    of_x, of_gain = torch.autograd.grad(again, (x, gain), normed)
    return of_x + total, of_x + total, of_gain


add_norm.register_autograd(_backward, setup_context=_save)

Join = Callable[[Tensor, Tensor], Tensor]
JOINS: dict[str, Join] = {
    "stack": lambda x, f: torch.stack([x, f]).sum(0),
    "cat": lambda x, f: torch.cat([x[:, None], f[:, None]], dim=1).sum(1),
    "addcmul": lambda x, f: torch.addcmul(x, torch.ones(()), f),
    "sum": lambda x, f: sum([x, f]),  # type: ignore[return-value]
}


class Block(nn.Module):
    def __init__(self, join: Join) -> None:
        super().__init__()
        self.join, self.norm, self.norm2 = join, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attend(self.norm(x)))
        return self.join(x, self.feed(self.norm2(x)))


class ByMatrix(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        inside = F.gelu(self.up(self.norm2(x))).flatten(0, 1)
        return torch.addmm(x.flatten(0, 1), inside, self.down.weight.t()).view(x.shape)


class WithBias(Block):
    """A bias of the logits that the first block computes and the others add, as in WavLM."""

    def __init__(self, join: Join) -> None:
        super().__init__(join)
        self.biases: list[Tensor] = []

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if not self.biases:
            self.biases.append(x @ x.transpose(1, 2))
        logits = torch.baddbmm(self.biases[0], q, k.transpose(1, 2))
        out: Tensor = self.out(logits.softmax(dim=-1) @ v)
        return out


class Language(LanguageOf):
    def __init__(self, join: Join = torch.add, kind: type[Block] = Block) -> None:
        super().__init__(kind(join) for _ in range(3))


class SharedBias(Language):
    def __init__(self) -> None:
        super().__init__(kind=WithBias)

    def forward(self, x: Tensor) -> Tensor:
        shared: list[Tensor] = []
        for block in self.blocks:
            assert isinstance(block, WithBias)
            block.biases = shared
        return super().forward(x)


class Fused(Language):
    def forward(self, x: Tensor) -> Tensor:
        f = self.tokens(x) + self.places.weight[: x.shape[1]]
        stream = torch.zeros_like(f)
        for block in self.blocks:
            assert isinstance(block, Block)
            normed, stream = add_norm(f, stream, block.norm.weight)
            normed, stream = add_norm(block.attend(normed), stream, block.norm2.weight)
            f = block.feed(normed)
        out: Tensor = self.head(add_norm(f, stream, self.norm.weight)[0])
        return out


def _by_einsum(x: Tensor, f: Tensor) -> Tensor:
    return torch.einsum("nbtd,n->btd", torch.stack([x, f]), torch.ones(2))


def quick(model: nn.Module) -> Examination:
    ids = torch.randint(VOCAB, (6, 16))
    return addnorm.examine(model, ids, causal=True, sharpness=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", JOINS)
def test_other_sums_are_sites(name: str) -> None:
    result = quick(Language(JOINS[name]))
    roles = [site.role for site in result.evidence.sites]
    assert (result.verdict, roles) == ("healthy", ["attention", "ffn"] * 3)
    assert result.evidence.arrangement.name == "pre"


def test_a_matrix_product_that_adds_the_stream_is_a_site() -> None:
    result = quick(Language(kind=ByMatrix))
    assert (result.verdict, len(result.evidence.sites)) == ("healthy", 6)
    assert result.evidence.arrangement.name == "pre"


def test_logits_and_their_bias_are_no_site() -> None:
    evidence = quick(SharedBias()).evidence
    assert [site.role for site in evidence.sites] == ["attention", "ffn"] * 3


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Fused(), "addnorm_tests::add_norm takes the stream and a branch"),
        (lambda: Language(_by_einsum), "a gradient passes the attention of blocks.0 unchanged"),
    ],
)
def test_what_cannot_be_seen_is_neither_missing_nor_healthy(
    model: Callable[[], nn.Module], reason: str
) -> None:
    result = quick(model())
    assert (result.verdict, result.names()) == ("not examined", [])
    assert reason in {check.name: check.reason for check in result.checks}["residual stream"]


class ByEinsum(Block):
    """Weights and values multiplied outside a fused kernel, within one branch for both parts."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        logits = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).flatten(2)
        return self.feed(self.norm2(self.out(mixed)))


@pytest.mark.parametrize("length", [4, 16])
def test_values_that_attention_passes_are_no_hidden_shortcut(length: int) -> None:
    ids = torch.randint(VOCAB, (6, length))
    result = addnorm.examine(Language(kind=ByEinsum), ids, causal=True, sharpness=False)
    assert result.names() == ["no residual connections"]


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_branch_alone_is_no_hidden_shortcut(scale: float) -> None:
    model = Language(lambda x, f: scale * f)
    assert quick(model).names() == ["no residual connections"]


def test_factors_of_all_shortcuts_are_multiplied_and_shown() -> None:
    for join in (lambda x, f: 2 * x + f, lambda x, f: x + x + f, lambda x, f: x / 0.5 + f):
        arrangement = quick(Language(join)).evidence.arrangement
        assert arrangement.shortcut_product == pytest.approx(2**6)
        assert arrangement.text().startswith("pre, scaled shortcut: x ← λx + f(N(x))")


class ScaledEmbeddings(Language):
    def forward(self, x: Tensor) -> Tensor:
        h = 8.0 * self.tokens(x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out


def test_a_factor_that_the_branches_read_is_not_of_the_shortcut() -> None:
    assert quick(ScaledEmbeddings()).evidence.arrangement.shortcut_product == 1.0
