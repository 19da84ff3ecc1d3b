"""Find the residual stream of any model by tracing the operations of one forward pass.

    a site:   total = a + b,   all of one shape, b computed from a through a matrix product

a is then the shortcut, b the branch. For every tensor the tracer records what it was computed from
(`ancestors`), which of that lies behind a matrix product (`projected`), and what it is only a
rescaled copy of (`copies_of`); each set is an integer with one bit for each operation. Neither the
names nor the classes of the model's modules matter. A sum of two tensors that are both the stream
(a norm or a factor away from an earlier site) merges two streams and is not a site.

Between two sites the stream passes norms and factors; these are recorded, so that the output of a
branch can be followed to any later depth (`StreamNode`, `Rescaling`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from addnorm.clinic.call_model import ClinicBatch, call_model
from addnorm.clinic.forward_stats import ACTIVATIONS, ForwardStats
from addnorm.clinic.module_names import block_of, common_block, has_even_sizes, is_norm
from addnorm.layers.addnorm import AddNorm

MATRIX_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
}  # fmt: skip
"""Operations whose result is no longer the stream."""
FUSED_KERNELS = {name for name in MATRIX_PRODUCTS if name.startswith("_scaled_dot")}
LOOKUPS = {"embedding", "index", "index_select"}
"""Operations that look token ids up in a table."""
COPYING = {"clone", "_to_copy", "detach", "alias", "view", "_unsafe_view", "expand", "contiguous"}
NORM_OPERATIONS = {"native_layer_norm", "_fused_rms_norm"}
NONLINEAR = {
    *ACTIVATIONS, "erf", "exp", "mish", "softplus", "hardswish", "hardsigmoid", "clamp",
    "clamp_min", "abs", "maximum", "glu", "celu", "selu", "threshold", "where", "_softmax",
    "_prelu_kernel", "log_sigmoid_forward", "sin", "cos", "pow", "topk", "hardshrink", "softshrink",
    "log1p",
}  # fmt: skip
"""Operations that make a feed-forward sublayer more than one matrix."""
MASKED_FROM = 1e9
"""Values that only masks of attention hold."""
SUMS = {"add", "sub", "add_", "sub_", "lerp", "lerp_"}
RESCALINGS = COPYING | {"mul", "div", "native_dropout", "neg", "transpose", "permute", "unsqueeze"}


@dataclass(frozen=True)
class Rescaling:
    """What a norm or a factor does to a part c of the stream: c ← factor ⊙ (c − mean c)."""

    factor: Tensor | float
    centred: bool = False
    """Subtract the mean first."""

    def __call__(self, component: Tensor) -> Tensor:
        if self.centred:
            component = component - component.mean(dim=-1, keepdim=True)
        return self.factor * component


@dataclass
class StreamNode:
    """A state of the stream: the rescaled sum of its parents, plus one branch."""

    parents: list[tuple[int, tuple[Rescaling, ...]]]
    site: int | None = None
    start: Tensor | None = None


@dataclass
class Site:
    """One sum where a branch joins the stream.

    Parameters
    ----------
    name : name of the site
    path : the module in whose forward pass the sum is computed
    branch_path : the module that computes the branch
    role : attention, memory or ffn
    shortcut : the shortcut a
    branch : the branch b
    total : their sum
    sign : +, or − if one is subtracted from the other
    node : the node of the stream after the sum
    weights : names of the parameters that the branch uses
    shortcut_norm : the norm that computes the shortcut, if one does
    norm_of_stream : whether that norm reads an earlier sum, rather than the embedding
    read_norm : the norm through which the branch reads the shortcut
    branch_norm : the norm that ends the branch
    factor : constant that the shortcut was multiplied by since the last sum or norm
    gated : whether shortcut or branch is multiplied by a gate that is computed from the input
    scaled : whether the shortcut is multiplied by one constant or learned number
    parallel : whether the block's other branch reads the same stream as this one
    linear : whether two or more matrices of a feed-forward branch have nothing between them
    cut : whether the shortcut, or all of the branch, was detached from what it was computed from
    edge : the sum in the graph of the backward pass, if its memory was overwritten since
    """

    name: str
    path: str
    branch_path: str
    role: str
    shortcut: Tensor
    branch: Tensor
    total: Tensor
    sign: str
    node: int
    weights: tuple[str, ...]
    shortcut_norm: str | None = None
    norm_of_stream: bool = False
    read_norm: str | None = None
    branch_norm: str | None = None
    factor: float = 1.0
    gated: bool = False
    scaled: bool = False
    parallel: bool = False
    linear: bool = False
    cut: bool = False
    edge: GradientEdge | None = None

    @property
    def arrangement(self) -> str:
        """Where the norms of this site stand: post, pre, res-post, sandwich or none."""
        if self.shortcut_norm is not None and self.norm_of_stream:
            return "post"
        if self.read_norm is not None:
            return "sandwich" if self.branch_norm is not None else "pre"
        return "none" if self.branch_norm is None else "res-post"


@dataclass
class Trace:
    """The residual stream of one forward pass.

    Parameters
    ----------
    sites : every site, in forward order
    nodes : every state of the stream
    normed : each norm of the stream: its module, and the node that it reads
    normed_sites : sites whose sum, or what is pooled or picked from it, is read by a norm
    used_sites : sites that the output is computed from
    mixing : modules that compute a product of activations, as attention does
    multiplied : parameters of matrix products
    embeddings : parameters that token ids are looked up in
    restarts : sites that begin a stream of their own, computed from the sum of an earlier site
    head : the parameters of the last matrix product before the output
    dropouts : the largest probability of dropout, and its module (0 in evaluation mode)
    stats : statistics of the forward pass
    output : the model's own output
    """

    sites: list[Site] = field(default_factory=list)
    nodes: list[StreamNode] = field(default_factory=list)
    normed: list[tuple[str, int]] = field(default_factory=list)
    normed_sites: set[int] = field(default_factory=set)
    used_sites: set[int] = field(default_factory=set)
    mixing: list[str] = field(default_factory=list)
    multiplied: set[str] = field(default_factory=set)
    embeddings: set[str] = field(default_factory=set)
    restarts: set[int] = field(default_factory=set)
    head: tuple[str, ...] = ()
    dropouts: tuple[float, str] = (0.0, "")
    stats: ForwardStats = field(default_factory=ForwardStats)
    output: Any = None


@dataclass
class _Lineage:
    """What one tensor's memory was computed from."""

    ancestors: int
    projected: int
    copies_of: int
    maker: str
    """The module of the last matrix product."""
    shape: tuple[int, ...]
    stream: tuple[int, tuple[Rescaling, ...]] | None = None
    """If it is the stream: the node, and the rescalings since."""
    norm: str | None = None
    norm_of_stream: bool = False
    bit: int = 0
    parts: tuple["_Lineage", ...] = ()
    """If it is a sum: what was added."""
    gated: bool = False
    """Whether it is a copy multiplied by a gate that was computed from the same tensor."""
    head: tuple[str, ...] = ()
    """The parameters of the last matrix product."""
    is_weight: bool = False
    """Whether it is only a copy of a parameter, in another shape."""
    trained: bool = False
    """Whether a parameter that requires a gradient is among what it was computed from."""


@dataclass
class _NormUse:
    """One norm: its module, the bit of its result, and what it read."""

    path: str
    bit: int
    source: _Lineage


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations as torch dispatches them; `trace` is the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.paths = {module: name for name, module in model.named_modules()}
        self.module_stack = [""]
        self._params = {_key(p): name for name, p in model.named_parameters()}
        self._lineages: dict[int, _Lineage] = {}
        self._used: dict[int, tuple[str, ...]] = {}
        self._mixes: list[tuple[int, int, int]] = []
        self._alive: list[Tensor] = []
        self._branches: dict[int, int] = {}
        self._norms: list[_NormUse] = []
        self._token_keys: set[int] = set()
        self._totals: list[_Lineage] = []
        """The sum of each site."""
        self._shortcuts: list[_Lineage] = []
        """The shortcut of each site."""
        self._ranks = {name: p.ndim for name, p in model.named_parameters()}
        self._answered = -1
        """What the answers were computed from: all bits until they are known."""
        self._nonlinear = 0
        """The bits of operations that are not linear."""
        self._dropped: set[int] = set()
        """Sites that turned out to be none."""
        self._bits = 0
        self.paused = self.sites_only = self.until_attention = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        joined = self._join_of(name, args, kwargs) if name in SUMS else None
        if name.endswith("_") and operands:
            self._save_overwritten(operands[0])
        out = func(*args, **kwargs)
        result = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
        if result is None:
            return out
        self._alive += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not self.sites_only:
            self.trace.stats.update(name, args, kwargs, out, operands, self.module_stack[-1])
        lineage = self._record(name, operands, result, args, out)
        if joined is not None:
            self._join(joined, lineage, result)
        self._note_dropout(name, args, kwargs)
        if name in ("_softmax", "_safe_softmax"):
            self._drop_logits(operands[0])
        return out

    def _drop_logits(self, logits: Tensor) -> None:
        """Forget sums that only add a bias to attention logits."""
        for number, site in enumerate(self.trace.sites):
            inside = site.path == self.module_stack[-1] and site.total.shape == logits.shape
            if inside and logits.ndim == 4:
                self._dropped.add(number)

    def _save_overwritten(self, memory: Tensor) -> None:
        """Copy what sites hold in memory that is about to be overwritten."""
        key = _key(memory)
        for site in self.trace.sites:
            if _key(site.total) == key:
                if site.edge is None and site.total.requires_grad:
                    site.edge = get_gradient_edge(site.total)
                site.total = site.total.detach().clone()
            if _key(site.shortcut) == key:
                site.shortcut = site.shortcut.detach().clone()
            if _key(site.branch) == key:
                site.branch = site.branch.detach().clone()

    def _note_dropout(self, name: str, args: Any, kwargs: Any) -> None:
        """Record the probability with which values are dropped."""
        share = 0.0
        if name in ("native_dropout", "dropout") and len(args) > 1:
            share = float(args[1])
        elif name in ("bernoulli_", "bernoulli") and len(args) > 1 and isinstance(args[1], float):
            share = 1.0 - args[1]
        elif name in FUSED_KERNELS:
            share = float(kwargs.get("dropout_p", args[3] if _is_plain_number(args, 3) else 0.0))
        if share > self.trace.dropouts[0]:
            self.trace.dropouts = share, self.module_stack[-1]

    # ── What each tensor is computed from ─────────────────────────────────────────────────────────

    def _record(
        self, name: str, operands: list[Tensor], result: Tensor, args: Any, out: Any
    ) -> _Lineage:
        """Record what the result of one operation was computed from."""
        old = self._lineages.get(_key(result))
        if old is not None and not name.endswith("_"):
            return old  # another view of the same memory
        name = name.rstrip("_")
        known = [self._lineages[key] for key in map(_key, operands) if key in self._lineages]
        if name.endswith("_like") or name.startswith("new_"):
            operands, known = [], []  # only the shape of another tensor
        bit = 1 << self._bits
        self._bits += 1
        ancestors, projected = bit, 0
        for lineage in known:
            ancestors |= lineage.ancestors
            projected |= lineage.ancestors if name in MATRIX_PRODUCTS else lineage.projected
        used = tuple(self._params[key] for key in map(_key, operands) if key in self._params)
        if used:
            self._used[bit] = used
        self._record_mixing(name, operands, bit)
        # The tensor that the operation rescales, or of which it returns a view.
        main = self._lineages.get(_key(operands[0])) if operands else None
        gated = False
        if name in ("mul", "div", "native_dropout") and len(operands) > 1:
            other = self._lineages.get(_key(operands[1]))
            if main is None:
                main = other
            elif name == "mul" and other is not None:
                first = _is_gate(main, other)
                gated = first or _is_gate(other, main)
                main = other if first or _is_per_position(main, other) else main
        doubled = name == "add" and len(operands) > 1 and _same_memory(operands)
        rescales = (name in RESCALINGS or doubled) and name not in MATRIX_PRODUCTS
        known_main = main if rescales else None
        is_product = name in MATRIX_PRODUCTS
        lineage = _Lineage(
            ancestors=ancestors,
            projected=projected,
            copies_of=bit | (0 if known_main is None else known_main.copies_of),
            maker=self.module_stack[-1] if is_product or main is None else main.maker,
            shape=tuple(result.shape),
            bit=bit,
            gated=gated or (known_main is not None and known_main.gated),
            trained=any(t.requires_grad for t in operands) or any(k.trained for k in known),
            head=used if is_product and used else () if main is None else main.head,
            is_weight=bool(operands) and not is_product and self._are_weights(operands),
        )
        if known_main is not None:
            lineage.norm, lineage.norm_of_stream = known_main.norm, known_main.norm_of_stream
        if name == "add" and len(known) == 2 and not doubled:
            lineage.parts = tuple(known)
        if is_product:
            self.trace.multiplied |= set(used)
        if name in NONLINEAR or (name == "mul" and len(known) > 1):
            self._nonlinear |= bit
        if name in LOOKUPS and any(_key(each) in self._token_keys for each in operands[1:]):
            self.trace.embeddings |= set(used)
        if main is not None:
            self._follow_stream(name, main, lineage, args, out, operands)
        self._lineages[_key(result)] = lineage
        return lineage

    def _are_weights(self, operands: list[Tensor]) -> bool:
        """Return whether all operands are parameters, or copies of them in another shape."""
        lineages = ((_key(each), self._lineages.get(_key(each))) for each in operands)
        return all(key in self._params or (at is not None and at.is_weight) for key, at in lineages)

    def _record_mixing(self, name: str, operands: list[Tensor], bit: int) -> None:
        """Record a product of two activations, as attention computes them."""
        if name not in FUSED_KERNELS | {"bmm", "baddbmm"}:
            return
        pair = operands[:2] if name in FUSED_KERNELS else operands[-2:]
        sides = [self._lineages.get(_key(tensor)) for tensor in pair]
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            if sides[0].is_weight or sides[1].is_weight:
                return  # einsum copies a matrix that it transposes
            self._mixes.append((bit, sides[0].ancestors, sides[1].ancestors))
            self.trace.mixing.append(self.module_stack[-1])

    def _follow_stream(
        self,
        name: str,
        main: _Lineage,
        lineage: _Lineage,
        args: Any,
        out: Any,
        operands: list[Tensor],
    ) -> None:
        """Follow the stream through a norm, a factor, or a copy."""
        if name in NORM_OPERATIONS:
            self._note_norm(self.module_stack[-1], main, lineage)
        elif name in ("mul", "div") and self._acts_as_norm(main, lineage, operands, out):
            self._note_norm(self.module_stack[-1], main, lineage)
            if main.stream is not None:
                self.trace.normed.append((self.module_stack[-1], main.stream[0]))
        if main.stream is None or not _same_size(main.shape, lineage.shape):
            return
        node, earlier = main.stream
        factors: tuple[Rescaling, ...] | None = None
        if name in COPYING or name == "native_dropout":
            factors = ()
        elif name == "add" and _same_memory(operands):
            factors = (Rescaling(2.0),)
        elif name == "mul" and not _same_memory(operands):
            other = args[1] if self._lineages.get(_key_or_none(args[0])) is main else args[0]
            factors = (Rescaling(_detached(other)),)
        elif name == "div":
            if self._lineages.get(_key_or_none(args[0])) is not main:
                return
            factors = (Rescaling(1 / _detached(args[1])),)
        elif name in NORM_OPERATIONS:
            gain = args[2] if len(args) > 2 and args[2] is not None else 1.0
            scale = out[2] if name == "native_layer_norm" else out[1]
            factors = (
                Rescaling(_detached(gain) * _detached(scale), centred=name == "native_layer_norm"),
            )
            self.trace.normed.append((self.module_stack[-1], node))
        if factors is not None:
            lineage.stream = node, (*earlier, *factors)
            lineage.norm = lineage.norm or main.norm

    def module_normed(self, path: str, argument: Tensor, result: Tensor) -> None:
        """Record that a module without submodules acts as a norm."""
        before, after = self._lineages.get(_key(argument)), self._lineages.get(_key(result))
        if before is None or after is None or before is after:
            return
        if any(use.path == path and use.bit & after.ancestors for use in self._norms):
            if after.norm is None:
                after.norm, after.norm_of_stream = path, before.stream is not None
            return
        self._note_norm(path, before, after)
        if before.stream is not None:
            self.trace.normed.append((path, before.stream[0]))

    def _note_norm(self, path: str, before: _Lineage, after: _Lineage) -> None:
        after.norm, after.norm_of_stream = path, before.stream is not None
        self._norms.append(_NormUse(path, after.bit, before))

    def _acts_as_norm(
        self, main: _Lineage, lineage: _Lineage, operands: list[Tensor], out: Any
    ) -> bool:
        """Return whether a factor for each position, computed from it, gives all the same size."""
        if len(operands) < 2 or not isinstance(out, Tensor) or out.ndim < 3:
            return False
        whole, factor = operands[:2] if operands[0].shape == out.shape else operands[1::-1]
        known = self._lineages.get(_key(factor))
        per_position = factor.ndim == out.ndim and factor.shape[-1] == 1 and factor.numel() > 1
        if not per_position or known is None or not known.ancestors & main.bit:
            return False
        if whole.shape != out.shape or known.projected & main.bit:
            return False
        return has_even_sizes(out)

    # ── Sites ─────────────────────────────────────────────────────────────────────────────────────

    def _join_of(self, name: str, args: Any, kwargs: Any) -> "_Join | None":
        """Return what a sum joins, if it is a site or a merge of streams."""
        a, b = args[0], args[1]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
            return None
        if a.ndim < 2 or not a.is_floating_point() or a is b:
            return None
        one, two = self._lineages.get(_key(a)), self._lineages.get(_key(b))
        if one is None or two is None or one is two:
            return None
        if name.startswith("lerp"):
            return self._lerp_of(a, b, one, two, args[2])
        negative = name.startswith("sub") or kwargs.get("alpha", 1) == -1
        cut = self._is_cut(a, one) or self._is_cut(b, two)
        if one.stream is not None and two.stream is not None:
            return _Join(None, None, one, two, negative)
        if two.stream is None and two.projected & one.copies_of:
            return _Join(_before(a, name), b, one, two, negative, cut=cut)
        if one.stream is None and one.projected & two.copies_of:
            return _Join(b, _before(a, name), two, one, negative, cut=cut)
        return None

    def _is_cut(self, tensor: Tensor, lineage: _Lineage) -> bool:
        """Return whether a tensor has no gradient although what it was computed from has one."""
        return lineage.trained and not tensor.requires_grad and torch.is_grad_enabled()

    def _lerp_of(
        self, a: Tensor, b: Tensor, one: _Lineage, two: _Lineage, weight: Any
    ) -> "_Join | None":
        """Return what torch.lerp(a, b, w) = (1 − w) a + w b joins."""
        share = weight if isinstance(weight, Tensor) else float(weight)
        if two.stream is None and two.projected & one.copies_of:
            return _Join((1 - share) * a, share * b, one, two, False, 1 - share)
        if one.stream is None and one.projected & two.copies_of:
            return _Join(share * b, (1 - share) * a, two, one, False, share)
        return None

    def input(self, tensor: Tensor, *, tokens: bool = False) -> None:
        """Record a tensor that the model is called with, and whether it holds token ids."""
        bit = 1 << self._bits
        self._bits += 1
        self._alive.append(tensor)
        if tokens:
            self._token_keys.add(_key(tensor))
        self._lineages[_key(tensor)] = _Lineage(bit, 0, bit, "", tuple(tensor.shape), bit=bit)

    def _join(self, join: "_Join", lineage: _Lineage, total: Tensor) -> None:
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
            trace.nodes.append(StreamNode([], start=join.shortcut.detach()))
            join.first.stream = number, ()
            number += 1
            if self._totals and join.first.projected & self._totals[-1].bit:
                trace.restarts.add(len(trace.sites))
        parent, rescalings = join.first.stream
        if join.factor is not None:
            rescalings = (*rescalings, Rescaling(join.factor))
        known = self._branches.get(_key(join.branch))
        if known is not None and self._is_gated_difference(known, parent, rescalings):
            self._turn_into_gate(known, rescalings, lineage, total)
            lineage.stream = parent, ()
            lineage.copies_of |= join.first.copies_of
            return
        trace.nodes.append(StreamNode([(parent, rescalings)], site=len(trace.sites)))
        lineage.stream = number, ()
        lineage.copies_of |= join.first.copies_of
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
        self._branches[_key(join.branch)] = len(trace.sites)
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

    def _close_gate(self, join: "_Join", lineage: _Lineage, total: Tensor) -> bool:
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
        self, number: int, gates: Sequence[Rescaling], lineage: _Lineage, total: Tensor
    ) -> None:
        """Make one gated site of a difference that was multiplied by a gate and added."""
        site = self.trace.sites[number]
        factor, _, gated = _describe_factors(gates, total.shape[-1])
        site.sign, site.gated, site.factor = "+", gated, 1 - factor
        site.scaled = not gated
        site.branch = (total - site.shortcut).detach()
        site.total = total
        self._totals[number] = lineage

    def _read_norm(self, join: "_Join", shortcut: _Lineage) -> str | None:
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
        lineages = [self._lineages.get(_key(answer)) for answer in answers if answer.ndim > 1]
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
        for answer in answers:
            known = self._lineages.get(_key(answer))
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

    def _role(self, join: "_Join", parts: Sequence[_Lineage]) -> str:
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


@dataclass
class _Join:
    shortcut: Tensor | None
    branch: Tensor | None
    first: _Lineage
    second: _Lineage
    negative: bool
    factor: Any = None
    """What the shortcut is multiplied by in the sum itself."""
    cut: bool = False
    """Whether no gradient passes one side although it was computed with one."""


def _is_gate(gate: _Lineage, of: _Lineage) -> bool:
    """Return whether one factor of a product was computed from the other by a matrix product."""
    return bool(gate.projected & of.copies_of) and _same_size(gate.shape, of.shape)


def _is_per_position(one: _Lineage, two: _Lineage) -> bool:
    """Return whether the first has one number for each position of the second."""
    return one.shape[-1:] == (1,) and two.shape[-1:] != (1,)


def _same_size(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal but for merged leading dimensions."""
    return one[-1:] == two[-1:] and math.prod(one) == math.prod(two)


def _is_plain_number(args: Any, index: int) -> bool:
    return len(args) > index and isinstance(args[index], float)


def _parts_of_value(lineage: _Lineage) -> list[_Lineage]:
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


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key_or_none(value: Any) -> int:
    return _key(value) if isinstance(value, Tensor) else -1


def _same_memory(operands: list[Tensor]) -> bool:
    return len(operands) > 1 and _key(operands[0]) == _key(operands[1])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else float(value)


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
    tracer.trace.stats.padding = None if padding is None else (row, padding)
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
