"""Healthy models and batches in unusual styles, written without sight of the clinic's rules.

None of them is wrong: every finding above a note is a false alarm. Where a model does something
that looks like a sickness, the comment says why it is right.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch
from bench.clinic_unseen_bases import (
    HEADS,
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    Around,
    Case,
    HandLM,
    TorchLM,
    causal_batch,
    class_batch,
    hand,
    hub,
    ids,
    lm,
    next_token,
    our_translator,
    ours,
    padded,
    torched,
)

HEALTHY: dict[str, Callable[[], Case]] = {}


def healthy(make: Callable[[], Case]) -> Callable[[], Case]:
    HEALTHY[make.__name__.replace("_", " ")] = make
    return make


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -1e30)).softmax(-1) @ v


class SelfAttention(nn.Module):
    """Multi-head attention with a fused projection; `mask` is True where a key is visible."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS):
        super().__init__()
        self.qkv, self.proj, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1)
        )
        return self.proj(attention(q, k, v, mask).transpose(-2, -3).flatten(-2))


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class PreBlock(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = SelfAttention(width), mlp(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.n1(x), mask)
        return x + self.mlp(self.n2(x))


class Stack(nn.Module):
    """Token embeddings, blocks called by a function, final norm, head."""

    def __init__(
        self,
        blocks: list[nn.Module],
        run: Callable[..., Tensor],
        outputs: int = VOCAB,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks, self.run = nn.ModuleList(blocks), run
        self.norm, self.head = norm or nn.LayerNorm(WIDTH), nn.Linear(WIDTH, outputs)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens.long()) + self.wpe.weight[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self, self.embed(tokens))))


def tril(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


def in_order(self: Stack, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x, tril(x))
    return x


def blocks(count: int = 3) -> list[nn.Module]:
    return [PreBlock() for _ in range(count)]


# ── Our bases of the sick models, as they are when nothing is broken ──────────────────────────────

HEALTHY["base: ours"] = lambda: lm(ours())
HEALTHY["base: torch.nn"] = lambda: lm(TorchLM())
HEALTHY["base: torch.nn classes"] = lambda: Case(torched({"causal": False, "classes": 5}), ids())
HEALTHY["base: hand-written"] = lambda: lm(HandLM())
HEALTHY["base: hand-written classes"] = lambda: Case(hand({"causal": False, "classes": 5}), ids())
HEALTHY["base: BERT"] = lambda: Case(hub("bert"), class_batch())
HEALTHY["base: Llama"] = lambda: Case(hub("llama"), causal_batch())
HEALTHY["base: BART"] = lambda: Case(hub("bart"), {"input_ids": ids(), "labels": ids(length=9)})
HEALTHY["base: ours, translation"] = lambda: Case(
    our_translator(), (ids(), ids(length=9)), lambda out, pair: next_token(out, pair[1])
)
HEALTHY["base: ours, padded left"] = lambda: Case(
    ours(pad=0), padded("left")[0], _next_real_token, {"pad": 0, "causal": True}
)
HEALTHY["base: ours, optimizer with two groups"] = lambda: _two_groups()


def _next_real_token(output: Tensor, tokens: Tensor) -> Tensor:
    targets = tokens[:, 1:].masked_fill(tokens[:, :-1] == 0, -100)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets.flatten())


def _two_groups() -> Case:
    """No weight decay for biases and norms, as everybody does."""
    model = TorchLM()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return lm(model, optimizer=torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95)))


# ── Structures ────────────────────────────────────────────────────────────────────────────────────


@healthy
def shared_block() -> Case:
    """Universal Transformer: one block six times."""
    block = PreBlock()
    return lm(Stack([block] * 6, in_order))


@healthy
def shifted_inside() -> Case:
    """Shifts right inside forward: the own token may not move the own answer, which predicts it."""

    def call(self: Any, tokens: Tensor) -> Tensor:
        return self.inner(F.pad(tokens[:, :-1], (1, 0)))

    def loss(output: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), tokens.flatten())

    return Case(Around(Stack(blocks(), in_order), call), ids(), loss, {"causal": True})


class Experts(nn.Module):
    """Top-1 mixture of experts: an expert that no token chose has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 8), nn.ModuleList(mlp() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where = choice == index
            if where.any():
                y[where] = weight[where][:, None] * expert(x[where])
        return y


@healthy
def mixture_of_experts() -> Case:
    model = Stack(blocks(), in_order)
    for block in model.blocks:
        block.mlp = Experts()
    return lm(model)


class DiTBlock(nn.Module):
    """adaLN-Zero (Peebles and Xie 2023): all gates and the output are 0 at the start, by design."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in "ab")
        self.attn, self.mlp = SelfAttention(), mlp()
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        nn.init.zeros_(self.ada[1].weight)
        nn.init.zeros_(self.ada[1].bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, b1, g1, s2, b2, g2 = self.ada(c)[:, None].chunk(6, -1)
        x = x + g1 * self.attn(self.n1(x) * (1 + s1) + b1)
        return x + g2 * self.mlp(self.n2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self, zero: bool):
        super().__init__()
        self.embed, self.pos = (
            nn.Conv2d(3, WIDTH, 4, 4),
            nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1),
        )
        self.time, self.blocks = nn.Linear(1, WIDTH), nn.ModuleList(DiTBlock() for _ in range(3))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48)
        if zero:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, image: Tensor, t: Tensor) -> Tensor:
        x, c = self.embed(image).flatten(2).transpose(1, 2) + self.pos, self.time(t[:, None])
        for block in self.blocks:
            x = block(x, c)
        return F.fold(self.out(self.norm(x)).transpose(1, 2), 16, 4, stride=4)


def _dit(zero: bool) -> Case:
    noise = torch.randn(ROWS, 3, 16, 16)
    loss = lambda out, targets: F.mse_loss(out, targets)  # noqa: E731
    return Case(
        DiT(zero), ClinicBatch((torch.randn(ROWS, 3, 16, 16), torch.rand(ROWS)), noise), loss
    )


@healthy
def diffusion_transformer_gates_zero() -> Case:
    return _dit(zero=False)


@healthy
def diffusion_transformer_output_zero() -> Case:
    return _dit(zero=True)


class Perceiver(nn.Module):
    """Latents read the input by cross-attention; the input's own order is given by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.latents = nn.Parameter(torch.randn(5, WIDTH) * 0.3)
        self.nq, self.nk, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.blocks, self.head = nn.ModuleList(blocks(2)), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.nk(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        x = self.latents.expand(len(tokens), -1, -1)
        x = x + self.read(self.nq(x), memory, memory, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@healthy
def perceiver() -> Case:
    return Case(Perceiver(), ids())


@healthy
def set_transformer() -> Case:
    """A set has no order: no positions is right."""
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True),
        2,
        enable_nested_tensor=False,
    )

    def call(self: Any, points: Tensor) -> Tensor:
        return self.parts["out"](net_of(self)(self.parts["inp"](points)).mean(1))

    def net_of(self: Any) -> nn.Module:
        return self.inner

    return Case(
        Around(net, call, inp=nn.Linear(3, WIDTH), out=nn.Linear(WIDTH, 4)),
        torch.randn(ROWS, 20, 3),
    )


@healthy
def clip_contrastive() -> Case:
    """Every row is compared with every other: the rows must be mixed in the output."""
    import transformers as t

    text = dict(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        eos_token_id=2,
    )
    vision = dict(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        image_size=16,
        num_attention_heads=HEADS,
        patch_size=4,
    )
    model = t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    tokens = ids(low=3)
    tokens[:, -1] = 2
    return Case(
        model,
        {"input_ids": tokens, "pixel_values": torch.randn(ROWS, 3, 16, 16), "return_loss": True},
    )


class Towers(nn.Module):
    """Two hand-written towers and the InfoNCE loss inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            Stack(blocks(2), lambda s, x: [x := k(x) for k in s.blocks][-1], 16) for _ in "ab"
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        u, v = (F.normalize(m(t).mean(1), dim=-1) for m, t in ((self.a, left), (self.b, right)))
        return u @ v.T / 0.1


@healthy
def two_towers() -> Case:
    loss = lambda scores, _: F.cross_entropy(scores, torch.arange(len(scores)))  # noqa: E731
    return Case(Towers(), (ids(), ids()), loss)


@healthy
def normalised_gpt() -> Case:
    """nGPT (Loshchilov et al. 2024): x ← norm(x + α (norm(f) - x)), no norm layers at all."""

    def run(self: Stack, x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1)
        for block in self.blocks:
            for f in (lambda y, b=block: b.attn(y, tril(y)), block.mlp):
                y = F.normalize(f(x * WIDTH**0.5), dim=-1)
                x = F.normalize(torch.lerp(x, y, 0.2), dim=-1)
        return x * WIDTH**0.5

    model = Stack(blocks(), run, norm=nn.Identity())
    for block in model.blocks:
        block.n1, block.n2 = nn.Identity(), nn.Identity()
    return lm(model)


@healthy
def u_shaped_skips() -> Case:
    """U-ViT: long skips by concatenation."""
    down, up = nn.ModuleList(blocks(2)), nn.ModuleList(blocks(2))
    joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def run(self: Stack, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks[0]:
            x = block(x, tril(x))
            kept.append(x)
        for block, join in zip(self.blocks[1], self.blocks[2], strict=True):
            x = block(join(torch.cat([x, kept.pop()], -1)), tril(x))
        return x

    return lm(Stack([down, up, joins], run))


@healthy
def reversible() -> Case:
    """Two streams (Gomez et al. 2017)."""

    def run(self: Stack, x: Tensor) -> Tensor:
        a = b = x
        for block in self.blocks:
            a = a + block.attn(block.n1(b), tril(b))
            b = b + block.mlp(block.n2(a))
        return (a + b) / 2

    return lm(Stack(blocks(), run))


@healthy
def sigmoid_gated_attention_heads() -> Case:
    class Gated(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.gate(x).sigmoid() * super().forward(x, mask)

    model = Stack(blocks(), in_order)
    for block in model.blocks:
        block.attn = Gated()
    return lm(model)


@healthy
def rezero_by_hand() -> Case:
    """Bachlechner et al. 2021: gates that start at 0; branches contribute nothing at first."""

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp, self.gate = SelfAttention(), mlp(), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x + self.gate * self.attn(x, mask)
            return x + self.gate * self.mlp(x)

    return lm(Stack([Zero() for _ in range(3)], in_order))


@healthy
def zero_output_projections() -> Case:
    """muP and modded-nanoGPT start every output projection at 0."""
    model = Stack(blocks(), in_order)
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
        nn.init.zeros_(block.mlp[2].weight)
    return lm(model)


@healthy
def zero_head() -> Case:
    """A head that starts at 0: all gradients below it are 0 in the first step only."""
    model = Stack(blocks(), in_order)
    nn.init.zeros_(model.head.weight)
    return lm(model)


@healthy
def stochastic_depth() -> Case:
    def run(self: Stack, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x, tril(x)) - x
            if self.training:
                keep = (torch.rand(len(x), 1, 1) < 0.8) / 0.8
                y = y * keep
            x = x + y
        return x

    return lm(Stack(blocks(4), run))


class Conformer(nn.Module):
    """Macaron half-steps, convolution with BatchNorm, GLU (Gulati et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.f1, self.f2, self.attn = mlp(), mlp(), SelfAttention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.point, self.depth = (
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
        )
        self.bn, self.last = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.f1(self.norms[0](x))
        x = x + self.attn(self.norms[1](x))
        y = F.glu(self.point(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.last(F.silu(self.bn(self.depth(y)))).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.f2(self.norms[3](x)))


@healthy
def conformer_ctc() -> Case:
    net = nn.Sequential(Conformer(), Conformer())

    def call(self: Any, sound: Tensor) -> Tensor:
        x = self.parts["sub"](sound.transpose(1, 2)).transpose(1, 2)
        return self.parts["out"](self.inner(x + self.parts["pos"].weight[: x.shape[1]]))

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        n = torch.full((len(out),), out.shape[1])
        return F.ctc_loss(
            out.log_softmax(-1).transpose(0, 1), targets, n, torch.full((len(out),), 4)
        )

    model = Around(
        net,
        call,
        sub=nn.Conv1d(8, WIDTH, 3, 2, 1),
        pos=nn.Embedding(40, WIDTH),
        out=nn.Linear(WIDTH, 11),
    )
    return Case(model, ClinicBatch(torch.randn(ROWS, 40, 8), torch.randint(1, 11, (ROWS, 4))), loss)


@healthy
def patch_time_series() -> Case:
    """PatchTST: channels folded into the batch, each window normalised by its own statistics."""

    class Patch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.pos = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(6, WIDTH) * 0.2)
            self.blocks, self.out = nn.ModuleList(blocks(2)), nn.Linear(6 * WIDTH, 12)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, series: Tensor) -> Tensor:
            mean, std = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
            x = ((series - mean) / std).transpose(1, 2).unfold(2, 8, 8)
            shape, x = x.shape[:2], self.inp(x).flatten(0, 1) + self.pos
            for block in self.blocks:
                x = block(x)
            out = self.out(self.norm(x).flatten(1)).unflatten(0, shape).transpose(1, 2)
            return out * std + mean

    loss = lambda out, targets: F.l1_loss(out, targets)  # noqa: E731
    return Case(Patch(), ClinicBatch(torch.randn(ROWS, 48, 3), torch.randn(ROWS, 12, 3)), loss)


# ── Adapters, outputs, batches ────────────────────────────────────────────────────────────────────


class LoRA(nn.Module):
    """Hu et al. 2022: everything frozen but A and B; B starts at 0."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(inner.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.T @ self.b.T


@healthy
def lora_on_a_frozen_model() -> Case:
    model = Stack(blocks(), in_order).requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = LoRA(block.attn.qkv)
    return lm(model)


@healthy
def learned_prefix() -> Case:
    """Prompt tuning: eight learned vectors before a frozen GPT-2."""
    gpt = hub("gpt2").requires_grad_(False)
    prompt = nn.Embedding(8, WIDTH)

    def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.inner.transformer.wte(input_ids)
        x = torch.cat([self.parts["prompt"].weight.expand(len(x), -1, -1), x], 1)
        return self.inner(inputs_embeds=x, labels=F.pad(labels, (8, 0), value=-100))

    return Case(Around(gpt, call, prompt=prompt), causal_batch())


@healthy
def frozen_backbone_new_head() -> Case:
    model = hub("bert")
    model.bert.requires_grad_(False)
    return Case(model, class_batch())


class Answer(NamedTuple):
    hidden: Tensor
    scores: Tensor


@healthy
def named_tuple_output() -> Case:
    def call(self: Any, tokens: Tensor) -> Answer:
        x = self.inner.norm(in_order(self.inner, self.inner.embed(tokens)))
        return Answer(x, self.inner.head(x))

    loss = lambda out, tokens: next_token(out.scores, tokens)  # noqa: E731
    return Case(Around(Stack(blocks(), in_order), call), ids(), loss, {"causal": True})


@healthy
def packed_documents() -> Case:
    """Two documents in a row, a mask that separates them, positions that start again."""

    def call(self: Any, tokens: Tensor, document: Tensor, position: Tensor) -> Tensor:
        inner = self.inner
        x = inner.wte(tokens) + inner.wpe(position)
        mask = tril(x) & (document[:, None, :, None] == document[:, None, None])
        for block in inner.blocks:
            x = block(x, mask)
        return inner.head(inner.norm(x))

    document = (torch.arange(LENGTH) >= 6).long().expand(ROWS, -1).contiguous()
    position = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(ROWS, -1).contiguous()
    batch = {"tokens": ids(), "document": document, "position": position}
    loss = lambda out, b: next_token(out, b["tokens"])  # noqa: E731
    return Case(Around(Stack(blocks(), in_order), call), batch, loss, {"causal": True})


def _batch(tokens: Tensor, **options: Any) -> Case:
    return Case(Stack(blocks(), in_order), tokens, next_token, {"causal": True} | options)


HEALTHY["one row"] = lambda: _batch(ids(1))
HEALTHY["two tokens"] = lambda: _batch(ids(length=2))
HEALTHY["int32 ids"] = lambda: Case(
    Stack(blocks(), in_order), ids().int(), lambda o, t: next_token(o, t.long()), {"causal": True}
)
HEALTHY["one token all over"] = lambda: _batch(torch.full((ROWS, LENGTH), 7))
HEALTHY["equal rows"] = lambda: _batch(ids(1).repeat(ROWS, 1))
HEALTHY["not contiguous"] = lambda: _batch(ids(LENGTH, ROWS).T)
HEALTHY["float64"] = lambda: Case(
    Stack(blocks(), in_order).double(), ids(), next_token, {"causal": True}
)


@healthy
def length_first_throughout() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, norm_first=True)
    net = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def call(self: Any, tokens: Tensor) -> Tensor:
        x = self.parts["wte"](tokens) + self.parts["wpe"](torch.arange(len(tokens)))[:, None]
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        return self.parts["out"](self.inner(x, mask=mask))

    model = Around(
        net,
        call,
        wte=nn.Embedding(VOCAB, WIDTH),
        wpe=nn.Embedding(64, WIDTH),
        out=nn.Linear(WIDTH, VOCAB),
    )
    loss = lambda out, t: F.cross_entropy(out[:-1].flatten(0, 1), t[1:].flatten())  # noqa: E731
    return Case(model, ids(LENGTH, ROWS), loss)


@healthy
def almost_all_padding() -> Case:
    tokens, mask = padded()
    tokens[1:, 2:], mask[1:, 2:] = 0, 0
    return Case(
        hub("bert"), {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(ROWS) % 5}
    )


@healthy
def four_dimensional_mask() -> Case:
    mask = torch.ones(LENGTH, LENGTH).tril()[None, None].expand(ROWS, 1, -1, -1)
    mask = torch.zeros_like(mask).masked_fill(mask == 0, torch.finfo(torch.float32).min)
    return Case(hub("llama"), causal_batch() | {"attention_mask": mask})


@healthy
def regression_with_one_number() -> Case:
    model = torched({"causal": False, "classes": 1})
    loss = lambda out, y: F.mse_loss(out.squeeze(-1), y)  # noqa: E731
    return Case(model, ClinicBatch(ids(), torch.randn(ROWS)), loss)


@healthy
def multi_label() -> Case:
    model = torched({"causal": False, "classes": 6})
    targets = (torch.rand(ROWS, 6) < 0.3).float()
    return Case(model, ClinicBatch(ids(), targets), F.binary_cross_entropy_with_logits)


@healthy
def log_softmax_and_nll() -> Case:
    model = Around(
        torched({"causal": False, "classes": 5}), lambda self, t: self.inner(t).log_softmax(-1)
    )
    return Case(model, ClinicBatch(ids(), torch.arange(ROWS) % 5), F.nll_loss)


@healthy
def probabilities_and_their_own_loss() -> Case:
    """The softmax is in the model, and the loss takes its logarithm: right, if unusual."""
    model = Around(
        torched({"causal": False, "classes": 5}), lambda self, t: self.inner(t).softmax(-1)
    )
    return Case(
        model,
        ClinicBatch(ids(), torch.arange(ROWS) % 5),
        lambda p, y: F.nll_loss(p.clamp(min=1e-8).log(), y),
    )


@healthy
def learned_temperature_and_qk_norm() -> Case:
    class Cosine(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((HEADS, 1, 1), 10.0))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
            )
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.scale
            return self.proj(
                (scores.masked_fill(~mask, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)
            )

    model = Stack(blocks(), in_order)
    for block in model.blocks:
        block.attn = Cosine()
    return lm(model)


@healthy
def attention_sink() -> Case:
    """Softmax off by one: a learned logit without a value, so weights sum to less than 1."""

    class Sink(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.sink = nn.Parameter(torch.zeros(HEADS, 1, 1))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
            )
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, -1e9)
            sink = self.sink.expand(len(x), -1, x.shape[1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            return self.proj((weights @ v).transpose(1, 2).flatten(2))

    model = Stack(blocks(), in_order)
    for block in model.blocks:
        block.attn = Sink()
    return lm(model)


@healthy
def graph_with_distances() -> Case:
    """Graphormer: nodes without order, a bias from the distance, a readout node."""
    net = nn.ModuleList(blocks(2))

    def call(self: Any, nodes: Tensor, distance: Tensor) -> Tensor:
        x = self.parts["atom"](nodes)
        bias = self.parts["bias"](distance).permute(0, 3, 1, 2)
        for block in self.inner:
            y = block.n1(x)
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in block.attn.qkv(y).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + block.attn.proj(mixed.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.n2(x))
        return self.parts["out"](self.parts["norm"](x)[:, 0])

    model = Around(
        net,
        call,
        atom=nn.Embedding(VOCAB, WIDTH),
        bias=nn.Embedding(6, HEADS),
        norm=nn.LayerNorm(WIDTH),
        out=nn.Linear(WIDTH, 2),
    )
    distance = torch.randint(6, (ROWS, LENGTH, LENGTH))
    return Case(model, (ids(), (distance + distance.transpose(1, 2)) // 2))
