"""Distributions over bins: a network predicts how likely a number is to fall into each range.

    F(y) = Σ_{j<k} p_j + p_k (y − e_k) / (e_{k+1} − e_k)   for y in bin k, between e_k and e_{k+1}

The probability p_k of a bin is spread evenly over it, so F is piecewise linear; mean, quantiles and
scores follow from it exactly. A bin without width is one value, such as 0, that many rows have. The
network is trained by cross-entropy with a smoothed label, a normal distribution around the target
(HL-Gauss: Imani, White 2018, 1806.04613, §3.1; Farebrother et al. 2024, 2403.03950, eq. 3):

    q_k = Φ((k + 1 − t)/σ) − Φ((k − t)/σ),    t: position of the target, in bins

The logits of a network that gives each bin its own weights are learnt slowly. They are therefore
corrections r_k of a Student distribution whose location m and scale s the network predicts, too:

    z_k = −2 log(1 + ((c_k − m)/s)² / 3) + r_k,    c_k: middle of bin k, from −2 to 2

Shapes: probabilities (rows, bins), edges in ascending order: (bins + 1,), the same for all rows, or
(rows, bins + 1).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

EXTRA_OUTPUTS = 2
"""Outputs of the network beside one for each bin: location and scale."""
MIN_SCALE = 0.02
TINY = 1e-8
"""Probability of a bin below which R(F) within it is taken as constant."""
LABEL_SIGMA = 0.75
"""σ of the label, in bins: the value of Farebrother et al. 2024, §3.1."""


def bin_means(edges: Tensor) -> Tensor:
    """Return the mean of each bin: the shape of `edges`, with one less at the end."""
    return (edges[..., 1:] + edges[..., :-1]) / 2


def cumulative(probabilities: Tensor) -> Tensor:
    """Return F at each edge, (rows, bins + 1), from 0 to 1."""
    below = torch.cat((torch.zeros_like(probabilities[:, :1]), probabilities.cumsum(dim=1)), dim=1)
    return below / below[:, -1:]


def quantiles_of(probabilities: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles, (rows, levels), of distributions that are uniform within each bin.

    `levels` is (levels,), the same for every row, or (rows, levels).
    """
    below = cumulative(probabilities)
    targets = levels.to(below.dtype).expand(len(probabilities), -1).contiguous()
    place = torch.searchsorted(below, targets, right=True).clamp(1, probabilities.shape[1]) - 1
    low, high = below.gather(1, place), below.gather(1, place + 1)
    share = ((targets - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    first, last = _at(edges, place), _at(edges, place + 1)
    return first + share * (last - first)


def _at(edges: Tensor, place: Tensor) -> Tensor:
    """Return the edge at each place, (rows, places)."""
    return edges[place] if edges.ndim == 1 else edges.gather(1, place)


def positions_of(y: Tensor, edges: Tensor) -> Tensor:
    """Return the position of each number, counted in bins: k + ½ in the middle of bin k.

    A number that is a bin of its own is in the middle of that bin. Numbers outside of all bins are
    at 0 or at the number of bins.

    >>> positions_of(torch.tensor([0.5, 1.0, 9.0]), torch.tensor([0.0, 1.0, 1.0, 3.0]))
    tensor([0.5000, 1.5000, 3.0000])
    """
    bins = len(edges) - 1
    y = y.contiguous()
    at = (torch.searchsorted(edges, y) + torch.searchsorted(edges, y, right=True)).to(y.dtype) / 2
    place = (torch.searchsorted(edges, y, right=True) - 1).clamp(0, bins - 1)
    width = edges[place + 1] - edges[place]
    share = ((y - edges[place]) / torch.where(width > 0, width, 1.0)).clamp(0, 1)
    is_edge = torch.isin(y, edges)
    # Of n equal edges, k … k + n − 1, the middle is between k and k + n − 1.
    return torch.where(is_edge, at - 0.5, place + share).clamp(0, bins)


def cdf_of(probabilities: Tensor, edges: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return P(Y < y) and P(Y ≤ y) for numbers (rows,), or (rows, numbers).

    They are equal, except for a number that is a bin of its own.
    """
    below, wide = cumulative(probabilities), y if y.ndim == 2 else y[:, None]
    wide, bins = wide.contiguous(), probabilities.shape[1]
    sides = []
    for right in (False, True):
        place = (torch.searchsorted(edges, wide, right=right) - 1).clamp(0, bins - 1)
        low, high = below.gather(1, place), below.gather(1, place + 1)
        first = _at(edges, place)
        width = _at(edges, place + 1) - first
        share = (wide - first) / torch.where(width > 0, width, 1.0)
        is_over = (wide >= first) if right else (wide > first)
        share = torch.where(width > 0, share, is_over).clamp(0, 1)
        sides.append((low + (high - low) * share).view(y.shape))
    return sides[0], sides[1]


def crps_of(probabilities: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of each row, in units of y; 0 is best.

        CRPS = ∫ (F(x) − [y ≤ x])² dx

    Matheson, Winkler 1976; Gneiting, Raftery 2007, eq. 20. F is linear within a bin, so each bin
    contributes w (a² + ab + b²)/3, where F − [y ≤ x] goes from a to b over the width w.
    """
    below, y = cumulative(probabilities), y[:, None]
    a, b, width = below[:, :-1], below[:, 1:], edges.diff()
    share = ((y - edges[..., :-1]) / torch.where(width > 0, width, 1.0)).clamp(0, 1)
    at = a + (b - a) * share
    left = share * (a * a + a * at + at * at)
    right = (1 - share) * ((1 - at) ** 2 + (1 - at) * (1 - b) + (1 - b) ** 2)
    inside = (width * (left + right)).sum(dim=1) / 3
    outside = (edges[..., :1] - y).clamp(min=0) + (y - edges[..., -1:]).clamp(min=0)
    return inside + outside[:, 0]


def smoothed_labels(position: Tensor, edges: Tensor, width: float = LABEL_SIGMA) -> Tensor:
    """Return the label of each row, (rows, bins): a normal distribution around its position.

    A target that is a bin of its own has all of the label: its neighbours are not nearly right.
    """
    bins = len(edges) - 1
    steps = torch.arange(bins + 1, dtype=position.dtype, device=position.device)
    below = torch.special.ndtr((steps - position[:, None]) / width)
    label = below.diff(dim=1)
    label = label / label.sum(dim=1, keepdim=True)
    place = position.long().clamp(max=bins - 1)
    is_value = (edges[place + 1] == edges[place])[:, None]
    return torch.where(is_value, F.one_hot(place, bins).to(label.dtype), label)


def shaped_logits(outputs: Tensor) -> Tensor:
    """Return logits (..., bins) from outputs (..., bins + 2): location, scale and corrections."""
    location, scale = outputs[..., :1], F.softplus(outputs[..., 1:2]) + MIN_SCALE
    bins = outputs.shape[-1] - EXTRA_OUTPUTS
    steps = torch.arange(bins, dtype=outputs.dtype, device=outputs.device)
    middle = (steps + 0.5) * (4 / bins) - 2
    return outputs[..., 2:] - 2 * torch.log1p(((middle - location) / scale).square() / 3)


def recalibrated(
    probabilities: Tensor, edges: Tensor, stated: Tensor, observed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return probabilities and edges after F ← R(F), R piecewise linear.

    R bends at its knots, which lie within bins. Each is therefore an edge of its own, in another
    place in each row: F is R(F) everywhere, not only at the edges that were there before.

    Parameters
    ----------
    probabilities, edges
        (rows, bins), (bins + 1,)
    stated, observed
        Knots of R, both from 0 to 1: of all rows, a share `observed` has F(y) of at most `stated`.
        Kuleshov et al. 2018 (1807.00263), §3.

    Returns
    -------
    (rows, bins + inner knots) and (rows, bins + inner knots + 1)
    """
    rows, inner = len(probabilities), stated[1:-1]
    places = quantiles_of(probabilities, edges, inner)
    shares = (cumulative(probabilities)[..., None] - stated[:-1]) / stated.diff()
    before = shares.clamp(0, 1) @ observed.diff()
    # F does not fall with y, so each is sorted by itself.
    below = torch.cat((before, observed[1:-1].expand(rows, -1)), dim=1).sort(dim=1).values
    both = torch.cat((edges.expand(rows, -1), places), dim=1).sort(dim=1).values
    return below.diff(dim=1), both


def recalibrated_mean(
    probabilities: Tensor, edges: Tensor, knots: Sequence[tuple[float, float]]
) -> Tensor:
    """Return the means, (rows,), of the distributions of `recalibrated`, without sorting.

        E[Y] = e_last − ∫ R(F(y)) dy = e_last − Σ_k w_k (S(F_{k+1}) − S(F_k)) / p_k

    where w_k is the width of bin k and S(u) = ∫_0^u R. In float64, as knots may be close
    to one another.
    """
    below, edges = cumulative(probabilities.double()), edges.double()
    R, S = torch.zeros_like(below), torch.zeros_like(below)
    for (start, low), (stop, high) in pairwise(knots):
        slope = (high - low) / (stop - start)
        inside = (below - start).clamp(0, stop - start)
        beyond = (below - stop).clamp(min=0)
        R = R + slope * inside
        S = S + slope * inside * inside / 2 + (high - low) * beyond
    p = below.diff(dim=1)
    level = torch.where(p > TINY, S.diff(dim=1) / p.clamp(min=TINY), R[:, 1:])
    return (edges[-1] - level @ edges.diff()).to(probabilities.dtype)
