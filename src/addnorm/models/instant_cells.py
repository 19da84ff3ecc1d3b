"""The cells of a table as the instant model sees them: features from the known rows alone.

A cell x of a numeric column becomes a few features:

    z  = (x − mean) / deviation, clipped smoothly: z / √(1 + (z/4)²)
    u  = 2 · (share of known cells below x, ties counted half) − 1
    sin, cos of π k u for k = ½, 1, 2, 4;  1 if missing (the others are 0);  1 if a category

Attention treats all columns alike, so that "this column is high and that one low" would look like
the opposite: random numbers, the same for all cells of a column, tell columns apart.

Shapes: cells (tables, rows, columns).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FREQUENCIES = (0.5, 1.0, 2.0, 4.0)
FEATURES = 4 + 2 * len(FREQUENCIES)
"""Numbers that describe a cell."""
CLIP = 4.0


@dataclass(frozen=True)
class ColumnStats:
    """What is known of each column from the known rows of its table."""

    mean: Tensor
    """(tables, 1, columns)"""
    deviation: Tensor
    """(tables, 1, columns), above 0."""
    ordered: Tensor
    """(tables, columns, known): the cells in ascending order, then infinities for missing ones."""
    count: Tensor
    """(tables, 1, columns): cells that are not missing."""


def column_stats(known: Tensor) -> ColumnStats:
    """Return the statistics of columns from (tables, known, columns), NaN where missing."""
    present = ~known.isnan()
    count = present.sum(dim=1, keepdim=True)
    filled = known.masked_fill(~present, 0.0)
    divisor = count.clamp(min=1)
    mean = filled.sum(dim=1, keepdim=True) / divisor
    centred = (filled - mean).masked_fill(~present, 0.0)
    deviation = (centred.square().sum(dim=1, keepdim=True) / divisor).sqrt()
    tiny = 1e-6 * (1 + mean.abs())
    deviation = torch.where(deviation > tiny, deviation, torch.ones_like(deviation))
    ordered = known.masked_fill(~present, float("inf")).transpose(1, 2).contiguous()
    return ColumnStats(mean, deviation, ordered.sort(dim=-1).values, count)


def cell_features(x: Tensor, stats: ColumnStats, is_category: Tensor | None = None) -> Tensor:
    """Return (tables, rows, columns, FEATURES) for cells (tables, rows, columns)."""
    missing = x.isnan()
    filled = torch.where(missing, stats.mean, x)
    z = (filled - stats.mean) / stats.deviation
    z = z / (1 + (z / CLIP).square()).sqrt()
    along = filled.transpose(1, 2).contiguous()
    below = torch.searchsorted(stats.ordered, along)
    upto = torch.searchsorted(stats.ordered, along, right=True)
    share = (below + upto).transpose(1, 2) / (2 * stats.count.clamp(min=1))
    u = torch.where(stats.count > 0, 2 * share.clamp(max=1.0) - 1, torch.zeros_like(z))
    angles = u[..., None] * (math.pi * torch.tensor(FREQUENCIES, device=x.device))
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    known = (~missing).to(z.dtype)[..., None]
    values = torch.cat((z[..., None], u[..., None], waves), dim=-1) * known
    if is_category is None:
        category = torch.zeros_like(known)
    else:
        category = is_category.to(z.dtype)[:, None, :, None].expand_as(known)
    return torch.cat((values, 1 - known, category), dim=-1)


def column_identities(stats: ColumnStats, count: int, seed: int = 0) -> Tensor:
    """Return `count` standard normal numbers for each column, (tables, columns, count).

    They are a function of the sorted known cells of the column, bit for bit, and of the seed: so
    they follow the column wherever it stands, the order of the rows changes nothing, and other
    columns get others. (In TabPFN they are drawn anew for each prediction: Hollmann et al. 2025.)
    """
    bits = bits_of(stats.ordered)
    places = torch.arange(bits.shape[-1], device=bits.device) * _GOLDEN
    column = mix_bits(mix_bits(bits + places).sum(dim=-1) + seed)
    draws = mix_bits(column[..., None] + torch.arange(1, count + 1, device=bits.device) * _GOLDEN)
    share = ((draws & (2**24 - 1)).float() + 0.5) / 2**24
    return math.sqrt(2) * torch.special.erfinv(2 * share - 1)


_GOLDEN = -7046029254386353131
"""2^64 / golden ratio, as a signed number: consecutive multiples are far apart."""


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of numbers in single precision as whole numbers; -0 has those of 0."""
    return (x.float() + 0.0).view(torch.int32).to(torch.int64)


def mix_bits(x: Tensor) -> Tensor:
    """Return 64 bits, each of which depends on all of x (splitmix64: Steele et al. 2014)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
