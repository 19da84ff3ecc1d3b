"""Scalings of numeric columns: each is fitted on training rows and applied to any."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from addnorm.data.table.frame import Array


def _fit_quantiles(values: Array) -> tuple[float, ...]:
    """Return one quantile for each 30 rows, 10 to 1,000 of them. Gorishniy et al. 2021, §E."""
    count = int(np.clip(len(values) // 30, 10, 1000))
    knots = np.quantile(values, np.linspace(0, 1, count))
    return tuple(np.maximum.accumulate(knots).tolist())


def _to_normal(values: Array, knots: Sequence[float]) -> Array:
    """Φ⁻¹ of the share of training values below x; the middle of the step where values tie."""
    grid = np.asarray(knots)
    shares = np.linspace(0, 1, len(grid))
    rise = np.interp(values, grid, shares)
    fall = -np.interp(-values, -grid[::-1], -shares[::-1])
    share = np.clip((rise + fall) / 2, 1e-7, 1 - 1e-7)
    return np.asarray(torch.special.ndtri(torch.from_numpy(share)).numpy())


def _fit_robust(values: Array) -> tuple[float, ...]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    width = float(high - low) or float(values.max() - values.min()) / 2 or 1.0
    return float(middle), width


def _to_robust(values: Array, knots: Sequence[float]) -> Array:
    """z / √(1 + (z/3)²), z = (x − median) / interquartile range.

    Robust scaling with a smooth clip: Holzmüller et al. 2024 (2407.04491), §3.
    """
    with np.errstate(over="ignore"):
        z = np.clip((values - knots[0]) / knots[1], -1e100, 1e100)
    return np.asarray(z / np.sqrt(1 + (z / 3) ** 2))


def _fit_standard(values: Array) -> tuple[float, ...]:
    """Return mean and deviation; then the bounds of values, if some lie absurdly far out.

    One cell of 999,999,999 would make the others equal, in single precision.
    """
    ordered = np.sort(values)  # so that the order of rows does not change the last bit
    middle, width = _fit_robust(ordered)
    bounds = (middle - FAR_OUT * width, middle + FAR_OUT * width)
    kept = np.clip(ordered, *bounds)
    fitted = float(kept.mean()), deviation(kept) or 1.0
    return fitted if (kept == ordered).all() else (*fitted, *bounds)


def _to_standard(values: Array, knots: Sequence[float]) -> Array:
    """(x − mean) / standard deviation, clipped to ± 1e6, and x to bounds if there are any."""
    inside = np.clip(values, knots[2], knots[3]) if len(knots) > 2 else values
    return np.clip((inside - knots[0]) / knots[1], -1e6, 1e6)


def deviation(values: Array, weights: Array | None = None) -> float:
    """Return √(mean of (x − mean)²), also of numbers whose squares are too small for a float."""
    mean = np.average(values, weights=weights)
    for unit in (1.0, float(np.abs(values - mean).max())):
        found = float(np.average(((values - mean) / (unit or 1.0)) ** 2, weights=weights) ** 0.5)
        if found >= 1e-150:  # whose square has all its digits
            break
    return found * unit


def _no_knots(values: Array) -> tuple[float, ...]:
    return ()


FAR_OUT = 10_000.0
"""Interquartile ranges from the median beyond which standard scaling takes the bound instead."""
FitScaling = Callable[[Array], tuple[float, ...]]
ApplyScaling = Callable[[Array, Sequence[float]], Array]
SCALINGS: dict[str, tuple[FitScaling, ApplyScaling]] = {
    "quantile": (_fit_quantiles, _to_normal),
    "robust": (_fit_robust, _to_robust),
    "standard": (_fit_standard, _to_standard),
    "none": (_no_knots, lambda values, knots: np.clip(values, -1e6, 1e6)),
}
"""By name: the function that fits a scaling, and the one that applies it."""
