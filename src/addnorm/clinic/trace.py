"""Finding the residual stream in anyone's code: one forward pass, watched operation by operation.

    a site:   total = a + b,   all of one shape, b computed from a through a matrix product

a is then the shortcut, b the branch. Every tensor remembers what it was computed from (`made_of`),
what of that lies beyond a matrix product (`beyond`), and what it is a mere rescaling of (`roots`);
sets are whole numbers with one bit an operation. Nothing is asked of the model's code: not its
names, not its classes. A sum of two tensors that are both still the stream (a norm or a factor away
from an earlier site) is a merge of streams, not a site.

Between two sites the stream is carried by norms and factors; these are kept, so that what a branch
wrote can be followed to any later depth (`Node`, `Carry`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from addnorm.clinic.paths import block_of, common_block, is_norm
from addnorm.clinic.watch import Watch
from addnorm.layers.addnorm import AddNorm

MATRIX = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
}  # fmt: skip
"""Operations beyond which a tensor is no longer the stream."""
KERNELS = {name for name in MATRIX if name.startswith("_scaled_dot")}
SAME = {"clone", "_to_copy", "detach", "alias", "view", "_unsafe_view", "expand", "contiguous"}
NORMS = {"native_layer_norm", "_fused_rms_norm"}


@dataclass(frozen=True)
class Carry:
    """What happens to a part of the stream on its way: c ← factor ⊙ (c − mean c, if centred)."""

    factor: Tensor | float
    centred: bool = False

    def __call__(self, component: Tensor) -> Tensor:
        if self.centred:
            component = component - component.mean(dim=-1, keepdim=True)
        return self.factor * component


@dataclass
class Node:
    """A state of the stream: the sum of what came in, carried, and of one branch."""

    parents: list[tuple[int, tuple[Carry, ...]]]
    site: int | None = None
    start: Tensor | None = None


@dataclass
class Site:
    """One place where a branch joins the stream."""

    name: str
    path: str
    """The module in whose forward pass the sum was taken."""
    branch_path: str
    """The module that made the branch."""
    role: str
    """attention, memory or ffn."""
    shortcut: Tensor
    branch: Tensor
    total: Tensor
    sign: str
    """+, or − where one was taken from the other."""
    node: int
    weights: tuple[str, ...]
    """Names of the parameters that the branch used."""
    shortcut_norm: str | None = None
    """The module whose norm made the shortcut, if one did."""


@dataclass
class Trace:
    """What one forward pass showed."""

    sites: list[Site] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    normed: list[tuple[str, int]] = field(default_factory=list)
    """Each norm of the stream: its module, and the node that it was given."""
    watch: Watch = field(default_factory=Watch)
    output: Any = None


@dataclass
class _Facts:
    """What is known of one tensor's memory."""

    made_of: int
    beyond: int
    roots: int
    maker: str
    shape: tuple[int, ...]
    stream: tuple[int, tuple[Carry, ...]] | None = None
    norm: str | None = None


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches operations; `trace` is what it found."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.paths = {module: name for name, module in model.named_modules()}
        self.here = [""]
        self._params = {_key(p): name for name, p in model.named_parameters()}
        self._facts: dict[int, _Facts] = {}
        self._used: dict[int, tuple[str, ...]] = {}
        self._mixes: list[tuple[int, int, int]] = []
        self._alive: list[Tensor] = []
        self._branches: dict[int, int] = {}
        self._bits = 0
        self.paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: else torch would import its compiler, which takes seconds, to keep it away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        joined = self._site_of(name, args, kwargs) if name in SUMS else None
        out = func(*args, **kwargs)
        result = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
        if result is None:
            return out
        self._alive += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.trace.watch.operation(name, args, kwargs, out, given, self.here[-1])
        facts = self._learn(name, given, result, args, out)
        if joined is not None:
            self._join(joined, facts, result)
        return out

    # ── What each tensor is made of ───────────────────────────────────────────────────────────────

    def _learn(self, name: str, given: list[Tensor], result: Tensor, args: Any, out: Any) -> _Facts:
        """Note what the result of one operation was computed from."""
        old = self._facts.get(_key(result))
        if old is not None and not name.endswith("_"):
            return old  # the same memory, looked at in another way
        name = name.rstrip("_")
        known = [self._facts[key] for key in map(_key, given) if key in self._facts]
        bit = 1 << self._bits
        self._bits += 1
        made_of, beyond = bit, 0
        for facts in known:
            made_of |= facts.made_of
            beyond |= facts.made_of if name in MATRIX else facts.beyond
        used = tuple(self._params[key] for key in map(_key, given) if key in self._params)
        if used:
            self._used[bit] = used
        self._note_mixing(name, given, bit)
        # Where the operation only rescales, or only looks at the same memory in another way.
        main = self._facts.get(_key(given[0])) if given else None
        if name in ("mul", "div", "native_dropout") and main is None and len(given) > 1:
            main = self._facts.get(_key(given[1]))
        light = name in LIGHT and main is not None and name not in MATRIX
        facts = _Facts(
            made_of=made_of,
            beyond=beyond,
            roots=bit | (main.roots if light and main is not None else 0),
            maker=self.here[-1] if name in MATRIX or main is None else main.maker,
            shape=tuple(result.shape),
        )
        if main is not None:
            self._carry(name, main, facts, args, out, given)
        self._facts[_key(result)] = facts
        return facts

    def _note_mixing(self, name: str, given: list[Tensor], bit: int) -> None:
        """Remember a product of two activations: attention makes them."""
        if name not in KERNELS | {"bmm", "baddbmm"}:
            return
        pair = given[:2] if name in KERNELS else given[-2:]
        sides = [self._facts.get(_key(tensor)) for tensor in pair]
        if len(sides) == 2 and sides[0] is not None and sides[1] is not None:
            self._mixes.append((bit, sides[0].made_of, sides[1].made_of))

    def _carry(
        self, name: str, main: _Facts, facts: _Facts, args: Any, out: Any, given: list[Tensor]
    ) -> None:
        """Follow the stream through a norm, a factor, or a copy."""
        if name in NORMS:
            facts.norm = self.here[-1]
        if main.stream is None or main.shape != facts.shape:
            return
        node, carried = main.stream
        carry: tuple[Carry, ...] | None = None
        if name in SAME or name == "native_dropout":
            carry = ()
        elif name == "mul" and not _same_memory(given):
            other = args[1] if self._facts.get(_key_or_none(args[0])) is main else args[0]
            carry = (Carry(_plain(other)),)
        elif name == "div":
            if self._facts.get(_key_or_none(args[0])) is not main:
                return
            carry = (Carry(1 / _plain(args[1])),)
        elif name in NORMS:
            gain = args[2] if len(args) > 2 and args[2] is not None else 1.0
            scale = out[2] if name == "native_layer_norm" else out[1]
            carry = (Carry(_plain(gain) * _plain(scale), centred=name == "native_layer_norm"),)
            self.trace.normed.append((self.here[-1], node))
        if carry is not None:
            facts.stream = node, (*carried, *carry)
            facts.norm = facts.norm or main.norm

    def module_normed(self, path: str, given: Tensor, result: Tensor) -> None:
        """A module without parts turned the stream into something of even size: it is a norm."""
        before, after = self._facts.get(_key(given)), self._facts.get(_key(result))
        if before is None or after is None or after.norm is not None:
            return
        after.norm = path
        if before.stream is not None:
            self.trace.normed.append((path, before.stream[0]))

    # ── Sites ─────────────────────────────────────────────────────────────────────────────────────

    def _site_of(self, name: str, args: Any, kwargs: Any) -> "_Join | None":
        """What a sum is about to join, if it is a site or a merge."""
        a, b = args[0], args[1]
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
            return None
        if a.ndim < 2 or not a.is_floating_point() or a is b:
            return None
        one, two = self._facts.get(_key(a)), self._facts.get(_key(b))
        if one is None or two is None:
            return None
        negative = name.startswith("sub") or kwargs.get("alpha", 1) == -1
        if one.stream is not None and two.stream is not None:
            return _Join(None, None, one, two, negative)
        if two.stream is None and two.beyond & one.roots:
            return _Join(_kept(a, name), b, one, two, negative)
        if one.stream is None and one.beyond & two.roots:
            return _Join(b, _kept(a, name), two, one, negative)
        return None

    def input(self, tensor: Tensor) -> None:
        """A tensor that came from outside is where lineages begin."""
        bit = 1 << self._bits
        self._bits += 1
        self._alive.append(tensor)
        self._facts[_key(tensor)] = _Facts(bit, 0, bit, "", tuple(tensor.shape))

    def _join(self, join: "_Join", facts: _Facts, total: Tensor) -> None:
        trace, number = self.trace, len(self.trace.nodes)
        if join.shortcut is None or join.branch is None:
            assert join.first.stream is not None and join.second.stream is not None
            trace.nodes.append(Node([join.first.stream, join.second.stream]))
            facts.stream = number, ()
            facts.roots |= join.first.roots | join.second.roots
            return
        if join.first.stream is None:
            trace.nodes.append(Node([], start=join.shortcut.detach()))
            join.first.stream = number, ()
            number += 1
        known = self._branches.get(_key(join.branch))
        trace.nodes.append(Node([join.first.stream], site=len(trace.sites)))
        facts.stream = number, ()
        facts.roots |= join.first.roots
        if known is not None:
            trace.nodes[-1].site = known
            return
        self._branches[_key(join.branch)] = len(trace.sites)
        trace.sites.append(
            Site(
                name="",
                path=self.here[-1],
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
        """By what was mixed on the way from the shortcut to the branch."""
        inside = join.second.made_of & ~join.first.made_of
        role = "ffn"
        for bit, query, key in self._mixes:
            sides = bool(query & join.first.roots), bool(key & join.first.roots)
            if bit & inside and any(sides):
                role = "attention" if all(sides) else "memory"
        return role

    def _weights(self, join: "_Join") -> tuple[str, ...]:
        inside = join.second.made_of & ~join.first.made_of
        found = [name for bit, names in self._used.items() if bit & inside for name in names]
        around = common_block(join.second.maker, self.here[-1])
        return tuple(dict.fromkeys(n for n in found if n.startswith(around)))


@dataclass
class _Join:
    shortcut: Tensor | None
    branch: Tensor | None
    first: _Facts
    second: _Facts
    negative: bool


SUMS = {"add", "sub", "add_", "sub_"}
LIGHT = SAME | {"mul", "div", "native_dropout", "neg", "transpose", "permute", "unsqueeze"}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key_or_none(value: Any) -> int:
    return _key(value) if isinstance(value, Tensor) else -1


def _same_memory(given: list[Tensor]) -> bool:
    return len(given) > 1 and _key(given[0]) == _key(given[1])


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else float(value)


def _kept(tensor: Tensor, name: str) -> Tensor:
    """A tensor as it was before a sum that is about to write into it."""
    return tensor.detach().clone() if name.endswith("_") else tensor


@contextmanager
def module_paths(tracer: Tracer) -> Iterator[None]:
    """Tell the tracer which module is running, by hooks that belong to no module."""

    def enter(module: nn.Module, given: Any) -> None:
        tracer.here.append(tracer.paths.get(module, tracer.here[-1]))

    def leave(module: nn.Module, given: Any, result: Any) -> None:
        path = tracer.here.pop()
        tensors = isinstance(result, Tensor) and given and isinstance(given[0], Tensor)
        if tensors and not list(module.children()):
            tracer.paused = True
            if is_norm(module, given[0], result):
                tracer.module_normed(path, given[0], result)
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


def watch(model: nn.Module, run: Callable[[], Any], inputs: list[Tensor]) -> Trace:
    """Run a model once and find its sites; torch's fused encoder layer is taken apart for it."""
    tracer = Tracer(model)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with module_paths(tracer), tracer:
            for tensor in inputs:
                tracer.input(tensor)
            tracer.trace.output = run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    _name(tracer.trace.sites, model)
    return tracer.trace


def _name(sites: list[Site], model: nn.Module) -> None:
    """Call each site by its block and role, with a number where that is said twice.

    Where the sum was taken by an Add & Norm box of ours, the box knows its role and its place.
    """
    seen: dict[str, int] = {}
    boxes = {name: part for name, part in model.named_modules() if isinstance(part, AddNorm)}
    for site in sites:
        if site.path in boxes:
            place = boxes[site.path].place
            site.role, site.name = place.role, f"{place.side}.{place.layer}.{place.role}"
            continue
        block = block_of(site.path) or block_of(site.branch_path) or site.path
        name = f"{block}.{site.role}" if block else site.role
        seen[name] = seen.get(name, 0) + 1
        site.name = name if seen[name] == 1 else f"{name}.{seen[name]}"
