"""A third set of sick models: structure. The author had not read the clinic's rules.

Known to the author: the issue's list, how `examine` is called, the first two sets of models, the
page of their results and the rehearsal. Not known: rules, experiments and trace. The words that a
finding above a note must contain (`SICKNESSES`) were committed before the first run. What is wrong
with data, loss, weights and optimizer is in clinic_sick_third_training.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.clinic import ClinicBatch
from bench import clinic_sick_third_training as training
from bench.clinic_third_bases import (
    Nano,
    TorchPairs,
    Translator,
    all_padded,
    each,
    made,
    nano,
)
from bench.clinic_unseen_bases import (
    DEPTH,
    HAND,
    HEADS,
    HUB,
    OURS,
    ROWS,
    TORCH,
    VOCAB,
    WIDTH,
    Around,
    Case,
    HandLM,
    TorchLM,
    after,
    before,
    causal_batch,
    hand,
    hub,
    ids,
    lm,
    next_token,
    our_translator,
    ours,
    torched,
    with_boxes,
)

SICKNESSES = {
    "mask inverted": r"padding|padded|mask",
    "first position reads only itself": r"not read|ignor|depend|reach|first position|only|pool",
    "positions by row": r"position|\brow|batch|order",
    "heads split by view": r"future|later (position|token)|causal",
    "norm over positions": r"future|later (position|token)|causal",
    "target sees its future": r"future|later (position|token)|causal",
    "source of another row": r"\brow|source|batch",
    "source padding attended": r"padding|padded",
    "last position is padding": r"padding|padded|last position",
    "layers in a Python list": r"regist|parameters\(\)|not in|optimi|not train|list",
    "block never called": r"gradient|unused|never|without|missing",
    "gradient shrunk": r"gradient|detach|shortcut|vanish",
    "shortcut 0.8 in twelve blocks": r"shortcut|factor|scaled|fade",
    "eps of 1e5 in the norms": r"norm|\beps|ε|epsilon",
    "attention scores times 0": r"attention|uniform|gradient|quer",
    "gate shut": r"branch|zero|contribut|gate|gradient|dead",
    "body without gradient": r"gradient|detach",
    "reentrant checkpoint without gradient": r"gradient|checkpoint",
    "dropout 0.95 of the embeddings": r"dropout",
    "no positions on pictures": r"position|order",
    "tokens clamped": r"token|embedding|distinguish|depend",
} | training.SICKNESSES

Cases = Iterator[tuple[str, str, Callable[[], Case]]]
PLAIN = {"causal": False, "classes": 5}


def classes() -> Tensor:
    return torch.arange(ROWS) % 5


def labelled(model: nn.Module, tokens: Tensor | None = None, **options: Any) -> Case:
    inputs = ids() if tokens is None else tokens
    return Case(model, ClinicBatch(inputs, classes()), F.cross_entropy, options)


# ── What may be seen ──────────────────────────────────────────────────────────────────────────────


def masks() -> Cases:
    def call(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=1 - attention_mask, labels=labels)

    def batch() -> dict[str, Tensor]:
        tokens, mask = all_padded()
        return {"input_ids": tokens, "attention_mask": mask, "labels": classes()}

    name = "mask inverted"
    wrong = torched(PLAIN, padding=lambda _, tokens: tokens != 0)
    yield name, TORCH, lambda: labelled(wrong, all_padded()[0], pad=0)
    model = nano(PLAIN, hidden=lambda _, tokens: tokens != 0)
    yield name, HAND, lambda: labelled(model, all_padded()[0], pad=0)
    yield name, HUB, lambda: Case(Around(hub("bert"), call), batch())


def first_position() -> Cases:
    def first(self: Any, tokens: Tensor) -> Tensor:
        return self.parts["out"](self.inner(tokens)[:, 0])

    def gpt2(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.parts["out"](self.inner.transformer(input_ids).last_hidden_state[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    name = "first position reads only itself"
    head = partial(nn.Linear, VOCAB, 5)
    yield name, OURS, lambda: labelled(Around(ours(), first, out=head()))
    yield name, TORCH, lambda: labelled(Around(TorchLM(), first, out=head()))
    wrong = {"causal": True, "classes": 5}
    yield name, HAND, lambda: labelled(nano(wrong, pool=lambda _, x, tokens: x[:, 0]))
    yield (
        name,
        HUB,
        lambda: Case(
            Around(hub("gpt2"), gpt2, out=nn.Linear(WIDTH, 5)),
            {"input_ids": ids(), "labels": classes()},
        ),
    )


def positions() -> Cases:
    def by_row(self: Any, tokens: Tensor) -> Tensor:
        return self.emb(tokens) + self.pos(torch.arange(len(tokens)))[:, None]

    def nano_by_row(self: Any, tokens: Tensor) -> Tensor:
        return (
            self.transformer["wte"](tokens)
            + self.transformer["wpe"](torch.arange(len(tokens)))[:, None]
        )

    def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        places = torch.arange(len(input_ids))[:, None].expand_as(input_ids)
        return self.inner(input_ids=input_ids, position_ids=places, labels=labels)

    name = "positions by row"
    yield name, TORCH, lambda: lm(torched(start=by_row))
    yield name, HAND, lambda: lm(nano(embed=nano_by_row))
    yield name, HUB, lambda: Case(Around(hub("gpt2"), call), causal_batch())
    name = "no positions on pictures"
    yield name, TORCH, lambda: pictures(False)
    yield name, HAND, lambda: pictures(True)
    yield name, HUB, vit_without_positions


class Pictures(nn.Module):
    """Patches without positions, the mean over them as the answer."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        if by_hand:
            self.net: nn.Module = nn.Sequential(*Nano(causal=False).transformer["h"])  # type: ignore[misc]
        else:
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 64, norm_first=True, batch_first=True, dropout=0.0
            )
            self.net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.out(self.norm(self.net(x)).mean(1))


def pictures(by_hand: bool) -> Case:
    return labelled(Pictures(by_hand), torch.randn(ROWS, 3, 16, 16))


def vit_without_positions() -> Case:
    import transformers as t

    sizes: dict[str, Any] = dict(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, num_labels=5
    )
    model = t.ViTForImageClassification(
        t.ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=4)
    )
    model.vit.embeddings.position_embeddings.requires_grad_(False).zero_()
    return Case(model, {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": classes()})


def scrambled(x: Tensor) -> Tensor:
    """The view of (rows, length, width) as (rows, heads, length, …) without a transpose."""
    rows, n, width = x.shape
    return x.reshape(rows, HEADS, n, -1).transpose(1, 2).reshape(rows, n, width)


def over_positions(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


def leaks() -> Cases:
    def at(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        before(module, change)

    def mine(change: Callable[[Tensor], Tensor]) -> Case:
        model = ours()
        at(model.decoder.stack.blocks[1].sublayers["attention"], change)
        return lm(model)

    def written(change: Callable[[Tensor], Tensor]) -> Case:
        model = nano()
        at(model.transformer["h"][1].attn, change)
        return lm(model)

    def gpt2(change: Callable[[Tensor], Tensor]) -> Case:
        model = hub("gpt2")
        at(model.transformer.h[2].mlp, change)
        return Case(model, causal_batch())

    for name, change in (
        ("heads split by view", scrambled),
        ("norm over positions", over_positions),
    ):
        yield name, OURS, partial(mine, change)
        yield (
            name,
            TORCH,
            lambda change=change: lm(torched(between=lambda _, x, i: change(x))),
        )
        yield name, HAND, partial(written, change)
        yield name, HUB, partial(gpt2, change)


def pair_case(model: nn.Module, padded: bool = False) -> Case:
    source, target = (all_padded()[0] if padded else ids()), ids(length=11)
    return Case(model, (source, target), lambda out, pair: next_token(out, pair[1]), {"pad": 0})


def translation() -> Cases:
    def rolled_ours() -> Case:
        model = our_translator()
        after(model.encoder, lambda x: x.roll(1, 0))
        return pair_case(model)

    def hand_memory(self: Any, source: Tensor, hidden: Tensor | None) -> Tensor:
        return Translator.memory(self, source, hidden).roll(1, 0)

    def bart(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        states = self.inner.model.encoder(input_ids).last_hidden_state
        return self.inner(encoder_outputs=(states.roll(1, 0),), labels=labels)

    def unmasked(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(
            input_ids=input_ids, attention_mask=torch.ones_like(attention_mask), labels=labels
        )

    def batch() -> dict[str, Tensor]:
        return {"input_ids": ids(), "labels": ids(length=11)}

    def padded_batch() -> dict[str, Tensor]:
        tokens, mask = all_padded()
        return {"input_ids": tokens, "attention_mask": mask, "labels": ids(length=11)}

    name = "source of another row"
    yield name, OURS, rolled_ours
    yield name, TORCH, lambda: pair_case(made(TorchPairs, memory=lambda _, x: x.roll(1, 0)))
    yield name, HAND, lambda: pair_case(made(Translator, memory=hand_memory))
    yield name, HUB, lambda: Case(Around(hub("bart"), bart), batch())
    name = "source padding attended"
    yield name, TORCH, lambda: pair_case(made(TorchPairs, masks_source=False), padded=True)
    yield name, HAND, lambda: pair_case(made(Translator, masks_source=False), padded=True)
    yield name, HUB, lambda: Case(Around(hub("bart"), unmasked), padded_batch())
    name = "target sees its future"
    yield name, TORCH, lambda: pair_case(made(TorchPairs, masks_target=False))
    yield name, HAND, lambda: pair_case(made(Translator, causal_target=False))


def last_position() -> Cases:
    def torch_last(self: Any, tokens: Tensor) -> Tensor:
        x, pad = self.start(tokens), tokens == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=pad)
        return self.out(self.norm(x)[:, -1])

    def gpt2(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        x = self.inner.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.parts["out"](x[:, -1])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def batch() -> dict[str, Tensor]:
        tokens, mask = all_padded()
        return {"input_ids": tokens, "attention_mask": mask, "labels": classes()}

    name = "last position is padding"
    tokens = all_padded()[0]
    yield name, TORCH, lambda: labelled(torched(PLAIN, forward=torch_last), tokens, pad=0)
    model = nano(PLAIN, hidden=lambda _, t: t == 0, pool=lambda _, x, t: x[:, -1])
    yield name, HAND, lambda: labelled(model, tokens, pad=0)
    yield name, HUB, lambda: Case(Around(hub("gpt2"), gpt2, out=nn.Linear(WIDTH, 5)), batch())


# ── Modules and gradients ─────────────────────────────────────────────────────────────────────────


class Hidden(nn.Module):
    """A model kept in a plain list, and a layer that is registered."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = [inner], nn.Linear(VOCAB, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        answer = self.inner[0](tokens)
        return self.last(answer if isinstance(answer, Tensor) else answer.logits)


def modules() -> Cases:
    def unregistered(model: Any) -> nn.Module:
        layers = list(model.layers)
        del model.layers
        object.__setattr__(model, "layers", layers)
        return model

    def nano_unregistered() -> nn.Module:
        class Listed(Nano):
            def body(self, tokens: Tensor) -> Tensor:
                x = self.embed(tokens)
                for block in blocks:
                    x = block(x)
                return self.transformer["ln_f"](x)

        model = Listed()
        blocks = list(model.transformer["h"])  # type: ignore[arg-type]
        model.transformer["h"] = nn.ModuleList()
        return model

    def shortened() -> Case:
        model = hub("llama")
        model.config.num_hidden_layers = DEPTH - 1
        return Case(model, causal_batch())

    name = "layers in a Python list"
    yield name, OURS, lambda: lm(Hidden(ours()))
    yield name, TORCH, lambda: lm(unregistered(TorchLM()))
    yield name, HAND, lambda: lm(nano_unregistered())
    yield name, HUB, lambda: lm(Hidden(hub("gpt2")))

    def all_but_last(self: Any, tokens: Tensor) -> Tensor:
        x = self.start(tokens)
        for layer in self.layers[:-1]:
            x = layer(x, src_mask=self.mask(tokens))
        return self.out(self.norm(x))

    name = "block never called"
    yield name, TORCH, lambda: lm(torched(forward=all_but_last))
    yield name, HAND, lambda: lm(hand(block=lambda self, x, i: HandLM.block(self, x, 0)))
    yield name, HUB, shortened


def shrunk(x: Tensor) -> Tensor:
    return 0.01 * x + 0.99 * x.detach()


def gradients() -> Cases:
    def after_blocks(model: nn.Module, layers: Any, change: Callable[[Any], Any]) -> nn.Module:
        for layer in layers:
            after(layer, change)
        return model

    def mine(change: Callable[[Any], Any], depth: int) -> Case:
        model = ours(depth=depth)
        return lm(after_blocks(model, model.decoder.stack.blocks, change))

    def gpt2(change: Callable[[Any], Any], depth: int) -> Case:
        model = hub("gpt2", n_layer=depth)
        return Case(after_blocks(model, model.transformer.h, change), causal_batch())

    def written(change: Callable[[Any], Any], depth: int) -> Case:
        model = nano({"depth": depth})
        return lm(after_blocks(model, model.transformer["h"], change))  # type: ignore[index]

    for name, change, depth in (
        ("gradient shrunk", shrunk, 4),
        ("shortcut 0.8 in twelve blocks", lambda x: 0.8 * x, 12),
    ):
        yield name, OURS, partial(mine, change, depth)
        yield (
            name,
            TORCH,
            lambda change=change, depth=depth: lm(
                torched({"depth": depth}, between=lambda _, x, i: change(x))
            ),
        )
        yield name, HAND, partial(written, change, depth)
        yield name, HUB, partial(gpt2, change, depth)


def without_gradient() -> Cases:
    def torch_body(self: Any, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.start(tokens)
            for layer in self.layers:
                x = layer(x, src_mask=self.mask(tokens))
        return self.out(self.norm(x))

    def nano_body(self: Any, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return Nano.body(self, tokens)

    def gpt2(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            x = self.inner.transformer(input_ids).last_hidden_state
        logits = self.parts["out"](x)
        return {"loss": next_token(logits, labels), "logits": logits}

    name = "body without gradient"
    yield name, TORCH, lambda: lm(torched(forward=torch_body))
    yield name, HAND, lambda: lm(nano(body=nano_body))
    head = nn.Linear(WIDTH, VOCAB)
    yield name, HUB, lambda: Case(Around(hub("gpt2"), gpt2, out=head), causal_batch())

    def torch_checkpointed(self: Any, tokens: Tensor) -> Tensor:
        x, mask = self.start(tokens), self.mask(tokens)
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x, src_mask=mask), x, use_reentrant=True)
        return self.out(self.norm(x))

    def nano_checkpointed(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.transformer["h"]:
            x = checkpoint(block, x, use_reentrant=True)
        return self.transformer["ln_f"](x)

    def frozen(model: nn.Module) -> nn.Module:
        return each(model, lambda m: m.requires_grad_(False), nn.Embedding)

    name = "reentrant checkpoint without gradient"
    yield name, TORCH, lambda: lm(frozen(torched(forward=torch_checkpointed)))
    yield name, HAND, lambda: lm(frozen(nano(body=nano_checkpointed)))
    # The first version also listed a Llama, which is not sick: transformers itself makes the
    # embeddings' output require a gradient.


def norms_and_gates() -> Cases:
    def large_eps(model: nn.Module) -> nn.Module:
        return each(model, lambda norm: setattr(norm, "eps", 1e5), nn.LayerNorm)

    name = "eps of 1e5 in the norms"
    yield name, OURS, lambda: lm(large_eps(ours()))
    yield name, TORCH, lambda: lm(TorchLM(layer_norm_eps=1e5))
    yield name, HAND, lambda: lm(large_eps(nano()))
    yield name, HUB, lambda: Case(hub("gpt2", layer_norm_epsilon=1e5), causal_batch())

    def flat_nano() -> Case:
        model = nano()
        for block in model.transformer["h"]:  # type: ignore[index,union-attr]
            block.attn.scale = 1 // (WIDTH // HEADS) ** 0.5  # one slash too many: 0
        return lm(model)

    def flat_llama() -> Case:
        model = hub("llama")
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.0
        return Case(model, causal_batch())

    def flat_torch() -> Case:
        model = TorchLM()
        for layer in model.layers:
            with torch.no_grad():
                layer.self_attn.in_proj_weight[: 2 * WIDTH] = 0  # queries and keys
                layer.self_attn.in_proj_bias[: 2 * WIDTH] = 0
        return lm(model)

    name = "attention scores times 0"
    yield name, TORCH, flat_torch
    yield name, HAND, flat_nano
    yield (
        name,
        HAND,
        lambda: lm(hand(scores=lambda self, q, k: 0 * HandLM.scores(self, q, k))),
    )
    yield name, HUB, flat_llama

    class Shut(nn.TransformerEncoderLayer):
        def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1e-11 * super()._sa_block(*args, **kwargs)

    def shut_torch() -> Case:
        model = TorchLM()
        model.layers[1] = Shut(WIDTH, HEADS, 64, 0.1, batch_first=True, norm_first=True)
        return lm(model)

    def shut_gpt2() -> Case:
        model = hub("gpt2")
        after(model.transformer.h[1].mlp, lambda x: x * torch.tensor(-25.0).sigmoid())
        return Case(model, causal_batch())

    def shut_nano() -> Case:
        model = nano()
        after(model.transformer["h"][0].attn, lambda x: x * torch.tensor(-25.0).sigmoid())  # type: ignore[index]
        return lm(model)

    gate = torch.tensor(-25.0)
    name = "gate shut"
    yield (
        name,
        OURS,
        lambda: lm(with_boxes(lambda x, f, n: x + gate.sigmoid() * f(n(x)), only=3)),
    )
    yield name, TORCH, shut_torch
    yield name, HAND, shut_nano
    yield name, HUB, shut_gpt2


def inputs() -> Cases:
    def in_training(model: nn.Module, module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda m, _, x: F.dropout(x, 0.95, m.training))
        return model

    def mine() -> Case:
        model = ours()
        return lm(in_training(model, model.tokens))

    def written() -> Case:
        model = nano()
        return lm(in_training(model, model.transformer["wte"]))  # type: ignore[index,arg-type]

    def torches() -> Case:
        model = TorchLM()
        return lm(in_training(model, model.emb))

    name = "dropout 0.95 of the embeddings"
    yield name, OURS, mine
    yield name, TORCH, torches
    yield name, HAND, written
    yield name, HUB, lambda: Case(hub("gpt2", embd_pdrop=0.95), causal_batch())

    def clamped(self: Any, tokens: Tensor) -> Tensor:
        return self.inner(tokens.clamp(max=1))

    def hub_clamped(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids.clamp(max=1), labels=labels)

    name = "tokens clamped"
    yield name, OURS, lambda: lm(Around(ours(), clamped))
    yield name, TORCH, lambda: labelled(Around(torched(PLAIN), clamped))
    yield name, HAND, lambda: lm(Around(nano(), clamped))
    yield name, HUB, lambda: Case(Around(hub("gpt2"), hub_clamped), causal_batch())


FAMILIES = (
    masks,
    first_position,
    positions,
    leaks,
    translation,
    last_position,
    modules,
    gradients,
    without_gradient,
    norms_and_gates,
    inputs,
    *training.FAMILIES,
)
