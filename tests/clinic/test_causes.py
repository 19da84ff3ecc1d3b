"""Causes of misses and false alarms that models written without sight of the rules showed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import build, presets
from addnorm.clinic import ClinicBatch, Examination, TrainingPlan, examine
from addnorm.errors import InputError

WIDTH, VOCAB = 16, 23


class Block(nn.Module):
    """Pre-norm; `form` joins a branch to the stream."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor], gate: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "ab")
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.form = form

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.form(x, self.attend(self.norms[0](x)))
        return self.form(x, self.down(F.gelu(self.up(self.norms[1](x)))))


class Decoder(nn.Module):
    """A language model; `between` changes the stream after each block."""

    def __init__(
        self,
        form: Callable[[Tensor, Tensor], Tensor] = torch.add,
        between: Callable[[Tensor, Tensor], Tensor] = lambda before, after: after,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(form) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.between = between

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = self.between(x, block(x))
        return self.head(self.norm(x))


def next_token(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids(rows: int = 5, length: int = 10) -> Tensor:
    return torch.randint(1, VOCAB, (rows, length))


def look(
    model: nn.Module, batch: Any = None, loss: Any = next_token, **options: Any
) -> Examination:
    torch.manual_seed(0)
    batch = ids() if batch is None else batch
    return examine(model, batch, loss, sharpness=False, **options)


# ── Shortcuts ─────────────────────────────────────────────────────────────────────────────────────


def test_factors_of_shortcuts_add_where_paths_meet() -> None:
    """block(x) + x doubles the stream although every sum inside the block is right."""
    twice = look(Decoder(between=lambda before, after: before + after))
    assert "shortcut scaled" in twice.names()
    assert twice.evidence.arrangement.shortcut_product == pytest.approx(2**4)
    faded = look(Decoder(between=lambda before, after: after - 0.7 * before))
    assert faded.evidence.arrangement.shortcut_product == pytest.approx(0.3**4, rel=1e-3)


def test_a_difference_that_is_added_again_is_no_factor() -> None:
    """Stochastic depth: x + (block(x) − x)."""
    same = look(Decoder(between=lambda before, after: before + (after - before)))
    assert same.evidence.arrangement.shortcut_product == pytest.approx(1.0)
    assert same.names() == []


class Flat(nn.Module):
    """A model without numbered blocks, the matrices of which are parameters of its own."""

    def __init__(self, *, missing: int = -1, positions: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.table, self.places = (nn.Parameter(torch.randn(n, WIDTH) * 0.3) for n in (VOCAB, 32))
        self.matrices = nn.Parameter(torch.randn(3, 4, WIDTH, WIDTH) * 0.1)
        self.ffns = nn.Parameter(torch.randn(3, 2, WIDTH, WIDTH) * 0.1)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.missing, self.placed, self.causal = missing, positions, causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids] + (self.places[: ids.shape[1]] if self.placed else 0)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for i in range(3):
            y = F.layer_norm(x, (WIDTH,))
            q, k, v = (torch.einsum("bne,ed->bnd", y, self.matrices[i, j]) for j in range(3))
            scores = torch.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5
            scores = scores.masked_fill(hidden, float("-inf")) if self.causal else scores
            mixed = torch.einsum("bqk,bkd->bqd", scores.softmax(-1), v)
            x = x + torch.einsum("bqd,de->bqe", mixed, self.matrices[i, 3])
            y = F.relu(F.layer_norm(x, (WIDTH,)) @ self.ffns[i, 0]) @ self.ffns[i, 1]
            x = y if i == self.missing else x + y
        return self.head(self.norm(x))


def test_a_missing_residual_is_found_without_numbered_blocks() -> None:
    assert look(Flat()).names() == []
    assert "residual missing" in look(Flat(missing=1)).names()


def test_a_table_that_is_indexed_is_an_embedding() -> None:
    model = Flat()
    model.table.requires_grad_(False)
    assert look(model).names() == ["frozen embeddings"]


def test_einsum_is_attention_and_its_missing_positions_are_found() -> None:
    """A matrix that einsum transposes is not one side of an attention."""
    model = Flat(positions=False, causal=False)
    found = look(model, loss=None)
    assert {site.role for site in found.evidence.sites} == {"attention", "ffn"}
    assert found.names() == ["positions not distinguished"]


def test_an_encoder_configured_without_positions_is_warned_about_and_a_decoder_is_not() -> None:
    sizes = dict(vocab=VOCAB, width=WIDTH, depth=2, heads=2, positions="none")
    encoder = build(presets.bert(**sizes, head="class", outputs=3))
    assert look(encoder, loss=None).names() == ["positions not distinguished"]
    assert look(build(presets.gpt2(**sizes))).names() == []


# ── Modes, weights, gradients ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "drop",
    [
        lambda before, after: F.dropout(after, 0.3),
        lambda before, after: nn.Dropout(0.3).train()(after),
    ],
)
def test_dropout_in_evaluation_mode_is_found(drop: Callable[..., Tensor]) -> None:
    found = look(Decoder(between=drop))
    assert found.names() == ["dropout in evaluation mode"]
    assert found.verdict != "healthy"


def test_a_norm_gain_of_zero_is_named_where_it_blocks() -> None:
    model = Decoder()
    nn.init.zeros_(model.norm.weight)
    assert "norm gain is zero" in look(model).names()


def test_a_branch_of_zeros_alone_stays_zero_and_one_zero_matrix_does_not() -> None:
    dead, usual = Decoder(), Decoder()
    for block in dead.blocks:
        for matrix in (block.qkv, block.out, block.up, block.down):
            nn.init.zeros_(matrix.weight)
    for block in usual.blocks:
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.down.weight)
    assert "equal initial weights" in look(dead).names()
    assert look(usual).names() == []


def adapters() -> nn.Module:
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.out.bias.requires_grad_(True)
    return model


def new_head() -> nn.Module:
    model = Decoder().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


@pytest.mark.parametrize("make", [adapters, new_head])
def test_a_model_that_is_mostly_frozen_is_fine_tuned_on_purpose(
    make: Callable[[], nn.Module],
) -> None:
    found = look(make())
    assert found.names() == []
    assert "mostly frozen" in [finding.name for finding in found.findings]


# ── Inputs ────────────────────────────────────────────────────────────────────────────────────────


class Shifted(nn.Module):
    """Shifts its input itself: the answer at t predicts the token at t."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(F.pad(ids[:, :-1], (1, 0)))


def same_token(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def test_labels_are_right_where_the_model_shifts_its_input() -> None:
    assert look(Shifted(), loss=same_token, causal=True).names() == []
    assert look(Decoder(), loss=same_token, causal=True).names() == ["labels misaligned"]


class LengthFirst(nn.Module):
    """(length, rows) throughout, as torch.nn has it by default."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, norm_first=True)
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head, self.leaks = nn.Linear(WIDTH, VOCAB), leaks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: len(ids), None]
        hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(2 if self.leaks else 1)
        return self.head(self.layers(x, mask=hidden))


def next_step(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output[:-1].flatten(0, 1), ids[1:].flatten())


def test_a_length_first_batch_is_read_along_its_length() -> None:
    healthy = look(LengthFirst(), ids(10, 6), next_step)
    assert healthy.names() == [] and healthy.evidence.causal
    assert look(LengthFirst(leaks=True), ids(10, 6), next_step).names() == ["future leaks"]


class Latents(nn.Module):
    """Learned vectors read the tokens by attention, as in Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.latents = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.positions = nn.Embedding(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "abc")
        self.read = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.norms[0](self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        x = self.latents.expand(len(ids), -1, -1)
        x = x + self.read(self.norms[1](x), memory, memory, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norms[2](x).mean(1))


def test_a_stream_that_begins_with_learned_vectors_has_no_small_embeddings() -> None:
    assert "token embeddings too small" not in look(Latents(), loss=None).names()


# ── Arguments ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": None}, "a batch must be a tensor"),
        ({"batch": "text"}, "a batch must be a tensor"),
        ({"model": nn.Linear}, "not the class"),
        ({"loss": 3}, "loss must be a function"),
        ({"loss": lambda output: output.sum()}, "as a function of output and targets"),
        ({"plan": 1e-3}, "plan must be a TrainingPlan"),
        ({"pad": "0"}, "pad must be an integer"),
        ({"optimizer": "adam"}, "optimizer must be an optimizer of torch"),
        ({"more_batches": [torch.randn(5, 10)]}, "must have the form of the batch"),
        ({"batch": ClinicBatch((ids(), ids(), ids()))}, "must be what Decoder.forward takes"),
    ],
)
def test_arguments_of_another_kind_are_one_clear_error(change: dict[str, Any], words: str) -> None:
    plan = TrainingPlan(lr=1e-3)
    arguments = {"model": Decoder(), "batch": ids(), "loss": next_token, "plan": plan} | change
    with pytest.raises(InputError, match=words):
        examine(**arguments, sharpness=False)
