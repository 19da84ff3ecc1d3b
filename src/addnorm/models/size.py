"""The cost of a model by formula: parameters, operations, training memory, decoding cache.

With b sequences of n positions, width d, inner width f, and h heads of width w (a = h w):

    projections of attention   2 b n d (2a + 2 kv w)   operations: O(n d²)
    scores and mixed values    4 b n m a               operations: O(n² d), m the keys
    feed-forward               4 b n d f               operations (6 b n d f if gated): O(n d²)
    output over a vocabulary   2 b n d V               operations
    convolution                2 b n d² (2k + 1)       operations, in place of self-attention

Operations are those of matrix products; a multiplication and an addition count as 2, as in torch,
and hidden pairs of causal attention count as well. The backward pass has twice the operations of
the forward pass. Activations are what training saves for the backward pass with the fused kernel
and the chunked loss, in bytes of float32.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import InputError, choose
from addnorm.layers.attention_kernels import CHUNK_QUERIES, MAX_TABLE_ENTRIES
from addnorm.layers.feedforward import FEEDFORWARDS
from addnorm.layers.key_value import ProductKeyMemory
from addnorm.layers.positions import Positions
from addnorm.models.build import (
    arrangement_of,
    make_ffn,
    make_norm,
    make_positions,
    make_sublayer,
    model_config,
    places_of,
)

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one kind of layer, in all blocks of a side together.

    Parameters
    ----------
    name
        Such as `encoder ffn`.
    parameters
        Number of parameters.
    forward
        Operations of the forward pass.
    activations
        Bytes saved for the backward pass.
    cache
        Bytes of keys and values stored while decoding.
    """

    name: str
    parameters: int = 0
    forward: int = 0
    activations: int = 0
    cache: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Cost:
    """The cost of a model for a batch of sequences; printed, it is a table.

    Parameters
    ----------
    batch, length
        Number of sequences, and of positions in each (source and target alike).
    parts
        The cost of each kind of layer.
    attention_overtakes_at
        Length from which scores and mixed values cost more than all the rest; None if they never
        do.
    """

    batch: int
    length: int
    parts: tuple[LayerCost, ...]
    attention_overtakes_at: int | None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return sum(part.forward for part in self.parts)

    @property
    def backward(self) -> int:
        """Operations of the backward pass."""
        return 2 * self.forward

    @property
    def activations(self) -> int:
        """Bytes saved for the backward pass."""
        return sum(part.activations for part in self.parts)

    @property
    def cache(self) -> int:
        """Bytes of keys and values stored while decoding."""
        return sum(part.cache for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        totals = ("parameters", "forward", "backward", "activations", "cache")
        return {
            "batch": self.batch,
            "length": self.length,
            **{name: getattr(self, name) for name in totals},
            "attention_overtakes_at": self.attention_overtakes_at,
            "parts": [asdict(part) for part in self.parts],
        }

    def __repr__(self) -> str:
        return f"Cost of {self}"

    def __str__(self) -> str:
        title, notes = self._notes()
        lines = [_TEXT_ROW.format(*row) for row in self._rows()]
        rule = "─" * len(lines[-1])
        return "\n".join([title, "", *lines[:-1], rule, lines[-1], "", *notes])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        title, notes = self._notes()
        header, *rows = self._rows()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        return (
            f"<div><div>Cost of {escape(title)}</div>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<div>{'<br>'.join(escape(note) for note in notes)}</div></div>"
        )

    def _notes(self) -> tuple[str, list[str]]:
        """Return the line above the table and the lines below it."""
        step = _with_unit(self.forward + self.backward, "FLOP")
        length = self.attention_overtakes_at
        overtakes = "attention scores never cost more than the rest: the window bounds them"
        if length is not None:
            overtakes = f"attention scores cost more than all the rest from length {length:,}"
        title = f"{self.batch} × {self.length} positions, float32"
        return title, [f"forward and backward: {step} per step", overtakes]

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the header, of each part that costs something, and of the total."""
        total = LayerCost(
            name="total",
            parameters=self.parameters,
            forward=self.forward,
            activations=self.activations,
            cache=self.cache,
        )
        parts = [p for p in self.parts if p.parameters or p.forward or p.activations or p.cache]
        header = ("", "parameters", "", "forward", "", "activations", "cache")
        cells = [
            (
                part.name,
                f"{part.parameters:,}",
                _percent(part.parameters, self.parameters),
                _with_unit(part.forward, "FLOP"),
                _percent(part.forward, self.forward),
                _in_bytes(part.activations),
                _in_bytes(part.cache),
            )
            for part in [*parts, total]
        ]
        return [header, *cells]


_TEXT_ROW = "{:<20}{:>14}{:>7}{:>12}{:>7}{:>16}{:>10}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole and part else ""


def _with_unit(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}" if number else ""
        number /= 1000
    return f"{number:.3g} E{unit}"


def _in_bytes(number: float) -> str:
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if number < 1024:
            return f"{number:.3g} {prefix}B" if number else ""
        number /= 1024
    return f"{number:.3g} PiB"


def cost(
    config: Config | ModelConfig | str | Path, length: int | None = None, batch: int = 1
) -> Cost:
    """Return the cost of a model for one batch, by formula; printed, it is a table.

    Parameters
    ----------
    config : a configuration, the name of a preset, a TOML file or the directory of a saved model
    length : positions of each sequence; the configured length by default
    batch : number of sequences

    Examples
    --------
    >>> gpt2 = cost("gpt2", length=1024)
    >>> gpt2.parameters, gpt2.attention_overtakes_at
    (124439808, 6703)
    """
    c = model_config(config)
    if batch < 1 or (length is not None and length < 1):
        raise InputError(
            f"length and batch must be positive: got {length} and {batch}. Try 128, 1."
        )
    if c.segment_memory:
        # What is remembered is read besides the segment, as keys and values of every layer.
        return _with_memory(c, length or c.length, batch)
    n = c.input_length if length is None or c.input == "patches" else length + int(c.summary)
    parts = tuple(_parts(c, n, batch))
    return Cost(batch=batch, length=n, parts=parts, attention_overtakes_at=_crossover(c))


def _with_memory(c: ModelConfig, n: int, batch: int) -> Cost:
    """Return the cost of a segment of n positions with a full memory before it.

    Queries, keys and values are projected for both, scores are n × (n + memory), the rest is for
    the segment alone.
    """
    memory, plain = c.segment_memory, c.replace(segment_memory=0)
    whole = {part.name: part for part in _parts(plain, n + memory, batch)}
    parts = []
    for part in _parts(plain, n, batch):
        if part.name == "decoder attention":
            depth, q, kv = c.depths["decoder"], c.query_width, c.kv_width
            width = c.width + q + 2 * kv
            part = replace(
                part,
                forward=part.forward + depth * 2 * batch * memory * c.width * (q + 2 * kv),
                activations=part.activations + depth * batch * memory * width * FLOAT,
            )
        elif part.name == "decoder scores":
            big = whole[part.name]
            ratio = n / (n + memory)
            part = replace(
                part, forward=round(big.forward * ratio), activations=round(big.activations * ratio)
            )
        parts.append(part)
    overtakes = _crossover(plain)
    return Cost(batch=batch, length=n, parts=tuple(parts), attention_overtakes_at=overtakes)


def _parts(c: ModelConfig, n: int, batch: int) -> Iterator[LayerCost]:
    yield _embedding(c, n, batch)
    if c.mixing == "recurrent":
        yield from _recurrence(c, n, batch)
    else:
        for side in c.sides:
            yield from _side(c, side, n, batch)
    yield _head(c, n, batch)


def _side(c: ModelConfig, side: str, n: int, batch: int) -> Iterator[LayerCost]:
    depth = c.depths[side]
    with torch.device("meta"):
        positions = make_positions(c, side)
    yield LayerCost(
        name=f"{side} positions",
        parameters=_count(positions),
        activations=batch * n * c.width * (FLOAT if c.dropout else 0),
    )
    if c.mixing == "convolution":
        yield _convolution(c, f"{side} convolution", depth, n, batch, side == "decoder")
    else:
        yield _projections(c, f"{side} attention", depth, n, batch, side == "decoder")
        yield _scores(c, f"{side} scores", depth, n, batch, positions)
    if side == "decoder" and c.mode == "encoder-decoder":
        yield _projections(c, "memory attention", depth, n, batch, True)
        yield _scores(c, "memory scores", depth, n, batch, None)
    if c.persistent:
        yield _persistent(c, f"{side} learned keys", depth, n, batch, positions)
    if c.has_ffn:
        yield _ffn(c, f"{side} ffn", depth, n, batch)
    yield _addnorm(c, side, n, batch, positions)


def _embedding(c: ModelConfig, n: int, batch: int) -> LayerCost:
    target = c.output_vocab * c.width if c.mode == "encoder-decoder" else 0
    embed = c.effective_embed_width
    source = {
        "tokens": c.vocab * embed,
        "patches": (c.patch_values + 1) * c.width,
        "vectors": 0,
    }[c.input]
    extra = (c.segments + int(c.summary)) * embed
    project = embed * c.width if c.embed_width else 0
    biases = c.width if c.embed_width else 0
    patches = c.patches * c.patch_values * c.width if c.input == "patches" else 0
    return LayerCost(
        name="embedding",
        parameters=(0 if c.ties_source else source) + target + extra + project + biases,
        forward=2 * batch * (patches + n * project),
        activations=batch * n * (embed if c.embed_width else 0) * FLOAT,
    )


def _projections(
    c: ModelConfig, name: str, depth: int, n: int, batch: int, cached: bool
) -> LayerCost:
    """Return the cost of the projections to queries, keys and values, and of the output."""
    q, kv = c.query_width, c.kv_width
    weights = c.width * (q + 2 * kv) + q * c.width
    biases = (q + 2 * kv if c.attention_bias != "none" else 0) + (
        c.width if c.attention_bias == "all" else 0
    )
    norm = {"none": 0, "head": 2 * c.effective_head_width, "width": q + kv}[c.qk_norm]
    norms = norm * _norm_parameters_per_channel(c) if c.norm != "scale" else 2 * (norm > 0)
    saved = (c.width + q + 2 * kv) * FLOAT + (c.width * FLOAT if c.dropout else 0)
    return LayerCost(
        name=name,
        parameters=depth * (weights + biases + norms),
        forward=depth * 2 * batch * n * weights,
        activations=depth * batch * n * saved,
        cache=depth * batch * n * 2 * kv * FLOAT if cached else 0,
    )


def _convolution(
    c: ModelConfig, name: str, depth: int, n: int, batch: int, cached: bool
) -> LayerCost:
    """Return the cost of the convolutions in place of self-attention: O(k n d²)."""
    d = c.width
    weights = (2 * c.kernel + 1) * d * d
    biases = 3 * d if c.attention_bias != "none" else 0
    # Neighbours of every position; value and gate, the gate's sigmoid and the product; dropout.
    saved = c.kernel * d + 4 * d + (d if c.dropout else 0)
    return LayerCost(
        name=name,
        parameters=depth * (weights + biases),
        forward=depth * 2 * batch * n * weights,
        activations=depth * batch * n * saved * FLOAT,
        cache=depth * batch * n * 2 * c.kv_width * FLOAT if cached else 0,
    )


def _recurrence(c: ModelConfig, n: int, batch: int) -> Iterator[LayerCost]:
    """Yield the costs of a recurrent encoder-decoder: O(n d²), and O(n² d) for its attention.

    Activations are those that the formulas need; torch saves a few more.
    """
    d, encoder, decoder = c.width, c.depths["encoder"], c.depths["decoder"]
    cell = 3 * d * (d + d // 2)  # both directions: three gates, of half the width
    yield LayerCost(
        name="encoder recurrence",
        parameters=encoder * (cell + 6 * d),
        forward=encoder * 2 * batch * n * cell,
        activations=encoder * batch * n * 5 * d * FLOAT,
    )
    start = decoder * d * (d // 2)
    yield LayerCost(
        name="memory attention",
        parameters=2 * d * d + d + start + decoder * d,
        forward=2 * batch * (2 * n * d * d + start),
        activations=batch * n * 3 * d * FLOAT,
    )
    yield LayerCost(
        name="memory scores",
        parameters=d,
        forward=4 * batch * n * n * d,
        activations=batch * n * n * (2 * d + 1) * FLOAT,
    )
    cells = 3 * d * (3 * d + (decoder - 1) * 2 * d)
    yield LayerCost(
        name="decoder recurrence",
        parameters=cells + decoder * 6 * d,
        forward=2 * batch * n * cells,
        activations=decoder * batch * n * 5 * d * FLOAT,
        cache=decoder * batch * 2 * d * FLOAT,
    )
    yield LayerCost(
        name="readout",
        parameters=6 * d * d + 2 * d,
        forward=2 * batch * n * 6 * d * d,
        activations=batch * n * 5 * d * FLOAT,
    )


def _scores(
    c: ModelConfig, name: str, depth: int, n: int, batch: int, positions: Positions | None
) -> LayerCost:
    """Return the cost of scores and mixed values, which grows with the square of the length."""
    q = c.query_width
    keys = depth * n  # in all blocks together
    if positions is not None and c.window is not None and n * n > MAX_TABLE_ENTRIES:
        full = depth // c.full_every if c.full_every else 0
        keys = full * n + (depth - full) * min(n, CHUNK_QUERIES + 2 * c.window)
    relative = positions is not None and positions.bias_per_layer
    extra = c.persistent if positions is not None else 0
    spans = c.span is not None and positions is not None
    # Learned keys meet unrotated queries, so both are twice as wide if positions rotate.
    parts = 2 if extra and positions is not None and positions.rotates else 1
    scores = 4 * batch * n * keys * q * parts
    forward = 0
    parameters = q if c.attention == "additive" else 0
    parameters += c.heads if spans else 0
    if relative:
        distances = 2 * n - 1
        forward += 2 * batch * n * distances * q + 2 * distances * c.width * q
        parameters += c.width * q + 2 * q
    plain = c.attention != "dot" or c.attention_cap is not None or c.attention_dropout > 0
    learned = positions is not None and positions.has_bias and _count(positions) + int(relative) > 0
    learned = learned or spans
    saved = batch * n * (q + c.heads)
    if positions is not None and positions.rotates:
        # With learned keys the widened queries and results, and not the projections.
        saved += batch * n * (3 * q - 2 * c.kv_width if extra else q + c.kv_width)
    if extra:
        saved += batch * n * 2 * c.kv_width * parts + n * n * name.startswith("decoder")
    if spans:
        saved += n * n * (5 * c.heads + 1) // 2
    if (plain or learned) and n * (n + extra) <= MAX_TABLE_ENTRIES:
        # The weights, and for some scores also their intermediate results.
        tables = 4 * c.heads if relative else 3 * c.heads if plain else c.heads
        saved += batch * n * n * (2 * q if c.attention == "additive" else tables)
    if c.qk_norm != "none":
        saved += batch * n * (c.query_width + c.kv_width)
    return LayerCost(
        name=name,
        parameters=depth * parameters,
        forward=scores + depth * forward,
        activations=depth * saved * FLOAT,
    )


def _persistent(
    c: ModelConfig, name: str, depth: int, n: int, batch: int, positions: Positions
) -> LayerCost:
    """Return what the learned keys and values of all-attention add to the scores."""
    extra = c.persistent
    parts = 2 if positions.rotates else 1
    saved = batch * extra * 2 * c.kv_width * parts + n * extra * name.startswith("decoder")
    if c.attention != "dot" or c.attention_cap is not None or c.attention_dropout > 0:
        saved += batch * n * extra * (2 * c.query_width if c.attention != "dot" else 3 * c.heads)
    return LayerCost(
        name=name,
        parameters=depth * 2 * extra * c.kv_width,
        forward=depth * 4 * batch * n * extra * c.query_width * parts,
        activations=depth * saved * FLOAT,
    )


def _product_keys(c: ModelConfig, name: str, depth: int, n: int, batch: int) -> LayerCost:
    """Return the cost of product-key memories, without reading the values: no matrix product."""
    with torch.device("meta"):
        memory = make_ffn(c, ())
    assert isinstance(memory, ProductKeyMemory)
    heads, pair, subkeys, half = memory.key.shape
    queries, reads = heads * pair * half, heads * memory.best
    # Input; queries before and after their norm; the best sub-keys with their numbers; the sums of
    # pairs; the chosen pairs with their numbers; weights.
    norms = 2 if isinstance(memory.norm, nn.Identity) else 3
    saved = c.width + (norms - 1) * queries + 4 * reads + 2 * reads + 3 * reads
    return LayerCost(
        name=name,
        parameters=depth * _count(memory),
        forward=depth * 2 * batch * n * queries * (c.width + subkeys),
        activations=depth * batch * n * (saved + (c.width if c.dropout else 0)) * FLOAT,
    )


def _ffn(c: ModelConfig, name: str, depth: int, n: int, batch: int) -> LayerCost:
    if c.ffn == "product-key":
        return _product_keys(c, name, depth, n, batch)
    kind, _ = choose("model.ffn", c.ffn, FEEDFORWARDS)
    f, parts = c.effective_ffn_width, kind.parts
    biases = parts * f + c.width if c.ffn_bias else 0
    weights = c.width * f * (parts + 1)
    # relu saves its result, which is also the input of the output projection.
    once = c.ffn == "relu" and not c.ffn_dropout
    inner = f * (1 if once else 2 * parts) * FLOAT
    dropouts = (c.width if c.dropout else 0) + (f if c.ffn_dropout else 0)
    return LayerCost(
        name=name,
        parameters=depth * (weights + biases),
        forward=depth * 2 * batch * n * weights,
        activations=depth * batch * n * (c.width * FLOAT + inner + dropouts * FLOAT),
    )


def _addnorm(c: ModelConfig, side: str, n: int, batch: int, positions: Positions) -> LayerCost:
    """Return the cost of the Add & Norm boxes, of what they add to branches, and of the ends.

    Each arrangement has its own parameters, so the boxes are built, on the meta device.
    """
    kind, box_options, ends_options = arrangement_of(c, side)
    places = [place for row in places_of(c, side) for place in row]
    norm_widths: list[int] = []

    def norm(width: int) -> nn.Module:
        norm_widths.append(width)
        return make_norm(c)(width)

    with torch.device("meta"):
        modules: list[nn.Module] = [kind.ends(c.width, c.depths[side], norm, **ends_options)]
        modules += [norm(c.effective_embed_width)] if c.embed_norm else []
        modules += [norm(c.width)] if c.final_norm else []
        boxes = [kind(place, norm, **box_options) for place in places]
        if kind.inside:
            modules += [make_sublayer(c, p, kind.inside, positions).inner for p in places]
    saved = sum(_saved_by_norm(c, width) for width in norm_widths)
    saved += sum(box.saved_per_position() for box in boxes)
    inner_places = [p for p in places if p.role != "ffn" or c.ffn != "product-key"]
    for place in inner_places if kind.inside else []:
        # A module inside a branch saves its input, besides its output.
        width = c.effective_ffn_width if place.role == "ffn" else c.query_width
        inner = "ffn-norm" if place.role == "ffn" else "attention-norm"
        saved += width + (2 if inner in kind.inside else 0)
    return LayerCost(
        name=f"{side} add & norm",
        parameters=sum(_count(module) for module in [*modules, *boxes]),
        forward=sum(box.flops_per_position() for box in boxes) * batch * n,
        activations=batch * n * saved * FLOAT,
    )


def _head(c: ModelConfig, n: int, batch: int) -> LayerCost:
    d, vocab = c.width, c.output_vocab
    if c.head in ("token", "masked"):
        e = c.effective_embed_width
        matrix = 0 if c.ties_output else vocab * e
        bias = vocab if c.unembed_bias or c.head == "masked" else 0
        with torch.device("meta"):
            transform = d * e + e + _count(make_norm(c)(e)) if c.head == "masked" else 0
        hidden = 2 * batch * n * d * e if c.head == "masked" else 0
        return LayerCost(
            name="head",
            parameters=matrix + bias + transform,
            forward=2 * batch * n * e * vocab + hidden,
            activations=(batch * n * e * (4 if transform else 1) + vocab * e) * FLOAT,
        )
    if c.head in ("class", "number"):
        dense = c.pooler in ("tanh", "dense-relu", "dense-gelu")
        pooler = d * d + d if dense else 0
        weights = d * c.outputs + (d * d if dense else 0)
        rows = batch * n if c.pool == "none" else batch
        return LayerCost(
            name="head",
            parameters=pooler + d * c.outputs + c.outputs,
            forward=2 * rows * weights,
            activations=rows * d * FLOAT,
        )
    return LayerCost(name="head")


def _crossover(c: ModelConfig) -> int | None:
    """Return where rest(n) = r n and scores(n) = s n² cross: n = r / s."""
    if c.window is not None and not c.full_every:
        return None
    unit = [part for part in _parts(c, 1, 1) if part.name != "embedding"]
    scores = sum(part.forward for part in unit if part.name.endswith("scores"))
    rest = sum(part.forward for part in unit if not part.name.endswith("scores"))
    return -(-rest // scores) if scores else None


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _saved_by_norm(c: ModelConfig, width: int) -> int:
    """Return how many numbers a norm saves per position: input, statistics, for some the result."""
    return {"layer": width + 2, "batch": width, "none": 0}.get(c.norm, 2 * width + 1)


def _norm_parameters_per_channel(c: ModelConfig) -> int:
    with torch.device("meta"):
        return _count(make_norm(c)(1))
