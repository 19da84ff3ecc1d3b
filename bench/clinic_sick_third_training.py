"""A third set of sick models: data, loss, weights, optimizer, plan (see clinic_sick_third.py)."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch, TrainingPlan
from bench.clinic_sick_training_unseen import learnable_text
from bench.clinic_third_bases import TorchPairs, Translator, made, nano, same_place
from bench.clinic_unseen_bases import (
    HAND,
    HUB,
    LENGTH,
    OURS,
    ROWS,
    TORCH,
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
    our_encoder,
    our_translator,
    ours,
    torched,
)

SICKNESSES = {
    "decoder input not shifted": r"label|target|shift|own token|copy|misalign|future",
    "predicts the previous token": r"label|target|misalign|previous|shift|visible|copy",
    "labels shifted twice": r"label|target|shift|misalign",
    "no label counts": r"nan|finite|label|target",
    "row of padding only": r"nan|finite|padding",
    "loss without gradient": r"gradient|differentia|no grad|depend",
    "nll of raw logits": r"softmax|negative|unbounded|\blog\b|nll|below",
    "dead outputs": r"gradient|dead|zero|relu|output",
    "head far too large": r"weights|loss|logit|head|large",
    "embeddings far too large": r"embedding|token|large|branch|weights|position",
    "optimizer of another copy": r"optimi|parameter",
    "group with rate 0": r"rate|\blr\b|never change|not train|frozen|not updated",
    "eps of 1 in Adam": r"\beps|ε|epsilon",
    "momentum 1": r"momentum",
    "bfloat16 with a tiny rate": r"bf|bfloat|precision|round|resolution|rate",
    "clipped to 1e-7": r"clip|will not train|rate",
    "warm-up longer than the training": r"warm",
    "rate 1e-9": r"rate|will not train",
}

Cases = Iterator[tuple[str, str, Callable[[], Case]]]
PLAIN = {"causal": False, "classes": 5}
Bases = Iterator[tuple[str, Callable[[], Case]]]


def bases() -> Bases:
    """Yield a healthy language model of each style."""
    yield OURS, lambda: lm(ours())
    yield TORCH, lambda: lm(TorchLM())
    yield HAND, lambda: lm(nano())
    yield HUB, lambda: Case(hub("gpt2"), causal_batch())


def with_options(base: Callable[[], Case], change: Callable[[nn.Module], dict[str, Any]]) -> Case:
    case = base()
    return Case(case.model, case.batch, case.loss, case.options | change(case.model))


def with_loss(model: nn.Module, loss: Callable[..., Tensor], **options: Any) -> Case:
    return Case(model, ids(), loss, {"causal": True} | options)


# ── Data and loss ─────────────────────────────────────────────────────────────────────────────────


def shifts() -> Cases:
    def pair(model: nn.Module) -> Case:
        batch = (ids(), ids(length=11))
        return Case(model, batch, lambda out, pair: same_place(out, pair[1]))

    def bart(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, decoder_input_ids=labels, labels=labels)

    name = "decoder input not shifted"
    yield name, OURS, lambda: pair(our_translator())
    yield name, TORCH, lambda: pair(made(TorchPairs))
    yield name, HAND, lambda: pair(made(Translator))
    batch = {"input_ids": ids(), "labels": ids(length=11)}
    yield name, HUB, lambda: Case(Around(hub("bart"), bart), batch)

    def backwards(output: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(output[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())

    def backwards_inside(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.inner(input_ids=input_ids).logits
        return {"loss": backwards(logits, labels), "logits": logits}

    name = "predicts the previous token"
    yield name, OURS, lambda: with_loss(ours(), backwards)
    yield name, TORCH, lambda: with_loss(TorchLM(), backwards)
    yield name, HAND, lambda: with_loss(nano(), backwards)
    yield name, HUB, lambda: Case(Around(hub("gpt2"), backwards_inside), causal_batch())

    def shifts_inside(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.inner(input_ids)
        return {"loss": next_token(logits, labels), "logits": logits}

    def shifted() -> dict[str, Tensor]:
        tokens = ids(length=LENGTH + 1)
        return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}

    name = "labels shifted twice"
    yield name, OURS, lambda: Case(Around(ours(), shifts_inside), shifted())
    yield name, TORCH, lambda: Case(Around(TorchLM(), shifts_inside), shifted())
    yield name, HAND, lambda: Case(Around(nano(), shifts_inside), shifted())
    yield name, HUB, lambda: Case(hub("gpt2"), shifted())


def labels() -> Cases:
    none = torch.full((ROWS, LENGTH), -100)

    def ignored(model: nn.Module) -> Case:
        return Case(model, ClinicBatch(ids(), none), same_place)

    name = "no label counts"
    yield name, TORCH, lambda: ignored(torched({"causal": False}))
    yield name, HAND, lambda: ignored(nano({"causal": False}))
    yield name, HUB, lambda: Case(hub("bert-mlm"), {"input_ids": ids(), "labels": none})

    def empty_row() -> Tensor:
        tokens = ids()
        tokens[2] = 0
        return tokens

    def masked(model: nn.Module) -> Case:
        batch = ClinicBatch(empty_row(), torch.arange(ROWS) % 5)
        return Case(model, batch, F.cross_entropy, {"pad": 0})

    name = "row of padding only"
    # The first version also listed nn.TransformerEncoderLayer: torch 2.13 gives zeros, not NaN.
    yield name, HAND, lambda: masked(nano(PLAIN, hidden=lambda _, t: t == 0))


def losses() -> Cases:
    def wrong_answers(output: Tensor, tokens: Tensor) -> Tensor:
        return (output[:, :-1].argmax(-1) != tokens[:, 1:]).float().mean()

    def raw(output: Tensor, tokens: Tensor) -> Tensor:
        return F.nll_loss(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def inside(loss: Callable[..., Tensor]) -> Callable[..., Any]:
        def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.inner(input_ids=input_ids).logits
            return {"loss": loss(logits, labels), "logits": logits}

        return call

    for name, loss in (("loss without gradient", wrong_answers), ("nll of raw logits", raw)):
        yield name, OURS, lambda loss=loss: with_loss(ours(), loss)
        yield name, TORCH, lambda loss=loss: with_loss(TorchLM(), loss)
        yield name, HAND, lambda loss=loss: with_loss(nano(), loss)
        yield (
            name,
            HUB,
            lambda loss=loss: Case(Around(hub("gpt2"), inside(loss)), causal_batch()),
        )

    def dead(self: Any, tokens: Tensor) -> Tensor:
        return (self.inner(tokens)[:, 0] - 5).relu()

    def number(model: nn.Module) -> Case:
        return Case(Around(model, dead), ClinicBatch(ids(), torch.rand(ROWS)), F.mse_loss)

    one = {"causal": False, "classes": 1}
    name = "dead outputs"
    yield name, OURS, lambda: number(our_encoder(outputs=1))
    yield name, TORCH, lambda: number(torched(one))
    yield name, HAND, lambda: number(nano(one))


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────


def weights() -> Cases:
    def louder(model: nn.Module, name: str, factor: float) -> nn.Module:
        with torch.no_grad():
            dict(model.named_parameters())[name].mul_(factor)
        return model

    def head_of_ours() -> nn.Module:
        model = ours(tie_embeddings="none")
        names = [n for n, p in model.named_parameters() if p.shape[:1] == (VOCAB,) and p.ndim == 2]
        return louder(model, names[-1], 300.0)

    def tokens_of_ours() -> nn.Module:
        model = ours(tie_embeddings="none")
        names = [n for n, p in model.named_parameters() if p.shape == (VOCAB, WIDTH)]
        return louder(model, names[0], 3000.0)

    untied = partial(hub, "gpt2", tie_word_embeddings=False)
    name = "head far too large"
    yield name, OURS, lambda: lm(head_of_ours())
    yield name, TORCH, lambda: lm(louder(TorchLM(), "out.weight", 300.0))
    yield name, HAND, lambda: lm(louder(nano(), "lm_head.weight", 300.0))
    yield name, HUB, lambda: Case(louder(untied(), "lm_head.weight", 1000.0), causal_batch())
    name = "embeddings far too large"
    yield name, OURS, lambda: lm(tokens_of_ours())
    yield name, TORCH, lambda: lm(louder(TorchLM(), "emb.weight", 3000.0))
    yield name, HAND, lambda: lm(louder(nano(), "transformer.wte.weight", 20000.0))
    wte = "transformer.wte.weight"
    yield name, HUB, lambda: Case(louder(untied(), wte, 100000.0), causal_batch())


# ── Optimizer and plan ────────────────────────────────────────────────────────────────────────────


def optimizers() -> Cases:
    def copied(model: nn.Module) -> Any:
        return torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)

    def still(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        body, rest = parameters[2:-2], parameters[:2] + parameters[-2:]
        return torch.optim.AdamW([{"params": body, "lr": 0.0}, {"params": rest}], lr=1e-3)

    def eps(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1.0)

    def momentum(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=1.0)

    def coarse(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.bfloat16().parameters(), lr=1e-6)

    for name, make in (
        ("optimizer of another copy", copied),
        ("group with rate 0", still),
        ("eps of 1 in Adam", eps),
        ("momentum 1", momentum),
        ("bfloat16 with a tiny rate", coarse),
    ):
        for style, base in bases():
            yield (
                name,
                style,
                lambda base=base, make=make: with_options(base, lambda m: {"optimizer": make(m)}),
            )


def plans() -> Cases:
    def case(model: nn.Module, plan: TrainingPlan) -> Case:
        text = learnable_text()
        options = {"plan": plan, "more_batches": text[1:], "causal": True}
        return Case(model, text[0], next_token, options)

    def hub_case(plan: TrainingPlan) -> Case:
        batches = [{"input_ids": t, "labels": t.clone()} for t in learnable_text()]
        return Case(hub("gpt2"), batches[0], None, {"plan": plan, "more_batches": batches[1:]})

    for name, plan in (
        ("clipped to 1e-7", TrainingPlan(lr=0.1, steps=300, optimizer="sgd", clip=1e-7)),
        ("warm-up longer than the training", TrainingPlan(lr=1e-3, steps=100, warmup=5000)),
        ("rate 1e-9", TrainingPlan(lr=1e-9, steps=300)),
    ):
        yield name, OURS, lambda plan=plan: case(ours(), plan)
        yield name, TORCH, lambda plan=plan: case(TorchLM(), plan)
        yield name, HAND, lambda plan=plan: case(nano(), plan)
        yield name, HUB, lambda plan=plan: hub_case(plan)


FAMILIES = (shifts, labels, losses, weights, optimizers, plans)
