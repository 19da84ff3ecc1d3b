"""A prior over tables: the synthetic tables on which the instant model is trained.

A table is drawn in four steps, all of them vectorised over the tables of a batch:

    inputs      independent, linearly mixed, clustered, or nodes of a random causal network
    relevance   a random weight for each column; many are close to 0, so columns may be irrelevant
    target      a function of the inputs: linear, network, additive, product, trees, distances,
                waves (only if asked for: the package's weights were trained without); or
                another node of the causal network, which may be a cause or an effect of the inputs;
                or a class that the inputs follow from: every class has its own clusters
    columns     each is warped, rounded, cut into categories with random codes, duplicated, made
                constant, or loses cells; so a column carries less than the target was made from

A score s becomes a class by one of two rules, and a number by the third:

    ordinal     the class is the interval of s + σ ε; the intervals have random probabilities
    softmax     one score for each class: class ~ softmax(β s + b), b random (imbalance)
    number      s + σ(s₁) ε, where the noise may grow with another score (heteroscedastic)

`difficulty` d in [0, 1] is the share of tables from the whole prior; the others are easy: linear or
one hidden layer, balanced, with little noise and plain columns. Training begins with easy tables,
without which learning from context does not start in a small budget (docs/instant.md).

The idea is that of prior-fitted networks: Müller et al. 2022 (2112.10510); causal networks and
trees as priors: Hollmann et al. 2023 (2207.01848), 2025. The choices here are our own.

Shapes: (tables, rows, columns).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from addnorm.errors import ConfigError

MAX_CLASSES = 10
MAX_CODES = 12
"""Most values of a synthetic category."""
GROUP = 4
"""Tables of a batch that share the kind of their inputs, target and activations."""


@dataclass(frozen=True)
class Tables:
    """A batch of tables of one shape."""

    cells: Tensor
    """(tables, rows, columns) float32; NaN where missing."""
    is_category: Tensor
    """(tables, columns) boolean: the numbers of the column are codes without an order."""
    target: Tensor
    """(tables, rows): int64 classes from 0, or float32 numbers."""
    classes: int
    """Number of classes; 0 for numbers."""


class Draw:
    """Seeded random numbers, with the distributions that the prior needs."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def log_uniform(self, *shape: int, low: float, high: float) -> Tensor:
        return self.uniform(*shape, low=math.log(low), high=math.log(high)).exp()

    def happens(self, share: float | Tensor, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def one(self, low: int, high: int) -> int:
        return int(self.integers(low, high, 1))

    def pick(self, weights: dict[str, float]) -> str:
        """A key, with probabilities in proportion to the values."""
        place = torch.multinomial(torch.tensor([*weights.values()]), 1, generator=self.generator)
        return list(weights)[int(place)]

    def gumbel(self, *shape: int) -> Tensor:
        return -(-self.uniform(*shape, low=1e-9).log()).log()


def sample_tables(
    generator: Generator,
    *,
    tables: int,
    rows: int,
    columns: int,
    classes: int,
    difficulty: float = 1.0,
    targets: dict[str, float] | None = None,
) -> Tables:
    """Return a batch of synthetic tables.

    Parameters
    ----------
    generator
        Seeded; equal seeds give equal tables.
    tables, rows, columns
        Shape of the batch.
    classes
        2 to 10 classes, or 0 for a numeric target.
    difficulty
        Share of the tables that are from the whole prior; the others are easy.
    targets
        Weights of the kinds of targets in TARGET_KINDS, without nodes of causal networks; None for
        TARGET_SHARES, with them.

    >>> batch = sample_tables(
    ...     torch.Generator().manual_seed(0), tables=3, rows=50, columns=4, classes=2
    ... )
    >>> batch.cells.shape, batch.target.shape, sorted(set(batch.target.flatten().tolist()))
    (torch.Size([3, 50, 4]), torch.Size([3, 50]), [0, 1])
    """
    if classes and not 2 <= classes <= MAX_CLASSES:
        raise ConfigError(f"classes must be 2 to {MAX_CLASSES}, or 0 for numbers: got {classes}.")
    if min(tables, rows, columns) < 1:
        raise ConfigError(
            f"tables, rows and columns must be 1 or more: got {tables}, {rows} and {columns}."
        )
    unknown = set(targets or ()) - set(TARGET_KINDS)
    if unknown:
        known = ", ".join(TARGET_KINDS)
        raise ConfigError(f"targets must be among {known}: got {', '.join(sorted(unknown))}.")
    draw = Draw(generator)
    parts = []
    for start in range(0, tables, GROUP):
        count = min(GROUP, tables - start)
        if bool(draw.happens(difficulty, 1)):
            parts.append(_full_tables(draw, count, rows, columns, classes, targets))
        else:
            parts.append(_easy_tables(draw, count, rows, columns, classes))
    return Tables(
        torch.cat([part.cells for part in parts]),
        torch.cat([part.is_category for part in parts]),
        torch.cat([part.target for part in parts]),
        classes,
    )


# ── Whole tables ──────────────────────────────────────────────────────────────────────────────────


def _easy_tables(draw: Draw, tables: int, rows: int, columns: int, classes: int) -> Tables:
    x = draw.normal(tables, rows, columns)
    outputs = 1 if classes <= 2 else classes
    if bool(draw.happens(0.5, 1)):
        score = x @ draw.normal(tables, columns, outputs)
    else:
        hidden = 8
        inner = torch.tanh(x @ (draw.normal(tables, columns, hidden) * columns**-0.5 * 1.5))
        score = inner @ draw.normal(tables, hidden, outputs)
    score = standardise(score) + 0.1 * draw.normal(*score.shape)
    if not classes:
        target = score[..., 0]
    elif outputs == 1:
        target = (score[..., 0] > 0).long() ^ draw.integers(0, 1, tables, 1)
    else:
        target = score.argmax(dim=-1)
    return Tables(x, torch.zeros(tables, columns, dtype=torch.bool), target, classes)


def _full_tables(
    draw: Draw,
    tables: int,
    rows: int,
    columns: int,
    classes: int,
    targets: dict[str, float] | None,
) -> Tables:
    if classes and bool(draw.happens(0.2 if classes == 2 else 0.5, 1)):
        x, target = _class_clusters(draw, tables, rows, columns, classes)
        cells, is_category = _warp_columns(draw, x)
        return Tables(_lose_cells(draw, cells), is_category, _flip(draw, target, classes), classes)
    by_softmax = classes > 2 and bool(draw.happens(0.6, 1))
    outputs = classes if by_softmax else 1
    if targets is None and bool(draw.happens(0.25, 1)):
        x, score = _causal_network(draw, tables, rows, columns, outputs)
        cells, is_category = _warp_columns(draw, x)
    else:
        x = standardise(INPUT_KINDS[draw.pick(INPUT_SHARES)](draw, tables, rows, columns))
        cells, is_category = _warp_columns(draw, x)
        if bool(draw.happens(0.5, 1)):  # the target follows the columns as they are written
            x = standardise(_effects(draw, cells, is_category))
        keep = draw.uniform(tables, 1, 1, low=0.2, high=1.0)
        weight = draw.normal(tables, 1, columns).abs() * draw.happens(keep, tables, 1, columns)
        weight[:, :, :1] += 0.3
        weight = weight / weight.square().mean(dim=-1, keepdim=True).sqrt()
        order = draw.uniform(tables, 1, columns).argsort(dim=-1)
        x = x * weight.gather(2, order)
        score = TARGET_KINDS[draw.pick(targets or TARGET_SHARES)](draw, x, outputs)
    score = standardise(score)
    if not classes:
        target = _numbers(draw, score[..., 0], x)
    elif by_softmax:
        target = _softmax_classes(draw, score)
    else:
        target = _ordinal_classes(draw, score[..., 0], classes)
    cells = _lose_cells(draw, cells)
    return Tables(cells, is_category, target, classes)


def standardise(x: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the rows of each table; clipped to ±10."""
    deviation, mean = torch.std_mean(x, dim=1, keepdim=True, correction=0)
    return ((x - mean) / (deviation + 1e-6)).clamp(-10, 10)


# ── Inputs ────────────────────────────────────────────────────────────────────────────────────────


def _independent(draw: Draw, tables: int, rows: int, columns: int) -> Tensor:
    normal = draw.normal(tables, rows, columns)
    uniform = draw.uniform(tables, rows, columns, low=-1.7, high=1.7)
    return torch.where(draw.happens(0.5, tables, 1, columns), normal, uniform)


def _mixed(draw: Draw, tables: int, rows: int, columns: int) -> Tensor:
    """Linear combinations of a few factors, plus noise of each column."""
    factors = draw.one(1, max(1, columns))
    mix = draw.normal(tables, factors, columns) * factors**-0.5
    own = draw.uniform(tables, 1, columns)
    return draw.normal(tables, rows, factors) @ mix + own * draw.normal(tables, rows, columns)


def _clustered(draw: Draw, tables: int, rows: int, columns: int) -> Tensor:
    """Gaussian clusters of different sizes and widths."""
    clusters = draw.one(2, 8)
    centres = draw.normal(tables, clusters, columns) * draw.uniform(tables, 1, 1, high=3.0)
    logits = draw.normal(tables, 1, clusters) + draw.gumbel(tables, rows, clusters)
    place = logits.argmax(dim=-1, keepdim=True).expand(-1, -1, columns)
    width = draw.uniform(tables, clusters, columns, low=0.2, high=1.2)
    noise = draw.normal(tables, rows, columns)
    return centres.gather(1, place) + width.gather(1, place) * noise


INPUT_KINDS: dict[str, Callable[[Draw, int, int, int], Tensor]] = {
    "independent": _independent,
    "mixed": _mixed,
    "clustered": _clustered,
}
INPUT_SHARES = {"independent": 0.3, "mixed": 0.45, "clustered": 0.25}


def _activate(draw: Draw, x: Tensor) -> Tensor:
    """One of several functions, drawn for each unit (the last dimension)."""
    candidates = (x.tanh(), x.relu(), x.abs(), x.sin(), x.sign() + 0.1 * x, x, (-x * x).exp())
    first, second = draw.one(0, len(candidates) - 1), draw.one(0, len(candidates) - 1)
    choice = draw.happens(0.5, x.shape[0], 1, x.shape[2])
    return torch.where(choice, candidates[first], candidates[second])


def _causal_network(
    draw: Draw, tables: int, rows: int, columns: int, outputs: int
) -> tuple[Tensor, Tensor]:
    """Return columns and target as different nodes of one random layered network with noise."""
    depth = draw.one(2, 4)
    needed = -(-(columns + outputs) // depth)
    width = needed + draw.one(1, 6)
    nodes = [draw.normal(tables, rows, draw.one(2, 8))]
    for _ in range(depth):
        fan_in = nodes[-1].shape[-1]
        weight = draw.normal(tables, fan_in, width) * draw.happens(0.6, tables, fan_in, width)
        inner = nodes[-1] @ weight * (0.6 * fan_in) ** -0.5 + 0.5 * draw.normal(tables, 1, width)
        noise = draw.log_uniform(tables, 1, width, low=0.01, high=0.5)
        nodes.append(_activate(draw, 1.5 * inner) + noise * draw.normal(tables, rows, width))
    every = torch.cat(nodes[1:], dim=-1)
    order = draw.uniform(tables, 1, every.shape[-1]).argsort(dim=-1)
    chosen = every.gather(2, order[:, :, : columns + outputs].expand(-1, rows, -1))
    return standardise(chosen[..., :columns]), chosen[..., columns:]


def _class_clusters(
    draw: Draw, tables: int, rows: int, columns: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Return columns and classes: every class has one to three clusters in a few dimensions.

    The columns are mixtures of these dimensions with noise of their own; some are noise alone.
    """
    each, latent = draw.one(1, 3), draw.one(2, max(2, min(columns, 20)))
    shares = _shares(draw, tables, classes).log()
    target = (shares[:, None] + draw.gumbel(tables, rows, classes)).argmax(dim=-1)
    cluster = target * each + draw.integers(0, each - 1, tables, rows)
    place = cluster[..., None].expand(-1, -1, latent)
    apart = draw.log_uniform(tables, 1, 1, low=0.5 if classes == 2 else 1.0, high=6.0)
    centres = draw.normal(tables, classes * each, latent) * apart
    width = draw.uniform(tables, classes * each, latent, low=0.3, high=1.5)
    z = centres.gather(1, place) + width.gather(1, place) * draw.normal(tables, rows, latent)
    mix = draw.normal(tables, latent, columns) * draw.happens(0.6, tables, latent, columns)
    x = standardise(z @ mix)
    if bool(draw.happens(0.4, 1)):
        x = _activate(draw, 1.5 * x + 0.5 * draw.normal(tables, 1, columns))
    own = 1.5 * draw.uniform(tables, 1, columns) * draw.uniform(tables, 1, 1)
    return standardise(x + own * draw.normal(tables, rows, columns)), target


# ── Targets ───────────────────────────────────────────────────────────────────────────────────────


def _linear_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    return x @ draw.normal(len(x), x.shape[-1], outputs)


def _network_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    for _ in range(draw.one(1, 3)):
        fan_in, width = x.shape[-1], draw.one(4, 32)
        gain = draw.uniform(len(x), 1, 1, low=0.5, high=2.5)
        inner = x @ (draw.normal(len(x), fan_in, width) * fan_in**-0.5) * gain
        x = _activate(draw, inner + draw.normal(len(x), 1, width))
    return x @ draw.normal(len(x), x.shape[-1], outputs)


def _additive_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    """Σ_j g_j(x_j) with random g_j."""
    bent = _activate(draw, x * draw.uniform(len(x), 1, x.shape[-1], low=0.5, high=3.0))
    return _linear_target(draw, bent + draw.uniform(len(x), 1, 1) * x, outputs)


def _product_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    """Linear terms and a few products of two columns."""
    pairs = draw.one(1, 4)
    first, second = (
        x.gather(2, draw.integers(0, x.shape[-1] - 1, len(x), 1, pairs).expand(-1, x.shape[1], -1))
        for _ in range(2)
    )
    terms = torch.cat((x, 2 * first * second), dim=-1)
    return _linear_target(draw, terms, outputs)


def _tree_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    """The sum of random decision trees whose thresholds are values that occur in the column."""
    tables, rows, columns = x.shape
    trees, depth = (1, 4, 16)[draw.one(0, 2)], draw.one(2, 5)
    strength = x.std(dim=1) + 1e-3  # relevant columns are chosen more often
    count = trees * (2**depth - 1)
    column = torch.multinomial(strength, count, replacement=True, generator=draw.generator)
    row = draw.integers(0, rows - 1, tables, count)
    threshold = x.flatten(1).gather(1, row * columns + column)
    column, threshold = column.view(tables, trees, -1), threshold.view(tables, trees, -1)
    node = torch.zeros(tables, rows, trees, dtype=torch.long)
    for _ in range(depth):
        at = node.transpose(1, 2)  # (tables, trees, rows)
        value = x.gather(2, column.gather(2, at).transpose(1, 2))
        node = 2 * node + 1 + (value > threshold.gather(2, at).transpose(1, 2))
    leaf = node - (2**depth - 1)
    score = torch.zeros(tables, rows, outputs)
    values = draw.normal(tables, trees, 2**depth, outputs)
    for output in range(outputs):
        score[..., output] = values[..., output].gather(2, leaf.transpose(1, 2)).sum(dim=1)
    return score


def _distance_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    """Σ_m a_m exp(−|x − c_m|² / 2h²) over centres c_m, which are rows of the table."""
    centres = draw.one(1, 4) * outputs
    rows = draw.integers(0, x.shape[1] - 1, len(x), centres, 1).expand(-1, -1, x.shape[-1])
    squared = torch.cdist(x, x.gather(1, rows)).square()
    h = squared.mean(dim=(1, 2), keepdim=True) * draw.uniform(len(x), 1, 1, low=0.1, high=1.0)
    kernel = (-squared / (2 * h + 1e-6)).exp()
    if outputs > 1 and bool(draw.happens(0.5, 1)):  # each centre belongs to one class
        return kernel.view(*kernel.shape[:2], outputs, -1).amax(dim=-1)
    return kernel @ draw.normal(len(x), centres, outputs)


def _wave_target(draw: Draw, x: Tensor, outputs: int) -> Tensor:
    """Effects with several peaks, which a second column may switch, and a linear rest.

        Σ_j Σ_k a_jk sin(2π k r_j + φ_jk)    r_j: rank of column j from 0 to 1, k = 1 to 4

    A column above or below a threshold of another one has other a and φ: an hour of a working day
    and of a holiday. In half of the batches the effects multiply: exp of their sum.
    """
    tables, rows, _ = x.shape
    waves, orders = draw.one(1, 3), 4
    strength = x.std(dim=1) + 1e-3
    chosen = torch.multinomial(strength, 2 * waves, replacement=True, generator=draw.generator)
    picked = x.gather(2, chosen[:, None].expand(-1, rows, -1))
    ties = picked[..., :waves].transpose(1, 2).contiguous()
    rank = torch.searchsorted(ties.sort(dim=-1).values, ties).transpose(1, 2) / rows
    edge = draw.integers(0, rows - 1, tables, 1, waves)
    switch = (picked[..., waves:] > picked[..., waves:].gather(1, edge)).long()
    switch = switch * draw.happens(0.7, tables, 1, waves)
    k = torch.arange(1, orders + 1)
    score = torch.zeros(tables, rows, outputs)
    for output in range(outputs):
        size = draw.normal(tables, 2, waves, orders) * k**-0.5
        phase = draw.uniform(tables, 2, waves, orders, high=2 * math.pi)
        shape = (-1, -1, -1, orders)
        at = switch[..., None].expand(shape)
        angle = 2 * math.pi * k * rank[..., None] + phase.gather(1, at)
        score[..., output] = (size.gather(1, at) * angle.sin()).sum(dim=(2, 3))
    score = standardise(score) + draw.uniform(tables, 1, 1) * standardise(
        _linear_target(draw, x, outputs)
    )
    return score.exp() if bool(draw.happens(0.5, 1)) else score


TARGET_KINDS: dict[str, Callable[[Draw, Tensor, int], Tensor]] = {
    "linear": _linear_target,
    "network": _network_target,
    "additive": _additive_target,
    "products": _product_target,
    "trees": _tree_target,
    "distances": _distance_target,
    "waves": _wave_target,
}
TARGET_SHARES = {
    **{"linear": 0.15, "network": 0.27, "additive": 0.15},
    **{"products": 0.08, "trees": 0.25, "distances": 0.1},
}
"""Of the tables that the package's weights were trained on, which have no waves."""


def _softmax_classes(draw: Draw, score: Tensor) -> Tensor:
    tables, rows, classes = score.shape
    sharpness = draw.log_uniform(tables, 1, 1, low=1.0, high=30.0)
    bias = draw.normal(tables, 1, classes) * draw.uniform(tables, 1, 1, high=2.0)
    # Relabelled at random by the exchangeable classes.
    return (sharpness * (score + 0.5 * bias) + draw.gumbel(tables, rows, classes)).argmax(dim=-1)


def _ordinal_classes(draw: Draw, score: Tensor, classes: int) -> Tensor:
    tables, rows = score.shape
    noise = draw.log_uniform(tables, 1, low=0.03, high=2.0 if classes == 2 else 0.6)
    noisy = score + noise * draw.normal(tables, rows)
    edges = _shares(draw, tables, classes).cumsum(dim=1)[:, :-1]
    place = noisy.argsort(dim=1).argsort(dim=1).float() / rows
    ordered = torch.searchsorted(edges.contiguous(), place.contiguous(), right=True)
    names = draw.uniform(tables, classes).argsort(dim=1)
    return _flip(draw, names.gather(1, ordered), classes)


def _shares(draw: Draw, tables: int, classes: int) -> Tensor:
    """Return probabilities of classes, (tables, classes), from equal to unequal."""
    even = draw.uniform(tables, 1)
    share = -draw.uniform(tables, classes, low=1e-6).log()
    share = even / classes + (1 - even) * share / share.sum(dim=1, keepdim=True) + 0.03
    return share / share.sum(dim=1, keepdim=True)


def _flip(draw: Draw, target: Tensor, classes: int) -> Tensor:
    """Return the classes with up to 15 % of them drawn again, in some of the tables."""
    rate = draw.uniform(len(target), 1, high=0.15) * draw.happens(0.4, len(target), 1)
    flip = draw.happens(rate, *target.shape)
    return torch.where(flip, draw.integers(0, classes - 1, *target.shape), target)


def _numbers(draw: Draw, score: Tensor, x: Tensor) -> Tensor:
    tables, rows = score.shape
    noise = draw.log_uniform(tables, 1, low=0.02, high=1.0).expand(tables, rows)
    if bool(draw.happens(0.4, 1)):
        column = x[..., draw.one(0, x.shape[-1] - 1)]
        noise = noise * (0.7 * column.clamp(-3, 3)).exp()
    epsilon = draw.normal(tables, rows)
    if bool(draw.happens(0.2, 1)):  # heavier tails
        epsilon = epsilon / draw.uniform(tables, rows, low=0.15).sqrt()
    target = standardise((score + noise * epsilon)[..., None])[..., 0]
    shape = draw.pick({"plain": 0.6, "skewed": 0.25, "rounded": 0.15})
    if shape == "skewed":
        return (draw.uniform(tables, 1, low=0.3, high=1.2) * target).exp()
    if shape == "rounded":
        return (target * draw.log_uniform(tables, 1, low=1.0, high=20.0)).round()
    return target


# ── Columns as they are written ───────────────────────────────────────────────────────────────────


def _warp_columns(draw: Draw, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns warped, rounded or cut into categories, and which are categories."""
    tables, rows, columns = x.shape
    shape = (tables, 1, columns)
    warped = torch.where(draw.happens(0.12, *shape), (x * draw.uniform(*shape, high=1.2)).exp(), x)
    power = draw.uniform(*shape, low=1.0, high=2.5)
    warped = torch.where(draw.happens(0.1, *shape), x.sign() * x.abs().pow(power), warped)
    # Many zeros and a tail, as of amounts and pixels.
    tail = (x - draw.uniform(*shape, low=-0.5, high=1.5)).relu()
    tail = torch.where(draw.happens(0.5, *shape), tail.expm1(), tail)
    zeros = draw.uniform(tables, 1, 1, high=0.6) * draw.happens(0.25, tables, 1, 1)
    warped = torch.where(draw.happens(zeros, *shape), tail, warped)
    step = draw.log_uniform(*shape, low=0.15, high=1.0)
    warped = torch.where(draw.happens(0.2, *shape), (warped / step).round(), warped)
    # Categories: up to MAX_CODES intervals of the column; the codes of some have no order.
    share = draw.uniform(tables, 1, 1, high=0.7) * draw.happens(0.7, tables, 1, 1)
    is_cut = draw.happens(share, *shape)
    levels = 2 + (draw.uniform(*shape).square() * (MAX_CODES - 1)).floor()
    tilt = draw.log_uniform(*shape, low=0.5, high=2.0)
    place = torch.special.ndtr(x.clamp(-4, 4)).pow(tilt)
    code = (place * levels).floor().clamp(max=MAX_CODES - 1)
    is_category = is_cut & draw.happens(0.7, *shape)
    names = draw.uniform(tables, MAX_CODES, columns)
    hidden = torch.arange(MAX_CODES)[None, :, None] >= levels
    names = names.masked_fill(hidden, 2.0).argsort(dim=1).argsort(dim=1)
    renamed = names.gather(1, code.long()).float()
    cells = torch.where(is_category, renamed, torch.where(is_cut, code, warped))
    # A copy of another column, and constant columns.
    other = draw.integers(0, columns - 1, tables, 1, columns)
    is_copy = draw.happens(0.03, *shape)
    cells = torch.where(is_copy, cells.gather(2, other.expand(-1, rows, -1)), cells)
    is_category = torch.where(is_copy, is_category.gather(2, other), is_category)
    cells = torch.where(draw.happens(0.01, *shape), cells[:, :1], cells)
    return cells, is_category[:, 0]


def _effects(draw: Draw, cells: Tensor, is_category: Tensor) -> Tensor:
    """Return what columns contribute as they are written: bounded numbers, an effect of each code.

    Heavy tails would make the target one outlier's.
    """
    effects = draw.normal(len(cells), MAX_CODES, cells.shape[-1])
    codes = torch.where(is_category[:, None], cells, 0.0).long()
    return torch.where(
        is_category[:, None], effects.gather(1, codes), standardise(cells).clamp(-3, 3)
    )


def _lose_cells(draw: Draw, cells: Tensor) -> Tensor:
    """Return the cells with some missing: at random, or only large values of a column."""
    tables, _, columns = cells.shape
    rate = draw.uniform(tables, 1, columns, high=0.5) * draw.happens(0.4, tables, 1, columns)
    rate = rate * draw.happens(0.3, tables, 1, 1)
    where = draw.happens(rate, *cells.shape)
    large = cells > cells.mean(dim=1, keepdim=True)
    where = where & (large | draw.happens(0.7, tables, 1, columns))
    return cells.masked_fill(where, float("nan"))
