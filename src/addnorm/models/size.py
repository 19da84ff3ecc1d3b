"""What a model costs, by formula: parameters, operations, memory for training, cache for decoding.

With b sequences of n positions, width d, inner width f, and h heads of w numbers (a = h w):

    projections of attention   2 b n d (2a + 2 kv w)   operations: O(n d²)
    scores and mixing          4 b n m a               operations: O(n² d), m the keys
    feed-forward               4 b n d f               operations (6 b n d f if gated): O(n d²)
    output over a vocabulary   2 b n d V               operations

Operations are those of matrix products, a multiplication and an addition counting 2, as torch
counts them: causal attention counts whole. The backward pass does twice the forward's. Activations
are what training keeps for the backward pass with the fused kernel and the chunked loss, in bytes
of float32.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import InputError, choose
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.feedforward import FEEDFORWARDS
from addnorm.layers.positions import Positions
from addnorm.layers.scores import LARGE, PIECE
from addnorm.models.build import (
    depth_of,
    ffn_width_of,
    head_width_of,
    is_tied,
    length_of,
    make_norm,
    make_positions,
    make_sublayer,
    pick_options,
    places_of,
)

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The cost of one kind of layer, all blocks of a side together."""

    name: str
    parameters: int = 0
    forward: int = 0
    """Operations of the forward pass."""
    activations: int = 0
    """Bytes kept for the backward pass."""
    cache: int = 0
    """Bytes of keys and values kept while decoding."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a model for a batch of sequences of a length (source and target alike)."""

    batch: int
    length: int
    parts: tuple[Part, ...]
    overtakes: int | None
    """Length at which scores and mixing cost more than all the rest; None if they never do."""

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def forward(self) -> int:
        return sum(part.forward for part in self.parts)

    @property
    def backward(self) -> int:
        return 2 * self.forward

    @property
    def activations(self) -> int:
        return sum(part.activations for part in self.parts)

    @property
    def cache(self) -> int:
        return sum(part.cache for part in self.parts)

    def table(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        totals = ("parameters", "forward", "backward", "activations", "cache")
        return {
            "batch": self.batch,
            "length": self.length,
            **{name: getattr(self, name) for name in totals},
            "attention_overtakes_at": self.overtakes,
            "parts": [asdict(part) for part in self.parts],
        }


def cost(config: Config | ModelConfig, length: int | None = None, batch: int = 1) -> Cost:
    """What a model costs; the length is the configured one unless given.

    >>> from addnorm import presets
    >>> cost(presets.gpt2()).parameters
    124439808
    """
    c = config.model if isinstance(config, Config) else config
    if batch < 1 or (length is not None and length < 1):
        raise InputError(
            f"length and batch must be positive: got {length} and {batch}. Try 128, 1."
        )
    n = length_of(c) if length is None or c.input == "patches" else length + int(c.summary)
    parts = tuple(_parts(c, n, batch))
    return Cost(batch=batch, length=n, parts=parts, overtakes=_overtakes(c))


def _parts(c: ModelConfig, n: int, batch: int) -> Iterator[Part]:
    yield _embedding(c, n, batch)
    for side in ("encoder", "decoder"):
        if side in c.mode.split("-"):
            yield from _side(c, side, n, batch)
    yield _head(c, n, batch)


def _side(c: ModelConfig, side: str, n: int, batch: int) -> Iterator[Part]:
    depth = depth_of(c, side)
    with torch.device("meta"):
        positions = make_positions(c, side)
    yield Part(
        name=f"{side} positions",
        parameters=_count(positions),
        activations=batch * n * c.width * (FLOAT if c.dropout else 0),
    )
    yield _attention(c, f"{side} attention", depth, n, batch, side == "decoder")
    yield _scores(c, f"{side} scores", depth, n, batch, positions)
    if side == "decoder" and c.mode == "encoder-decoder":
        yield _attention(c, "memory attention", depth, n, batch, True)
        yield _scores(c, "memory scores", depth, n, batch, None)
    yield _ffn(c, f"{side} ffn", depth, n, batch)
    yield _addnorm(c, side, n, batch, positions)


def _embedding(c: ModelConfig, n: int, batch: int) -> Part:
    shared = c.mode == "encoder-decoder" and c.input == "tokens" and c.tie in ("all", "source")
    target = (c.target_vocab or c.vocab) * c.width if c.mode == "encoder-decoder" else 0
    patch = c.channels * c.patch**2
    source = {
        "tokens": c.vocab * c.width,
        "patches": (patch + 1) * c.width,
        "vectors": 0,
    }[c.input]
    extra = (c.segments + int(c.summary)) * c.width
    patches = (c.image // c.patch) ** 2
    return Part(
        name="embedding",
        parameters=(0 if shared else source) + target + extra,
        forward=2 * batch * patches * patch * c.width if c.input == "patches" else 0,
    )


def _sizes(c: ModelConfig) -> tuple[int, int]:
    """Width of all heads together, and of all key/value heads."""
    return c.heads * head_width_of(c), (c.kv_heads or c.heads) * head_width_of(c)


def _attention(c: ModelConfig, name: str, depth: int, n: int, batch: int, cached: bool) -> Part:
    """The projections to queries, keys and values, and back."""
    q, kv = _sizes(c)
    weights = c.width * (q + 2 * kv) + q * c.width
    biases = (q + 2 * kv if c.attention_bias != "none" else 0) + (
        c.width if c.attention_bias == "all" else 0
    )
    norm = {"none": 0, "head": 2 * head_width_of(c), "width": q + kv}[c.qk_norm]
    norms = norm * _norm_parameters_per_channel(c) if c.norm != "scale" else 2 * (norm > 0)
    kept = (c.width + q + 2 * kv) * FLOAT + (c.width * FLOAT if c.dropout else 0)
    return Part(
        name=name,
        parameters=depth * (weights + biases + norms),
        forward=depth * 2 * batch * n * weights,
        activations=depth * batch * n * kept,
        cache=depth * batch * n * 2 * kv * FLOAT if cached else 0,
    )


def _scores(
    c: ModelConfig, name: str, depth: int, n: int, batch: int, positions: Positions | None
) -> Part:
    """Queries against keys, and values mixed: the part that grows with the square of the length."""
    q, _ = _sizes(c)
    keys = n
    if positions is not None and c.window is not None and n * n > LARGE:
        keys = min(n, PIECE + 2 * c.window)
    relative = positions is not None and positions.per_layer
    forward = 4 * batch * n * keys * q
    parameters = q if c.attention == "additive" else 0
    if relative:
        spread = 2 * n - 1
        forward += 2 * batch * n * spread * q + 2 * spread * c.width * q
        parameters += c.width * q + 2 * q
    plain = c.attention != "dot" or c.attention_cap is not None or c.attention_dropout > 0
    learned = positions is not None and positions.biased and _count(positions) + int(relative) > 0
    kept = batch * n * (q + c.heads)
    if positions is not None and positions.turns:
        kept += batch * n * sum(_sizes(c))
    if (plain or learned) and n * n <= LARGE:
        # The weights alone, or also the scores and what made them.
        tables = 4 * c.heads if relative else 3 * c.heads if plain else c.heads
        kept += batch * n * n * (2 * q if c.attention == "additive" else tables)
    if c.qk_norm != "none":
        kept += batch * n * sum(_sizes(c))
    return Part(
        name=name,
        parameters=depth * parameters,
        forward=depth * forward,
        activations=depth * kept * FLOAT,
    )


def _ffn(c: ModelConfig, name: str, depth: int, n: int, batch: int) -> Part:
    kind, _ = choose("model.ffn", c.ffn, FEEDFORWARDS)
    f, parts = ffn_width_of(c), kind.parts
    biases = parts * f + c.width if c.ffn_bias else 0
    weights = c.width * f * (parts + 1)
    once = c.ffn == "relu" and not c.ffn_dropout  # relu keeps its result, which the output reads
    inner = f * (1 if once else 2 * parts) * FLOAT
    dropouts = (c.width if c.dropout else 0) + (f if c.ffn_dropout else 0)
    return Part(
        name=name,
        parameters=depth * (weights + biases),
        forward=depth * 2 * batch * n * weights,
        activations=depth * batch * n * (c.width * FLOAT + inner + dropouts * FLOAT),
    )


def _addnorm(c: ModelConfig, side: str, n: int, batch: int, positions: Positions) -> Part:
    """The Add & Norm boxes, what they put inside the branches, and both ends of the stack.

    An arrangement may hold anything, so the boxes themselves are asked, on no device.
    """
    kind = choose("model.addnorm", c.addnorm, ADDNORMS)
    box_options, ends_options = pick_options(
        "model.addnorm_options", c.addnorm_options, [kind, kind.ends]
    )
    places = [place for row in places_of(c, side) for place in row]
    made: list[int] = []

    def norm(width: int) -> nn.Module:
        made.append(width)
        return make_norm(c)(width)

    with torch.device("meta"):
        modules: list[nn.Module] = [kind.ends(c.width, depth_of(c, side), norm, **ends_options)]
        modules += [norm(c.width) for wanted in (c.embed_norm, c.final_norm) if wanted]
        boxes = [kind(place, norm, **box_options) for place in places]
        if kind.inside:
            modules += [make_sublayer(c, p, kind.inside, positions).inner for p in places]
    kept = sum(_norm_keeps(c, width) for width in made) + sum(box.kept() for box in boxes)
    for place in places if kind.inside else []:
        # A part inside a branch keeps what it is given, beside what it gives.
        width = ffn_width_of(c) if place.role == "ffn" else _sizes(c)[0]
        inner = "ffn-norm" if place.role == "ffn" else "attention-norm"
        kept += width + (2 if inner in kind.inside else 0)
    return Part(
        name=f"{side} add & norm",
        parameters=sum(_count(module) for module in [*modules, *boxes]),
        forward=sum(box.operations() for box in boxes) * batch * n,
        activations=batch * n * kept * FLOAT,
    )


def _head(c: ModelConfig, n: int, batch: int) -> Part:
    d, vocab = c.width, c.target_vocab or c.vocab
    if c.head in ("token", "masked"):
        matrix = 0 if is_tied(c) else vocab * d
        bias = vocab if c.unembed_bias or c.head == "masked" else 0
        with torch.device("meta"):
            transform = d * d + d + _count(make_norm(c)(d)) if c.head == "masked" else 0
        between = 2 * batch * n * d * d if c.head == "masked" else 0
        return Part(
            name="head",
            parameters=matrix + bias + transform,
            forward=2 * batch * n * d * vocab + between,
            activations=(batch * n * d * (4 if transform else 1) + vocab * d) * FLOAT,
        )
    if c.head in ("class", "number"):
        pooler = d * d + d if c.pooler == "tanh" else 0
        weights = d * c.outputs + (d * d if c.pooler == "tanh" else 0)
        return Part(
            name="head",
            parameters=pooler + d * c.outputs + c.outputs,
            forward=2 * batch * weights,
            activations=batch * d * FLOAT,
        )
    return Part(name="head")


def _overtakes(c: ModelConfig) -> int | None:
    """rest(n) = r n and scores(n) = s n² cross at n = r / s."""
    if c.window is not None:
        return None
    unit = [part for part in _parts(c, 1, 1) if part.name != "embedding"]
    scores = sum(part.forward for part in unit if part.name.endswith("scores"))
    rest = sum(part.forward for part in unit if not part.name.endswith("scores"))
    return -(-rest // scores) if scores else None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _norm_keeps(c: ModelConfig, width: int) -> int:
    """Numbers a position that a norm keeps: its input and statistics, and for some its result."""
    return {"layer": width + 2, "batch": width, "none": 0}.get(c.norm, 2 * width + 1)


def _norm_parameters_per_channel(c: ModelConfig) -> int:
    with torch.device("meta"):
        return _count(make_norm(c)(1))
