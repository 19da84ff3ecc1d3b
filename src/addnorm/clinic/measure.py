"""What one forward and one backward pass say of every site.

    scale         √mean x² of the shortcut x, the branch f and their sum
    dependency    Var[f] / Var[x + f]
    map           Var[c_ij] / Var[x_i],   c_ij what branch j wrote, carried to depth i

Dependency and map are those of Liu et al. 2020 (2004.08249), §4.1: with x̂_i = Σ_j β_ij â_j, where â
have variance 1, the map is β²_ij. Variances are over all elements. What a branch wrote is carried
through the norms and factors that the stream meets on its way, whose divisors are those that were
measured. Branches that do not go together (Cov = 0) make each row of the map sum to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.clinic.trace import Node, Site, Trace


@dataclass(frozen=True)
class Measured:
    """One site."""

    name: str
    path: str
    role: str
    shortcut: float
    branch: float
    total: float
    dependency: float
    stream_gradient: float
    """Norm of the loss's gradient in the sum."""
    weight_gradient: float
    """Norm of the loss's gradient in the branch's parameters."""
    outlier: float
    """Largest channel of the sum over the median channel, by root mean square."""
    distinct: float
    """Share of the sum's variance in which the positions of a sequence differ."""
    trained: float
    """Share of the branch's parameters that are trained."""


def size(tensor: Tensor) -> float:
    """√mean x²."""
    return float(tensor.detach().float().pow(2).mean().sqrt())


def dependency(site: Site) -> float:
    """Var[f] / Var[x + f], over all elements."""
    whole = float(site.total.detach().float().var())
    return float(site.branch.detach().float().var()) / whole if whole > 0 else 0.0


def outlier(stream: Tensor) -> float:
    """max / median over channels of √mean x²: Dettmers et al. 2022 (2208.07339), §4."""
    channels = stream.detach().float().reshape(-1, stream.shape[-1]).pow(2).mean(dim=0).sqrt()
    middle = float(channels.median())
    return float(channels.max()) / middle if middle > 0 else 1.0


def distinct(stream: Tensor) -> float:
    """Var[x − mean over positions] / Var[x]: near 0 all positions have become the same vector.

    Rank collapse: Dong et al. 2021 (2103.03404); Noci et al. 2022 (2206.03126).
    """
    x = stream.detach().float()
    whole = float(x.var())
    if x.ndim < 3 or x.shape[-2] < 2 or whole <= 0:
        return 1.0
    return float((x - x.mean(dim=-2, keepdim=True)).pow(2).mean()) / whole


def gradients(
    model: nn.Module, loss: Tensor, sites: Sequence[Site]
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """The loss's gradient in the sum of each site, and in each trained parameter."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    streams = [site.total for site in sites if site.total.requires_grad]
    if not loss.requires_grad:
        return [None] * len(sites), {}
    wanted = [*streams, *(p for _, p in named)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    of_streams = iter(found[: len(streams)])
    by_site = [next(of_streams) if site.total.requires_grad else None for site in sites]
    weights = {
        name: grad
        for (name, _), grad in zip(named, found[len(streams) :], strict=True)
        if grad is not None
    }
    return by_site, weights


def measure(
    model: nn.Module, trace: Trace, loss: Tensor
) -> tuple[list[Measured], dict[str, Tensor]]:
    """Every site, and the gradient in every parameter."""
    streams, weights = gradients(model, loss, trace.sites)
    shape = dict(model.named_parameters(remove_duplicate=False))
    norms = {name: float(grad.float().norm()) for name, grad in weights.items()}
    found = []
    for site, stream in zip(trace.sites, streams, strict=True):
        squares = sum(norms.get(name, 0.0) ** 2 for name in site.weights)
        used = [shape[name] for name in site.weights if name in shape]
        every = sum(p.numel() for p in used)
        trained = sum(p.numel() for p in used if p.requires_grad)
        found.append(
            Measured(
                name=site.name,
                path=site.path,
                role=site.role,
                shortcut=size(site.shortcut),
                branch=size(site.branch),
                total=size(site.total),
                dependency=dependency(site),
                stream_gradient=0.0 if stream is None else float(stream.float().norm()),
                weight_gradient=squares**0.5,
                outlier=outlier(site.total),
                distinct=distinct(site.total),
                trained=trained / every if every else 1.0,
            )
        )
    return found, weights


@torch.no_grad()
def dependency_map(trace: Trace) -> list[dict[str, float]]:
    """For the sum of every site, by name of branch (or `input`): its share β²."""
    components: dict[int, dict[str, Tensor]] = {}
    waiting = _children(trace.nodes)
    rows: dict[int, dict[str, float]] = {}
    for number, node in enumerate(trace.nodes):
        own: dict[str, Tensor] = {}
        if node.start is not None:
            own["input"] = _plain(node.start)
        for parent, carries in node.parents:
            for name, component in components[parent].items():
                for carry in carries:
                    component = carry(component)
                own[name] = own[name] + component if name in own else component
            waiting[parent] -= 1
            if not waiting[parent]:
                del components[parent]
        if node.site is not None:
            site = trace.sites[node.site]
            sign = -1.0 if site.sign == "−" else 1.0
            own[site.name] = sign * _plain(site.branch)
            if site.node == number:
                whole = float(_plain(site.total).var())
                rows[node.site] = {
                    name: float(part.var()) / whole if whole > 0 else 0.0
                    for name, part in own.items()
                }
        components[number] = own
    return [rows[i] for i in range(len(trace.sites))]


def _children(nodes: Sequence[Node]) -> dict[int, int]:
    count = dict.fromkeys(range(len(nodes)), 0)
    for node in nodes:
        for parent, _ in node.parents:
            count[parent] += 1
    return count


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().float()
