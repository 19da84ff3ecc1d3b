"""Sick models for bench/clinic_sick.py: each is sound but for one change, in three styles of code.

    ours     built by addnorm, then changed from outside
    torch    torch.nn's layers: nn.MultiheadAttention, nn.LayerNorm, nn.Linear
    hand     everything written out with matrix products, as in teaching code

This half was written before the rules that find them. To add cases, append to `CASES` here or write
another module with a list `CASES` of `Sickness` and name it in `bench.clinic_sick.MODULES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.layers.addnorm import AddNorm, Branch

VOCAB, WIDTH, HEADS, DEPTH, ROWS, LENGTH, PAD = 53, 32, 4, 3, 8, 16, 0


@dataclass
class Patient:
    """What `examine` is called with: a model that is sick."""

    model: nn.Module
    batch: Any
    loss: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sickness:
    """One change that makes a model sick.

    Parameters
    ----------
    name : what was done, in a few words
    findings : names of findings that are right; one of them must be reported
    styles : a maker of the sick model for each style of code
    """

    name: str
    findings: tuple[str, ...]
    styles: dict[str, Callable[[], Patient]]


def ids(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def next_token(output: Any, tokens: Any) -> Tensor:
    logits = output[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=PAD)


# ── The three styles ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Options:
    """What can be wrong with a model of the styles torch and hand.

    Parameters
    ----------
    join : how a branch f(N(x)) joins the stream: from x, f(N(x)), block and role to the new x
    mask : the hidden pairs (query, key), from a length; None hides nothing
    norm : the kind of norm in the blocks
    between : applied to the stream between two blocks, with the number of the block
    dropout : its probability
    scale : what attention logits are multiplied by, times 1/√head width
    final_norm, positions : whether there are any
    end : applied to the logits
    hide_padding : whether padding is hidden from attention
    """

    join: Callable[[Tensor, Tensor, int, str], Tensor] = lambda x, f, block, role: x + f
    mask: Callable[[int], Tensor] | None = lambda n: torch.ones(n, n, dtype=torch.bool).triu(1)
    norm: Callable[[int], nn.Module] = nn.LayerNorm
    between: Callable[[Tensor, int], Tensor] = lambda x, block: x
    dropout: float = 0.0
    scale: float = 1.0
    final_norm: bool = True
    positions: bool = True
    end: Callable[[Tensor], Tensor] = lambda logits: logits
    hide_padding: bool = True


class TorchBlock(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            WIDTH, HEADS, dropout=options.dropout, batch_first=True
        )
        self.first, self.second = options.norm(WIDTH), options.norm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(options.dropout)
        self.options = options
        with torch.no_grad():
            self.attention.in_proj_weight[:WIDTH].mul_(options.scale)

    def forward(self, x: Tensor, number: int, hidden: Tensor | None, pads: Tensor | None) -> Tensor:
        y = self.first(x)
        f, _ = self.attention(y, y, y, attn_mask=hidden, key_padding_mask=pads, need_weights=False)
        x = self.options.join(x, self.drop(f), number, "attention")
        f = self.drop(self.feed(self.second(x)))
        return self.options.join(x, f, number, "ffn")


class HandBlock(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.key = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.value = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.merge = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * (4 * WIDTH) ** -0.5)
        self.first, self.second = options.norm(WIDTH), options.norm(WIDTH)
        self.options = options

    def attend(self, x: Tensor, hidden: Tensor | None, pads: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        parts = [x @ w for w in (self.query, self.key, self.value)]
        q, k, v = (p.view(rows, length, HEADS, -1).transpose(1, 2) for p in parts)
        logits = q @ k.transpose(-1, -2) * (self.options.scale / math.sqrt(WIDTH // HEADS))
        if hidden is not None:
            logits = logits.masked_fill(hidden, -1e9)
        if pads is not None:
            logits = logits.masked_fill(pads[:, None, None], -1e9)
        y = (logits.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, WIDTH)
        return F.dropout(y @ self.merge, self.options.dropout, self.training)

    def forward(self, x: Tensor, number: int, hidden: Tensor | None, pads: Tensor | None) -> Tensor:
        x = self.options.join(x, self.attend(self.first(x), hidden, pads), number, "attention")
        f = F.gelu(self.second(x) @ self.up) @ self.down
        return self.options.join(
            x, F.dropout(f, self.options.dropout, self.training), number, "ffn"
        )


class Language(nn.Module):
    """A language model of one kind of block; ids in, logits out."""

    def __init__(self, block: type[nn.Module], **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = Options(**changes)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(block(self.options) for _ in range(DEPTH))
        self.final = nn.LayerNorm(WIDTH) if self.options.final_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCAB)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        options, length = self.options, ids.shape[1]
        x = self.tokens(ids)
        if options.positions:
            x = x + self.places(torch.arange(length, device=ids.device))
        hidden = None if options.mask is None else options.mask(length).to(ids.device)
        pads = None
        if options.hide_padding and attention_mask is not None:
            pads = attention_mask == 0
        for number, block in enumerate(self.blocks):
            x = options.between(block(x, number, hidden, pads), number)
        return options.end(self.head(self.final(x)))


class LayerLanguage(nn.Module):
    """A language model over nn.TransformerEncoder, in place of ours where ours cannot be wrong."""

    def __init__(self, mask: Callable[[int], Tensor] | None, positions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.mask, self.positions = mask, positions
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        if self.positions:
            x = x + self.places(torch.arange(ids.shape[1]))
        hidden = None if self.mask is None else self.mask(ids.shape[1])
        if hidden is not None and attention_mask is not None:
            pads = (attention_mask == 0)[:, None] & ~torch.eye(ids.shape[1], dtype=torch.bool)
            hidden = (hidden | pads).repeat_interleave(HEADS, dim=0)
        return self.head(self.stack(x, mask=hidden))


STYLES: dict[str, type[nn.Module]] = {"torch": TorchBlock, "hand": HandBlock}


def ours(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab": VOCAB, "width": WIDTH, "depth": DEPTH, "heads": HEADS}
    settings |= {"mode": "decoder", "addnorm": "pre", "dropout": 0.0, "length": 64} | changes
    return build(ModelConfig(**settings))


class Rebuilt(AddNorm):
    """A box that joins as in `Options.join`."""

    joining: Any = None

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        place = self.place
        return self.joining(x, f(self.norm(x)), place.layer, place.role)


def ours_joined(join: Callable[[Tensor, Tensor, int, str], Tensor]) -> nn.Module:
    model = ours()
    for box in [part for part in model.modules() if isinstance(part, AddNorm)]:
        box.__class__ = Rebuilt
        box.joining = join  # type: ignore[attr-defined]
    return model


def joined(name: str, findings: tuple[str, ...], join: Any) -> Sickness:
    """Return a sickness of the way in which branches join the stream."""
    styles: dict[str, Callable[[], Patient]] = {
        "ours": lambda: Patient(ours_joined(join), ids(), next_token)
    }
    for style, block in STYLES.items():
        styles[style] = lambda b=block: Patient(Language(b, join=join), ids(), next_token)  # type: ignore[misc]
    return Sickness(name, findings, styles)


def sound(style: str) -> nn.Module:
    return ours() if style == "ours" else Language(STYLES[style])


def changed(name: str, findings: tuple[str, ...], change: Callable[[nn.Module], Any]) -> Sickness:
    """Return a sickness that is a change of a sound model, from outside."""

    def make(style: str) -> Patient:
        model = sound(style)
        with torch.no_grad():
            change(model)
        return Patient(model, ids(), next_token)

    return Sickness(name, findings, {s: lambda s=s: make(s) for s in ("ours", *STYLES)})  # type: ignore[misc]


def trained_badly(
    name: str, findings: tuple[str, ...], patient: Callable[[nn.Module], Patient]
) -> Sickness:
    """Return a sickness of loss, batch or optimizer around a sound model."""
    return Sickness(
        name,
        findings,
        {s: lambda s=s: patient(sound(s)) for s in ("ours", *STYLES)},  # type: ignore[misc]
    )


def optional(
    name: str, findings: tuple[str, ...], mine: Callable[[], nn.Module], **changes: Any
) -> Sickness:
    """Return a sickness of an option of the styles torch and hand; `mine` makes that of ours."""
    styles: dict[str, Callable[[], Patient]] = {"ours": lambda: Patient(mine(), ids(), next_token)}
    for style, block in STYLES.items():
        styles[style] = lambda b=block: Patient(Language(b, **changes), ids(), next_token)  # type: ignore[misc]
    return Sickness(name, findings, styles)


# ── Parts of sicknesses ───────────────────────────────────────────────────────────────────────────


def embeddings_of(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.shape == (VOCAB, WIDTH))


def head_of(model: nn.Module) -> nn.Parameter:
    return [p for p in model.parameters() if p.shape == (VOCAB, WIDTH)][-1]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def matrices_of(model: nn.Module) -> list[Tensor]:
    return [p for p in blocks_of(model).parameters() if p.ndim == 2]


def bad_root(x: Tensor, f: Tensor, block: int, role: str) -> Tensor:
    """x + f, where the size of f is also computed at f = 0, as in a guard against zero."""
    if block == 1 and role == "ffn":
        zero = f * 0
        f = torch.where(zero == 0, f, zero / zero.norm(dim=-1, keepdim=True))
    return x + f


class OverBatch(nn.Module):
    """A norm over the rows of the batch, in place of the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = (x - x.mean(0, keepdim=True)) / (x.var(0, keepdim=True, correction=0) + 1e-5).sqrt()
        return y * self.weight + self.bias


def ours_over_batch() -> nn.Module:
    model = ours()
    for box in [part for part in model.modules() if isinstance(part, AddNorm)]:
        box.norm = OverBatch(WIDTH)
    return model


def future(n: int, diagonal: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(diagonal)


def strictly_past(n: int) -> Tensor:
    hidden = future(n, 0)
    hidden[0, 0] = False
    return hidden


class Softmaxed(nn.Module):
    """A model whose logits go through a softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).softmax(-1)


def padded(
    model: nn.Module, side: str = "right", smoothing: float = 0.0, ignored: bool = True
) -> Patient:
    """A batch whose second half of rows is padded, with an attention mask."""
    tokens = ids()
    real = torch.ones_like(tokens)
    where = slice(LENGTH - 6, None) if side == "right" else slice(0, 6)
    tokens[ROWS // 2 :, where], real[ROWS // 2 :, where] = PAD, 0

    def loss(output: Any, inputs: Any) -> Tensor:
        logits, targets = output[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten()
        return F.cross_entropy(logits, targets, ignore_index=PAD if ignored else -100)

    return Patient(model, {"ids": tokens, "attention_mask": real}, loss, {"pad": PAD})


class OursWithMask(nn.Module):
    """Our decoder, called with ids and a mask that it derives from the padding id itself."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.model = ours(**changes)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(ids)


def other_rows(model: nn.Module) -> Patient:
    def loss(output: Any, tokens: Any) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens.roll(1, 0)[:, 1:].flatten())

    return Patient(model, ids(), loss)


def smoothed(model: nn.Module) -> Patient:
    def loss(output: Any, tokens: Any) -> Tensor:
        logits, targets = output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, label_smoothing=0.9)

    return Patient(model, ids(), loss)


def shifted_labels(model: nn.Module) -> Patient:
    def loss(output: Any, tokens: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), tokens.flatten())

    return Patient(model, ids(), loss)


def with_optimizer(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Patient]:
    return lambda model: Patient(model, ids(), next_token, {"optimizer": make(model)})


def adamw(model: nn.Module, **settings: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-3} | settings))


# ── Models with a source ──────────────────────────────────────────────────────────────────────────


class TorchPair(nn.Module):
    """nn.Transformer between embeddings; `wrong` has the decoder read its own input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        one, two = (
            self.tokens(t) + self.places(torch.arange(t.shape[1])) for t in (source, target)
        )
        hidden = future(target.shape[1], 1)
        self.body.encoder(one)
        memory = two  # instead of what the encoder returns
        return self.head(self.body.decoder(two, memory, tgt_mask=hidden))


class HandPair(nn.Module):
    """Two stacks written out; the attention to the source is computed and then dropped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = Language(HandBlock, mask=None), Language(HandBlock)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.left(source)
        x = self.right.tokens(target) + self.right.places(torch.arange(target.shape[1]))
        for number, block in enumerate(self.right.blocks):
            x = block(x, number, future(target.shape[1], 1), None)
            y = self.norm(x)
            q, k, v = self.query(y), self.key(y), self.value(y)  # k and v should be of memory
            x = x + (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).softmax(-1) @ v
        return self.right.head(self.right.final(x)) + 0 * memory.mean()


def ours_pair() -> nn.Module:
    model = ours(mode="encoder-decoder", depth=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "decoder" in name and ".memory." in name and "sublayers" in name:
                p.zero_()
    return model


def pair_loss(output: Any, inputs: Any) -> Tensor:
    target = inputs[1]
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def pair(make: Callable[[], nn.Module]) -> Callable[[], Patient]:
    return lambda: Patient(make(), (ids(seed=1), ids(length=12)), pair_loss)


def left(make: Callable[[], nn.Module]) -> Callable[[], Patient]:
    return lambda: padded(make(), "left")


# ── The list ──────────────────────────────────────────────────────────────────────────────────────

CASES: list[Sickness] = [
    joined("no residual anywhere", ("no residual connections",), lambda x, f, b, r: f),
    joined("no residual in the second block", ("residual missing",),
           lambda x, f, b, r: f if b == 1 else x + f),
    joined("no residual around the attention", ("residual missing",),
           lambda x, f, b, r: f if r == "attention" else x + f),
    joined("shortcut doubled", ("shortcut scaled",), lambda x, f, b, r: x + x + f),
    joined("shortcut halved", ("shortcut scaled",), lambda x, f, b, r: torch.lerp(x, f, 0.5)),
    joined("shortcut times 0.3", ("shortcut scaled",), lambda x, f, b, r: 0.3 * x + f),
    joined("branch subtracted", ("branch subtracted",), lambda x, f, b, r: f - x),
    joined("stream detached", ("gradient cut",),
           lambda x, f, b, r: (x.detach() if b == 1 and r == "ffn" else x) + f.detach()
           if b == 1 and r == "ffn" else x + f),
    joined("shortcut detached everywhere", ("gradient cut",), lambda x, f, b, r: x.detach() + f),
    joined("gradient is 0/0", ("gradient not finite",), bad_root),
    joined("one branch is zero", ("zero branch",),
           lambda x, f, b, r: x + (0.0 * f if b == 1 and r == "ffn" else f)),
    optional("norm over the batch", ("rows of the batch mixed",), ours_over_batch, norm=OverBatch),
    optional("own token hidden", ("own token hidden",),
             lambda: LayerLanguage(strictly_past), mask=strictly_past),
    optional("future visible", ("future leaks",),
             lambda: ours(mode="encoder", head="masked"), mask=None),
    optional("mask one too far", ("future leaks",),
             lambda: LayerLanguage(lambda n: future(n, 2)), mask=lambda n: future(n, 2)),
    optional("dropout 0.9", ("dropout too high",), lambda: ours(dropout=0.9), dropout=0.9),
    optional("attention not scaled", ("attention logits too large",),
             lambda: ours(attention_scale=1.0, width=64), scale=math.sqrt(WIDTH)),
    optional("no final norm", ("no final norm",),
             lambda: _without_final_norm(), final_norm=False),
    optional("no positions", ("positions not distinguished",),
             lambda: LayerLanguage(None, positions=False), positions=False, mask=None),
    optional("softmax before the cross-entropy", ("softmax before the loss",),
             lambda: Softmaxed(ours()), end=lambda logits: logits.softmax(-1)),
    trained_badly("labels of another row", ("labels of another row",), other_rows),
    trained_badly("labels not shifted", ("labels misaligned",), shifted_labels),
    trained_badly("label smoothing 0.9", ("label smoothing too large",), smoothed),
    trained_badly("weight decay 10", ("weight decay too large",),
                  with_optimizer(lambda m: adamw(m, weight_decay=10.0))),
    trained_badly("β₂ = 0.5", ("β₂ out of range",),
                  with_optimizer(lambda m: adamw(m, betas=(0.9, 0.5)))),
    trained_badly("β₂ = 0.999999", ("β₂ out of range",),
                  with_optimizer(lambda m: adamw(m, betas=(0.9, 0.999999)))),
    trained_badly("half of the parameters not in the optimizer",
                  ("parameters not in the optimizer",),
                  with_optimizer(lambda m: torch.optim.AdamW(list(m.parameters())[::2], lr=1e-3))),
    changed("frozen embeddings", ("frozen embeddings",),
            lambda m: embeddings_of(m).requires_grad_(False)),
    changed("everything frozen", ("nothing is trained",), lambda m: m.requires_grad_(False)),
    changed("block frozen", ("frozen layer",),
            lambda m: blocks_of(m)[1].requires_grad_(False)),
    changed("all weights equal", ("equal initial weights",),
            lambda m: [w.fill_(0.05) for w in matrices_of(m)]),
    changed("weights times 4", ("initial weights too large", "attention logits too large"),
            lambda m: [w.mul_(4) for w in matrices_of(m)]),
    changed("NaN in a weight", ("weights not finite",),
            lambda m: matrices_of(m)[2].view(-1)[:1].fill_(math.nan)),
    Sickness("frozen head", ("frozen head",), {
        "ours": lambda: _frozen_head(ours(tie_embeddings="none")),
        "torch": lambda: _frozen_head(sound("torch")),
        "hand": lambda: _frozen_head(sound("hand")),
    }),
    Sickness("source not read", ("source not read",), {
        "ours": pair(ours_pair), "torch": pair(TorchPair), "hand": pair(HandPair),
    }),
    Sickness("padding attended to", ("padding attended to",), {
        "ours": lambda: padded(OursWithMask(mode="encoder", head="masked"), "right"),
        "torch": lambda: padded(Language(TorchBlock, hide_padding=False, mask=None), "right"),
        "hand": lambda: padded(Language(HandBlock, hide_padding=False, mask=None), "right"),
    }),
    Sickness("padding in the loss", ("padding in the loss",), {
        "ours": lambda: padded(OursWithMask(pad=PAD), "right", ignored=False),
        "torch": lambda: padded(Language(TorchBlock), "right", ignored=False),
        "hand": lambda: padded(Language(HandBlock), "right", ignored=False),
    }),
    Sickness("left padding without position ids", ("padding shifts positions",), {
        "torch encoder": left(lambda: LayerLanguage(lambda n: future(n, 1))),
        "torch": left(lambda: Language(TorchBlock)),
        "hand": left(lambda: Language(HandBlock)),
    }),
]  # fmt: skip


def _without_final_norm() -> nn.Module:
    model = ours()
    model.decoder.stack.ends.norm = nn.Identity()  # type: ignore[union-attr]
    return model


def _frozen_head(model: nn.Module) -> Patient:
    head_of(model).requires_grad_(False)
    return Patient(model, ids(), next_token)
