"""Batching and training of a small GPT together, on texts of different lengths.

One epoch over the same 384 texts (8 to 256 tokens, mean about 60): random batches of 16 padded to
their longest, as Hugging Face's Trainer makes them by default; length-grouped ones, its option; and
those of addnorm, one stream cut into windows of 256 without padding. Model as in `bench.gpt`,
dropout 0.1. Real tokens per second.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import gpt
from bench.gpt import Step
from bench.harness import Contender
from bench.ragged import Rows, pad

TEXTS, ROWS, DROPOUT, IGNORE = 384, 16, 0.1, -100


def contenders() -> list[Contender]:
    def peer(name: str, order: str, keep: bool = False, **settings: Any) -> Contender:
        return Contender(name, "bench.ragged_gpt:hugging_face", {"order": order, **settings}, keep)

    return [
        Contender("addnorm", "bench.ragged_gpt:addnorm", {}, True, ours=True),
        peer("HF GPT-2, random padded", "random"),
        peer("HF GPT-2, length-grouped", "grouped"),
        peer("HF GPT-2, grouped, kept memory", "grouped", True),
        peer("HF GPT-2, grouped, dropout 0", "grouped", dropout=0.0),
    ]


def texts() -> Rows:
    """Return random ids of different lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randn(TEXTS, generator=draw).mul(0.8).add(3.8).exp().round().clamp(8, 256)
    return [torch.randint(5, gpt.VOCAB, (int(n),), generator=draw).tolist() for n in lengths]


def tokens_per_step() -> float:
    return float(sum(map(len, texts())))


def flops_per_step() -> float:
    """Return the operations for real tokens, each attending to those before it in its text."""
    lengths = [len(row) for row in texts()]
    layer = (4 * gpt.WIDTH + 2 * gpt.FFN) * gpt.WIDTH * sum(lengths)
    scores = gpt.WIDTH * sum(n * n for n in lengths)
    return 6.0 * (gpt.DEPTH * (layer + scores) + gpt.WIDTH * gpt.VOCAB * sum(lengths))


def addnorm() -> Step:
    from addnorm import build, presets, token_loss
    from addnorm.data.text.windows import Windows, collate_windows, join_texts

    sizes = dict(width=gpt.WIDTH, depth=gpt.DEPTH, heads=gpt.HEADS, ffn_width=gpt.FFN)
    model = build(presets.gpt2(vocab=gpt.VOCAB, length=gpt.LENGTH, dropout=DROPOUT, **sizes))
    stream = join_texts(texts())
    windows = Windows(len(stream), gpt.LENGTH, 4)
    current: list[Tensor] = []
    step = gpt.training(model, lambda: token_loss(model, model.hidden(current[0]), current[1]))

    def run() -> None:
        for part in windows.epoch(0):
            current[:] = collate_windows(stream, part)
            step()

    return run


def hugging_face(order: str, dropout: float = DROPOUT) -> Step:
    rows = texts()
    numbers = torch.randperm(TEXTS, generator=torch.Generator().manual_seed(2)).tolist()
    if order == "grouped":
        numbers.sort(key=lambda i: -len(rows[i]))
    model = gpt.hugging_face_model(dropout)
    current: list[Tensor] = []

    def loss() -> Tensor:
        ids, mask = current
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORE)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    step = gpt.training(model, loss)

    def run() -> None:
        for start in range(0, TEXTS, ROWS):
            ids = pad([rows[i] for i in numbers[start : start + ROWS]])
            current[:] = [ids, (ids != 0).long()]
            step()

    return run
