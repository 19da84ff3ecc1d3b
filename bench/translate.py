"""One training step of the same small encoder-decoder, on the same batches of similar lengths.

4 + 4 blocks, width 128, ffn 256, 4 heads, shared vocabulary of 10,000, lengths of mean 13 (3 to
40), 128 pairs of similar length in a batch; real source and target tokens per second. Post-norm, as
Multi30k's Transformer-Tiny; every library uses its own loss over the target.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gpt import Step, training
from bench.harness import Contender

WIDTH, DEPTH, HEADS, FFN, VOCAB, PAIRS, BATCHES, PAD = 128, 4, 4, 256, 10_000, 128, 6, 0


def contenders(dropout: float) -> list[Contender]:
    def peer(name: str, maker: str, keep: bool = False, **settings: Any) -> Contender:
        return Contender(name, f"bench.translate:{maker}", {"dropout": dropout, **settings}, keep)

    return [
        Contender("addnorm", "bench.translate:addnorm", {"dropout": dropout}, True, ours=True),
        peer("addnorm, stock allocator", "addnorm"),
        peer("torch.nn.Transformer", "torch_layers"),
        peer("Hugging Face Marian", "hugging_face", kind="Marian"),
        peer("Hugging Face BART", "hugging_face", kind="Bart"),
        peer("x-transformers", "x_transformers"),
        peer("torch.nn, kept memory", "torch_layers", keep=True),
        peer("HF BART, kept memory", "hugging_face", keep=True, kind="Bart"),
    ]


def lengths() -> Tensor:
    """Return lengths of source and target, (batches, pairs, 2), similar within a batch."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(BATCHES * PAIRS, generator=draw).mul(0.4).add(2.48).exp()
    other = base * torch.randn(BATCHES * PAIRS, generator=draw).mul(0.15).exp()
    both = torch.stack((base, other), dim=1).round().clamp(3, 40).long()
    order = (both[:, 0] * 100 + both[:, 1]).argsort()
    return both[order].view(BATCHES, PAIRS, 2)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return source and target ids of each batch, padded to its longest."""
    draw = torch.Generator().manual_seed(1)
    result = []
    for pairs in lengths():
        rows = []
        for side in range(2):
            longest = int(pairs[:, side].max())
            ids = torch.randint(1, VOCAB, (PAIRS, longest), generator=draw)
            rows.append(ids.masked_fill(torch.arange(longest) >= pairs[:, side, None], PAD))
        result.append((rows[0], rows[1]))
    return result


def tokens_per_step() -> float:
    return float(lengths().sum()) / BATCHES


def flops_per_step() -> float:
    """Return the operations of a mean step on real tokens; causal attention counts half."""
    source, target = lengths()[..., 0].double(), lengths()[..., 1].double()
    encoder = (4 * WIDTH**2 + 2 * WIDTH * FFN) * source + 2 * WIDTH * source**2
    decoder = (6 * WIDTH**2 + 2 * WIDTH * FFN) * target + WIDTH * target**2
    memory = 2 * WIDTH**2 * source + 2 * WIDTH * source * target
    head = WIDTH * VOCAB * target
    return 6 * float((DEPTH * (encoder + decoder + memory) + head).sum()) / BATCHES


def over_batches(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return a step that cycles through the batches: a cycle is timed as `BATCHES` steps."""
    rows: Iterator[tuple[Tensor, Tensor]] = cycle(batches())
    return training(model, lambda: loss(*next(rows)))


def shifted(target: Tensor) -> Tensor:
    return F.pad(target[:, :-1], (1, 0), value=1)


def addnorm(dropout: float) -> Step:
    from addnorm import build, presets, token_loss

    sizes = dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, ffn_width=FFN, pad=PAD)
    model = build(presets.base(dropout=dropout, **sizes))

    def loss(source: Tensor, target: Tensor) -> Tensor:
        return token_loss(model, model.hidden(source, shifted(target)), target, ignore=PAD)

    return over_batches(model, loss)


def flat_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


class TorchTranslator(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.body = nn.Transformer(
            WIDTH, HEADS, DEPTH, DEPTH, FFN, dropout=dropout, batch_first=True
        )
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.tokens(ids) * WIDTH**0.5 + self.positions.weight[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) < 0
        hidden = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.tokens.weight)


def torch_layers(dropout: float) -> Step:
    model = TorchTranslator(dropout)
    return over_batches(
        model, lambda source, target: flat_loss(model(source, shifted(target)), target)
    )


def hugging_face_model(dropout: float, kind: str) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_position_embeddings=64,
        activation_function="relu",
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=PAD,
        decoder_start_token_id=1,
        use_cache=False,
    )
    name = {"Marian": "MarianMTModel", "Bart": "BartForConditionalGeneration"}[kind]
    return getattr(transformers, name)(config)


def hugging_face(dropout: float, kind: str) -> Step:
    model = hugging_face_model(dropout, kind)

    def loss(source: Tensor, target: Tensor) -> Tensor:
        logits = model(
            input_ids=source,
            attention_mask=(source != PAD).long(),
            decoder_input_ids=shifted(target),
        ).logits
        return flat_loss(logits, target)

    return over_batches(model, loss)


def x_transformers_model(dropout: float) -> Any:
    from x_transformers import XTransformer

    return XTransformer(
        dim=WIDTH,
        tie_token_emb=True,
        pad_value=PAD,
        ignore_index=PAD,
        enc_num_tokens=VOCAB,
        enc_depth=DEPTH,
        enc_heads=HEADS,
        enc_attn_dim_head=WIDTH // HEADS,
        enc_ff_mult=FFN / WIDTH,
        enc_max_seq_len=64,
        enc_attn_flash=True,
        enc_ff_dropout=dropout,
        dec_num_tokens=VOCAB,
        dec_depth=DEPTH,
        dec_heads=HEADS,
        dec_attn_dim_head=WIDTH // HEADS,
        dec_ff_mult=FFN / WIDTH,
        dec_max_seq_len=64,
        dec_attn_flash=True,
        dec_ff_dropout=dropout,
    )


def x_transformers(dropout: float) -> Step:
    model = x_transformers_model(dropout)

    def loss(source: Tensor, target: Tensor) -> Tensor:
        return model(source, F.pad(target, (1, 0), value=1), mask=source != PAD)

    return over_batches(model, loss)
