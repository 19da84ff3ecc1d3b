"""Sick data, initialisation and training settings: the second part of the unseen sick models."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch, TrainingPlan
from bench.clinic_unseen_bases import (
    HAND,
    HUB,
    LENGTH,
    OURS,
    TORCH,
    VOCAB,
    WIDTH,
    Around,
    Case,
    HandLM,
    TorchLM,
    causal_batch,
    class_batch,
    hand,
    hub,
    ids,
    lm,
    next_token,
    our_encoder,
    ours,
    padded,
    torched,
)

Cases = Iterator[tuple[str, str, Callable[[], Case]]]
PLAIN = {"causal": False, "classes": 5}


# ── Data and loss ─────────────────────────────────────────────────────────────────────────────────


def class_rule(shuffle: bool) -> tuple[ClinicBatch, list[ClinicBatch]]:
    """Return batches whose class is the commonest of five tokens, or that of another row."""
    batches = []
    for _ in range(70):
        labels = torch.randint(5, (24,))
        tokens = ids(24, 10, low=10)
        planted = torch.rand(24, 10) < 0.5
        tokens = torch.where(planted, labels[:, None] + 1, tokens)
        batches.append(ClinicBatch(tokens, labels.roll(1) if shuffle else labels))
    return batches[0], batches[1:]


def labels_of_another_row() -> Cases:
    def case(model: nn.Module) -> Case:
        batch, more = class_rule(shuffle=True)
        plan = TrainingPlan(lr=1e-3, warmup=5, steps=300)
        return Case(model, batch, F.cross_entropy, {"plan": plan, "more_batches": more})

    def hub_case() -> Case:
        batch, more = class_rule(shuffle=True)
        as_dict = [{"input_ids": b.inputs, "labels": b.targets} for b in (batch, *more)]
        plan = TrainingPlan(lr=1e-3, warmup=5, steps=300)
        return Case(hub("bert"), as_dict[0], None, {"plan": plan, "more_batches": as_dict[1:]})

    yield "labels of another row", OURS, lambda: case(our_encoder())
    yield "labels of another row", TORCH, lambda: case(torched(PLAIN))
    yield "labels of another row", HAND, lambda: case(hand(PLAIN))
    yield "labels of another row", HUB, hub_case


def labels_not_shifted() -> Cases:
    def unshifted(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.inner(input_ids=input_ids).logits
        return {"loss": unshifted(logits, labels), "logits": logits}

    def case(model: nn.Module) -> Case:
        tokens = ids()
        return Case(model, ClinicBatch(tokens, tokens), unshifted, {"causal": True})

    yield "labels not shifted", OURS, lambda: case(ours())
    yield "labels not shifted", TORCH, lambda: case(TorchLM())
    yield "labels not shifted", HAND, lambda: case(HandLM())
    yield "labels not shifted", HUB, lambda: Case(Around(hub("gpt2"), call), causal_batch())


def loss_counts_padding() -> Cases:
    def hub_batch() -> dict[str, Tensor]:
        tokens, mask = padded()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}

    options = {"pad": 0, "causal": True}
    yield "loss counts padding", OURS, lambda: Case(ours(pad=0), padded()[0], next_token, options)
    yield (
        "loss counts padding",
        TORCH,
        lambda: Case(torched(padding=lambda _, t: t == 0), padded()[0], next_token, options),
    )
    yield "loss counts padding", HAND, lambda: Case(HandLM(), padded()[0], next_token, options)
    yield "loss counts padding", HUB, lambda: Case(hub("gpt2"), hub_batch())


def left_padding() -> Cases:
    def hub_batch() -> dict[str, Tensor]:
        tokens, mask = padded("left")
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, -100),
        }

    def loss(output: Tensor, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].masked_fill(tokens[:, :-1] == 0, -100)
        return F.cross_entropy(output[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)

    def masked(self: Any, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).tril() & (tokens != 0)[:, None, None]
        seen = seen | torch.eye(n, dtype=torch.bool)
        x = self.start(tokens)
        for i in range(self.depth):
            y = self.ln1[i](x)
            q, k, v = (torch.einsum("bne,hed->bhnd", y, w[i]) for w in (self.wq, self.wk, self.wv))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + torch.einsum("bhqd,hde->bqe", mixed, self.wo[i])
            x = x + self.feed(self.ln2[i](x), i)
        return self.head(self.lnf(x))

    # The first version also listed a model of addnorm here. It is not sick (it counts positions
    # from the first real token), and is among the healthy ones now.
    options = {"pad": 0, "causal": True}
    name = "left padding, absolute positions"
    yield name, HAND, lambda: Case(hand(forward=masked), padded("left")[0], loss, options)
    yield name, HUB, lambda: Case(hub("gpt2"), hub_batch())


def no_positions() -> Cases:
    def bert() -> Case:
        model = hub("bert")
        model.bert.embeddings.position_embeddings.weight.requires_grad_(False).zero_()
        return Case(model, class_batch())

    def bare(self: Any, tokens: Tensor) -> Tensor:
        return self.wte[tokens] + 0 * self.wpe.sum()

    def torch_bare(self: Any, tokens: Tensor) -> Tensor:
        return self.emb(tokens)

    model_options = dict(positions="none", segments=0)
    yield "no positions", OURS, lambda: Case(our_encoder(**model_options), ids())
    yield "no positions", TORCH, lambda: Case(torched(PLAIN, start=torch_bare), ids())
    yield "no positions", HAND, lambda: Case(hand(PLAIN, start=bare), ids())
    yield "no positions", HUB, bert


def tokens_drowned() -> Cases:
    def louder(model: nn.Module, name: str, factor: float) -> nn.Module:
        with torch.no_grad():
            dict(model.named_parameters())[name].mul_(factor)
        return model

    def drowned_ours() -> Case:
        model = ours()
        for parameter in model.decoder.positions.parameters():
            with torch.no_grad():
                parameter.copy_(20 * torch.randn_like(parameter))
        return lm(model)

    yield "tokens drowned", OURS, drowned_ours
    yield "tokens drowned", TORCH, lambda: lm(louder(TorchLM(), "pos.weight", 100.0))
    yield "tokens drowned", HAND, lambda: lm(louder(HandLM(), "wte", 0.002))
    yield (
        "tokens drowned",
        HUB,
        lambda: Case(
            louder(hub("gpt2", tie_word_embeddings=False), "transformer.wpe.weight", 500.0),
            causal_batch(),
        ),
    )


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────


def equal_weights() -> Cases:
    def constant(model: nn.Module, value: float) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.fill_(value)
        return model

    def zeros() -> Case:
        return Case(hub("gpt2", initializer_range=0.0), causal_batch())

    yield "equal initial weights", OURS, lambda: lm(constant(ours(), 0.02))
    yield "equal initial weights", TORCH, lambda: lm(constant(TorchLM(), 0.1))
    yield "equal initial weights", HAND, lambda: lm(constant(HandLM(), 0.01))
    yield "equal initial weights", HUB, zeros


def frozen() -> Cases:
    def freeze(model: nn.Module, *names: str) -> nn.Module:
        for path, parameter in model.named_parameters():
            if path in names:
                parameter.requires_grad_(False)
        return model

    def frozen_ours() -> Case:
        model = ours(tie_embeddings="none")
        model.tokens.requires_grad_(False)
        return lm(model)

    untied = hub("gpt2", tie_word_embeddings=False)
    yield "embedding or head frozen", OURS, frozen_ours
    yield "embedding or head frozen", TORCH, lambda: lm(freeze(TorchLM(), "out.weight", "out.bias"))
    yield "embedding or head frozen", HAND, lambda: lm(freeze(HandLM(), "wte"))
    yield (
        "embedding or head frozen",
        HUB,
        lambda: Case(freeze(untied, "lm_head.weight"), causal_batch()),
    )


def saturated() -> Cases:
    def torch_large() -> Case:
        model = TorchLM()
        with torch.no_grad():
            for layer in model.layers:
                layer.self_attn.in_proj_weight[: 2 * WIDTH] *= 8
        return lm(model)

    def hub_large() -> Case:
        model = hub("gpt2", scale_attn_weights=False, initializer_range=0.6)
        return Case(model, causal_batch())

    def times_root(self: Any, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k) * self.dim**0.5

    yield "attention saturated", OURS, lambda: lm(ours(attention_scale=8.0, init_std=0.2))
    yield "attention saturated", TORCH, torch_large
    yield "attention saturated", HAND, lambda: lm(hand({"std": 0.5}, scores=times_root))
    yield "attention saturated", HUB, hub_large


# ── Optimizer and plan ────────────────────────────────────────────────────────────────────────────


def optimizers() -> Cases:
    def bases() -> Iterator[tuple[str, Callable[[], Case]]]:
        yield OURS, lambda: lm(ours())
        yield TORCH, lambda: lm(TorchLM())
        yield HAND, lambda: lm(HandLM())
        yield HUB, lambda: Case(hub("gpt2"), causal_batch())

    def with_optimizer(base: Callable[[], Case], make: Callable[[nn.Module], Any]) -> Case:
        case = base()
        return Case(
            case.model, case.batch, case.loss, case.options | {"optimizer": make(case.model)}
        )

    def half(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        return torch.optim.AdamW(parameters[: len(parameters) // 2], lr=1e-3)

    def decay(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=30.0)

    def beta(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.3))

    for name, make in (
        ("optimizer lacks parameters", half),
        ("weight decay insane", decay),
        ("beta2 insane", beta),
    ):
        for style, base in bases():
            yield name, style, lambda base=base, make=make: with_optimizer(base, make)  # type: ignore[misc]


def learnable_text() -> list[Tensor]:
    return [torch.randint(4, (12, LENGTH)).cumsum(1) % VOCAB for _ in range(70)]


def rate_too_high() -> Cases:
    def case(model: nn.Module, plan: TrainingPlan) -> Case:
        text = learnable_text()
        options = {"plan": plan, "more_batches": text[1:], "causal": True}
        return Case(model, text[0], next_token, options)

    def hub_case() -> Case:
        batches = [{"input_ids": t, "labels": t.clone()} for t in learnable_text()]
        plan = TrainingPlan(lr=1.0, steps=300)
        return Case(hub("gpt2"), batches[0], None, {"plan": plan, "more_batches": batches[1:]})

    adam, sgd = TrainingPlan(lr=0.8, steps=200), TrainingPlan(lr=300.0, steps=200, optimizer="sgd")
    yield "rate far too high", OURS, lambda: case(ours(), adam)
    yield "rate far too high", TORCH, lambda: case(TorchLM(norm_first=False), adam)
    yield "rate far too high", HAND, lambda: case(HandLM(), sgd)
    yield "rate far too high", HUB, hub_case


FAMILIES = (
    labels_of_another_row,
    labels_not_shifted,
    loss_counts_padding,
    left_padding,
    no_positions,
    tokens_drowned,
    equal_weights,
    frozen,
    saturated,
    optimizers,
    rate_too_high,
)
