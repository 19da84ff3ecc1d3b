"""What reaches which parameter: gradients by parameter, weights that the model does not list.

    unregistered   leaves of the answer's graph that are not in model.parameters()
    unused         blocks of a list whose siblings have gradients, and which have none
    shrunk         sites behind which the gradient is far smaller, though the stream is not scaled

All is read from one backward graph; nothing depends on the code of the model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import ClinicBatch, Objective
from addnorm.clinic.measure import SiteMeasurement
from addnorm.clinic.module_names import block_of
from addnorm.clinic.stream_records import Trace

SHRUNK = 0.05
"""Share of a sum's gradient that must reach the sum before it along an unscaled shortcut."""
LARGE_EPSILON = 0.1
"""Of a norm: beyond it the result depends on the size of what is normed."""


def unregistered_weights(model: nn.Module, answer: Tensor, batch: ClinicBatch) -> int:
    """Return how many trained values the answer depends on that are no parameters of the model."""
    known = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    known |= {id(argument) for argument in batch.arguments.values()}
    leaves = {id(leaf): leaf for leaf in _leaves_of(answer)}
    return sum(leaf.numel() for key, leaf in leaves.items() if key not in known)


def _leaves_of(answer: Tensor) -> Iterator[Tensor]:
    """Yield the parameters at the ends of a backward graph."""
    waiting: list[Any] = [answer.grad_fn] if answer.grad_fn is not None else []
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        waiting += [after for after, _ in node.next_functions if after is not None]


def unused_blocks(
    model: nn.Module, trace: Trace, gradients: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """Return members of a list of blocks without any gradient, while others of it have one.

    Only the first number of a name is read: experts, heads and adapters lie deeper, or in no
    branch of the stream.
    """
    branches = {name for site in trace.sites for name in site.weights}
    used: dict[str, set[str]] = {}
    unused: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters():
        found = re.match(r"(.*?)(?:^|\.)(\d+)(?:\.|$)", name)
        if found is None or not parameter.requires_grad:
            continue
        prefix, index = found.groups()
        if name in gradients:
            used.setdefault(prefix, set()).add(index)
        else:
            unused.setdefault(prefix, set()).add(index)
    names = []
    for prefix, indices in unused.items():
        start = f"{prefix}." if prefix else ""
        alive = used.get(prefix, set())
        in_branch = any(name.startswith(f"{start}{i}") for i in alive for name in branches)
        if in_branch:
            names += [f"{start}{i}" for i in sorted(indices - alive, key=int)]
    return tuple(names)


def shrunk_gradients(trace: Trace, sites: Sequence[SiteMeasurement]) -> tuple[str, ...]:
    """Return sites whose sum gets far less gradient than the next one passes back unscaled."""
    by_node = {site.node: number for number, site in enumerate(trace.sites)}
    names = []
    for number, site in enumerate(trace.sites):
        before, factor = _previous_site(trace, site.node, by_node)
        if before is None or abs(factor) < 0.5:
            continue
        mine, earlier = sites[number].stream_gradient, sites[before].stream_gradient
        if 0 < earlier < SHRUNK * mine:
            names.append(sites[before].name)
    return tuple(names)


def _previous_site(trace: Trace, node: int, by_node: Mapping[int, int]) -> tuple[int | None, float]:
    """Return the site before one along shortcuts without norms, and the factor between them."""
    factor = 1.0
    parents = trace.nodes[node].parents
    while parents and len({parent for parent, _ in parents}) == 1:
        factors = [_constant(rescalings) for _, rescalings in parents]
        if any(each is None for each in factors):
            return None, 0.0
        factor *= sum(each for each in factors if each is not None)
        node = parents[0][0]
        if node in by_node:
            return by_node[node], factor
        parents = trace.nodes[node].parents
    return None, 0.0


def _constant(rescalings: Sequence[Any]) -> float | None:
    """Return the product of constant factors; None if one is a norm or a vector."""
    product = 1.0
    for rescaling in rescalings:
        factor = rescaling.factor
        if rescaling.centred or (isinstance(factor, Tensor) and factor.numel() != 1):
            return None
        product *= float(factor)
    return product


def idle_attention(trace: Trace, gradients: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return attention branches with equal logits half of whose weights have the gradient zero.

    Queries and keys are half of the four matrices of a branch. If only the queries start at zero,
    as in muP, they have a gradient, and a quarter has none.
    """
    flat = [a for a in trace.stats.attention if max(a.spread) == 0.0 and a.keys > 1]
    blocks = {block_of(a.path) for a in flat}
    names = []
    for site in trace.sites:
        if not blocks & {block_of(site.path), block_of(site.branch_path)}:
            continue
        own = [gradients[w] for w in site.weights if w in gradients and gradients[w].ndim > 1]
        every = sum(grad.numel() for grad in own)
        zero = sum(int((grad == 0).sum()) for grad in own)
        if site.role == "attention" and every and 0.4 < zero / every < 1:
            names.append(site.name)
    return tuple(names)


def large_epsilons(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that norm with an ε beyond the size of what they norm."""
    names = []
    for name, module in model.named_modules():
        for attribute in ("eps", "epsilon", "variance_epsilon"):
            value = getattr(module, attribute, None)
            if (
                isinstance(value, float)
                and value > LARGE_EPSILON
                and "orm" in type(module).__name__
            ):
                names.append(name or type(module).__name__)
    return tuple(dict.fromkeys(names))


def untrained_in_training_mode(
    model: nn.Module, batch: ClinicBatch, objective: Objective, trace: Trace
) -> bool:
    """Return whether no weight of any branch has a gradient in training mode, but others have."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    branches = [name for site in trace.sites for name in site.weights if name in named]
    if not branches:
        return False
    model.train()
    try:
        with torch.enable_grad():
            loss = objective(model, batch)
            if not loss.requires_grad:
                return True
            every = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    except RuntimeError:  # reentrant checkpointing allows .backward() only
        return False
    finally:
        model.eval()
    reached = {name for name, grad in zip(named, every, strict=True) if grad is not None}
    return not any(name in reached for name in branches)
