"""Copies of a model for inference on a CPU, their matrices packed in float32 or quantised to int8.

**Packed.** A product W x of few vectors x spends much of its time on rearranging W for the
processor, and below about fifty vectors torch does not divide that work among its threads. `pack`
rearranges W once, with oneDNN. Results equal those of the model up to the rounding of float32.

**Int8.** y ≈ a_x Σ_j s_i (q(x)_j − z) q(W)_ij + b_i        q(W)_ij = round(W_ij / s_i)

s_i = max_j |W_ij| / 127 is the scale of one row of W, computed once; a_x and z, the scale and zero
point of x, are computed at every call, over the whole batch. Sums are exact, in 32 bits. Jacob et
al. 2018 (1712.05877), §2, with dynamic activations. Because a batch shares one scale, the result of
a sentence may differ slightly from batch to batch. The arithmetic is torch's own
(`quantized::linear_dynamic`), by one of its engines.
"""

import copy
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from addnorm.cpu import uses_broken_amx
from addnorm.errors import InputError, SavedError
from addnorm.layers.heads import TokenHead
from addnorm.models.build import Model

PACKED_ROWS = 80
"""Number of vectors that the packed layout is optimised for; it is correct for any number."""

ENGINES = {
    "vocabulary": ("onednn", "x86", "fbgemm", "qnnpack"),
    "wide": ("x86", "fbgemm", "qnnpack"),
    "narrow": ("fbgemm", "x86", "qnnpack"),
}
"""torch's int8 engines in order of preference. x86 is faster for matrices with more outputs than
inputs, fbgemm for the others; onednn for the matrix of a vocabulary, where it is exact."""
VOCABULARY_SHAPE = 8
"""A matrix with more than this many times as many outputs as inputs is that of a vocabulary."""


def pack(model: Model) -> Model:
    """Return a packed copy of a float32 model, for faster inference on a CPU.

    The copy needs as much memory as the model, plus that of the embedding if the output is tied to
    it. The model is not changed.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> bool((pack(model)(ids) - model(ids)).abs().max() < 1e-5)
    True
    """
    if not can_pack():
        raise InputError(
            "packing needs a torch built with oneDNN: this one is not. Decode with the model."
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InputError(f"packing needs a float32 model: got {names}. Try model.float().")
    return freeze(model, PackedLinear)


def quantise(model: Model) -> Model:
    """Return a copy of a model with all linear layers and the output matrix in int8, for a CPU.

    It needs a quarter of the memory and is up to several times faster; embeddings, norms and
    attention scores stay in float32. The model is not changed.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> bool((quantise(model)(ids) - model(ids)).abs().max() < 0.05)
    True
    """
    return freeze(model, Int8Linear).float()


class FrozenLinear(nn.Module):
    """nn.Linear with its matrix in another form; for inference only, cannot be saved."""

    model_kind, function = "a frozen model", "freeze"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"

    def _save_to_state_dict(self, *rest: object) -> None:
        raise SavedError(
            f"{self.model_kind} cannot be saved. Save the original model, and call "
            f"{self.function} after loading."
        )


MakeLinear = Callable[[Tensor, Tensor | None], FrozenLinear]
"""From the weight and bias of a linear layer to its replacement."""


def freeze(model: Model, make: MakeLinear) -> Model:
    """Return a copy of a model with all linear layers and the output matrix replaced.

    `make` receives tensors of the original model and must copy what it keeps of them.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise InputError(
            f"int8 and packed models need a model on the CPU: got {', '.join(sorted(devices))}. "
            "Try model.cpu()."
        )
    linears = [part for part in model.modules() if type(part) is nn.Linear]
    # deepcopy shares these matrices instead of copying them, because they are replaced below.
    shared = {id(part): part for linear in linears for part in linear.parameters()}
    clone = copy.deepcopy(model, shared)
    with torch.no_grad():
        for parent in list(clone.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, make(child.weight, child.bias))
        if isinstance(clone.head, TokenHead):
            clone.head = FrozenHead(clone.head, clone.embedding(), make)
    return clone.eval().requires_grad_(False)


class FrozenHead(TokenHead):
    """The next-token head with its output matrix replaced; if tied, by a copy of the embedding."""

    def __init__(self, head: TokenHead, embedding: Tensor, make: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.scale, self.cap = None, None, head.scale, head.cap
        self.output = make(head.matrix(embedding), head.bias)
        head.weight = None
        self.inner = head

    def prepare(self, x: Tensor) -> Tensor:
        return self.inner.prepare(x)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.finish(self.output(self.prepare(x)))


# ── Packed float32 ────────────────────────────────────────────────────────────────────────────────


class PackedLinear(FrozenLinear):
    """nn.Linear with its matrix rearranged in advance by oneDNN."""

    model_kind, function = "a packed model", "pack"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else bias.detach().clone()
        weight = weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")


def can_pack() -> bool:
    """Return whether this build of torch can pack a matrix with oneDNN."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    known = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return known and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


# ── Int8 ──────────────────────────────────────────────────────────────────────────────────────────


class Int8Linear(FrozenLinear):
    """nn.Linear in int8."""

    model_kind, function = "an int8 model", "quantise"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        engine = find_engine(self.outputs, self.inputs)
        # Without VNNI a sum of two products may overflow 16 bits, so x is limited to 7 bits.
        self.reduce_range = engine != "qnnpack" and not torch.cpu._is_vnni_supported()
        bias = None if bias is None else bias.detach().float().clone()
        self.packed = pack_int8(weight.detach().float(), bias, engine)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.packed, self.reduce_range)


def pack_int8(weight: Tensor, bias: Tensor | None, engine: str) -> object:
    """Return a matrix quantised by row, packed for the engine."""
    scales = (weight.abs().amax(dim=1).double() / 127).clamp(min=1e-30)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            # Deprecated in torch, but its engines accept no other kind of tensor yet.
            warnings.filterwarnings("ignore", ".*quantize_per_channel.*deprecated", UserWarning)
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantised, bias)
    finally:
        torch.backends.quantized.engine = before


def find_engine(outputs: int, inputs: int) -> str:
    """Return the preferred engine of this build of torch for a matrix of this shape."""
    available = available_engines()
    shape = "wide" if outputs > inputs else "narrow"
    engines = ENGINES["vocabulary" if outputs > VOCABULARY_SHAPE * inputs else shape]
    for engine in engines:
        if engine in available and (engine != "onednn" or can_use_onednn()):
            return engine
    raise InputError(
        f"int8 needs a torch with one of the engines {', '.join(engines)}: this one has "
        f"{', '.join(available) or 'none'}. Decode in float32."
    )


@cache
def can_use_onednn() -> bool:
    """Return whether onednn computes on this CPU, and exactly: without VNNI 16 bits overflow.

    Every product is the greatest there is, so that the first two would overflow together.
    """
    if uses_broken_amx():
        return False
    weight, x = torch.ones(64, 64), torch.ones(32, 64)
    found = torch.ops.quantized.linear_dynamic.default(x, pack_int8(weight, None, "onednn"), False)
    return bool((found - x @ weight.T).abs().max() < 0.01 * 64)


def available_engines() -> list[str]:
    """Return the int8 engines of this build of torch."""
    can = hasattr(torch, "quantize_per_channel") and hasattr(torch.ops.quantized, "linear_dynamic")
    return list(torch.backends.quantized.supported_engines) if can else []
