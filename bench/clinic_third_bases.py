"""A hand-written GPT in the style of nanoGPT, for the third set of the clinic's models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.clinic_unseen_bases import DEPTH, HEADS, LENGTH, ROWS, VOCAB, WIDTH, ids


class NanoAttention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.scale = causal, (WIDTH // HEADS) ** -0.5

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        rows, n, _ = x.shape
        q, k, v = (t.view(rows, n, HEADS, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, n, WIDTH))


class NanoBlock(nn.Module):
    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = NanoAttention(causal)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), hidden)
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    """GPT, or with `classes` an encoder whose answer is the mean over the tokens that are real."""

    def __init__(
        self, *, depth: int = DEPTH, causal: bool = True, classes: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCAB, WIDTH),
                wpe=nn.Embedding(64, WIDTH),
                h=nn.ModuleList(NanoBlock(causal, dropout) for _ in range(depth)),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, classes or VOCAB, bias=False)
        self.classes = classes
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.08)

    def hidden(self, tokens: Tensor) -> Tensor | None:
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.transformer["wte"](tokens) + self.transformer["wpe"](places)

    def body(self, tokens: Tensor) -> Tensor:
        x, hidden = self.embed(tokens), self.hidden(tokens)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x, hidden)
        return self.transformer["ln_f"](x)

    def pool(self, x: Tensor, tokens: Tensor) -> Tensor:
        real = (tokens != 0).to(x.dtype)[..., None]
        return (x * real).sum(1) / real.sum(1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(tokens)
        return self.lm_head(self.pool(x, tokens) if self.classes else x)


def nano(settings: dict[str, Any] | None = None, **methods: Callable[..., Any]) -> nn.Module:
    """Return a Nano some methods of which are replaced."""
    return type("Nano", (Nano,), methods)(**(settings or {}))


def all_padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask; every row ends in padding."""
    tokens, mask = ids(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row in range(ROWS):
        tokens[row, LENGTH - 2 - row :], mask[row, LENGTH - 2 - row :] = 0, 0
    return tokens, mask


def each(model: nn.Module, change: Callable[[Any], Any], *kinds: type) -> nn.Module:
    """Apply a change to every module of some kinds, and return the model."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, kinds):
                change(module)
    return model


class Translator(nn.Module):
    """Two stacks of Nano's blocks, joined by cross-attention of torch.nn."""

    causal_target, masks_source = True, True

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = Nano(depth=2, causal=False), Nano(depth=2, causal=False)
        for block in self.target.transformer["h"]:  # type: ignore[union-attr]
            block.attn.causal = self.causal_target
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.cross = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )

    def memory(self, source: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.source.embed(source)
        for block in self.source.transformer["h"]:  # type: ignore[union-attr]
            x = block(x, hidden)
        return self.source.transformer["ln_f"](x)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = source == 0 if self.masks_source else None
        memory, x = self.memory(source, hidden), self.target.embed(target)
        parts = zip(self.target.transformer["h"], self.norms, self.cross, strict=True)  # type: ignore[arg-type]
        for block, norm, cross in parts:
            x = block(x)
            x = x + cross(norm(x), memory, memory, key_padding_mask=hidden, need_weights=False)[0]
        return self.target.lm_head(self.target.transformer["ln_f"](x))


class TorchPairs(nn.Module):
    """nn.Transformer with embeddings and a head."""

    masks_source, masks_target = True, True

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.net = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True, norm_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def memory(self, memory: Tensor) -> Tensor:
        return memory

    def embed(self, tokens: Tensor) -> Tensor:
        return self.emb(tokens) + self.pos(torch.arange(tokens.shape[1]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        n, hidden = target.shape[1], source == 0 if self.masks_source else None
        mask = torch.ones(n, n, dtype=torch.bool).triu(1) if self.masks_target else None
        memory = self.net.encoder(self.embed(source), src_key_padding_mask=hidden)
        x = self.net.decoder(
            self.embed(target),
            self.memory(memory),
            tgt_mask=mask,
            memory_key_padding_mask=hidden,
        )
        return self.out(x)


def made(kind: type[nn.Module], **members: Any) -> nn.Module:
    """Return an instance of a class some members of which are replaced."""
    return type(kind.__name__, (kind,), members)()


def same_place(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())
