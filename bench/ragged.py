"""Batching and training together, on pairs of different lengths.

One epoch over the same 1,536 pairs (lengths of mean 13, 3 to 40): random batches padded to their
longest, as Hugging Face's Trainer makes them by default; length-grouped ones, its option; and those
of addnorm, by tokens from length buckets. Model, dropout and loss as in Multi30k's
Transformer-Tiny (4 + 4 blocks, width 128, dropout 0.3). Real source and target tokens per second.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import translate
from bench.gpt import Step, training
from bench.harness import Contender

PAIRS, ROWS, DROPOUT, IGNORE = 1536, 128, 0.3, -100
FLOPS = translate.flops_per_step() / translate.tokens_per_step()
"""Operations for each real token; bench.translate has the same distribution of lengths."""
Rows = list[list[int]]


def contenders() -> list[Contender]:
    def peer(name: str, maker: str, order: str, **settings: Any) -> Contender:
        return Contender(name, f"bench.ragged:{maker}", {"order": order, **settings})

    return [
        Contender("addnorm", "bench.ragged:addnorm", {}, True, ours=True),
        Contender("addnorm, random padded", "bench.ragged:addnorm", {"order": "random"}, True),
        peer("HF Marian, random padded", "hugging_face", "random", kind="Marian"),
        peer("HF Marian, length-grouped", "hugging_face", "grouped", kind="Marian"),
        peer("HF BART, length-grouped", "hugging_face", "grouped", kind="Bart"),
        peer("torch.nn, length-grouped", "torch_layers", "grouped"),
        peer("x-transformers, length-grouped", "x_transformers", "grouped"),
    ]


def pairs() -> tuple[Rows, Rows]:
    """Return random ids of different lengths, source and target."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(PAIRS, generator=draw).mul(0.4).add(2.48).exp()
    other = base * torch.randn(PAIRS, generator=draw).mul(0.15).exp()
    lengths = torch.stack((base, other), dim=1).round().clamp(3, 40).long().tolist()
    sides = [
        [
            torch.randint(5, translate.VOCAB, (row[side],), generator=draw).tolist()
            for row in lengths
        ]
        for side in range(2)
    ]
    return sides[0], sides[1]


def tokens_per_step() -> float:
    return float(sum(len(row) for side in pairs() for row in side))


def batches(order: str) -> list[list[int]]:
    """Return batches of 128: random, or sorted by length."""
    draw = torch.Generator().manual_seed(2)
    numbers = torch.randperm(PAIRS, generator=draw).tolist()
    if order == "grouped":
        source, _ = pairs()
        numbers.sort(key=lambda i: -len(source[i]))
    return [numbers[start : start + ROWS] for start in range(0, PAIRS, ROWS)]


def pad(rows: Rows, value: int = 0) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def sweep(model: nn.Module, order: str, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return a step that trains on all pairs once, each batch padded to its longest."""
    source, target = pairs()
    current: list[Tensor] = []
    step = training(model, lambda: loss(current[0], current[1]))

    def run() -> None:
        for batch in batches(order):
            current[:] = [pad([side[i] for i in batch]) for side in (source, target)]
            step()

    return run


def addnorm(order: str = "buckets") -> Step:
    from addnorm import build, presets, token_loss
    from addnorm.data.text.batches import Batches
    from addnorm.data.text.collate import collate_pairs, pair_lengths

    sizes = dict(vocab=translate.VOCAB, width=128, depth=4, heads=4, ffn_width=256, pad=0)
    model = build(presets.base(dropout=DROPOUT, **sizes))
    source, target = pairs()
    buckets = Batches(pair_lengths(source, target), 4096)
    current: list[Tensor] = []

    def loss() -> Tensor:
        return token_loss(model, model.hidden(current[0], current[1]), current[2], smoothing=0.1)

    step = training(model, loss)

    def run() -> None:
        for batch in batches(order) if order == "random" else buckets.epoch(0):
            current[:] = collate_pairs([source[i] for i in batch], [target[i] for i in batch])
            step()

    return run


def smooth(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.masked_fill(target == translate.PAD, IGNORE)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def torch_layers(order: str) -> Step:
    model = translate.TorchTranslator(DROPOUT)
    return sweep(model, order, lambda s, t: smooth(model(s, translate.shifted(t)), t))


def hugging_face(order: str, kind: str) -> Step:
    model = translate.hugging_face_model(DROPOUT, kind)

    def loss(source: Tensor, target: Tensor) -> Tensor:
        logits = model(
            input_ids=source,
            attention_mask=(source != translate.PAD).long(),
            decoder_input_ids=translate.shifted(target),
        ).logits
        return smooth(logits, target)

    return sweep(model, order, loss)


def x_transformers(order: str) -> Step:
    model = translate.x_transformers_model(DROPOUT)

    def loss(source: Tensor, target: Tensor) -> Tensor:
        return model(source, F.pad(target, (1, 0), value=1), mask=source != translate.PAD)

    return sweep(model, order, loss)
