"""Sick models written without sight of the clinic's rules and of the earlier sick models.

The author had read only how `addnorm.examine` is called and issue 12's list of sicknesses. The
words that a right finding must contain (`SICKNESSES`) were fixed before the first run. Every
sickness has at least three code styles: ours, torch.nn, hand-written, Hugging Face.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch
from addnorm.layers.addnorm import Ends
from addnorm.layers.masks import Mask
from bench import clinic_sick_training_unseen as training
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
    class_batch,
    hand,
    hub,
    ids,
    lm,
    next_token,
    our_encoder,
    our_translator,
    ours,
    padded,
    torched,
    with_boxes,
)

SICKNESSES = {
    "future visible": r"future|later (position|token)|causal",
    "padding attended": r"padding|padded",
    "own token hidden": r"own (token|position)|itself|self|diagonal",
    "rows mixed": r"\brow|batch",
    "source not read": r"source|cross|memory|encoder",
    "dropout 0.9": r"dropout",
    "random in eval mode": r"eval|random|determin|dropout",
    "softmax twice": r"softmax|sum to 1|probabilit",
    "NaN gradient": r"nan|not finite|non-finite|infinite",
    "lower blocks detached": r"gradient|detach",
    "shortcut doubled": r"shortcut|factor|twice|doubl|scaled",
    "shortcut halved": r"shortcut|factor|half|scaled|fade",
    "one residual missing": r"residual|shortcut|skip",
    "no residual anywhere": r"residual|shortcut|skip",
    "labels of another row": r"label|target|will not train|depend",
    "embedding or head frozen": r"frozen|not trained|requires_grad|not train",
    "left padding, absolute positions": r"left|position",
    "equal initial weights": r"equal|identical|symmetr|same|constant|zero",
    "optimizer lacks parameters": r"optimi[sz]er|not updated|parameter",
    "weight decay insane": r"weight.decay|decay",
    "beta2 insane": r"beta|β",
    "attention saturated": r"satur|entropy|one key|single key|logit",
    "no positions": r"position|order",
    "tokens drowned": r"token|drown|position",
    "no final norm": r"final norm|last norm|norm after",
    "loss counts padding": r"padding|padded",
    "dead feed-forward": r"dead|relu|inactive|branch|contribut|gradient",
    "rate far too high": r"rate|will not train|diverge",
    "norm gain zero": r"gain|norm|zero|collapse",
    "labels not shifted": r"label|target|copy|own token|shift",
}
"""For each sickness, what the name or evidence of one finding above a note must match."""


Cases = Iterator[tuple[str, str, Callable[[], Case]]]
# ── What may be seen ──────────────────────────────────────────────────────────────────────────────


def future_visible() -> Cases:
    def shifted() -> Case:
        model = ours()
        before(model.decoder.stack.blocks[1].sublayers["attention"], lambda x: x.roll(-1, 1))
        return lm(model)

    def off_by_one(_: Any, tokens: Tensor) -> Tensor:
        return torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(2)

    def masked_after_softmax(self: Any, scores: Tensor) -> Tensor:
        return scores.softmax(-1) * self.visible(scores.shape[-1])

    def softmax_over_queries(self: Any, scores: Tensor) -> Tensor:
        hidden = self.visible(scores.shape[-1]) == 0
        return scores.masked_fill(hidden, -1e9).softmax(-2)

    def convolved() -> Case:
        def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
            x = self.inner.model.embed_tokens(input_ids)
            x = x + self.parts["conv"](x.transpose(1, 2)).transpose(1, 2)
            return self.inner(inputs_embeds=x, labels=labels)

        conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        return Case(Around(hub("llama"), call, conv=conv), causal_batch(), None, {"causal": True})

    yield "future visible", OURS, shifted
    yield "future visible", TORCH, lambda: lm(torched(mask=off_by_one))
    yield "future visible", HAND, lambda: lm(hand(weights=masked_after_softmax))
    yield "future visible", HAND, lambda: lm(hand(weights=softmax_over_queries))
    yield "future visible", HUB, convolved


def padding_attended() -> Cases:
    def call(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)

    def pooled_over_all(self: Any, tokens: Tensor) -> Tensor:
        hidden = (tokens == 0)[:, None, None]
        x = self.start(tokens)
        for i in range(self.depth):
            y = self.ln1[i](x)
            q, k, v = (torch.einsum("bne,hed->bhnd", y, w[i]) for w in (self.wq, self.wk, self.wv))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
            x = x + torch.einsum("bhqd,hde->bqe", mixed, self.wo[i])
            x = x + self.feed(self.ln2[i](x), i)
        return self.head(self.lnf(x).mean(1))  # the mean is over padding, too

    plain = {"causal": False, "classes": 5}
    yield "padding attended", OURS, lambda: Case(our_encoder(), padded()[0], None, {"pad": 0})
    yield "padding attended", TORCH, lambda: Case(torched(plain), padded()[0], None, {"pad": 0})
    yield (
        "padding attended",
        HAND,
        lambda: Case(hand(plain, forward=pooled_over_all), padded()[0], None, {"pad": 0}),
    )
    yield "padding attended", HUB, lambda: Case(Around(hub("bert"), call), class_batch())


def strictly_lower(n: int) -> Tensor:
    mask = torch.ones(n, n).tril(-1)
    mask[0, 0] = 1
    return mask


def own_token_hidden() -> Cases:
    def call(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        n = input_ids.shape[1]
        mask = strictly_lower(n)[None, None].expand(len(input_ids), 1, n, n)
        mask = torch.zeros_like(mask).masked_fill(mask == 0, torch.finfo(torch.float32).min)
        return self.inner(input_ids=input_ids, attention_mask=mask, labels=labels)

    def ours_masked(self: Any, tokens: Tensor) -> Tensor:
        mask = Mask(pairs=strictly_lower(tokens.shape[1])[None].bool())
        return self.inner(tokens, mask=mask)

    yield "own token hidden", OURS, lambda: lm(Around(ours(), ours_masked))
    yield (
        "own token hidden",
        TORCH,
        lambda: lm(torched(mask=lambda _, tokens: strictly_lower(tokens.shape[1]) == 0)),
    )
    yield "own token hidden", HAND, lambda: lm(hand(visible=lambda _, n: strictly_lower(n)))
    yield "own token hidden", HUB, lambda: Case(Around(hub("gpt2"), call), causal_batch())


def rows_mixed() -> Cases:
    def across_batch() -> Case:
        model = ours()
        before(
            model.decoder.stack.blocks[2].sublayers["ffn"], lambda x: x - x.mean(0, keepdim=True)
        )
        return lm(model)

    def whole_tensor_norm(self: Any, x: Tensor, i: int) -> Tensor:
        y = (x - x.mean((0, 1))) / (x.std((0, 1)) + 1e-5)
        x = x + self.attend(y, i)
        return x + self.feed(self.ln2[i](x), i)

    class OverBatch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()

    def bert() -> Case:
        model = hub("bert")
        model.bert.embeddings.LayerNorm = OverBatch()
        return Case(model, class_batch())

    length_first = {"batch_first": False, "causal": False, "classes": 5}
    plain = {"causal": False, "classes": 5}
    yield "rows mixed", OURS, across_batch
    yield "rows mixed", TORCH, lambda: Case(torched(length_first), ids())
    yield "rows mixed", HAND, lambda: Case(hand(plain, block=whole_tensor_norm), ids())
    yield "rows mixed", HUB, bert


class HandTranslator(nn.Module):
    """A hand-written decoder whose cross-attention takes its keys from the target."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (HandLM(causal=c, depth=2) for c in (False, True))
        self.cross = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in "ab"
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in "ab")

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source.start(source)
        for i in range(2):
            memory = self.source.block(memory, i)
        x = self.target.start(target)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for i in range(2):
            x = self.target.block(x, i)
            y = self.norms[i](x)
            keys = y  # should be the memory
            x = x + self.cross[i](y, keys, keys, attn_mask=mask, need_weights=False)[0]
        return self.target.head(self.target.lnf(x) + 0 * memory.mean())


class TorchTranslator(nn.Module):
    """nn.Transformer, the source of which is the target."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.net = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.emb(tokens) + self.pos(torch.arange(tokens.shape[1]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.net.encoder(self.embed(source))
        memory = torch.zeros_like(memory)  # a forgotten debugging line
        return self.out(self.net.decoder(self.embed(target), memory, tgt_mask=mask))


def pair_loss(output: Tensor, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return next_token(output, inputs[1])


def source_not_read() -> Cases:
    def constant_encoder() -> Case:
        model = our_translator()
        after(model.encoder, torch.ones_like)
        return Case(model, (ids(), ids(length=11)), pair_loss)

    def bart(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=labels.clamp(min=0), labels=labels)  # the wrong variable

    def pair() -> dict[str, Tensor]:
        return {"input_ids": ids(), "labels": ids(length=11)}

    yield "source not read", OURS, constant_encoder
    yield (
        "source not read",
        TORCH,
        lambda: Case(TorchTranslator(), (ids(), ids(length=11)), pair_loss),
    )
    yield (
        "source not read",
        HAND,
        lambda: Case(HandTranslator(), (ids(), ids(length=11)), pair_loss),
    )
    yield "source not read", HUB, lambda: Case(Around(hub("bart"), bart), pair())


# ── Dropout, outputs, gradients ───────────────────────────────────────────────────────────────────


def dropout_and_randomness() -> Cases:
    def dropped(self: Any, x: Tensor, i: int) -> Tensor:
        x = x + F.dropout(self.attend(self.ln1[i](x), i), 0.9, self.training)
        return x + F.dropout(self.feed(self.ln2[i](x), i), 0.9, self.training)

    def always(self: Any, x: Tensor, i: int) -> Tensor:
        return HandLM.block(self, F.dropout(x, 0.2), i)  # training=True is the default

    def always_after(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)

    def always_gpt2() -> Case:
        model = hub("gpt2")
        after(model.transformer.h[0].mlp, always_after)
        return Case(model, causal_batch())

    def always_ours() -> Case:
        model = ours()
        after(model.decoder.stack.blocks[0].sublayers["ffn"], always_after)
        return lm(model)

    high = dict(resid_pdrop=0.9, embd_pdrop=0.9, attn_pdrop=0.9)
    yield "dropout 0.9", OURS, lambda: lm(ours(dropout=0.9))
    yield "dropout 0.9", TORCH, lambda: lm(torched({"dropout": 0.9}))
    yield "dropout 0.9", HAND, lambda: lm(hand(block=dropped))
    yield "dropout 0.9", HUB, lambda: Case(hub("gpt2", **high), causal_batch())
    yield "random in eval mode", OURS, always_ours
    yield (
        "random in eval mode",
        TORCH,
        lambda: lm(torched(between=lambda _, x, i: F.dropout(x, 0.3))),
    )
    yield "random in eval mode", HAND, lambda: lm(hand(block=always))
    yield "random in eval mode", HUB, always_gpt2


def softmax_twice() -> Cases:
    def ours_softmax(self: Any, tokens: Tensor) -> Tensor:
        return self.inner(tokens).softmax(-1)

    def bert(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        chances = logits.softmax(-1)
        return {"loss": F.cross_entropy(chances, labels), "logits": chances}

    plain = {"causal": False, "classes": 5}
    yield "softmax twice", OURS, lambda: lm(Around(ours(), ours_softmax))
    yield (
        "softmax twice",
        TORCH,
        lambda: Case(
            nn.Sequential(torched(plain), nn.Softmax(-1)),
            ClinicBatch(ids(), torch.arange(ROWS) % 5),
            F.cross_entropy,
        ),
    )
    yield (
        "softmax twice",
        HAND,
        lambda: Case(
            Around(hand(plain), ours_softmax),
            ClinicBatch(ids(), torch.arange(ROWS) % 5),
            nn.CrossEntropyLoss(),
        ),
    )
    yield "softmax twice", HUB, lambda: Case(Around(hub("bert"), bert), class_batch())


def gradients() -> Cases:
    def unsafe(x: Tensor) -> Tensor:
        return torch.where(x > 100, (x - 100).sqrt(), x)  # 0 · NaN in the backward pass

    def nan_ours() -> Case:
        model = ours()
        after(model.decoder.stack.blocks[1].sublayers["ffn"], unsafe)
        return lm(model)

    def zero_norm(self: Any, tokens: Tensor) -> Tensor:
        x = HandLM.start(self, tokens)
        penalty = (x - x).pow(2).sum(-1, keepdim=True).sqrt()  # √0
        return x + penalty

    def nan_gpt2() -> Case:
        model = hub("gpt2")
        after(model.transformer.h[1], unsafe)
        return Case(model, causal_batch())

    def detach_ours() -> Case:
        model = ours()
        after(model.decoder.stack.blocks[0], torch.Tensor.detach)
        return lm(model)

    def in_no_grad(self: Any, x: Tensor, i: int) -> Tensor:
        with torch.set_grad_enabled(i == self.depth - 1 and torch.is_grad_enabled()):
            return HandLM.block(self, x, i)

    def detach_gpt2() -> Case:
        model = hub("gpt2")
        after(model.transformer.h[1], torch.Tensor.detach)
        return Case(model, causal_batch())

    yield "NaN gradient", OURS, nan_ours
    yield "NaN gradient", TORCH, lambda: lm(torched(between=lambda _, x, i: unsafe(x)))
    yield "NaN gradient", HAND, lambda: lm(hand(start=zero_norm))
    yield "NaN gradient", HUB, nan_gpt2
    yield "lower blocks detached", OURS, detach_ours
    yield (
        "lower blocks detached",
        TORCH,
        lambda: lm(torched(between=lambda _, x, i: x.detach() if i == 1 else x)),
    )
    yield "lower blocks detached", HAND, lambda: lm(hand(block=in_no_grad))
    yield "lower blocks detached", HUB, detach_gpt2


# ── The residual stream ───────────────────────────────────────────────────────────────────────────


class TorchLayer(nn.TransformerEncoderLayer):
    """An encoder layer with another formula for its two residual connections."""

    formula: Callable[[Tensor, Tensor, int], Tensor]

    def forward(
        self,
        src: Tensor,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,  # type: ignore[override]
        is_causal: bool = False,
    ) -> Tensor:
        x = self.formula(src, self._sa_block(self.norm1(src), src_mask, src_key_padding_mask), 0)
        return self.formula(x, self._ff_block(self.norm2(x)), 1)


def torch_formula(
    formula: Callable[[Tensor, Tensor, int], Tensor], only: int | None = None, depth: int = DEPTH
) -> nn.Module:
    model = TorchLM(depth=depth)
    for index, layer in enumerate(model.layers):
        if only is None or index == only:
            layer.__class__ = TorchLayer
            object.__setattr__(layer, "formula", formula)
    return model


def residuals() -> Cases:
    def twice(self: Any, x: Tensor, i: int) -> Tensor:
        y = x + self.attend(self.ln1[i](x), i)
        x = x + y  # the shortcut is in y already
        return x + self.feed(self.ln2[i](x), i)

    def halved(self: Any, x: Tensor, i: int) -> Tensor:
        x = torch.lerp(x, self.attend(self.ln1[i](x), i), 0.6)
        return torch.lerp(x, self.feed(self.ln2[i](x), i), 0.6)

    def one_missing(self: Any, x: Tensor, i: int) -> Tensor:
        x = x + self.attend(self.ln1[i](x), i)
        y = self.feed(self.ln2[i](x), i)
        return y if i == 1 else x + y

    def all_missing(self: Any, x: Tensor, i: int) -> Tensor:
        return self.feed(self.ln2[i](self.attend(self.ln1[i](x), i)), i)

    def hub_blocks(factor: float) -> Case:
        model = hub("gpt2", n_layer=4)
        for block in model.transformer.h:
            old = block.forward
            block.forward = partial(_plus_shortcut, old, factor)
        return Case(model, causal_batch())

    def bert_without(count: int) -> Case:
        model = hub("bert")
        for layer in model.bert.encoder.layer[:count]:
            for owner in (layer.output, layer.attention.output):
                owner.forward = partial(_without_residual, owner)
        return Case(model, class_batch())

    yield "shortcut doubled", OURS, lambda: lm(with_boxes(lambda x, f, n: 2 * x + f(n(x))))
    yield "shortcut doubled", TORCH, lambda: lm(torch_formula(lambda x, y, _: x + x + y))
    yield "shortcut doubled", HAND, lambda: lm(hand(block=twice))
    yield "shortcut doubled", HUB, lambda: hub_blocks(1.0)
    yield (
        "shortcut halved",
        OURS,
        lambda: lm(with_boxes(lambda x, f, n: 0.4 * x + f(n(x)), depth=5)),
    )
    yield "shortcut halved", TORCH, lambda: lm(torch_formula(lambda x, y, _: (x + y) / 2, depth=5))
    yield "shortcut halved", HAND, lambda: lm(hand({"depth": 5}, block=halved))
    yield "shortcut halved", HUB, lambda: hub_blocks(-0.7)
    yield "one residual missing", OURS, lambda: lm(with_boxes(lambda x, f, n: f(n(x)), only=3))
    yield (
        "one residual missing",
        TORCH,
        lambda: lm(torch_formula(lambda x, y, k: y if k else x + y, only=1)),
    )
    yield "one residual missing", HAND, lambda: lm(hand(block=one_missing))
    yield "one residual missing", HUB, lambda: bert_without(1)
    yield "no residual anywhere", OURS, lambda: lm(with_boxes(lambda x, f, n: f(n(x))))
    yield "no residual anywhere", TORCH, lambda: lm(torch_formula(lambda x, y, _: y))
    yield "no residual anywhere", HAND, lambda: lm(hand(block=all_missing))
    yield "no residual anywhere", HUB, lambda: bert_without(DEPTH)


def _plus_shortcut(
    old: Callable[..., Any], factor: float, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    output = old(x, *args, **kwargs)
    if isinstance(output, tuple):
        return (output[0] + factor * x, *output[1:])
    return output + factor * x


def _without_residual(owner: Any, hidden: Tensor, _: Tensor) -> Tensor:
    return owner.LayerNorm(owner.dropout(owner.dense(hidden)))


def norms_and_branches() -> Cases:
    def zero_gain(model: nn.Module, which: int) -> nn.Module:
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
        with torch.no_grad():
            norms[which].weight.zero_()
        return model

    def no_final_ours() -> Case:
        model = ours(depth=6)
        model.decoder.stack.ends = Ends(WIDTH, 6, nn.LayerNorm)
        return lm(model)

    def no_final_hub() -> Case:
        model = hub("gpt2", n_layer=6)
        model.transformer.ln_f = nn.Identity()
        return Case(model, causal_batch())

    def no_final_torch() -> Case:
        model = TorchLM(depth=6)
        model.norm = nn.Identity()
        return lm(model)

    def no_final_hand() -> Case:
        model = HandLM(depth=6)
        model.lnf = nn.Identity()
        return lm(model)

    def dead(model: nn.Module, name: str) -> nn.Module:
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith(name):
                    parameter.fill_(-60.0)
        return model

    def dead_hand(self: Any, x: Tensor, i: int) -> Tensor:
        return F.relu(x @ self.up[i] - 50) @ self.down[i]

    yield "norm gain zero", OURS, lambda: lm(zero_gain(ours(), -1))
    yield "norm gain zero", TORCH, lambda: lm(zero_gain(TorchLM(norm_first=False), 2))
    yield "norm gain zero", HAND, lambda: lm(zero_gain(HandLM(), -1))
    yield "norm gain zero", HUB, lambda: Case(zero_gain(hub("bert"), 0), class_batch())
    yield "no final norm", OURS, no_final_ours
    yield "no final norm", TORCH, no_final_torch
    yield "no final norm", HAND, no_final_hand
    yield "no final norm", HUB, no_final_hub
    yield "dead feed-forward", OURS, lambda: lm(dead(ours(ffn="relu"), "ffn.input.bias"))
    yield "dead feed-forward", TORCH, lambda: lm(dead(TorchLM(), "linear1.bias"))
    yield "dead feed-forward", HAND, lambda: lm(hand(feed=dead_hand))
    yield (
        "dead feed-forward",
        HUB,
        lambda: Case(dead(hub("gpt2", activation_function="relu"), "c_fc.bias"), causal_batch()),
    )


FAMILIES = (
    future_visible,
    padding_attended,
    own_token_hidden,
    rows_mixed,
    source_not_read,
    dropout_and_randomness,
    softmax_twice,
    gradients,
    residuals,
    norms_and_branches,
    *training.FAMILIES,
)
