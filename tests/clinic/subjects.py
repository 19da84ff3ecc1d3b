"""Models broken on purpose, each in one way, and healthy ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.clinic import TrainingPlan
from addnorm.clinic.random_batch import draw_batch
from addnorm.layers.addnorm import AddNorm, Branch
from addnorm.models.build import Model
from addnorm.models.tabular import TabularConfig, build_tabular, trunk_of
from tests.clinic import models

VOCAB, PAD = 32, 0


@dataclass
class Example:
    """A model, its inputs, and the other arguments of `examine`."""

    model: nn.Module
    batch: Any
    loss: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def ids(rows: int = 8, length: int = 16) -> Tensor:
    return torch.randint(1, VOCAB, (rows, length))


def decoder(**changes: Any) -> Model:
    sizes: dict[str, Any] = {"vocab": VOCAB, "width": 32, "depth": 2, "heads": 4, "length": 32}
    chosen = {"mode": "decoder", "addnorm": "pre", "dropout": 0.0}
    return build(ModelConfig(**(chosen | sizes | changes)))


def boxes(model: nn.Module) -> list[AddNorm]:
    return [part for part in model.modules() if isinstance(part, AddNorm)]


class Language(nn.Module):
    """A language model of torch's layers, with any mask."""

    def __init__(self, mask: Tensor | None, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.output = nn.Linear(width, VOCAB)
        self.mask = mask
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        mask = None if self.mask is None else self.mask[: ids.shape[1], : ids.shape[1]]
        return self.output(self.stack(x, mask=mask))


def next_token(output: Tensor, batch: Any) -> Tensor:
    tokens = batch[0] if isinstance(batch, tuple) else batch
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# ── Broken models ─────────────────────────────────────────────────────────────────────────────────


class Minus(AddNorm):
    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return f(self.norm(x)) - x


class AfterNorm(AddNorm):
    def forward(self, x: Tensor, f: Branch) -> Tensor:
        x = self.norm(x)
        return x + f(x)


def wrong_sign() -> Example:
    model = decoder()
    for box in boxes(model):
        box.__class__ = Minus
    return Example(model, ids())


def residual_after_norm() -> Example:
    model = decoder(depth=3)  # the stream begins with the first sum: the block before has no norm
    for box in boxes(model):
        box.__class__ = AfterNorm
    return Example(model, ids())


def no_final_norm() -> Example:
    model = decoder()
    model.decoder.stack.ends.norm = nn.Identity()
    return Example(model, ids())


def unscaled_attention() -> Example:
    return Example(decoder(width=64, attention_scale=1.0), ids())


def tripled_init() -> Example:
    model = decoder()
    with torch.no_grad():
        for part in model.decoder.stack.modules():
            if isinstance(part, nn.Linear):
                part.weight.mul_(3)
    return Example(model, ids())


def zeroed_branch() -> Example:
    model = decoder()
    with torch.no_grad():
        model.decoder.stack.blocks[1].sublayers["ffn"].output.weight.zero_()
    return Example(model, ids())


def frozen_layer() -> Example:
    model = decoder()
    model.decoder.stack.blocks[1].requires_grad_(False)
    return Example(model, ids())


def leaking_mask() -> Example:
    one_too_far = torch.ones(64, 64, dtype=torch.bool).triu(2)
    return Example(Language(one_too_far), ids(), next_token)


def no_mask() -> Example:
    return Example(Language(None), ids(), next_token)


def attended_padding() -> Example:
    batch = ids()
    batch[1, 9:] = PAD
    return Example(Language(None), batch, None, {"pad": PAD})


def bert_without_mask() -> Example:
    model, batch = models.bert()
    batch["input_ids"][1, 7:] = PAD
    return Example(model, batch, None, {"pad": PAD})


def unscaled_tied_embedding() -> Example:
    return Example(decoder(width=64, scale_embedding=False), ids())


def half_overflow() -> Example:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].linear2.weight.mul_(1e5)
    return Example(model.half(), torch.randn(4, 16, 32).half())


def dead_units() -> Example:
    model = decoder()
    with torch.no_grad():
        model.decoder.stack.blocks[1].sublayers["ffn"].input.bias.fill_(-20)
    return Example(model, ids())


def duplicated_positions() -> Example:
    model = decoder(positions="learned")
    with torch.no_grad():
        table = model.decoder.positions.weight
        table[1::2] = table[::2]
    return Example(model, ids())


def labels_not_shifted() -> Example:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch.flatten())

    return Example(decoder(), ids(), loss)


def labels_shifted_twice() -> Example:
    model, batch = models.gpt2()
    tokens = batch["input_ids"]
    batch["labels"] = F.pad(tokens[:, 1:], (0, 1), value=-100)
    return Example(model, batch)


def exploding_gain() -> Example:
    model = decoder()
    with torch.no_grad():
        boxes(model)[2].norm.weight.mul_(50)
    return Example(model, ids())


def bad_batch() -> Example:
    model, batch = models.vit()
    batch["pixel_values"][1, 0, 3, 3] = float("nan")
    return Example(model, batch)


def table(kind: str, categories: tuple[int, ...] = (4, 7, 3, 9), members: int = 1) -> Example:
    """Return a model for tables with random rows, none of which are token ids."""
    embedding = "hidden" if kind == "saint" else "linear"
    trunk = trunk_of(kind, width=16, depth=2, heads=2)
    sizes: dict[str, Any] = {"numbers": 5, "categories": categories, "outputs": 10}
    config = TabularConfig(kind=kind, trunk=trunk, embedding=embedding, members=members, **sizes)
    model = build_tabular(config)
    return Example(model, draw_batch(model)[0], None, {"plan": TrainingPlan(lr=1e-3)})


def table_with_exploding_gain() -> Example:
    example = table("ft")
    gain = example.model.get_parameter("side.stack.blocks.1.addnorms.ffn.norm.weight")
    with torch.no_grad():
        gain.mul_(100)
    return example


BROKEN: dict[str, tuple[Callable[[], Example], str]] = {
    "wrong-sign residual": (wrong_sign, "branch subtracted"),
    "residual taken after the norm": (residual_after_norm, "residual after the norm"),
    "missing final norm": (no_final_norm, "no final norm"),
    "unscaled attention logits": (unscaled_attention, "attention logits too large"),
    "tripled init": (tripled_init, "initial weights too large"),
    "zeroed branch": (zeroed_branch, "zero branch"),
    "frozen layer": (frozen_layer, "frozen layer"),
    "causal mask one too far": (leaking_mask, "future leaks"),
    "no causal mask": (no_mask, "future leaks"),
    "padding attended to": (attended_padding, "padding attended to"),
    "padding attended to in BERT": (bert_without_mask, "padding attended to"),
    "tied embedding without scale": (unscaled_tied_embedding, "token embeddings too small"),
    "float16 overflow": (half_overflow, "float16 overflow"),
    "dead ReLUs": (dead_units, "dead units"),
    "duplicated positions": (duplicated_positions, "positions not distinguished"),
    "labels not shifted": (labels_not_shifted, "labels misaligned"),
    "labels shifted twice in GPT-2": (labels_shifted_twice, "labels misaligned"),
    "exploding norm gain": (exploding_gain, "norm gain too large"),
    "exploding norm gain in a table": (table_with_exploding_gain, "norm gain too large"),
    "NaN in one batch": (bad_batch, "batch not finite"),
}


# ── Healthy models ────────────────────────────────────────────────────────────────────────────────


def healthy_decoder() -> Example:
    return Example(decoder(), ids(), None, {"plan": TrainingPlan(lr=1e-3)})


def healthy_translator() -> Example:
    sizes: dict[str, Any] = {"vocab": VOCAB, "width": 32, "depth": 2, "heads": 4, "length": 32}
    model = build(ModelConfig(**sizes, pad=PAD, addnorm="post", dropout=0.0))
    source = ids(8, 12)
    source[2, 8:] = PAD
    return Example(model, (source, ids(8, 10)), None, {"plan": TrainingPlan(lr=1e-3, warmup=400)})


def healthy_gpt2() -> Example:
    model, batch = models.gpt2()
    return Example(
        model, batch | {"labels": batch["input_ids"]}, None, {"plan": TrainingPlan(lr=1e-3)}
    )


def healthy_bert() -> Example:
    model, batch = models.bert()
    real = torch.ones_like(batch["input_ids"])
    real[1, 7:] = 0
    return Example(model, batch | {"attention_mask": real})


def healthy_t5() -> Example:
    return Example(*models.t5())


def healthy_llama() -> Example:
    return Example(*models.llama())


def healthy_encoder() -> Example:
    return Example(*models.torch_pre_encoder())


HEALTHY: dict[str, Callable[[], Example]] = {
    "our FT-Transformer": lambda: table("ft"),
    "our FT-Transformer of numbers": lambda: table("ft", categories=()),
    "our FT-Transformer, four members": lambda: table("ft", members=4),
    "our TabTransformer": lambda: table("tab"),
    "our SAINT": lambda: table("saint"),
    "our decoder": healthy_decoder,
    "our translator": healthy_translator,
    "GPT-2": healthy_gpt2,
    "BERT": healthy_bert,
    "T5": healthy_t5,
    "Llama": healthy_llama,
    "torch's encoder": healthy_encoder,
}
