"""Train a small attention-only model that has an induction head, and draw how it appears.

    python -m bench.induction [--steps 1200] [--out docs/results/pictures]

Sequences are random tokens, said twice. To predict the second half, a head must find the earlier
copy of the current token and attend to what followed it: an induction head, made of two layers
(Elhage et al. 2021; Olsson et al. 2022, 2209.11895). It appears in a short time, together with a
drop of the loss on the second half. Prints the head, found by its attention, by its circuit and by
ablation, and writes a picture of the two curves.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.lens import ablate, head_statistics, look
from addnorm.lens.circuits import composition, copying_score
from addnorm.lens.patching import token_loss_metric
from addnorm.models.transformer import Decoder
from addnorm.report import line_chart, write_picture

VOCAB, HALF = 32, 16
"""Tokens, and the length of what is said twice."""


def draw(rows: int, generator: torch.Generator) -> Tensor:
    """Return sequences of a beginning token 0 and random tokens, said twice."""
    half = torch.randint(1, VOCAB, (rows, HALF), generator=generator)
    start = torch.zeros(rows, 1, dtype=torch.long)
    return torch.cat((start, half, half), dim=1)


def make_model(seed: int) -> Decoder:
    """Return a decoder of two layers whose feed-forward networks write nothing."""
    torch.manual_seed(seed)
    config = ModelConfig(
        mode="decoder",
        vocab=VOCAB,
        width=64,
        heads=4,
        depth=2,
        ffn_width=1,
        addnorm="pre",
        positions="learned",
        length=2 * HALF + 1,
        tie_embeddings="none",
        scale_embedding=False,
        attention_bias="none",
        ffn_bias=False,
        init="normal",
        dropout=0.0,
    )
    model = build(config)
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        if ".ffn." in name:
            parameter.requires_grad_(False)
            if name.endswith("output.weight"):
                torch.nn.init.zeros_(parameter)
    return model


def second_half_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of the tokens that were said before."""
    start = HALF + 1
    return F.cross_entropy(logits[:, start:-1].flatten(0, 1), ids[:, start + 1 :].flatten())


@dataclass
class History:
    """What was measured while training."""

    steps: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Loss of the first half, which cannot be predicted."""
    second: list[float] = field(default_factory=list)
    induction: list[float] = field(default_factory=list)
    """Largest induction score of a head."""
    previous: list[float] = field(default_factory=list)
    """Largest previous-token score of a head of the first layer."""


def train(steps: int, seed: int = 0, every: int = 25) -> tuple[Decoder, History]:
    """Return the trained model and how it came about."""
    model, generator = make_model(seed), torch.Generator().manual_seed(seed)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.01)
    history, test = History(), draw(64, torch.Generator().manual_seed(10_000))
    for step in range(steps + 1):
        if step % every == 0:
            measure(model.eval(), test, step, history)
            model.train()
        ids = draw(64, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), history


def measure(model: Decoder, test: Tensor, step: int, history: History) -> None:
    """Add the losses of both halves and the scores of the heads to the history."""
    seen = look(model, test)
    heads = head_statistics(seen, test)
    logits = seen.output
    history.steps.append(step)
    first = F.cross_entropy(logits[:, 1:HALF].flatten(0, 1), test[:, 2 : HALF + 1].flatten())
    history.first.append(float(first))
    history.second.append(float(second_half_loss(logits, test)))
    history.induction.append(heads.ranked("induction")[0][1])
    layer = [value for name, value in heads.ranked("previous") if name.startswith("decoder.0")]
    history.previous.append(layer[0])


def find(model: Decoder) -> dict[str, object]:
    """Return the induction head by each of three views, and its previous-token head."""
    test = draw(64, torch.Generator().manual_seed(10_000))
    heads = head_statistics(look(model, test), test)
    induction, score = heads.ranked("induction")[0]
    previous, before = heads.ranked("previous")[0]
    targets = test[:, 1:].clone()
    targets[:, : HALF + 1] = -100
    effects = ablate(model, test[:, :-1], token_loss_metric(targets), places=["*.1.attention.*"])
    names = [f"decoder.1.attention.{h}" for h in range(4)]
    copying = {name: copying_score(model, name) for name in names}
    reading = {name: composition(model, previous, name)["key"] for name in names}
    return {
        "by attention": (induction, score),
        "previous token": (previous, before),
        "by ablation": effects.ranked()[0],
        "by copying (OV)": max(copying.items(), key=lambda pair: pair[1]),
        "by K-composition (QK)": max(reading.items(), key=lambda pair: pair[1]),
        "copying of the head": copying[induction],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the picture")
    args = parser.parse_args(arguments)
    model, history = train(args.steps, args.seed)
    for view, found in find(model).items():
        print(f"{view:24} {found}")
    print("step   first  second  induction  previous")
    rows = zip(
        history.steps,
        history.first,
        history.second,
        history.induction,
        history.previous,
        strict=True,
    )
    for step, first, second, induction, previous in rows:
        if step % 100 == 0:
            print(f"{step:5d} {first:6.2f} {second:6.2f} {induction:8.2f} {previous:9.2f}")
    if args.out is not None:
        series = {
            "loss, second half ÷ 3.5": [loss / 3.5 for loss in history.second],
            "induction score": history.induction,
            "previous-token score": history.previous,
        }
        points = {
            name: list(zip(history.steps, values, strict=True)) for name, values in series.items()
        }
        picture = line_chart(points, title="An induction head appears", x="step", y="score, loss")
        print(write_picture(picture, args.out / "induction.svg"))


if __name__ == "__main__":
    main()
