"""What the trace says of how a model is built: where its norms stand, how large its weights are."""

from dataclasses import dataclass

from torch import Tensor, nn

from addnorm.clinic.paths import block_of
from addnorm.clinic.trace import Site, Trace


@dataclass(frozen=True)
class Structure:
    """How the norms stand to the stream."""

    kind: str = "none"
    """post (shortcuts come from a norm), pre (branches read through one), none, or mixed."""
    open_end: str | None = None
    """The last site of a stream that branches read through a norm but the output does not."""
    normed_shortcuts: tuple[str, ...] = ()
    """First sites of their block whose shortcut a norm of that same block made."""


@dataclass(frozen=True)
class Gain:
    """The gain of one norm."""

    name: str
    size: float
    largest: float
    even: bool
    """All its numbers are the same: it has not been trained."""


def structure(trace: Trace) -> Structure:
    """Read the arrangement from one forward pass."""
    normed_nodes = {node for _, node in trace.normed}
    from_norm = [site.shortcut_norm is not None for site in trace.sites[1:]]
    if trace.sites and any(from_norm) and sum(from_norm) >= 0.9 * len(from_norm):
        kind = "post"
    elif any(from_norm):
        kind = "mixed"
    else:
        kind = "pre" if normed_nodes & {site.node for site in trace.sites} else "none"
    open_end = None
    if kind == "pre":
        for last in _ends(trace):
            if last.node not in normed_nodes and last.total.ndim == 3:
                open_end = last.name
    return Structure(kind, open_end, _normed_shortcuts(trace))


def _ends(trace: Trace) -> list[Site]:
    """The last site of each stream: nothing is joined to what it gives."""
    parents = {parent for node in trace.nodes for parent, _ in node.parents}
    return [site for site in trace.sites if site.node not in parents]


def _normed_shortcuts(trace: Trace) -> tuple[str, ...]:
    found, seen = [], set()
    for site in trace.sites:
        block = block_of(site.path)
        inside = site.shortcut_norm is not None and block_of(site.shortcut_norm) == block
        if block and block not in seen and inside:
            found.append(site.name)
        seen.add(block)
    return tuple(found)


def gains(model: nn.Module) -> list[Gain]:
    """The gain vector of every norm: a module without parts whose weight is a vector."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 1 and not list(module.children()):
            w = weight.detach().float()
            found.append(
                Gain(
                    name,
                    float(w.pow(2).mean().sqrt()),
                    float(w.abs().max()),
                    bool((w == w[0]).all()),
                )
            )
    return found


def weight_gains(model: nn.Module, sites: list[Site]) -> list[float]:
    """√mean w² · √((in + out) / 2) of every matrix of every branch: 1 for Glorot, Bengio 2010."""
    named = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(name for site in sites for name in site.weights)
    found = []
    for name in names:
        w = named[name].detach().float()
        if w.ndim == 2 and min(w.shape) > 1:
            found.append(float(w.pow(2).mean().sqrt()) * (sum(w.shape) / 2) ** 0.5)
    return found


def is_fresh(model: nn.Module) -> bool:
    """Whether nothing has been trained yet: every norm's gain is one number, repeated."""
    found = gains(model)
    return bool(found) and all(gain.even for gain in found)
