"""Measurements of one forward and one backward pass: every site, the norms, the weights.

    scale         √mean x² of the shortcut x, the branch f and their sum
    dependency    Var[f] / Var[x + f]
    map           Var[c_ij] / Var[x_i],   c_ij the output of branch j, carried to depth i

Dependency and map are those of Liu et al. 2020 (2004.08249), §4.1: with x̂_i = Σ_j β_ij â_j, where â
have variance 1, the map is β²_ij. Variances are over all elements. The output of a branch is
carried through the norms and factors that the stream passes, with the divisors that were measured.
If the branches are uncorrelated (Cov = 0), each row of the map sums to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.module_names import block_of
from addnorm.clinic.stream_records import Site, StreamNode, Trace


@dataclass(frozen=True)
class SiteMeasurement:
    """The measurements of one site.

    Parameters
    ----------
    name : name of the site
    path : module that computes the sum
    role : attention, memory or ffn
    shortcut : scale of the shortcut
    branch : scale of the branch
    total : scale of the sum
    dependency : Var[f] / Var[x + f]
    stream_gradient : norm of the loss's gradient with respect to the sum
    weight_gradient : norm of the loss's gradient with respect to the branch's parameters
    outlier : largest channel of the sum over the median channel, by root mean square
    position_variance : share of the sum's variance that is between the positions of a sequence
    trainable : share of the branch's parameters that require a gradient
    """

    name: str
    path: str
    role: str
    shortcut: float
    branch: float
    total: float
    dependency: float
    stream_gradient: float
    weight_gradient: float
    outlier: float
    position_variance: float
    trainable: float


@dataclass(frozen=True)
class NormPlacement:
    """Where the norms stand with respect to the stream."""

    kind: str = "none"
    """post (a norm computes the shortcuts), pre (the branches read through one), none, or mixed."""
    unnormed_end: str | None = None
    """The last site of a stream that the branches read through a norm but the output does not."""
    normed_shortcuts: tuple[str, ...] = ()
    """First sites of their block whose shortcut is the output of a norm of that same block."""


@dataclass(frozen=True)
class NormGain:
    """The gain vector of one norm.

    Parameters
    ----------
    name : name of the norm
    size : root mean square of the gain
    largest : largest absolute value of the gain
    uniform : whether all its values are equal, as before any training
    """

    name: str
    size: float
    largest: float
    uniform: bool


# ── Sites ─────────────────────────────────────────────────────────────────────────────────────────


def root_mean_square(tensor: Tensor) -> float:
    """Return √mean x²."""
    return float(tensor.detach().float().pow(2).mean().sqrt())


def dependency(site: Site) -> float:
    """Return Var[f] / Var[x + f], over all elements."""
    total = float(site.total.detach().float().var())
    return float(site.branch.detach().float().var()) / total if total > 0 else 0.0


def outlier(stream: Tensor) -> float:
    """Return max / median over channels of √mean x²: Dettmers et al. 2022 (2208.07339), §4."""
    channels = stream.detach().float().reshape(-1, stream.shape[-1]).pow(2).mean(dim=0).sqrt()
    median = float(channels.median())
    return float(channels.max()) / median if median > 0 else 1.0


def position_variance(stream: Tensor) -> float:
    """Return Var[x − mean over positions] / Var[x]: near 0, all positions hold the same vector.

    Rank collapse: Dong et al. 2021 (2103.03404); Noci et al. 2022 (2206.03126).
    """
    x = stream.detach().float()
    total = float(x.var())
    if x.ndim < 3 or x.shape[-2] < 2 or total <= 0:
        return 1.0
    return float((x - x.mean(dim=-2, keepdim=True)).pow(2).mean()) / total


def gradients(
    model: nn.Module, loss: Tensor, sites: Sequence[Site]
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Return the loss's gradient at the sum of each site, and at each trained parameter."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sums = [site.edge or (site.total if site.total.requires_grad else None) for site in sites]
    streams = [each for each in sums if each is not None]
    if not loss.requires_grad:
        return [None] * len(sites), {}
    wanted: list[Any] = [*streams, *(p for _, p in named)]
    every = torch.autograd.grad(loss, wanted, allow_unused=True)
    of_streams = iter(every[: len(streams)])
    by_site = [None if each is None else next(of_streams) for each in sums]
    by_weight = {
        name: grad
        for (name, _), grad in zip(named, every[len(streams) :], strict=True)
        if grad is not None
    }
    return by_site, by_weight


def measure_sites(
    model: nn.Module, trace: Trace, loss: Tensor
) -> tuple[list[SiteMeasurement], dict[str, Tensor]]:
    """Return the measurements of every site, and the gradient at every parameter."""
    streams, weights = gradients(model, loss, trace.sites)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    norms = {name: float(grad.float().norm()) for name, grad in weights.items()}
    measurements = []
    for site, stream in zip(trace.sites, streams, strict=True):
        squares = sum(norms.get(name, 0.0) ** 2 for name in site.weights)
        used = [parameters[name] for name in site.weights if name in parameters]
        every = sum(p.numel() for p in used)
        trainable = sum(p.numel() for p in used if p.requires_grad)
        measurements.append(
            SiteMeasurement(
                name=site.name,
                path=site.path,
                role=site.role,
                shortcut=root_mean_square(site.shortcut),
                branch=root_mean_square(site.branch),
                total=root_mean_square(site.total),
                dependency=dependency(site),
                stream_gradient=0.0 if stream is None else float(stream.float().norm()),
                weight_gradient=squares**0.5,
                outlier=outlier(site.total),
                position_variance=position_variance(site.total),
                trainable=trainable / every if every else 1.0,
            )
        )
    return measurements, weights


@torch.no_grad()
def dependency_map(trace: Trace) -> list[dict[str, float]]:
    """Return, for the sum of every site, the share β² of each branch (and of `input`) by name."""
    components: dict[int, dict[str, Tensor]] = {}
    children = _count_children(trace.nodes)
    rows: dict[int, dict[str, float]] = {}
    for number, node in enumerate(trace.nodes):
        own: dict[str, Tensor] = {}
        if node.start is not None:
            own["input"] = _detached_float(node.start)
        for parent, rescalings in node.parents:
            for name, component in components[parent].items():
                for rescaling in rescalings:
                    component = rescaling(component)
                own[name] = own[name] + component if name in own else component
            children[parent] -= 1
            if not children[parent]:
                del components[parent]
        if node.site is not None:
            site = trace.sites[node.site]
            sign = -1.0 if site.sign == "−" else 1.0
            own[site.name] = sign * _detached_float(site.branch)
            if site.node == number:
                total = float(_detached_float(site.total).var())
                rows[node.site] = {
                    name: float(part.var()) / total if total > 0 else 0.0
                    for name, part in own.items()
                }
        components[number] = own
    return [rows[i] for i in range(len(trace.sites))]


def _count_children(nodes: Sequence[StreamNode]) -> dict[int, int]:
    count = dict.fromkeys(range(len(nodes)), 0)
    for node in nodes:
        for parent, _ in node.parents:
            count[parent] += 1
    return count


def _detached_float(tensor: Tensor) -> Tensor:
    return tensor.detach().float()


# ── Norms and weights ─────────────────────────────────────────────────────────────────────────────


def norm_placement(trace: Trace, kind: str, unnormed_end: str | None) -> NormPlacement:
    """Return where the norms stand, for an arrangement of this kind."""
    coarse = {"sandwich": "pre", "res-post": "pre", "no stream": "none"}.get(kind, kind)
    return NormPlacement(coarse, unnormed_end, _normed_shortcuts(trace))


def _normed_shortcuts(trace: Trace) -> tuple[str, ...]:
    names, blocks = [], set()
    for site in trace.sites:
        block = block_of(site.path)
        inside = site.shortcut_norm is not None and block_of(site.shortcut_norm) == block
        if block and block not in blocks and inside:
            names.append(site.name)
        blocks.add(block)
    return tuple(names)


def norm_gains(model: nn.Module) -> list[NormGain]:
    """Return the gain of every norm: a module without submodules whose weight is a vector."""
    gains = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 1 and not list(module.children()):
            w = weight.detach().float()
            uniform = bool((w == w[0]).all())
            gains.append(NormGain(name, root_mean_square(w), float(w.abs().max()), uniform))
    return gains


def weight_gains(model: nn.Module, sites: list[Site]) -> list[float]:
    """Return √mean w² · √((in + out) / 2) of each branch matrix: 1 for Glorot, Bengio 2010."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(name for site in sites for name in site.weights)
    matrices = [named[name].detach().float() for name in names]
    return [
        root_mean_square(w) * (sum(w.shape) / 2) ** 0.5
        for w in matrices
        if w.ndim == 2 and min(w.shape) > 1
    ]


def is_untrained(model: nn.Module) -> bool:
    """Return whether the gain of every norm is still uniform, as before any training."""
    gains = norm_gains(model)
    return bool(gains) and all(gain.uniform for gain in gains)


def equal_matrices(model: nn.Module, trace: Trace) -> tuple[str, ...]:
    """Return the branches' matrices whose rows are all equal: their units never differ.

    A matrix of zeros is one of them only if all other matrices of its branch are zero, too: then
    each has the gradient zero, and the branch stays zero for ever.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    every = dict.fromkeys(name for site in trace.sites for name in site.weights)
    names = [name for name in every if name in trace.multiplied and name in named]
    equal = {
        name: bool((named[name] != 0).any())
        for name in names
        if named[name].ndim == 2
        and min(named[name].shape) > 1
        and bool((named[name] == named[name][:1]).all())
    }
    dead = set()
    for site in trace.sites:
        own = [name for name in site.weights if name in names and named[name].ndim > 1]
        if len(own) > 1 and all(equal.get(name) is False for name in own):
            dead |= set(own)
    return tuple(name for name in names if equal.get(name) or name in dead)
