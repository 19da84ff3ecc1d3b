"""Positions: what a scheme adds, how its dot products depend on the offset, and what is lost.

vectors      what is added to the embedding, (length, width)
by offset    mean of the dot product PE(p) · PE(p + k) over p
rotation     R_k with PE(p + k) = R_k PE(p) for every p (sinusoids)
components   principal components of a table of positions
probe        how well a linear map tells something from hidden states
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.addnorm import AddNorm, NoResidual, Parallel, Stream
from addnorm.layers.attention import Attention
from addnorm.layers.positions import (
    Learned,
    NoPositions,
    Positions,
    RelativePart,
    Rotary,
    Sinusoidal,
)
from addnorm.lens.attribution import token_embedding
from addnorm.lens.frozen import Constant, mixing_norms, replace_modules
from addnorm.lens.look import look
from addnorm.lens.places import find_sides, find_sublayers, require_eval
from addnorm.report import Page, heat_map, line_chart, scatter_chart

PROBED_TOKENS = 8
"""Different tokens in the random texts of a probe."""
DRAWN_HEADS = 8
"""Heads whose curves are drawn."""


def position_vectors(scheme: Positions, length: int, width: int) -> Tensor:
    """Return what a scheme adds to the embedding, (length, width); zeros if it adds nothing."""
    dtype = next((p.dtype for p in scheme.parameters()), torch.get_default_dtype())
    blank = torch.zeros(1, length, width, dtype=dtype)
    with torch.no_grad():
        return scheme.embed(blank, torch.arange(length)[None])[0]


def rotary_scores(scheme: Rotary, length: int) -> Tensor:
    """Return the scores of equal queries and keys, each of ones, (length, length), over width."""
    ones = torch.ones(1, 1, length, scheme.rotated)
    turned = scheme.rotate(ones, torch.arange(length))[0, 0]
    return turned @ turned.T / scheme.rotated


def rotary_matrix(scheme: Rotary, offset: int) -> Tensor:
    """Return R_k, (rotated, rotated): what turns a query or key at position 0 to position k."""
    basis = torch.eye(scheme.rotated)[None, :, None]  # (1, heads, 1, rotated): one unit vector each
    return scheme.rotate(basis, torch.tensor([offset]))[0, :, 0].T


def index_vectors(length: int, width: int) -> Tensor:
    """Return plain indices as positions, p / length in every coordinate: the failing baseline.

    Their dot product p q says how far from the start both are, not how far apart.
    """
    return (torch.arange(length)[:, None] / length).expand(length, width)


def by_offset(matrix: Tensor) -> Tensor:
    """Return the mean of every diagonal of a square matrix, offsets 0 to length − 1.

    >>> by_offset(torch.tensor([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [2.0, 2.0]
    """
    return torch.stack([matrix.diagonal(k).mean() for k in range(len(matrix))])


def offset_dependence(matrix: Tensor) -> float:
    """Return the share of a matrix's variance that the offset explains: 1 if it is all there is.

    >>> offset_dependence(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    1.0
    """
    length = len(matrix)
    offset = torch.arange(length)[None] - torch.arange(length)[:, None]
    means = torch.stack([matrix.diagonal(k).mean() for k in range(1 - length, length)])
    rest = (matrix - means[offset + length - 1]).square().sum()
    spread = (matrix - matrix.mean()).square().sum()
    return 1.0 if float(spread) == 0 else float(1 - rest / spread)


def rotation(offset: int, width: int, base: float = 10000.0) -> Tensor:
    """Return R_k with PE(p + k) = R_k PE(p), for interleaved sinusoids, (width, width), float64.

    Each pair (sin, cos) turns by its own angle k · base^(−2i/width). Vaswani et al. 2017, §3.5.

    >>> from addnorm.layers.positions import sinusoids
    >>> table = sinusoids(torch.arange(9), 8, 1e4, "interleaved")
    >>> torch.allclose(table[2:], table[:-2] @ rotation(2, 8).T)
    True
    """
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for pair in range(width // 2):
        angle = offset * base ** (-2 * pair / width)
        sin, cos = math.sin(angle), math.cos(angle)
        i = 2 * pair
        matrix[i : i + 2, i : i + 2] = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
    return matrix


def principal_components(table: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """Return coordinates along the main directions, (rows, count), and their shares of variance."""
    centred = (table - table.mean(dim=0)).double()
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    shares = sizes.square() / sizes.square().sum().clamp(min=1e-30)
    return (left * sizes)[:, :count], shares[:count]


# ── What hidden states contain ───────────────────────────────────────────────────────────────────


def probe(features: Tensor, targets: Tensor, *, penalty: float = 1e-3) -> float:
    """Return how well a ridge regression tells targets of held-out rows from features.

    A random half of the rows trains, the other tests. Of floats the result is the share of variance
    explained (R², which may be below 0), of integers the share of right answers.

    Parameters
    ----------
    features
        (rows, width)
    targets
        (rows,), floats or classes.
    penalty
        Of the regression, relative to the mean variance of the features.
    """
    if len(features) != len(targets) or len(features) < 4:
        raise InputError(
            f"a probe needs as many targets as features, four or more: got {len(targets)} and "
            f"{len(features)}."
        )
    x = torch.cat((features, torch.ones_like(features[:, :1])), dim=1).double()
    is_class = not targets.is_floating_point()
    y = nn.functional.one_hot(targets).double() if is_class else targets.double()[:, None]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    inside, outside = order[::2], order[1::2]
    gram = x[inside].T @ x[inside]
    ridge = penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram + ridge, x[inside].T @ y[inside])
    guess = x[outside] @ weights
    if is_class:
        return float((guess.argmax(dim=1) == targets[outside]).double().mean())
    rest = (guess - y[outside]).square().sum()
    spread = (y[outside] - y[outside].mean()).square().sum()
    return float(1 - rest / spread)


@contextmanager
def without_shortcuts(model: nn.Module) -> Iterator[nn.Module]:
    """Remove every shortcut of a model within the block: a box passes on its branch alone.

    In post-norm x ← N(F(x)), in pre-norm x ← F(N(x)), and so on: the branch reads what it always
    reads, then the box's own `forward` joins it to a stream of zeros. What can then no longer be
    told, a probe shows: without shortcuts, attention averages tokens until they are all alike (Dong
    et al. 2021, 2103.03404).
    """
    handles: list[Any] = []
    written: dict[nn.Module, Tensor] = {}
    weighed: dict[nn.Module, Tensor] = {}

    def before(box: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, f = args

        def branch(x: Tensor) -> Tensor:
            written[box] = f(x)
            return written[box]

        return stream, branch

    def after(box: nn.Module, args: tuple[Any, ...], output: Stream) -> Stream:
        branch = written.pop(box)
        weights: dict[nn.Module, nn.Module] = {
            norm: Constant(weighed.pop(norm)) for norm in mixing_norms(box)
        }
        twin = replace_modules(box, weights)
        assert isinstance(twin, AddNorm)  # its `forward` is called without the hooks
        return twin.forward(_without_shortcut(twin, args[0]), lambda x: branch)

    def note(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weighed[norm] = output

    try:
        for step in find_sublayers(model):
            handles.append(step.box.register_forward_pre_hook(before))
            handles.append(step.box.register_forward_hook(after))
            handles += [norm.register_forward_hook(note) for norm in mixing_norms(step.box)]
        yield model
    finally:
        for handle in handles:
            handle.remove()


def _without_shortcut(box: AddNorm, stream: Stream) -> Stream:
    """Return what a box passes on besides its branch, if there are no shortcuts."""
    if isinstance(box, Parallel):  # the branches of a block read the same x; their sum starts at 0
        x, total = stream
        return (x, torch.zeros_like(total)) if box.place.first else stream
    return _zeros(stream)


def _zeros(stream: Any) -> Any:
    """Return a stream of zeros; what is no vector of a position, such as a scalar, stays."""
    if isinstance(stream, tuple):
        return tuple(_zeros(part) for part in stream)
    return torch.zeros_like(stream) if isinstance(stream, Tensor) and stream.ndim > 2 else stream


class _ContentOnly(NoPositions):
    """A scheme that adds nothing and acts on no score; what it learned for all queries stays."""

    def __init__(self, scheme: Positions) -> None:
        super().__init__(0, 0, 0, 0, causal=False)
        self.scheme = scheme

    def shift_queries(self, q: Tensor, local: nn.Module) -> Tensor:
        return self.scheme.shift_queries(q, local)


@contextmanager
def without_positions(model: nn.Module) -> Iterator[nn.Module]:
    """Let no side of a model use its positions within the block; what it can no longer tell.

    The scheme is replaced by one that adds nothing and acts on no score. An encoder then treats its
    input as a set: hidden states follow a permutation of the tokens, and a probe for the position
    fails (Vaswani et al. 2017, §3.5). A decoder can still count what its causal mask shows.
    """
    sides = list(find_sides(model).values())
    schemes = [side.positions for side in sides]
    try:
        for side, scheme in zip(sides, schemes, strict=True):
            side.positions = _ContentOnly(scheme)
        yield model
    finally:
        for side, scheme in zip(sides, schemes, strict=True):
            side.positions = scheme


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a probe tells from the final hidden states, as shares of right answers.

    Parameters
    ----------
    position, token
        Of the model itself: the position of a state, and the token there.
    chance
        Of guessing: (position, token).
    without
        The same two of the model without its positions and without its shortcuts, as far as it has
        them: (position, token).
    """

    position: float
    token: float
    chance: tuple[float, float]
    without: dict[str, tuple[float, float]]


def probe_states(model: nn.Module, *, length: int = 16, texts: int = 64) -> Told | None:
    """Return what a probe reads from a model's states, with and without positions and shortcuts.

    It reads texts of a few tokens at random; None of a model that reads no token ids.
    """
    require_eval(model, "probe_states")
    sides = find_sides(model)
    tables = [token_embedding(model, side) for side in sides]
    if not all(tables):
        return None
    length = min(length, *(_most_positions(side.positions) for side in sides.values()))
    if length < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    pad, ids = getattr(model.config, "pad", None), []
    for table in tables:
        assert table is not None
        usual = torch.tensor([i for i in range(table.vocab) if i != pad])
        few = usual[torch.randperm(len(usual), generator=generator)[:PROBED_TOKENS]]
        drawn = torch.randint(len(few), (texts, length), generator=generator)
        ids.append(few[drawn])
    place, token = torch.arange(length).repeat(texts), drawn.flatten()

    def tell() -> tuple[float, float]:
        states = look(model, ids, ()).hidden[list(sides)[-1]]
        states = states[:, -length:].flatten(0, 1)  # without a token that stands before the text
        return probe(states, place), probe(states, token)

    own, without = tell(), {}
    if not all(isinstance(side.positions, NoPositions) for side in sides.values()):
        with without_positions(model):
            without["positions"] = tell()
    if not all(isinstance(step.box, NoResidual) for step in find_sublayers(model)):
        with without_shortcuts(model):
            without["shortcuts"] = tell()
    chance = (1 / length, 1 / len(few))
    return Told(position=own[0], token=own[1], chance=chance, without=without)


def _most_positions(scheme: Positions) -> int:
    """Return how many positions a scheme has."""
    return scheme.length if isinstance(scheme, Learned) else 2**31


# ── Pictures ──────────────────────────────────────────────────────────────────────────────────────


def positions_page(model: nn.Module, length: int = 64) -> Page:
    """Return a page with pictures of a model's positions, beside plain indices."""
    side, module = list(find_sides(model).items())[-1]
    scheme, width = module.positions, find_sublayers(model)[-1].box.place.width
    length = min(length, _most_positions(scheme))
    page = Page(
        "Positions", f"{type(scheme).__name__} of the {side or 'table'}, {length} positions"
    )
    rows = [str(p) for p in range(length)]
    columns = [str(i) for i in range(width)]
    vectors = position_vectors(scheme, length, width)
    curves: dict[str, Tensor] = {}
    if vectors.any():
        page.section("What is added")
        picture = heat_map(vectors.tolist(), rows, columns, title="Positions", y="position")
        page.figure(picture, "One row for each position, one column for each number.")
        products = vectors @ vectors.T
        page.section("Dot products")
        picture = heat_map(products.tolist(), rows, rows, title="Dot products", x="position")
        page.figure(
            picture,
            f"The offset explains {offset_dependence(products):.0%} of their variance; of plain "
            f"indices {offset_dependence(_dot_products(index_vectors(length, width))):.0%}.",
        )
        curves["this scheme"] = by_offset(products) / products.diagonal().mean()
        if isinstance(scheme, Sinusoidal) and scheme.layout == "interleaved":
            _add_rotation(page, rotation(1, width, scheme.base), "every position is moved by 1")
        points, shares = principal_components(vectors)
        page.section("Main directions")
        picture = scatter_chart(
            {"positions": [(float(x), float(y)) for x, y in points]},
            title="Principal components",
            x=f"first ({float(shares[0]):.0%})",
            y=f"second ({float(shares[1]):.0%})",
        )
        page.figure(picture, "Each dot is a position; neighbours lie side by side.")
    elif isinstance(scheme, Rotary):
        curves["this scheme"] = by_offset(rotary_scores(scheme, length))
        _add_rotation(
            page, rotary_matrix(scheme, 1), "queries and keys are turned by it, once a position"
        )
    if curves:
        plain = _dot_products(index_vectors(length, width))
        curves["plain indices"] = by_offset(plain) / plain.diagonal().mean()
        page.section("By offset")
        series = {name: list(enumerate(each.tolist())) for name, each in curves.items()}
        picture = line_chart(series, title="Mean dot product", x="offset", y="of offset 0")
        page.figure(picture, "How alike two positions are, by how far apart they are.")
    elif scheme.has_bias:
        _add_bias(page, scheme, model, length)
    else:
        page.text(
            "This model has no positions. An encoder without them reads a set: its states follow "
            "the tokens when these change places. A decoder can count what its causal mask shows."
        )
    told = None if model.training else probe_states(model)
    if told is not None:
        _add_probe(page, told)
    return page


def score_bias(scheme: Positions, attention: Attention, length: int) -> Tensor:
    """Return what a scheme adds to the scores of the mean query, (heads, query, key).

    Of relative positions this is v · W r, the term that is the same for all queries.
    """
    local, q = attention.local, torch.zeros(1, attention.heads, length, attention.head_width)
    if isinstance(local, RelativePart):
        q = local.u.detach()[None, :, None].expand(-1, -1, length, -1)
    places = torch.arange(length)
    with torch.no_grad():
        bias = scheme.bias(q, places, places, local, attention.head_width**-0.5)
    assert bias is not None
    return bias[0]


def _add_bias(page: Page, scheme: Positions, model: nn.Module, length: int) -> None:
    """Add what is added to the scores, by offset, of the first layer's heads."""
    first = next(
        step
        for step in reversed(find_sublayers(model))
        if step.layer == 0 and isinstance(step.sublayer, Attention) and step.role != "memory"
    )
    assert isinstance(first.sublayer, Attention)
    bias = score_bias(scheme, first.sublayer, length)[:DRAWN_HEADS]
    offsets = range(1 - length, 1 if first.side == "decoder" else length)
    series = {
        f"head {head}": [(k, float(each.diagonal(k).mean())) for k in offsets]
        for head, each in enumerate(bias)
    }
    page.section("By offset")
    page.text("This scheme adds nothing to the embedding: it acts on scores.")
    picture = line_chart(series, title="Added to the score", x="key − query", y="score")
    where = f" in {first.name}, for a mean query" if scheme.bias_per_layer else ""
    page.figure(picture, f"What is added to a score{where}, by how far the key is ahead.")


def _add_probe(page: Page, told: Told) -> None:
    """Add what a linear map tells from the states."""
    rows = [("the model", told.position, told.token)]
    rows += [(f"without {what}", *shares) for what, shares in told.without.items()]
    page.section("What the states still tell")
    page.text(
        "A linear map is fitted to the final states of random texts, to tell the position and the "
        "token at it. Without positions an encoder cannot tell the one; without shortcuts, deep "
        "stacks lose both."
    )
    shown = [(name, *(f"{share:.0%}" for share in shares)) for name, *shares in rows]
    shown.append(("guessing", *(f"{share:.0%}" for share in told.chance)))
    page.table(("", "position", "token"), shown, "Right answers on held-out states.")


def _add_rotation(page: Page, matrix: Tensor, what: str) -> None:
    names = [str(i) for i in range(len(matrix))]
    page.section("The rotation R_k")
    picture = heat_map(matrix.tolist(), names, names, title="R_1")
    page.figure(picture, f"R_k for k = 1: {what}. Each pair of numbers turns by its own angle.")


def _dot_products(vectors: Tensor) -> Tensor:
    return vectors @ vectors.T
