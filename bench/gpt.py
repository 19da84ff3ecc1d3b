"""One training step of the same small GPT: forward, backward, AdamW.

Width 256, depth 4, ffn 1024, 8 heads, vocabulary 8,192, output tied to the embedding, batch 16 ×
256.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.harness import Contender

WIDTH, DEPTH, HEADS, FFN, VOCAB, BATCH, LENGTH = 256, 4, 8, 1024, 8192, 16, 256

Step = Callable[[], object]


def contenders(dropout: float) -> list[Contender]:
    def peer(name: str, maker: str, keep: bool = False, **settings: Any) -> Contender:
        return Contender(name, f"bench.gpt:{maker}", {"dropout": dropout, **settings}, keep)

    same = "" if dropout == 0 else ", no attention dropout"
    rows = [
        Contender("addnorm", "bench.gpt:addnorm", {"dropout": dropout}, True, ours=True),
        peer("addnorm, stock allocator", "addnorm"),
        peer("torch.nn.TransformerEncoder", "torch_layers"),
        peer("x-transformers", "x_transformers"),
        peer("Hugging Face GPT-2", "hugging_face"),
        peer("torch.nn, kept memory", "torch_layers", keep=True),
    ]
    if dropout:
        rows.append(peer(f"torch.nn{same}", "torch_layers", attention_dropout=0.0))
        rows.append(peer("addnorm, also inside the ffn", "addnorm", keep=True, ffn_dropout=dropout))
    return rows


def tokens_per_step() -> int:
    return BATCH * LENGTH


def flops_per_step() -> float:
    """Return the operations of a step: backward is twice forward; causal attention counts half."""
    layer = 4 * WIDTH * WIDTH + 2 * WIDTH * FFN + LENGTH * WIDTH
    return 3 * 2 * BATCH * LENGTH * (DEPTH * layer + WIDTH * VOCAB)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def training(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def addnorm(dropout: float, ffn_dropout: float = 0.0) -> Step:
    from addnorm import build, presets, token_loss

    sizes = dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, ffn_width=FFN, length=LENGTH)
    model = build(presets.gpt2(dropout=dropout, ffn_dropout=ffn_dropout, **sizes))
    inputs, targets = batch()
    return training(model, lambda: token_loss(model, model.hidden(inputs), targets))


class TorchGPT(nn.Module):
    """A GPT of torch's own layers."""

    def __init__(self, dropout: float, attention_dropout: float | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, FFN, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        if attention_dropout is not None:
            layer.self_attn.dropout = attention_dropout
        self.stack = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), False)
        self.dropout = nn.Dropout(dropout)
        # As in GPT-2: a tied matrix of N(0, 1) would make the logits so large that the softmax is
        # full of denormal numbers, which are slow.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions.weight)
        return F.linear(self.stack(x, mask=self.mask, is_causal=True), self.tokens.weight)


def torch_layers(dropout: float, attention_dropout: float | None = None) -> Step:
    model = TorchGPT(dropout, attention_dropout)
    inputs, targets = batch()
    return training(model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))


def x_transformers(dropout: float) -> Step:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH,
        depth=DEPTH,
        heads=HEADS,
        attn_dim_head=WIDTH // HEADS,
        attn_flash=True,
        attn_dropout=dropout,
        ff_dropout=dropout,
        ff_mult=FFN // WIDTH,
    )
    model = TransformerWrapper(
        num_tokens=VOCAB,
        max_seq_len=LENGTH,
        attn_layers=layers,
        tie_embedding=True,
        emb_dropout=dropout,
    )
    inputs, targets = batch()
    return training(model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))


def hugging_face_model(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_inner=FFN,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def hugging_face(dropout: float) -> Step:
    model = hugging_face_model(dropout)
    inputs, targets = batch()
    return training(
        model, lambda: F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
    )
