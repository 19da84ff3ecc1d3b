"""A Gaussian process over the known rows of one table: a second opinion on a number.

    w(y) = f(x) + ε,    f ~ N(0, K),    ε ~ N(0, σ²)
    K(x, x') = Σ_c k_c(x_c, x'_c)  +  g (1 + √3 r) exp(−√3 r),    r² = Σ_c w_c |x_c − x'_c|²

The first sum has the effect of each column alone: for a number a line in z and smooth functions of
its rank u of three lengths, for a category an effect of each value. The second term, Matérn 3/2
with a weight for each column, has all interactions (additive and full kernels: Duvenaud et al.
2011, 1112.4394). The smooth functions are sums of sines with the variances of a Matérn 3/2 process
(Solin, Särkkä 2020, 1401.5508, eq. 20), so all of it is matrix products. The targets of a skewed
table are bent: w(y) = log(y − min + δ), or mirrored; a large δ leaves them straight (warped
processes: Snelson et al. 2004, eq. 6).

Amplitudes, weights, σ² and δ minimise the negative log evidence plus a normal prior on their
logarithms (Rasmussen, Williams 2006, eq. 5.8, 5.9), in a few steps of Adam with exact gradients on
at most `fitted_rows` rows; the tables of bench/instant_process.py chose the prior. All known rows
are then used in the answer, and every known row can be predicted without itself exactly:

    mean   y_i − [K⁻¹ y]_i / [K⁻¹]_ii,    variance   1 / [K⁻¹]_ii         (K with σ²; eq. 5.12)

The answer's distribution is a mixture of normal ones, whose deviations are SPREADS times that of
the process; the shares are fitted to the known rows, each without itself. Everything is in double
precision and a function of the set of rows and columns, not of their order.

Shapes: features (rows, columns, parts) as in instant_solvers.py; one table.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.models.instant_solvers import PARTS

PROCESS_STEPS, PROCESS_RATE = 40, 0.2
"""Steps of Adam on the logarithms of the parameters, and their size."""
MIN_ROWS = 8
"""Fewest known rows."""
SINES = 20
"""Sines for the effect of a number."""
HALF = 1.3 * 3**0.5
"""They are 0 at ± this; ranks lie within ± √3."""
LENGTHS = (2.0, 0.6, 0.2)
"""Lengths of the smooth functions; the ranks of a column have deviation 1."""
FLOOR = 1e-4
"""Least σ², relative to the variance of the bent targets."""
SPREADS = (0.35, 0.6, 1.0, 1.7, 3.0, 6.0)
SPREAD_PRIOR = (0.0, 1.0, 8.0, 1.0, 0.5, 0.1)
"""Deviations of the mixture, and known rows that each is given beforehand."""
FITTED_CELLS = 6_000
"""Cells of the rows that parameters are fitted to, about."""


def fitted_rows(rows: int, columns: int) -> int:
    """Return how many rows parameters are fitted to: 250 to 500, fewer of wide tables."""
    return min(rows, max(250, min(500, FITTED_CELLS // max(columns, 1))))


@dataclass(frozen=True)
class Layout:
    """Which features belong to which column and which parameter."""

    is_category: Tensor
    """(columns,)"""
    effect: Tensor
    """(effects, features): the variance of each feature is amplitudes @ effect."""
    distance: Tensor
    """(coordinates,): the weight that each coordinate of the distance has."""
    weights: int

    @property
    def count(self) -> int:
        """Number of parameters: amplitudes, weights, then g, σ² and δ."""
        return len(self.effect) + self.weights + 3


def make_layout(is_category: Tensor, parts: int) -> Layout:
    """Return the layout for columns (columns,) whose cells have `parts` parts."""
    rank_variance = torch.stack([_sine_variances(length) for length in LENGTHS])
    rows, distance, weight, start = [], [], 0, 0
    sizes = [parts + 1 if category else SINES + 2 for category in is_category.tolist()]
    width = sum(sizes)
    for category, size in zip(is_category.tolist(), sizes, strict=True):
        part = torch.zeros(1 if category else 2 + len(LENGTHS), width, dtype=torch.float64)
        if category:
            part[0, start : start + size] = 1.0
            distance += [weight] * size
        else:
            part[0, start], part[1, start + 1] = 1.0, 1.0  # the line, and if it is missing
            part[2:, start + 2 : start + size] = rank_variance
            distance += [weight, weight + 1, weight + 1]
        rows.append(part)
        start, weight = start + size, weight + (1 if category else 2)
    effect = torch.cat(rows) if rows else torch.zeros(0, 0, dtype=torch.float64)
    return Layout(is_category, effect, torch.tensor(distance, dtype=torch.int64), weight)


def _sine_variances(length: float) -> Tensor:
    """Return the variance of each sine for a Matérn 3/2 process of variance 1 (Solin, Särkkä)."""
    a = 3**0.5 / length
    frequency = math.pi / (2 * HALF) * torch.arange(1, SINES + 1, dtype=torch.float64)
    return 4 * a**3 / (a * a + frequency.square()).square()


def expand_cells(features: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return features of the effects, (rows, features), and coordinates, (rows, coordinates)."""
    effects, places = [], []
    k = math.pi / (2 * HALF) * torch.arange(1, SINES + 1, dtype=torch.float64)
    for column, category in enumerate(layout.is_category.tolist()):
        cells = features[:, column].double()
        if category:
            named = torch.cat((cells, 1 - cells.sum(dim=1, keepdim=True)), dim=1)
            effects.append(named)
            places.append(named * 0.5**0.5)
            continue
        z, u, missing = cells[:, :1], cells[:, 1:2], cells[:, PARTS - 1 : PARTS]
        sines = ((u + HALF) * k).sin() * (1 - missing) * HALF**-0.5
        effects += [z, missing, sines]
        places += [z, u, missing]
    empty = features.new_zeros(len(features), 0, dtype=torch.float64)
    return torch.cat((empty, *effects), dim=1), torch.cat((empty, *places), dim=1)


def first_parameters(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return means and deviations of the prior of the logarithms of the parameters."""
    columns = max(len(layout.is_category), 1)
    amplitude = [
        [0.3] if category else [0.1, 0.1] + [0.1] * len(LENGTHS)
        for category in layout.is_category.tolist()
    ]
    scale = math.sqrt(columns)
    values = [a / scale for part in amplitude for a in part]
    values += [1 / max(layout.weights, 1)] * layout.weights + [0.3, 0.2, 2.0]
    deviation = [2.0] * len(layout.effect) + [1.5] * (layout.weights + 1) + [2.0, 1.5]
    to = torch.float64
    return torch.tensor(values, dtype=to).log(), torch.tensor(deviation, dtype=to)


def bend(y: Tensor, sign: float, least: float, delta: Tensor) -> Tensor:
    """Return log(±y − least + δ), and log of a tiny number below its domain."""
    return (sign * y - least + delta).clamp(min=1e-9).log()


def evidence(
    log: Tensor, layout: Layout, effects: Tensor, places: Tensor, y: Tensor, sign: float
) -> tuple[Tensor, Tensor]:
    """Return the negative log evidence of targets y and its gradient by the log parameters.

    Parameters
    ----------
    log
        (parameters,), as in Layout.
    effects, places
        What `expand_cells` returned.
    y
        (rows,), standardised.
    sign
        1, or −1 to mirror targets that are skewed to the left.
    """
    count, amplitudes = len(y), len(layout.effect)
    a, w = log[:amplitudes].exp(), log[amplitudes : amplitudes + layout.weights].exp()
    g, noise, delta = log[-3:].exp()
    variance, weight = a @ layout.effect, w[layout.distance]
    far = _matern(_squares(places * weight.sqrt(), places * weight.sqrt()))
    kernel = (effects * variance) @ effects.T + g * far.value
    kernel.diagonal().add_(noise + FLOOR)
    least = (sign * y).min()
    bent = bend(y, sign, float(least), delta)
    deviation, mean = torch.std_mean(bent, correction=0)
    deviation = deviation + 1e-9
    target = (bent - mean) / deviation
    factor = torch.linalg.cholesky(kernel)
    inverse = torch.cholesky_inverse(factor)
    alpha = inverse @ target
    loss = 0.5 * target @ alpha + factor.diagonal().log().sum()
    loss = loss + bent.sum() + count * deviation.log()  # of the bent targets: the Jacobian
    # d loss / d kernel = ½ (K⁻¹ − α αᵀ)
    by_kernel = 0.5 * (inverse - alpha[:, None] * alpha)
    by_effect = (effects * (by_kernel @ effects)).sum(dim=0)
    by_square = g * by_kernel * far.slope
    by_place = 2 * (by_square.sum(dim=1) @ places.square())
    by_place = by_place - 2 * (places * (by_square @ places)).sum(dim=0)
    by_weight = torch.zeros_like(w).index_add(0, layout.distance, by_place)
    step = delta / (sign * y - least + delta)  # d bent / d log δ
    centred = step - step.mean()
    along = (target * centred).mean() / deviation
    by_delta = alpha @ (centred / deviation - target * along) + count * along + step.sum()
    by_g = (by_kernel * far.value).sum()
    last = torch.stack((g * by_g, noise * by_kernel.trace(), by_delta))
    return loss, torch.cat((a * (layout.effect @ by_effect), w * by_weight, last))


@dataclass(frozen=True)
class Matern:
    """(1 + √3 r) exp(−√3 r) at squared distances r², and its derivative by r²."""

    value: Tensor
    slope: Tensor


def _matern(squares: Tensor) -> Matern:
    root = (3 * squares + 1e-10).sqrt()
    decay = (-root).exp()
    return Matern((1 + root) * decay, -1.5 * decay)


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Return squared distances, (rows of a, rows of b)."""
    squares = a.square().sum(dim=1)[:, None] + b.square().sum(dim=1)
    return (squares - 2 * a @ b.T).clamp(min=0)


@dataclass(frozen=True)
class Process:
    """A fitted process; see `fit_process`."""

    layout: Layout
    log: Tensor
    """(parameters,): the logarithms of the parameters."""
    sign: float
    least: float
    mean: Tensor
    deviation: Tensor
    """Of the bent targets, from which they are standardised."""
    effects: Tensor
    places: Tensor
    factor: Tensor
    """Cholesky factor of K + σ² I of the known rows."""
    alpha: Tensor
    shares: Tensor
    """(SPREADS,): of the mixture."""
    own: tuple[Tensor, Tensor]
    """Mean and deviation for each known row without itself, bent."""

    def latent(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the bent targets of rows, (rows,) each."""
        effects, places = expand_cells(features, self.layout)
        a = self.log[: len(self.layout.effect)].exp()
        g, noise, _ = self.log[-3:].exp()
        variance, root = a @ self.layout.effect, _weights(self.log, self.layout).sqrt()
        kernel = (effects * variance) @ self.effects.T
        kernel = kernel + g * _matern(_squares(places * root, self.places * root)).value
        whole = effects.square() @ variance + g + noise + FLOOR
        solved = torch.linalg.solve_triangular(self.factor, kernel.T, upper=False)
        left = (whole - solved.square().sum(dim=0)).clamp(min=FLOOR)
        return kernel @ self.alpha, left.sqrt()

    def probabilities(self, mean: Tensor, deviation: Tensor, edges: Tensor) -> Tensor:
        """Return the probabilities of bins, (rows, bins), from what `latent` returned.

        The first and the last bin have what lies beyond them.
        """
        delta = self.log[-1].exp()
        bent = (bend(edges.double(), self.sign, self.least, delta) - self.mean) / self.deviation
        z = (bent - mean[:, None]) / deviation[:, None]
        below = torch.zeros_like(z)
        for share, spread in zip(self.shares, SPREADS, strict=True):
            below = below + share * torch.special.ndtr(z / spread)
        if self.sign < 0:
            below = 1 - below
        inner = below[:, 1:-1]
        low, high = torch.zeros_like(inner[:, :1]), torch.ones_like(inner[:, :1])
        return torch.cat((low, inner, high), dim=1).diff(dim=1).clamp(min=0)


def _weights(log: Tensor, layout: Layout) -> Tensor:
    """Return the weight of each coordinate of the distance."""
    start = len(layout.effect)
    return log[start : start + layout.weights].exp()[layout.distance]


@torch.no_grad()
def fit_process(features: Tensor, is_category: Tensor, y: Tensor) -> Process | None:
    """Return the process of the known rows; None of too few, or if all targets are equal.

    Parameters
    ----------
    features
        (known, columns, parts).
    is_category
        (columns,).
    y
        (known,), standardised.
    """
    y = y.double()
    if len(y) < MIN_ROWS or float(y.std(correction=0)) < 1e-6:
        return None
    layout = make_layout(is_category, features.shape[2])
    effects, places = expand_cells(features, layout)
    sign = 1.0 if float(y.pow(3).mean()) >= 0 else -1.0
    chosen = _spread_rows(places, y, fitted_rows(len(y), len(is_category)))
    log = _fit(layout, effects[chosen], places[chosen], y[chosen], sign)
    least = float((sign * y).min())
    bent = bend(y, sign, least, log[-1].exp())
    deviation, mean = torch.std_mean(bent, correction=0)
    deviation = deviation + 1e-9
    target = (bent - mean) / deviation
    a, root = log[: len(layout.effect)].exp(), _weights(log, layout).sqrt()
    g, noise, _ = log[-3:].exp()
    kernel = (effects * (a @ layout.effect)) @ effects.T
    kernel = kernel + g * _matern(_squares(places * root, places * root)).value
    kernel.diagonal().add_(noise + FLOOR)
    factor = torch.linalg.cholesky(kernel)
    inverse = torch.cholesky_inverse(factor)
    alpha, own = inverse @ target, inverse.diagonal()
    without = target - alpha / own, own.rsqrt()
    shares = fit_shares((target - without[0]) / without[1])
    return Process(
        layout, log, sign, least, mean, deviation, effects, places, factor, alpha, shares, without
    )


def _spread_rows(places: Tensor, y: Tensor, count: int) -> Tensor:
    """Return `count` rows that are spread over the targets; the order of the rows is nothing."""
    by_content = places.sin().sum(dim=1).argsort(stable=True)
    order = by_content[y[by_content].argsort(stable=True)]
    return order[(torch.arange(count) * len(y)) // count]


def _fit(layout: Layout, effects: Tensor, places: Tensor, y: Tensor, sign: float) -> Tensor:
    """Return the log parameters after PROCESS_STEPS steps of Adam (Kingma, Ba 2015, 1412.6980)."""
    middle, width = first_parameters(layout)
    log, count = middle.clone(), len(y)
    first, second = torch.zeros_like(log), torch.zeros_like(log)
    for step in range(1, PROCESS_STEPS + 1):
        _, slope = evidence(log, layout, effects, places, y, sign)
        slope = (slope + (log - middle) / width.square()) / count
        first, second = 0.9 * first + 0.1 * slope, 0.95 * second + 0.05 * slope.square()
        rate = PROCESS_RATE * min(1.0, 2 * (1 - (step - 1) / PROCESS_STEPS))
        scale = (second / (1 - 0.95**step)).sqrt() + 1e-5
        log = log - rate * first / (1 - 0.9**step) / scale
        log = middle + (log - middle).clamp(-9.0, 9.0)
    return log


def fit_shares(errors: Tensor, steps: int = 30) -> Tensor:
    """Return the shares of SPREADS that errors (rows,) in deviations have, by EM."""
    spread, prior = errors.new_tensor(SPREADS), errors.new_tensor(SPREAD_PRIOR)
    density = (-0.5 * (errors[:, None] / spread).square()).exp() / spread
    shares = prior / prior.sum()
    for _ in range(steps):
        belongs = density * shares
        belongs = belongs / belongs.sum(dim=1, keepdim=True).clamp(min=1e-300)
        shares = (belongs.sum(dim=0) + prior) / (len(errors) + prior.sum())
    return shares
