"""Healthy models of four code styles, to be made sick by clinic_sick_models_unseen.py."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import build, presets
from addnorm.layers.addnorm import AddNorm

OURS, TORCH, HAND, HUB = "ours", "torch.nn", "hand-written", "Hugging Face"
VOCAB, WIDTH, DEPTH, HEADS, ROWS, LENGTH = 53, 32, 3, 4, 6, 14


@dataclass(frozen=True)
class Case:
    """A model as its user would hand it over."""

    model: nn.Module
    batch: Any
    loss: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def ids(rows: int = ROWS, length: int = LENGTH, low: int = 1) -> Tensor:
    return torch.randint(low, VOCAB, (rows, length))


def next_token(output: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def padded(side: str = "right") -> tuple[Tensor, Tensor]:
    tokens, mask = ids(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, count in ((0, 5), (3, 8)):
        where = slice(LENGTH - count, None) if side == "right" else slice(0, count)
        tokens[row, where], mask[row, where] = 0, 0
    return tokens, mask


# ── Healthy bases, one for each style ─────────────────────────────────────────────────────────────


def ours(**changes: Any) -> nn.Module:
    return build(
        presets.gpt2(**(dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS) | changes))
    )


def our_encoder(**changes: Any) -> nn.Module:
    sizes = dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, head="class", outputs=5)
    return build(presets.bert(**(sizes | changes)))


def our_translator(**changes: Any) -> nn.Module:
    return build(presets.base(**(dict(vocab=VOCAB, width=WIDTH, depth=2, heads=HEADS) | changes)))


class TorchLM(nn.Module):
    """Embeddings, nn.TransformerEncoder, linear head."""

    def __init__(self, *, depth: int = DEPTH, causal: bool = True, classes: int = 0, **layer: Any):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                **(
                    dict(
                        d_model=WIDTH,
                        nhead=HEADS,
                        dim_feedforward=64,
                        dropout=0.1,
                        batch_first=True,
                        norm_first=True,
                    )
                    | layer
                )
            )
            for _ in range(depth)
        )
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes or VOCAB)
        self.causal, self.classes = causal, classes

    def mask(self, tokens: Tensor) -> Tensor | None:
        n = tokens.shape[1]
        return torch.ones(n, n, dtype=torch.bool).triu(1) if self.causal else None

    def padding(self, tokens: Tensor) -> Tensor | None:
        return None

    def between(self, x: Tensor, index: int) -> Tensor:
        return x

    def start(self, tokens: Tensor) -> Tensor:
        return self.emb(tokens) + self.pos(torch.arange(tokens.shape[1]))

    def forward(self, tokens: Tensor) -> Tensor:
        x, pad = self.start(tokens), self.padding(tokens)
        for index, layer in enumerate(self.layers):
            x = self.between(layer(x, src_mask=self.mask(tokens), src_key_padding_mask=pad), index)
        x = self.norm(x)
        return self.out(x.mean(1)) if self.classes else self.out(x)


class HandLM(nn.Module):
    """Einsum attention, parameters in lists, everything overridable."""

    def __init__(
        self, *, depth: int = DEPTH, causal: bool = True, classes: int = 0, std: float = 0.08
    ):
        super().__init__()
        self.depth, self.causal, self.classes, self.dim = depth, causal, classes, WIDTH // HEADS

        def matrices(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.randn(shape) * std) for _ in range(depth))

        self.wte, self.wpe = (nn.Parameter(torch.randn(n, WIDTH) * 0.3) for n in (VOCAB, 64))
        self.wq, self.wk, self.wv = (matrices(HEADS, WIDTH, self.dim) for _ in range(3))
        self.wo, self.up, self.down = (
            matrices(HEADS, self.dim, WIDTH),
            matrices(WIDTH, 96),
            matrices(96, WIDTH),
        )
        self.ln1, self.ln2 = (
            nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth)) for _ in "ab"
        )
        self.lnf, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes or VOCAB, bias=False)

    def visible(self, n: int) -> Tensor:
        return torch.ones(n, n).tril() if self.causal else torch.ones(n, n)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.dim)

    def weights(self, scores: Tensor) -> Tensor:
        hidden = self.visible(scores.shape[-1]) == 0
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    def attend(self, x: Tensor, i: int) -> Tensor:
        q, k, v = (torch.einsum("bne,hed->bnhd", x, w[i]) for w in (self.wq, self.wk, self.wv))
        mixed = torch.einsum("bhqk,bkhd->bqhd", self.weights(self.scores(q, k)), v)
        return torch.einsum("bqhd,hde->bqe", mixed, self.wo[i])

    def feed(self, x: Tensor, i: int) -> Tensor:
        return F.relu(x @ self.up[i]) @ self.down[i]

    def block(self, x: Tensor, i: int) -> Tensor:
        x = x + self.attend(self.ln1[i](x), i)
        return x + self.feed(self.ln2[i](x), i)

    def start(self, tokens: Tensor) -> Tensor:
        return self.wte[tokens] + self.wpe[: tokens.shape[1]]

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.start(tokens)
        for i in range(self.depth):
            x = self.block(x, i)
        x = self.lnf(x)
        return self.head(self.pool(x) if self.classes else x)


def hub(kind: str, **changes: Any) -> nn.Module:
    """Return a tiny model of Hugging Face."""
    import transformers as t

    if kind == "gpt2":
        sizes = dict(vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS)
        return t.GPT2LMHeadModel(t.GPT2Config(**(sizes | dict(pad_token_id=0) | changes)))
    common = dict(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**(common | changes)))
    if kind == "bert":
        return t.BertForSequenceClassification(
            t.BertConfig(**(common | dict(num_labels=5) | changes))
        )
    if kind == "bert-mlm":
        return t.BertForMaskedLM(t.BertConfig(**(common | changes)))
    sizes = dict(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        pad_token_id=0,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=2,
    )
    return t.BartForConditionalGeneration(t.BartConfig(**(sizes | changes)))


def causal_batch() -> dict[str, Tensor]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def class_batch() -> dict[str, Tensor]:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(ROWS) % 5}


def lm(model: nn.Module, **options: Any) -> Case:
    return Case(model, ids(), next_token, {"causal": True} | options)


def after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Change what a module returns, the first item of a tuple."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(hook)


def before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first argument of a module."""
    module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def boxes(model: nn.Module) -> Iterator[tuple[nn.ModuleDict, str]]:
    for block in model.decoder.stack.blocks:  # type: ignore[union-attr]
        for role in block.addnorms:
            yield block.addnorms, role


class Around(nn.Module):
    """A model inside another, called by a function of the user's."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any], **parts: nn.Module):
        super().__init__()
        self.inner, self.call, self.parts = inner, call, nn.ModuleDict(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


class Box(AddNorm):
    """An Add & Norm box of a user's formula."""

    def __init__(self, old: AddNorm, formula: Callable[..., Tensor]):
        nn.Module.__init__(self)
        self.place, self.norm, self.formula = old.place, old.norm, formula

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self.formula(x, f, self.norm)


def with_boxes(
    formula: Callable[..., Tensor], only: int | None = None, **changes: Any
) -> nn.Module:
    model = ours(**changes)
    for index, (owner, role) in enumerate(list(boxes(model))):
        if only is None or index == only:
            owner[role] = Box(owner[role], formula)  # type: ignore[arg-type]
    return model


class Override(HandLM):
    """A hand-written model, some methods of which are replaced."""

    def __init__(self, methods: dict[str, Callable[..., Any]], **settings: Any):
        super().__init__(**settings)
        self.methods = methods

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__").get("methods", {})
        if name in own:
            return partial(own[name], self)
        return super().__getattribute__(name)


def hand(settings: dict[str, Any] | None = None, **methods: Callable[..., Any]) -> nn.Module:
    return Override(methods, **(settings or {}))


class TorchOverride(TorchLM):
    """A model of torch.nn, some methods of which are replaced."""

    def __init__(self, methods: dict[str, Callable[..., Any]], **settings: Any):
        super().__init__(**settings)
        for name, method in methods.items():
            object.__setattr__(self, name, partial(method, self))


def torched(settings: dict[str, Any] | None = None, **methods: Callable[..., Any]) -> nn.Module:
    return TorchOverride(methods, **(settings or {}))
