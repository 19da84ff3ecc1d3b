"""A third set of healthy models written by hand, without sight of the clinic's rules.

None of them is wrong: every finding above a note is a false alarm. Those of transformers and
x-transformers are in clinic_healthy_third_hub.py.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.clinic import ClinicBatch, TrainingPlan
from bench.clinic_healthy_third_hub import HEALTHY, Healthy
from bench.clinic_sick_training_unseen import learnable_text
from bench.clinic_third_bases import Nano, TorchPairs, Translator, all_padded, made, nano
from bench.clinic_unseen_bases import (
    HEADS,
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    Around,
    Case,
    TorchLM,
    causal_batch,
    hub,
    ids,
    lm,
    next_token,
    torched,
)

PLAIN = {"causal": False, "classes": 5}


def healthy(arrangement: str | None = "pre") -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def keep(make: Callable[[], Case]) -> Callable[[], Case]:
        HEALTHY[make.__name__.replace("_", " ")] = Healthy(make, arrangement)
        return make

    return keep


def classes() -> Tensor:
    return torch.arange(ROWS) % 5


def with_blocks(block: Callable[[], nn.Module], depth: int = 3) -> nn.Module:
    """Return a Nano with other blocks, called with x and a mask of padding."""
    model = nano()
    model.transformer["h"] = nn.ModuleList(block() for _ in range(depth))  # type: ignore[index]
    return model


def later(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))


class Base(nn.Module):
    """Two norms, attention of torch.nn and a feed-forward network; subclasses join them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.net = mlp()

    def attend(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=later(x), need_weights=False)[0]


# ── The bases of the sick models, as they are when nothing is broken ──────────────────────────────

for name, entry in {
    "base: nano": lambda: lm(nano()),
    "base: nano classes": lambda: Case(
        nano(PLAIN, hidden=lambda _, t: t == 0),
        ClinicBatch(all_padded()[0], classes()),
        F.cross_entropy,
        {"pad": 0},
    ),
    "base: translator": lambda: Case(
        made(Translator),
        (all_padded()[0], ids(length=9)),
        lambda out, pair: next_token(out, pair[1]),
        {"pad": 0},
    ),
    "base: nn.Transformer": lambda: Case(
        made(TorchPairs),
        (all_padded()[0], ids(length=9)),
        lambda out, pair: next_token(out, pair[1]),
        {"pad": 0},
    ),
    "base: nano and AdamW": lambda: _with_adamw(),
    "base: nano and a plan": lambda: _with_plan(),
}.items():
    HEALTHY[name] = Healthy(entry, "pre")


def _with_adamw() -> Case:
    model = nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return lm(model, optimizer=optimizer)


def _with_plan() -> Case:
    text = learnable_text()
    plan = TrainingPlan(lr=3e-3, steps=300, warmup=10, schedule="cosine", optimizer="adamw")
    options = {"plan": plan, "more_batches": text[1:], "causal": True}
    return Case(nano(), text[0], next_token, options)


# ── Blocks ────────────────────────────────────────────────────────────────────────────────────────


@healthy("post, scaled shortcut")
def deepnorm_by_hand() -> Case:
    """Wang et al. 2022: the shortcut is scaled up before the norm, by design."""

    class Deep(Base):
        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            x = self.a(6**0.25 * x + self.attend(x))
            return self.b(6**0.25 * x + self.net(x))

    return lm(with_blocks(Deep))


@healthy(None)
def norm_former() -> Case:
    """Shleifer et al. 2021: norms before and after the attention, one inside the network."""

    class Former(Base):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.LayerNorm(WIDTH)
            self.net.insert(2, nn.LayerNorm(2 * WIDTH))

        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            x = x + self.after(self.attend(self.a(x)))
            return x + self.net(self.b(x))

    return lm(with_blocks(Former))


@healthy("pre, parallel")
def parallel_with_one_matrix() -> Case:
    """Attention and feed-forward network from one projection, as in ViT-22B."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.inp = nn.Linear(WIDTH, 5 * WIDTH)
            self.out = nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            q, k, v, f = self.inp(self.norm(x)).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], -1)
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return x + self.out(torch.cat([y, F.gelu(f)], -1))

    return lm(with_blocks(Fused))


@healthy()
def in_place_on_a_clone() -> Case:
    class InPlace(Base):
        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            x = x.clone()
            x += self.attend(self.a(x.clone()))
            x += self.net(self.b(x.clone()))
            return x

    return lm(with_blocks(InPlace))


@healthy()
def stream_of_a_tuple() -> Case:
    """nn.Sequential of blocks that hand on a tuple of stream and mask."""

    class Passing(Base):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, mask = pair
            y = self.a(x)
            x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            return x + self.net(self.b(x)), mask

    blocks = nn.Sequential(*(Passing() for _ in range(3)))

    def body(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.transformer["ln_f"](self.transformer["h"]((x, later(x)))[0])

    model = nano(body=body)
    model.transformer["h"] = blocks  # type: ignore[index]
    return lm(model)


@healthy(None)
def linear_attention() -> Case:
    """Katharopoulos et al. 2020: no softmax; sums of keys times values up to each position."""

    class Linear(Base):
        def __init__(self) -> None:
            super().__init__()
            del self.attention
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = torch.einsum("bnhd,bnhe->bnhde", k, v).cumsum(1)
            scale = torch.einsum("bnhd,bnhd->bnh", q, k.cumsum(1))[..., None]
            return self.out((torch.einsum("bnhd,bnhde->bnhe", q, state) / scale).flatten(2))

        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            x = x + self.attend(self.a(x))
            return x + self.net(self.b(x))

    return lm(with_blocks(Linear))


@healthy()
def sliding_window_with_rotary() -> Case:
    class Window(Base):
        def __init__(self) -> None:
            super().__init__()
            del self.attention
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def attend(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            half = q.shape[-1] // 2
            angle = torch.arange(n)[:, None] / 100 ** (torch.arange(half) / half)
            cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
            q, k = (t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in (q, k))
            gap = torch.arange(n)[:, None] - torch.arange(n)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < 5))
            return self.out(y.transpose(1, 2).flatten(2))

        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            x = x + self.attend(self.a(x))
            return x + self.net(self.b(x))

    def embed(self: Any, tokens: Tensor) -> Tensor:
        return self.transformer["wte"](tokens)

    model = nano(embed=embed)
    del model.transformer["wpe"]  # type: ignore[union-attr]
    model.transformer["h"] = nn.ModuleList(Window() for _ in range(3))  # type: ignore[index]
    return lm(model)


@healthy(None)
def value_residual() -> Case:
    """Zhou et al. 2024: each block's values are mixed with those of the first."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.m, self.net = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mlp()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mix = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(self.n(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            kept = v if first is None else first
            v = v if first is None else self.mix * v + (1 - self.mix) * first
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.net(self.m(x)), kept

    def body(self: Any, tokens: Tensor) -> Tensor:
        x, first = self.embed(tokens), None
        for block in self.transformer["h"]:
            x, first = block(x, first)
        return self.transformer["ln_f"](x)

    model = nano(body=body)
    model.transformer["h"] = nn.ModuleList(Mixed() for _ in range(3))  # type: ignore[index]
    return lm(model)


@healthy(None)
def dense_connections() -> Case:
    """DenseFormer: the input of each block is a learned mean of all before; starts as identity."""

    def body(self: Any, tokens: Tensor) -> Tensor:
        kept = [self.embed(tokens)]
        for index, block in enumerate(self.transformer["h"]):
            kept.append(block(kept[-1]))
            weights = self.mean[index, : index + 2]
            kept[-1] = sum(w * k for w, k in zip(weights, kept, strict=True))
        return self.transformer["ln_f"](kept[-1])

    model = nano(body=body)
    start = torch.zeros(3, 4)
    start[torch.arange(3), torch.arange(1, 4)] = 1
    model.mean = nn.Parameter(start)
    return lm(model)


@healthy()
def checkpointed_with_dropout() -> Case:
    def body(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.transformer["h"]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.transformer["ln_f"](x)

    return lm(nano({"dropout": 0.1}, body=body))


@healthy()
def compiled_nano() -> Case:
    return lm(torch.compile(nano()))  # type: ignore[arg-type]


@healthy()
def bfloat16_nano() -> Case:
    return lm(nano().bfloat16())


@healthy()
def autocast_inside() -> Case:
    def call(self: Any, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(tokens).float()

    return lm(Around(nano(), call))


@healthy()
def twelve_blocks_of_scaled_weights() -> Case:
    """GPT-2's initialisation: output projections divided by √(2L)."""
    model = nano({"depth": 12})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("c_proj.weight", "mlp.2.weight")):
                parameter.div_(math.sqrt(24))
    return lm(model)


# ── Batches, losses, outputs ──────────────────────────────────────────────────────────────────────


@healthy()
def pool_by_attention_mask() -> Case:
    def call(self: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.inner.embed(input_ids)
        for block in self.inner.transformer["h"]:
            x = block(x, attention_mask == 0)
        x = self.inner.transformer["ln_f"](x)
        last = attention_mask.sum(1) - 1
        return {"answer": self.parts["out"](x[torch.arange(len(x)), last]), "states": x}

    tokens, mask = all_padded()
    batch = ClinicBatch({"input_ids": tokens, "attention_mask": mask}, classes())
    model = Around(Nano(), call, out=nn.Linear(WIDTH, 5))
    return Case(model, batch, lambda out, y: F.cross_entropy(out["answer"], y))


@healthy()
def label_smoothing_and_weights() -> Case:
    weight = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0])
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    return Case(torched(PLAIN), ClinicBatch(ids(), classes()), loss)


@healthy()
def focal_loss() -> Case:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(output, targets, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    return Case(nano(PLAIN), ClinicBatch(ids(), classes()), loss)


@healthy()
def two_heads_two_losses() -> Case:
    """The next token and the length's class; the loss is their sum."""

    def call(self: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner.body(tokens)
        return self.inner.lm_head(x), self.parts["cls"](x[:, -1])

    def loss(output: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        return next_token(output[0], tokens) + 0.1 * F.cross_entropy(output[1], tokens[:, 0] % 5)

    model = Around(Nano(), call, cls=nn.Linear(WIDTH, 5))
    return Case(model, ids(), loss, {"causal": True})


@healthy()
def summed_loss() -> Case:
    def loss(output: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )

    return Case(nano(), ids(), loss, {"causal": True})


@healthy()
def z_loss() -> Case:
    """Next token plus 1e-4 · (log Z)², as PaLM trains."""

    def loss(output: Tensor, tokens: Tensor) -> Tensor:
        return next_token(output, tokens) + 1e-4 * output.logsumexp(-1).pow(2).mean()

    return Case(nano(), ids(), loss, {"causal": True})


@healthy()
def capped_logits() -> Case:
    return lm(Around(nano(), lambda self, t: 30 * (self.inner(t) / 30).tanh()))


@healthy()
def quantiles_of_a_number() -> Case:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        gap = y[:, None] - output
        return torch.maximum(0.9 * gap, -0.1 * gap).mean()

    model = torched({"causal": False, "classes": 3})
    return Case(model, ClinicBatch(ids(), torch.randn(ROWS)), loss)


@healthy()
def masked_language_model_by_hand() -> Case:
    """A fifth of the tokens is hidden; the loss counts those alone."""
    tokens = ids()
    hidden = torch.rand(ROWS, LENGTH) < 0.3
    hidden[:, 0] = True
    targets = tokens.masked_fill(~hidden, -100)
    inputs = tokens.masked_fill(hidden, VOCAB - 1)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=-100)

    return Case(nano({"causal": False}), ClinicBatch(inputs, targets), loss)


@healthy("post")
def transformer_encoder_with_padding_mask() -> Case:
    def call(self: Any, tokens: Tensor) -> Tensor:
        hidden = tokens == 0
        x = self.inner(self.parts["emb"](tokens) + self.parts["pos"].weight[:LENGTH],
                       src_key_padding_mask=hidden)  # fmt: skip
        real = (~hidden)[..., None].float()
        return self.parts["out"]((x * real).sum(1) / real.sum(1))

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    model = Around(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        call,
        emb=nn.Embedding(VOCAB, WIDTH, padding_idx=0),
        pos=nn.Embedding(64, WIDTH),
        out=nn.Linear(WIDTH, 5),
    )
    return Case(model, ClinicBatch(all_padded()[0], classes()), F.cross_entropy, {"pad": 0})


@healthy()
def gpt2_with_a_new_embedding_only() -> Case:
    """Vocabulary extension: only the embeddings, which are the head, are trained."""
    model = hub("gpt2").requires_grad_(False)
    model.transformer.wte.requires_grad_(True)
    return Case(model, causal_batch())


@healthy()
def norms_and_biases_only() -> Case:
    """BitFit: everything frozen but biases and norms."""
    model = TorchLM()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    return lm(model)


@healthy()
def unused_pooler() -> Case:
    """BERT's pooler has no part in a masked language model's loss, as everyone's has not."""
    model = nano({"causal": False})
    model.pooler = nn.Linear(WIDTH, WIDTH)
    return Case(model, ClinicBatch(ids(), ids()), lambda out, y: F.cross_entropy(
        out.flatten(0, 1), y.flatten()))  # fmt: skip


@healthy()
def exponential_moving_average_beside() -> Case:
    """A frozen copy of the model inside it, as teachers are kept; it has no part in the loss."""
    import copy

    model = nano()
    model.teacher = copy.deepcopy(model).requires_grad_(False)
    return lm(model)
