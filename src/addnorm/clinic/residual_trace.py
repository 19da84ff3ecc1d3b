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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from addnorm.clinic.call_model import ClinicBatch, call_model
from addnorm.clinic.forward_stats import ForwardStats
from addnorm.clinic.module_names import block_of, common_block, is_norm
from addnorm.layers.addnorm import AddNorm

MATRIX_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
}  # fmt: skip
"""Operations whose result is no longer the stream."""
FUSED_KERNELS = {name for name in MATRIX_PRODUCTS if name.startswith("_scaled_dot")}
COPYING = {"clone", "_to_copy", "detach", "alias", "view", "_unsafe_view", "expand", "contiguous"}
NORM_OPERATIONS = {"native_layer_norm", "_fused_rms_norm"}
SUMS = {"add", "sub", "add_", "sub_"}
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


@dataclass
class Trace:
    """The residual stream of one forward pass.

    Parameters
    ----------
    sites : every site, in forward order
    nodes : every state of the stream
    normed : each norm of the stream: its module, and the node that it reads
    stats : statistics of the forward pass
    output : the model's own output
    """

    sites: list[Site] = field(default_factory=list)
    nodes: list[StreamNode] = field(default_factory=list)
    normed: list[tuple[str, int]] = field(default_factory=list)
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
        self._bits = 0
        self.paused = False

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
        out = func(*args, **kwargs)
        result = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
        if result is None:
            return out
        self._alive += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.trace.stats.update(name, args, kwargs, out, operands, self.module_stack[-1])
        lineage = self._record(name, operands, result, args, out)
        if joined is not None:
            self._join(joined, lineage, result)
        return out

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
        if name in ("mul", "div", "native_dropout") and main is None and len(operands) > 1:
            main = self._lineages.get(_key(operands[1]))
        rescales = name in RESCALINGS and main is not None and name not in MATRIX_PRODUCTS
        lineage = _Lineage(
            ancestors=ancestors,
            projected=projected,
            copies_of=bit | (main.copies_of if rescales and main is not None else 0),
            maker=self.module_stack[-1] if name in MATRIX_PRODUCTS or main is None else main.maker,
            shape=tuple(result.shape),
        )
        if main is not None:
            self._follow_stream(name, main, lineage, args, out, operands)
        self._lineages[_key(result)] = lineage
        return lineage

    def _record_mixing(self, name: str, operands: list[Tensor], bit: int) -> None:
        """Record a product of two activations, as attention computes them."""
        if name not in FUSED_KERNELS | {"bmm", "baddbmm"}:
            return
        pair = operands[:2] if name in FUSED_KERNELS else operands[-2:]
        sides = [self._lineages.get(_key(tensor)) for tensor in pair]
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            self._mixes.append((bit, sides[0].ancestors, sides[1].ancestors))

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
            lineage.norm = self.module_stack[-1]
        if main.stream is None or main.shape != lineage.shape:
            return
        node, earlier = main.stream
        factors: tuple[Rescaling, ...] | None = None
        if name in COPYING or name == "native_dropout":
            factors = ()
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
        if before is None or after is None or after.norm is not None:
            return
        after.norm = path
        if before.stream is not None:
            self.trace.normed.append((path, before.stream[0]))

    # ── Sites ─────────────────────────────────────────────────────────────────────────────────────

    def _join_of(self, name: str, args: Any, kwargs: Any) -> "_Join | None":
        """Return what a sum joins, if it is a site or a merge of streams."""
        a, b = args[0], args[1]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
            return None
        if a.ndim < 2 or not a.is_floating_point() or a is b:
            return None
        one, two = self._lineages.get(_key(a)), self._lineages.get(_key(b))
        if one is None or two is None:
            return None
        negative = name.startswith("sub") or kwargs.get("alpha", 1) == -1
        if one.stream is not None and two.stream is not None:
            return _Join(None, None, one, two, negative)
        if two.stream is None and two.projected & one.copies_of:
            return _Join(_before(a, name), b, one, two, negative)
        if one.stream is None and one.projected & two.copies_of:
            return _Join(b, _before(a, name), two, one, negative)
        return None

    def input(self, tensor: Tensor) -> None:
        """Record a tensor that the model is called with."""
        bit = 1 << self._bits
        self._bits += 1
        self._alive.append(tensor)
        self._lineages[_key(tensor)] = _Lineage(bit, 0, bit, "", tuple(tensor.shape))

    def _join(self, join: "_Join", lineage: _Lineage, total: Tensor) -> None:
        trace, number = self.trace, len(self.trace.nodes)
        if join.shortcut is None or join.branch is None:
            assert join.first.stream is not None and join.second.stream is not None
            trace.nodes.append(StreamNode([join.first.stream, join.second.stream]))
            lineage.stream = number, ()
            lineage.copies_of |= join.first.copies_of | join.second.copies_of
            return
        if join.first.stream is None:
            trace.nodes.append(StreamNode([], start=join.shortcut.detach()))
            join.first.stream = number, ()
            number += 1
        known = self._branches.get(_key(join.branch))
        trace.nodes.append(StreamNode([join.first.stream], site=len(trace.sites)))
        lineage.stream = number, ()
        lineage.copies_of |= join.first.copies_of
        if known is not None:
            trace.nodes[-1].site = known
            return
        self._branches[_key(join.branch)] = len(trace.sites)
        trace.sites.append(
            Site(
                name="",
                path=self.module_stack[-1],
                branch_path=join.second.maker,
                role=self._role(join),
                shortcut=join.shortcut,
                branch=join.branch,
                total=total,
                sign="−" if join.negative else "+",
                node=number,
                weights=self._weights(join),
                shortcut_norm=join.first.norm,
            )
        )

    def _role(self, join: "_Join") -> str:
        """Return the role of a branch, by the products of activations it contains."""
        inside = join.second.ancestors & ~join.first.ancestors
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
        tensors = isinstance(result, Tensor) and args and isinstance(args[0], Tensor)
        if tensors and not list(module.children()):
            tracer.paused = True
            if is_norm(module, args[0], result):
                tracer.module_normed(path, args[0], result)
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


def trace_stream(model: nn.Module, batch: ClinicBatch) -> Trace:
    """Call a model once and return its residual stream; torch's fused encoder layer is disabled."""
    tracer = Tracer(model)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with module_paths(tracer), tracer:
            for tensor in batch.tensors:
                tracer.input(tensor)
            tracer.trace.output = call_model(model, batch)
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
        name = f"{block}.{site.role}" if block else site.role
        counts[name] = counts.get(name, 0) + 1
        site.name = name if counts[name] == 1 else f"{name}.{counts[name]}"
