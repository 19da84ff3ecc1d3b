"""Find the residual stream of any model by tracing the operations of one forward pass.

    a site:   total = a + b,   all of one shape, b computed from a through a matrix product

a is then the shortcut, b the branch. What every tensor is computed from is recorded in lineage.py.
A sum of two tensors that are both the stream (a norm or a factor away from an earlier site) merges
two streams and is not a site.

Between two sites the stream passes norms and factors; these are recorded, so that the output of a
branch can be followed to any later depth (`StreamNode`, `Rescaling`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from addnorm.clinic.call_model import ClinicBatch, call_model
from addnorm.clinic.hidden_shortcuts import hidden_shortcuts
from addnorm.clinic.lineage import Lineage, LineageTracer, memory_of, memory_or_none
from addnorm.clinic.module_names import block_of, common_block, is_norm
from addnorm.clinic.stream_records import Rescaling, Site, StreamNode, Trace
from addnorm.layers.addnorm import AddNorm

MASKED_FROM = 1e9
"""Values that only masks of attention hold."""


@dataclass
class _Join:
    shortcut: Tensor | None
    branch: Tensor | None
    first: Lineage
    second: Lineage
    negative: bool
    factor: Any = None
    """What the shortcut is multiplied by in the sum itself."""
    cut: bool = False
    """Whether no gradient passes one side although it was computed with one."""


class Tracer(LineageTracer):  # type: ignore[no-untyped-call]
    """Finds the sites among the sums; `trace` is the result."""

    def _join_of(self, name: str, args: Any, kwargs: Any) -> "_Join | None":
        """Return what a sum joins, if it is a site or a merge of streams."""
        if name == "sum":
            return self._stacked_sum_of(args)
        if name.startswith(("add", "baddbmm")) and name not in ("add", "add_"):
            return self._product_sum_of(name, args, kwargs)
        a, b = args[0], args[1]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
            return None
        if a.ndim < 2 or not a.is_floating_point() or a is b:
            return None
        one, two = self._lineages.get(memory_of(a)), self._lineages.get(memory_of(b))
        if one is None or two is None or one is two:
            return None
        if name.startswith("lerp"):
            return self._lerp_of(a, b, one, two, args[2])
        negative = name.startswith("sub") or kwargs.get("alpha", 1) == -1
        return self._sum_of(name, a, b, one, two, negative)

    def _sum_of(
        self, name: str, a: Tensor, b: Tensor, one: Lineage, two: Lineage, negative: bool = False
    ) -> "_Join | None":
        cut = self._is_cut(a, one) or self._is_cut(b, two)
        if one.stream is not None and two.stream is not None:
            return _Join(None, None, one, two, negative)
        if two.stream is None and two.projected & one.copies_of:
            return _Join(_before(a, name), b, one, two, negative, cut=cut)
        if one.stream is None and one.projected & two.copies_of:
            return _Join(b, _before(a, name), two, one, negative, cut=cut)
        return None

    def _stacked_sum_of(self, args: Any) -> "_Join | None":
        """Return what torch.stack([a, b]).sum(axis) = a + b joins."""
        axis, parts = self._stacks.get(memory_or_none(args[0]), (0, []))
        if len(parts) != 2 or [each % args[0].ndim for each in args[1] or ()] != [axis]:
            return None
        one, two = (self._lineages.get(memory_of(part)) for part in parts)
        if one is None or two is None or one is two or args[0].ndim < 3:
            return None
        cut = self._is_cut(parts[0], one) or self._is_cut(parts[1], two)
        joined = parts[0].ndim == args[0].ndim
        a, b = (part.squeeze(axis) if joined else part for part in parts)
        join = self._sum_of("sum", a, b, one, two)
        return None if join is None else replace(join, cut=cut)

    def _product_sum_of(self, name: str, args: Any, kwargs: Any) -> "_Join | None":
        """Return what a + b ⊙ c (addcmul) or a + b c (addmm, baddbmm; c a weight) joins."""
        a, factors = args[0], args[1:3]
        product = not name.startswith("addcmul")
        if product and not any(self._are_weights([factor]) for factor in factors):
            return None  # q kᵀ and a bias: attention logits
        one = self._lineages.get(memory_of(a))
        keys = [memory_of(factor) for factor in factors]
        known = [self._lineages[key] for key in keys if key in self._lineages]
        if one is None or not known or any(kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
            return None
        self.paused = True
        try:
            if product:
                branch = factors[0] @ factors[1]
            else:
                branch = kwargs.get("value", 1) * factors[0] * factors[1]
        finally:
            self.paused = False
        if branch.shape != a.shape or a.ndim < 2:
            return None
        two = replace(known[0], stream=None, bit=0, copies_of=0, ancestors=0, projected=0)
        for each in known:
            two.ancestors |= each.ancestors
            two.projected |= each.ancestors if product else each.projected
        two.maker = self.module_stack[-1] if product else two.maker
        self._alive.append(branch)
        join = self._sum_of(name, a, branch, one, two)
        return None if join is None else replace(join, cut=self._is_cut(a, one))

    def _is_cut(self, tensor: Tensor, lineage: Lineage) -> bool:
        """Return whether a tensor has no gradient although what it was computed from has one."""
        return lineage.trained and not tensor.requires_grad and torch.is_grad_enabled()

    def _lerp_of(
        self, a: Tensor, b: Tensor, one: Lineage, two: Lineage, weight: Any
    ) -> "_Join | None":
        """Return what torch.lerp(a, b, w) = (1 − w) a + w b joins."""
        share = weight if isinstance(weight, Tensor) else float(weight)
        if two.stream is None and two.projected & one.copies_of:
            return _Join((1 - share) * a, share * b, one, two, False, 1 - share)
        if one.stream is None and one.projected & two.copies_of:
            return _Join(share * b, (1 - share) * a, two, one, False, share)
        return None

    def _join(self, join: "_Join", lineage: Lineage, total: Tensor) -> None:
        trace, number = self.trace, len(self.trace.nodes)
        if join.shortcut is None or join.branch is None:
            assert join.first.stream is not None and join.second.stream is not None
            if self._close_gate(join, lineage, total):
                return
            node, rescalings = join.second.stream
            rescalings = (*rescalings, Rescaling(-1.0)) if join.negative else rescalings
            trace.nodes.append(StreamNode([join.first.stream, (node, rescalings)]))
            lineage.stream = number, ()
            lineage.copies_of |= join.first.copies_of | join.second.copies_of
            return
        if join.first.stream is None:
            # λx + f(x): the branch reads the stream before it is multiplied.
            unread = [n for bit, n in join.first.constants if not join.second.ancestors & bit]
            factor = math.prod(unread)
            trace.nodes.append(StreamNode([], start=join.shortcut.detach() / factor))
            join.first.stream = number, () if factor == 1 else (Rescaling(factor),)
            number += 1
            if self._totals and join.first.projected & self._totals[-1].bit:
                trace.restarts.add(len(trace.sites))
        parent, rescalings = join.first.stream
        if join.factor is not None:
            rescalings = (*rescalings, Rescaling(join.factor))
        known = self._branches.get(memory_of(join.branch))
        if known is not None and self._is_gated_difference(known, parent, rescalings):
            self._turn_into_gate(known, rescalings, lineage, total)
            lineage.stream = parent, ()
            lineage.copies_of |= join.first.copies_of
            return
        trace.nodes.append(StreamNode([(parent, rescalings)], site=len(trace.sites)))
        lineage.stream = number, ()
        lineage.copies_of |= join.first.copies_of
        lineage.projected = join.first.projected | join.second.projected
        lineage.norm, lineage.norm_of_stream = None, False
        if known is not None:
            trace.nodes[-1].site = known
            return
        factor, scaled, gated = _describe_factors(rescalings, total.shape[-1])
        parts = _parts_of_value(join.second)
        own = trace.nodes[parent].site
        reads_older = own is not None and not join.second.ancestors & self._totals[own].bit
        if reads_older and own is not None:
            trace.sites[own].parallel = True
        self._branches[memory_of(join.branch)] = len(trace.sites)
        self._totals.append(lineage)
        self._shortcuts.append(
            self._shortcuts[own] if reads_older and own is not None else join.first
        )
        trace.sites.append(
            Site(
                name="",
                path=self.module_stack[-1],
                branch_path=join.second.maker,
                role=self._role(join, parts),
                shortcut=join.shortcut,
                branch=join.branch,
                total=total,
                sign="−" if join.negative else "+",
                node=number,
                weights=self._weights(join),
                shortcut_norm=join.first.norm,
                norm_of_stream=join.first.norm_of_stream,
                read_norm=self._read_norm(join, self._shortcuts[-1]),
                branch_norm=join.second.norm,
                factor=factor,
                gated=gated or join.first.gated or join.second.gated,
                scaled=scaled,
                parallel=reads_older,
                cut=join.cut,
            )
        )
        trace.sites[-1].linear = self._is_linear(trace.sites[-1], join)
        trace.sites[-1].parallel |= trace.sites[-1].role == "parallel"
        if self.until_attention and trace.sites[-1].role in ("attention", "parallel"):
            raise _FirstAttentionFound

    def _close_gate(self, join: "_Join", lineage: Lineage, total: Tensor) -> bool:
        """Turn f − x, then multiplied by a gate and added to x, into one gated site."""
        for one, two in ((join.first, join.second), (join.second, join.first)):
            assert one.stream is not None and two.stream is not None
            node = self.trace.nodes[one.stream[0]]
            if node.site is None or not node.parents or not one.stream[1]:
                continue
            if self.trace.sites[node.site].sign == "−" and node.parents[0][0] == two.stream[0]:
                self._turn_into_gate(node.site, one.stream[1], lineage, total)
                lineage.stream = one.stream[0], ()
                lineage.copies_of |= one.copies_of | two.copies_of
                return True
        return False

    def _is_gated_difference(self, number: int, parent: int, gates: Sequence[Rescaling]) -> bool:
        """Return whether a branch is added to its own difference: (x − f) ⊙ g + f, as in a GRU."""
        site = self.trace.sites[number]
        return bool(gates) and site.node == parent and site.sign == "−"

    def _turn_into_gate(
        self, number: int, gates: Sequence[Rescaling], lineage: Lineage, total: Tensor
    ) -> None:
        """Make one gated site of a difference that was multiplied by a gate and added."""
        site = self.trace.sites[number]
        factor, _, gated = _describe_factors(gates, total.shape[-1])
        site.sign, site.gated, site.factor = "+", gated, 1 - factor
        site.scaled = not gated
        site.branch = (total - site.shortcut).detach()
        site.total = total
        self._totals[number] = lineage

    def _read_norm(self, join: "_Join", shortcut: Lineage) -> str | None:
        """Return the norm through which the branch reads the shortcut."""
        inside = join.second.ancestors & ~shortcut.ancestors
        for use in self._norms:
            # The norm may read a copy: x is overwritten in place by the sum.
            of_stream = use.source.bit & join.first.copies_of
            if use.bit & inside and (of_stream or use.source.copies_of & join.first.bit):
                return use.path
        return None

    def _is_no_site(self, number: int, site: Site) -> bool:
        """Return whether a sum is of attention logits, a mask, of convolutions, or of the loss."""
        if float(site.shortcut.detach().abs().max()) >= MASKED_FROM:
            return True
        earlier = {name for other in self.trace.sites[:number] for name in other.weights}
        own = [name for name in site.weights if name in self.trace.multiplied]
        if earlier.issuperset(own) and not bool(site.branch.any()):
            return True  # a learned mean of earlier sums, this one weighed by zero
        images = site.total.ndim == 4 and any(self._ranks.get(name) == 4 for name in site.weights)
        of_loss = site.sign == "−" and not self._totals[number].bit & self._answered
        return number in self._dropped or images or of_loss

    def finish(self, output: Any) -> None:
        """Record what is known only after the forward pass."""
        answers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        lineages = [self._lineages.get(memory_of(answer)) for answer in answers if answer.ndim > 1]
        if lineages:
            self._answered = 0
        for answered in lineages:
            self._answered |= 0 if answered is None else answered.ancestors
        kept = [i for i, site in enumerate(self.trace.sites) if not self._is_no_site(i, site)]
        for node in self.trace.nodes:
            node.site = kept.index(node.site) if node.site in kept else None
        self.trace.sites = [self.trace.sites[i] for i in kept]
        self._totals = [self._totals[i] for i in kept]
        self.trace.restarts = {kept.index(i) for i in self.trace.restarts if i in kept}
        for number, lineage in enumerate(self._totals):
            if any(
                use.source.ancestors & lineage.bit and not use.source.projected & lineage.bit
                for use in self._norms
            ):
                self.trace.normed_sites.add(number)
        if torch.is_grad_enabled() and not self.sites_only and _lacks_sites(self.trace):
            attention = self.trace.stats.attention
            hidden = hidden_shortcuts(self._alive, self._attended)
            self.trace.hidden_shortcuts = [attention[number].path for number in hidden]
        for answer in answers:
            known = self._lineages.get(memory_of(answer))
            if known is None:
                continue
            used = (i for i, total in enumerate(self._totals) if total.bit & known.ancestors)
            self.trace.used_sites |= set(used)
            if known.head and answer.ndim > 1:
                self.trace.head = known.head

    def _is_linear(self, site: Site, join: "_Join") -> bool:
        """Return whether a feed-forward branch of several matrices has no activation function."""
        inside = join.second.ancestors & ~join.first.ancestors
        matrices = [name for name in site.weights if self._ranks.get(name) == 2]
        return site.role == "ffn" and len(matrices) > 1 and not inside & self._nonlinear

    def _role(self, join: "_Join", parts: Sequence[Lineage]) -> str:
        """Return the role of a branch, by the products of activations it contains."""
        inside = join.second.ancestors & ~join.first.ancestors
        mixing = sum(bit for bit, _, _ in self._mixes)
        both = [bool(part.ancestors & ~join.first.ancestors & mixing) for part in parts]
        from_stream = all(part.projected & join.first.copies_of for part in parts)
        if len(parts) > 1 and from_stream and any(both) and not all(both):
            return "parallel"
        role = "ffn"
        for bit, query, key in self._mixes:
            sides = bool(query & join.first.copies_of), bool(key & join.first.copies_of)
            if bit & inside and any(sides):
                role = "attention" if all(sides) else "memory"
        return role

    def _weights(self, join: "_Join") -> tuple[str, ...]:
        inside = join.second.ancestors & ~join.first.ancestors
        names = [name for bit, used in self._used.items() if bit & inside for name in used]
        block = common_block(join.second.maker, self.module_stack[-1])
        return tuple(dict.fromkeys(name for name in names if name.startswith(block)))


def _lacks_sites(trace: Trace) -> bool:
    """Return whether some self-attention of a stack has no site of its own."""
    attentions = sum(each.own is not None for each in trace.stats.attention)
    return attentions > 1 and sum(s.role != "ffn" for s in trace.sites) < attentions


def _parts_of_value(lineage: Lineage) -> list[Lineage]:
    """Return what a branch is the sum of: one part, or several."""
    if len(lineage.parts) != 2:
        return [lineage]
    return [part for half in lineage.parts for part in (half.parts or (half,))]


def _describe_factors(rescalings: Sequence[Rescaling], width: int) -> tuple[float, bool, bool]:
    """Return the constant factor since the last norm, whether there is one, and if it is a gate."""
    factor, scaled, gated = 1.0, False, False
    for rescaling in rescalings:
        value = rescaling.factor
        size = value.numel() if isinstance(value, Tensor) else 1
        if rescaling.centred or (isinstance(value, Tensor) and size > 1 and value.shape[-1] == 1):
            factor, scaled, gated = 1.0, False, False
        elif size == 1:
            factor *= float(value)
            scaled = scaled or abs(float(value) - 1) > 1e-3
        elif size > width:  # a vector may be the gain of a norm
            gated = True
    return factor, scaled, gated


def _before(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor, or a copy if the sum overwrites it."""
    return tensor.detach().clone() if name.endswith("_") else tensor


@contextmanager
def module_paths(tracer: Tracer) -> Iterator[None]:
    """Keep `tracer.module_stack` up to date with global hooks, which change no module."""

    def enter(module: nn.Module, args: Any) -> None:
        tracer.module_stack.append(tracer.paths.get(module, tracer.module_stack[-1]))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        path = tracer.module_stack.pop()
        first = result[0] if isinstance(result, tuple) and result else result
        tensors = isinstance(first, Tensor) and args and isinstance(args[0], Tensor)
        if tensors and not tracer.sites_only and all(p.ndim <= 1 for p in module.parameters()):
            tracer.paused = True
            try:
                if is_norm(module, args[0], first):
                    tracer.module_normed(path, args[0], first)
            finally:
                tracer.paused = False

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=False),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _FirstAttentionFound(Exception):
    """Ends a forward pass of which only the beginning is needed."""


def trace_stream(
    model: nn.Module,
    batch: ClinicBatch,
    *,
    padding: Tensor | None = None,
    row: int = 0,
    sites_only: bool = False,
    until_attention: bool = False,
) -> Trace:
    """Call a model once and return its residual stream; torch's fused encoder layer is disabled.

    Parameters
    ----------
    model : the model
    batch : what it is called with
    padding : where a row is padded, to measure the attention to it
    row : that row
    sites_only : leave out norms and statistics, which takes half of the time
    until_attention : end with the first site of self-attention, without an output
    """
    tracer = Tracer(model)
    tracer.sites_only, tracer.until_attention = sites_only or until_attention, until_attention
    tracer.trace.stats.padding = None if padding is None else (row, batch.row_count, padding)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with module_paths(tracer), tracer:
            tokens = {id(tensor) for tensor in batch.token_ids.values()}
            for tensor in batch.tensors:
                tracer.input(tensor, tokens=id(tensor) in tokens)
            with suppress(_FirstAttentionFound):
                tracer.trace.output = call_model(model, batch)
        tracer.finish(tracer.trace.output)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    _name_sites(tracer.trace.sites, model)
    return tracer.trace


def _name_sites(sites: list[Site], model: nn.Module) -> None:
    """Name each site by its block and role, with a number where two would be equal.

    Where an Add & Norm box of addnorm computes the sum, the names are those of the box.
    """
    counts: dict[str, int] = {}
    boxes = {name: part for name, part in model.named_modules() if isinstance(part, AddNorm)}
    for site in sites:
        if site.path in boxes:
            place = boxes[site.path].place
            site.role, site.name = place.role, f"{place.side}.{place.layer}.{place.role}"
            continue
        block = block_of(site.path) or block_of(site.branch_path) or site.path
        block = block.replace("._orig_mod", "").replace("_orig_mod.", "")
        role = "attention + ffn" if site.role == "parallel" else site.role
        name = f"{block}.{role}" if block else role
        counts[name] = counts.get(name, 0) + 1
        site.name = name if counts[name] == 1 else f"{name}.{counts[name]}"
