"""Where the norms and the shortcuts of a model stand, as facts read from one forward pass.

    post       x ← N(x + f(x))            pre        x ← x + f(N(x))
    res-post   x ← x + N(f(x))            sandwich   x ← x + N′(f(N(x)))     (also called peri)
    none       x ← x + f(x)               mixed      sites of several kinds

and, beside the kind: *parallel* branches that read the same x, a *scaled shortcut* λx + f, a
*gated* one (1 − g) ⊙ x + g ⊙ f.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from addnorm.clinic.module_names import block_of
from addnorm.clinic.stream_records import Rescaling, Site, Trace

FORMULAS = {
    "post": "x ← N(x + f(x))",
    "pre": "x ← x + f(N(x))",
    "res-post": "x ← x + N(f(x))",
    "sandwich": "x ← x + N′(f(N(x)))",
    "none": "x ← x + f(x), without norms",
    "mixed": "several kinds",
}


@dataclass(frozen=True)
class Arrangement:
    """How branches join the stream of a model.

    Parameters
    ----------
    kind : post, pre, res-post, sandwich, none or mixed; no stream
    parallel : whether attention and feed-forward read the same stream
    scaled : whether shortcuts are multiplied by one constant or learned number
    gated : whether a gate that is computed from the input weighs shortcut against branch
    final_norm : whether a norm stands between the last sum and the output
    sites : the kind of each site, by name
    shortcut_product : by what the stream's first state is multiplied in its last one, by constant
        factors and by being added more than once, if no norm stands on the shortcuts
    missing : blocks, or parts of them, without a residual connection that others have
    unseen : why there may be residual connections that were not seen
    """

    kind: str = "no stream"
    parallel: bool = False
    scaled: bool = False
    gated: bool = False
    final_norm: bool = False
    sites: Mapping[str, str] = field(default_factory=dict)
    shortcut_product: float = 1.0
    missing: tuple[str, ...] = ()
    unseen: str = ""

    @property
    def name(self) -> str:
        """The kind and what is special about it, such as `pre, parallel`."""
        words = ("parallel", self.parallel), ("scaled shortcut", self.scaled), ("gated", self.gated)
        return ", ".join([self.kind, *(word for word, applies in words if applies)])

    def text(self) -> str:
        """Return the arrangement with its formula as one sentence."""
        if self.kind == "no stream":
            return "no residual stream"
        counts = Counter(self.sites.values())
        several = ", ".join(f"{kind} at {n}" for kind, n in counts.most_common())
        formula = several if self.kind == "mixed" else FORMULAS[self.kind]
        formula = formula.replace("x + ", "λx + ") if self.scaled else formula
        last = "a norm before the output" if self.final_norm else "no norm before the output"
        return f"{self.name}: {formula}; {len(self.sites)} branches; {last}"


def _unseen_shortcuts(trace: Trace) -> str:
    """Return why the residual stream was not seen as a whole; empty if it was."""
    if trace.unknown_sums:
        return f"{trace.unknown_sums[0]} takes the stream and a branch, and may add them"
    if trace.hidden_shortcuts:
        where = trace.hidden_shortcuts[0] or "the model"
        return f"a gradient passes the attention of {where} unchanged, but no sum was seen"
    return ""


def find_arrangement(trace: Trace) -> Arrangement:
    """Return the arrangement of a traced model."""
    sites = trace.sites
    if not sites:
        return Arrangement(missing=_blocks_without_residual(trace), unseen=_unseen_shortcuts(trace))
    starts = {i for i, node in enumerate(trace.nodes) if node.start is not None}
    # In post-norm the first site of a stream has the embedding as its shortcut, and no norm.
    counted = [s for s in sites if s.arrangement != "none" or not _parents(trace, s) & starts]
    counted = [s for s in counted if block_of(s.path) or block_of(s.branch_path)] or counted
    kinds = Counter(site.arrangement for site in counted or sites)
    kind, count = kinds.most_common(1)[0]
    whole = sum(kinds.values())
    last = [number for number in _last_of_streams(trace) if number in trace.normed_sites]
    return Arrangement(
        kind=kind if count >= 0.7 * whole else "mixed",
        parallel=_most(sites, [site.parallel for site in sites]),
        scaled=_most(sites, [site.scaled for site in sites[1:]]),
        gated=_most(sites, [site.gated for site in sites]),
        final_norm=bool(last),
        sites={site.name: site.arrangement for site in sites},
        shortcut_product=_shortcut_product(trace),
        missing=_blocks_without_residual(trace),
        unseen=_unseen_shortcuts(trace),
    )


def _shortcut_product(trace: Trace) -> float:
    """Return the factor of the first state of a stream in its last, the one furthest from 1.

    Along one path through the sums the factors of the shortcuts multiply; where two paths meet
    (x + (x + f) holds 2x) they add. A norm on the shortcut sets the factor to 1 again.
    """
    factors: list[float] = []
    for node in trace.nodes:
        sums = [_carry(factors[parent], rescalings) for parent, rescalings in node.parents]
        factors.append(sum(sums) if sums else 1.0)
    ends = [factors[trace.sites[number].node] for number in _last_of_streams(trace)]
    ends += [factors[-1]] if factors else []
    sizes = [abs(end) for end in ends if end]
    return max(sizes, key=lambda size: abs(math.log(size)), default=1.0)


def _carry(factor: float, rescalings: Sequence[Rescaling]) -> float:
    """Return a factor after constant rescalings; 1 after a norm."""
    for rescaling in rescalings:
        value = rescaling.factor
        if not isinstance(value, Tensor) or value.numel() == 1:
            factor *= float(value)
        elif rescaling.centred or value.shape[-1] == 1:
            factor = 1.0
    return factor


def _most(sites: Sequence[Site], flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= 0.5 * len(flags)


def _parents(trace: Trace, site: Site) -> set[int]:
    return {parent for parent, _ in trace.nodes[site.node].parents}


def _last_of_streams(trace: Trace) -> list[int]:
    """Return the number of the last site of each stream: nothing is added to its sum."""
    parents = {parent for node in trace.nodes for parent, _ in node.parents}
    return [i for i, site in enumerate(trace.sites) if site.node not in parents]


def unnormed_end(trace: Trace) -> str | None:
    """Return the last site of a stream of pre-norm whose sum reaches the output without a norm."""
    decodes = any(site.role == "memory" for site in trace.sites)
    for number in _last_of_streams(trace):
        if not decodes and number != max(trace.used_sites, default=-1):
            continue  # of a stage: the next one may norm what it reads by a convolution
        site = trace.sites[number]
        longer = any(
            trace.nodes[parent].site is not None for parent, _ in trace.nodes[site.node].parents
        )
        used = number in trace.used_sites and longer and site.total.ndim == 3
        if used and site.arrangement == "pre" and number not in trace.normed_sites:
            return site.name
    return None


def _blocks_without_residual(trace: Trace) -> tuple[str, ...]:
    """Return attention without a shortcut around it, and blocks with fewer sites than others.

    Where shortcuts cannot all be seen, as in an operation outside torch, nothing is missing.
    """
    if trace.unknown_sums:
        return ()
    places = [(block_of(s.path), block_of(s.branch_path), s) for s in trace.sites]
    missing = []
    # Attention that pools has fewer queries than keys, and no shortcut of the same length.
    square = [a for a in trace.stats.attention if a.own is not None]
    hidden = {block_of(path) for path in trace.hidden_shortcuts}
    attending = list(dict.fromkeys(block_of(a.path) for a in square))
    for block in attending:
        around = [
            site
            for path, branch, site in places
            if site.role != "ffn" and block in (path, branch, _outer(path), _outer(branch))
        ]
        if block and not around and block not in hidden:
            missing.append(f"{block}.attention")
    by_block: dict[str, set[str]] = {}
    for block in attending:
        roles = {s.role for path, branch, s in places if block and block in (path, branch)}
        by_block[block] = roles
    groups: dict[str, list[str]] = {}
    for block in by_block:
        groups.setdefault(re.sub(r"\b\d+\b", "*", block, count=1), []).append(block)
    for blocks in groups.values():
        counts = Counter(frozenset(by_block[block]) for block in blocks)
        usual, _ = counts.most_common(1)[0]
        for block in blocks if len(blocks) > 1 else ():
            absent = usual - by_block[block] - ({"attention"} if block in hidden else set())
            missing += [f"{block}.{role}" for role in sorted(absent)]
    missing = missing or _gaps_in_order(trace)
    return tuple(dict.fromkeys(missing))


def _gaps_in_order(trace: Trace) -> list[str]:
    """Return where a stream ends and begins anew out of turn, for models without blocks.

    Roles alternate in a fixed order. If a sublayer without shortcut replaces the stream, the next
    site starts a stream that is computed from the last one, and a role is left out.
    """
    roles = [site.role for site in trace.sites]
    follows: dict[str, Counter[str]] = {}
    for i, (role, after) in enumerate(itertools.pairwise(roles)):
        if i + 1 not in trace.restarts:
            follows.setdefault(role, Counter())[after] += 1
    gaps = []
    for i in sorted(trace.restarts):
        before, site = trace.sites[i - 1], trace.sites[i]
        usual = follows.get(before.role, Counter())
        named = any(block_of(each.path) or block_of(each.branch_path) for each in (before, site))
        same = before.total.shape == site.total.shape  # pooling begins a stream, too
        if usual and site.role not in usual and same and not named:
            gaps.append(f"{usual.most_common(1)[0][0]} after {before.name}")
    return gaps


def _outer(path: str) -> str:
    """Return the block that a numbered part of a block stands in."""
    return block_of(path.rpartition(".")[0])
