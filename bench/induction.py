"""Train a small attention-only model that has an induction head, and draw how it appears.

    python -m bench.induction [--steps 400] [--out docs/results/pictures]

Random tokens are followed by phrases from anywhere before. To predict a repetition, a head must
find the earlier copy of the current token and attend to what followed it: an induction head, made
of two layers (Elhage et al. 2021; Olsson et al. 2022, 2209.11895). It appears in a short time,
together with a drop of the loss on repeated tokens. Prints the head, found by its attention, by its
circuits and by ablation, and writes a picture of the curves.
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

VOCAB, LENGTH, HEADS = 32, 48, 4
NEW, PHRASE = 16, 4
"""Random tokens at the start, and the length of a phrase that is repeated from anywhere before."""
UNSEEN = -100
"""Target of a token that is not a repetition."""


def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences that continue with earlier phrases, and which tokens repeat, (rows, LENGTH).

    Distances are random, so no fixed one leads to the copy. The first token of a phrase cannot be
    predicted and does not count as repeated.
    """
    ids = torch.randint(VOCAB, (rows, NEW), generator=generator)
    while ids.shape[1] < LENGTH:
        start = torch.randint(ids.shape[1] - PHRASE, (rows, 1), generator=generator)
        ids = torch.cat((ids, ids.gather(1, start + torch.arange(PHRASE))), dim=1)
    place = torch.arange(LENGTH).expand(rows, -1)
    return ids, (place >= NEW) & ((place - NEW) % PHRASE > 0)


def make_model(seed: int) -> Decoder:
    """Return a decoder of two layers whose feed-forward networks write nothing."""
    torch.manual_seed(seed)
    config = ModelConfig(
        mode="decoder",
        vocab=VOCAB,
        width=64,
        heads=HEADS,
        depth=2,
        ffn_width=1,
        addnorm="pre",
        positions="learned",
        length=LENGTH,
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


def losses(logits: Tensor, ids: Tensor, repeated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of new tokens, and of tokens that repeat."""
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return each[~repeated[:, 1:]].mean(), each[repeated[:, 1:]].mean()


@dataclass
class History:
    """What was measured while training."""

    steps: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Loss of new tokens, which cannot be predicted."""
    second: list[float] = field(default_factory=list)
    induction: list[float] = field(default_factory=list)
    """Largest induction score of a head."""
    previous: list[float] = field(default_factory=list)
    """Largest previous-token score of a head of the first layer."""


def train(steps: int, seed: int = 0, every: int = 10) -> tuple[Decoder, History]:
    """Return the trained model and how it came about."""
    model, generator = make_model(seed), torch.Generator().manual_seed(seed)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.01)
    history, test = History(), draw(64, torch.Generator().manual_seed(10_000))
    for step in range(steps + 1):
        if step % every == 0:
            measure(model.eval(), test, step, history)
            model.train()
        ids, _ = draw(64, generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), history


def measure(model: Decoder, test: tuple[Tensor, Tensor], step: int, history: History) -> None:
    """Add the losses of new and repeated tokens and the scores of the heads to the history."""
    seen = look(model, test[0])
    heads = head_statistics(seen, test[0])
    history.steps.append(step)
    first, second = losses(seen.output, *test)
    history.first.append(float(first))
    history.second.append(float(second))
    history.induction.append(heads.ranked("induction")[0][1])
    layer = [value for name, value in heads.ranked("previous") if name.startswith("decoder.0")]
    history.previous.append(layer[0])


def find(model: Decoder) -> dict[str, object]:
    """Return the induction head by each of three views, and its previous-token head."""
    test, repeated = draw(64, torch.Generator().manual_seed(10_000))
    heads = head_statistics(look(model, test), test)
    induction, score = heads.ranked("induction")[0]
    previous, before = heads.ranked("previous")[0]
    targets = test[:, 1:].masked_fill(~repeated[:, 1:], UNSEEN)
    metric = token_loss_metric(targets, ignore=UNSEEN)
    effects = dict(ablate(model, test[:, :-1], metric, places=["*.attention.*"]).ranked())
    names = [f"decoder.1.attention.{h}" for h in range(HEADS)]
    copying = {name: copying_score(model, name) for name in names}
    reading = {name: composition(model, previous, name)["key"] for name in names}
    return {
        "by attention": (induction, score),
        "previous token": (previous, before),
        "by ablation": next(iter(effects.items())),
        "ablation of the head": effects[induction],
        "by copying (OV)": max(copying.items(), key=lambda pair: pair[1]),
        "by K-composition (QK)": max(reading.items(), key=lambda pair: pair[1]),
        "copying of the head": copying.get(induction),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
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
        if step % 50 == 0:
            print(f"{step:5d} {first:6.2f} {second:6.2f} {induction:8.2f} {previous:9.2f}")
    if args.out is not None:
        series = {
            "loss ÷ 3.5": [loss / 3.5 for loss in history.second],
            "induction score": history.induction,
            "previous-token score": history.previous,
        }
        points = {
            name: list(zip(history.steps, values, strict=True)) for name, values in series.items()
        }
        picture = line_chart(points, title="An induction head appears", x="step", y="score, loss")
        args.out.mkdir(parents=True, exist_ok=True)
        print(write_picture(picture, args.out / "induction.svg"))


if __name__ == "__main__":
    main()
