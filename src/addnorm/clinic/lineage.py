"""What every tensor of a forward pass is computed from, operation by operation.

For every tensor the tracer records what it was computed from (`ancestors`), which of that lies
behind a matrix product (`projected`), and what it is only a rescaled copy of (`copies_of`); each
set is an integer with one bit for each operation. Neither the names nor the classes of the model's
modules matter. The stream is followed through norms, factors and copies.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from addnorm.clinic.forward_stats import ACTIVATIONS
from addnorm.clinic.module_names import has_even_sizes
from addnorm.clinic.stream_records import Rescaling, Trace

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
SUMS = {
    "add", "sub", "add_", "sub_", "lerp", "lerp_", "addcmul", "addcmul_", "addmm", "baddbmm", "sum",
}  # fmt: skip
STACKS = {"stack", "cat"}
RESCALINGS = COPYING | {"mul", "div", "native_dropout", "neg", "transpose", "permute", "unsqueeze"}


@dataclass
class Lineage:
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
    parts: tuple["Lineage", ...] = ()
    """If it is a sum: what was added."""
    gated: bool = False
    """Whether it is a copy multiplied by a gate that was computed from the same tensor."""
    head: tuple[str, ...] = ()
    """The parameters of the last matrix product."""
    constants: tuple[tuple[int, float], ...] = ()
    """The bit of each multiplication by a number since it is a copy, and the number."""
    is_weight: bool = False
    """Whether it is only a copy of a parameter, in another shape."""
    trained: bool = False
    """Whether a parameter that requires a gradient is among what it was computed from."""


@dataclass
class NormUse:
    """One norm: its module, the bit of its result, and what it read."""

    path: str
    bit: int
    source: Lineage


class LineageTracer(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """Records what every tensor is computed from; a subclass finds the sites among the sums."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.paths = {module: name for name, module in model.named_modules()}
        self.module_stack = [""]
        self._params = {memory_of(p): name for name, p in model.named_parameters()}
        self._lineages: dict[int, Lineage] = {}
        self._used: dict[int, tuple[str, ...]] = {}
        self._mixes: list[tuple[int, int, int]] = []
        self._alive: list[Tensor] = []
        self._branches: dict[int, int] = {}
        self._norms: list[NormUse] = []
        self._token_keys: set[int] = set()
        self._totals: list[Lineage] = []
        """The sum of each site."""
        self._shortcuts: list[Lineage] = []
        """The shortcut of each site."""
        self._ranks = {name: p.ndim for name, p in model.named_parameters()}
        self._answered = -1
        """What the answers were computed from: all bits until they are known."""
        self._nonlinear = 0
        """The bits of operations that are not linear."""
        self._dropped: set[int] = set()
        """Sites that turned out to be none."""
        self._stacks: dict[int, tuple[int, list[Tensor]]] = {}
        """By memory: tensors that were put together along an axis of their own, and that axis."""
        self._normalised: dict[int, int] = {}
        """By memory: attention weights, and the stride of the axis along which they sum to 1."""
        self._weighings = 0
        """The bits of these softmaxes."""
        self._attended: list[tuple[int, int]] = []
        """How many results came before the softmax and before the end of each attention."""
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
        before = len(self._alive)
        self._alive += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not self.sites_only:
            self.trace.stats.update(name, args, kwargs, out, operands, self.module_stack[-1])
            attentions = len(self.trace.stats.attention)
            new = attentions - len(self._attended)
            self._attended += [(before, len(self._alive))] * new
        if func.namespace != "aten" and self._takes_stream_and_branch(operands, result):
            self.trace.unknown_sums.append(str(func.name()))
        lineage = self._record(name, operands, result, args, out)
        if func.namespace != "aten":
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._lineages.setdefault(memory_of(leaf), lineage)
        if name in STACKS:
            self._note_stack(args, kwargs, result)
        if joined is not None:
            self._join(joined, lineage, result)
        self._note_dropout(name, args, kwargs)
        if name in ("_softmax", "_safe_softmax"):
            self._drop_logits(operands[0])
            self._note_softmax(args, result)
        elif name in ("clone", "_to_copy"):
            self._follow_softmax(operands[0], result)
        return out

    def _takes_stream_and_branch(self, operands: list[Tensor], result: Tensor) -> bool:
        """Return whether one operand was computed from another by a matrix product."""
        same = [each for each in operands if each.shape == result.shape]
        known = [self._lineages[key] for key in map(memory_of, same) if key in self._lineages]
        return any(b.projected & a.copies_of for a in known for b in known if a is not b)

    def _note_stack(self, args: Any, kwargs: Any, result: Tensor) -> None:
        """Record tensors that were stacked, or joined along an axis of size 1."""
        parts, axis = list(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if result.ndim == parts[0].ndim and any(part.shape[axis] != 1 for part in parts):
            return
        self._stacks[memory_of(result)] = axis % result.ndim, parts

    def _note_softmax(self, args: Any, weights: Tensor) -> None:
        """Record attention weights: a softmax of a product that no other product follows."""
        logits = self._lineages.get(memory_of(args[0]))
        if logits is None or weights.shape[args[1]] == 1:
            return
        if any(bit & logits.ancestors & ~logits.projected for bit, _, _ in self._mixes):
            self._normalised[memory_of(weights)] = weights.stride(args[1])
            self._weighings |= self._lineages[memory_of(weights)].bit

    def _follow_softmax(self, weights: Tensor, copy: Tensor) -> None:
        """Record a copy of attention weights, in an order of its own."""
        stride = self._normalised.get(memory_of(weights))
        for axis in range(weights.ndim):
            if weights.stride(axis) == stride and weights.shape[axis] > 1:
                self._normalised[memory_of(copy)] = copy.stride(axis)

    def _drop_logits(self, logits: Tensor) -> None:
        """Forget sums that only add a bias to attention logits."""
        for number, site in enumerate(self.trace.sites):
            inside = site.path == self.module_stack[-1] and site.total.shape == logits.shape
            if inside and logits.ndim == 4:
                self._dropped.add(number)

    def _save_overwritten(self, memory: Tensor) -> None:
        """Copy what sites hold in memory that is about to be overwritten."""
        key = memory_of(memory)
        for site in self.trace.sites:
            if memory_of(site.total) == key:
                if site.edge is None and site.total.requires_grad:
                    site.edge = get_gradient_edge(site.total)
                site.total = site.total.detach().clone()
            if memory_of(site.shortcut) == key:
                site.shortcut = site.shortcut.detach().clone()
            if memory_of(site.branch) == key:
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

    def input(self, tensor: Tensor, *, tokens: bool = False) -> None:
        """Record a tensor that the model is called with, and whether it holds token ids."""
        bit = 1 << self._bits
        self._bits += 1
        self._alive.append(tensor)
        if tokens:
            self._token_keys.add(memory_of(tensor))
        self._lineages[memory_of(tensor)] = Lineage(bit, 0, bit, "", tuple(tensor.shape), bit=bit)

    def _record(
        self, name: str, operands: list[Tensor], result: Tensor, args: Any, out: Any
    ) -> Lineage:
        """Record what the result of one operation was computed from."""
        old = self._lineages.get(memory_of(result))
        if old is not None and not name.endswith("_"):
            return old  # another view of the same memory
        name = name.rstrip("_")
        known = [self._lineages[key] for key in map(memory_of, operands) if key in self._lineages]
        if name.endswith("_like") or name.startswith("new_"):
            operands, known = [], []  # only the shape of another tensor
        bit = 1 << self._bits
        self._bits += 1
        ancestors, projected = bit, 0
        for lineage in known:
            ancestors |= lineage.ancestors
            projected |= lineage.ancestors if name in MATRIX_PRODUCTS else lineage.projected
        used = tuple(self._params[key] for key in map(memory_of, operands) if key in self._params)
        if used:
            self._used[bit] = used
        self._record_mixing(name, operands, bit)
        # The tensor that the operation rescales, or of which it returns a view.
        main = self._lineages.get(memory_of(operands[0])) if operands else None
        gated = False
        if name in ("mul", "div", "native_dropout") and len(operands) > 1:
            other = self._lineages.get(memory_of(operands[1]))
            if main is None:
                main = other
            elif name == "mul" and other is not None:
                first = _is_gate(main, other)
                gated = first or _is_gate(other, main)
                main = other if first or _is_per_position(main, other) else main
        doubled = name == "add" and len(operands) > 1 and _same_memory(operands)
        rescales = (
            name in RESCALINGS or doubled or _adds_zero(name, args)
        ) and name not in MATRIX_PRODUCTS
        known_main = main if rescales else None
        is_product = name in MATRIX_PRODUCTS
        lineage = Lineage(
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
            number = 2.0 if doubled else _constant_factor(name, args)
            lineage.constants = known_main.constants
            lineage.constants += () if number is None else ((bit, number),)
        if name == "add" and len(known) == 2 and not doubled:
            lineage.parts = tuple(known)
        if is_product:
            self.trace.multiplied |= set(used)
        if name in NONLINEAR or (name == "mul" and len(known) > 1):
            self._nonlinear |= bit
        if name in LOOKUPS and any(memory_of(each) in self._token_keys for each in operands[1:]):
            self.trace.embeddings |= set(used)
        if main is not None:
            self._follow_stream(name, main, lineage, args, out, operands)
        self._lineages[memory_of(result)] = lineage
        return lineage

    def _are_weights(self, operands: list[Tensor]) -> bool:
        """Return whether all operands are parameters, or copies of them in another shape."""
        lineages = ((memory_of(each), self._lineages.get(memory_of(each))) for each in operands)
        return all(key in self._params or (at is not None and at.is_weight) for key, at in lineages)

    def _record_mixing(self, name: str, operands: list[Tensor], bit: int) -> None:
        """Record a product of two activations, as attention computes them."""
        if name not in FUSED_KERNELS | {"bmm", "baddbmm"}:
            return
        pair = operands[:2] if name in FUSED_KERNELS else operands[-2:]
        sides = [self._lineages.get(memory_of(tensor)) for tensor in pair]
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            if sides[0].is_weight or sides[1].is_weight:
                return  # einsum copies a matrix that it transposes
            self._mixes.append((bit, sides[0].ancestors, sides[1].ancestors))
            self.trace.mixing.append(self.module_stack[-1])
            if any(s and s.ancestors & ~s.projected & self._weighings for s in sides):
                for start, _ in self._attended[-1:]:
                    self._attended[-1] = start, len(self._alive)  # it ends with this product
            values_follow = all(side.projected for side in sides if side is not None)
            if name not in FUSED_KERNELS and values_follow and not _same_memory(pair):
                self._check_weights(pair)

    def _check_weights(self, pair: list[Tensor]) -> None:
        """Record attention whose product with the values adds over another axis than its softmax.

        Σⱼ aᵢⱼ vⱼ is a mean of the values if Σⱼ aᵢⱼ = 1; the axes are told apart by their strides.
        """
        for operand, axis in zip(pair, (-1, -2), strict=True):
            stride = self._normalised.get(memory_of(operand))
            added = operand.shape[axis] > 1 and operand.stride(axis)
            if stride is not None and added and added != stride:
                self.trace.misnormed.append(self.module_stack[-1])

    def _follow_stream(
        self,
        name: str,
        main: Lineage,
        lineage: Lineage,
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
        if main.stream is None or not same_size(main.shape, lineage.shape):
            return
        node, earlier = main.stream
        factors: tuple[Rescaling, ...] | None = None
        if name in COPYING or name == "native_dropout" or _adds_zero(name, args):
            factors = ()
        elif name == "add" and _same_memory(operands):
            factors = (Rescaling(2.0),)
        elif name == "mul" and not _same_memory(operands):
            other = args[1] if self._lineages.get(memory_or_none(args[0])) is main else args[0]
            factors = (Rescaling(_detached(other)),)
        elif name == "div":
            if self._lineages.get(memory_or_none(args[0])) is not main:
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
        before, after = (
            self._lineages.get(memory_of(argument)),
            self._lineages.get(memory_of(result)),
        )
        if before is None or after is None or before is after:
            return
        if any(use.path == path and use.bit & after.ancestors for use in self._norms):
            if after.norm is None:
                after.norm, after.norm_of_stream = path, before.stream is not None
            return
        self._note_norm(path, before, after)
        if before.stream is not None:
            self.trace.normed.append((path, before.stream[0]))

    def _note_norm(self, path: str, before: Lineage, after: Lineage) -> None:
        after.norm, after.norm_of_stream = path, before.stream is not None
        self._norms.append(NormUse(path, after.bit, before))

    def _acts_as_norm(
        self, main: Lineage, lineage: Lineage, operands: list[Tensor], out: Any
    ) -> bool:
        """Return whether a factor for each position, computed from it, gives all the same size."""
        if len(operands) < 2 or not isinstance(out, Tensor) or out.ndim < 3:
            return False
        whole, factor = operands[:2] if operands[0].shape == out.shape else operands[1::-1]
        known = self._lineages.get(memory_of(factor))
        per_position = factor.ndim == out.ndim and factor.shape[-1] == 1 and factor.numel() > 1
        if not per_position or known is None or not known.ancestors & main.bit:
            return False
        if whole.shape != out.shape or known.projected & main.bit:
            return False
        return has_even_sizes(out)

    @abstractmethod
    def _join_of(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a sum joins, before it is computed; None if that is of no interest."""

    @abstractmethod
    def _join(self, join: Any, lineage: Lineage, total: Tensor) -> None:
        """Record a sum that `_join_of` described."""


def _is_gate(gate: Lineage, of: Lineage) -> bool:
    """Return whether one factor of a product was computed from the other by a matrix product."""
    return bool(gate.projected & of.copies_of) and same_size(gate.shape, of.shape)


def _is_per_position(one: Lineage, two: Lineage) -> bool:
    """Return whether the first has one number for each position of the second."""
    return one.shape[-1:] == (1,) and two.shape[-1:] != (1,)


def same_size(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal but for merged leading dimensions."""
    return one[-1:] == two[-1:] and math.prod(one) == math.prod(two)


def _is_plain_number(args: Any, index: int) -> bool:
    return len(args) > index and isinstance(args[index], float)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def memory_or_none(value: Any) -> int:
    return memory_of(value) if isinstance(value, Tensor) else -1


def _same_memory(operands: list[Tensor]) -> bool:
    return len(operands) > 1 and memory_of(operands[0]) == memory_of(operands[1])


def _constant_factor(name: str, args: Any) -> float | None:
    """Return the number by which an operation multiplies a tensor."""
    if name not in ("mul", "div"):
        return None
    numbers = [float(each) for each in args if isinstance(each, int | float)]
    return None if not numbers or not numbers[0] else numbers[0] ** (1 if name == "mul" else -1)


def _adds_zero(name: str, args: Any) -> bool:
    """Return whether an operation is x + 0, with which Python's sum() begins."""
    return name == "add" and not isinstance(args[1], Tensor) and args[1] == 0


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else float(value)
