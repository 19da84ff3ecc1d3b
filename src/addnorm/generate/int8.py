"""Int8 for inference: a copy of a model whose matrices are whole numbers of 8 bits.

    y ≈ a_x Σ_j s_i (q(x)_j − z) q(W)_ij + b_i        q(W)_ij = round(W_ij / s_i)

s_i = max_j |W_ij| / 127 is the scale of one row of W, found once; a_x and z, the scale and zero of
x, are found at every call, for all of the batch together. Sums are exact, in 32 bits. Jacob et al.
2018 (1712.05877), §2; the activations dynamically. Because a batch shares a scale, a sentence may
fare a little differently in another batch.

The arithmetic is torch's own (`quantized::linear_dynamic`), by one of its engines.
"""

import copy
import warnings

import torch
from torch import Tensor, nn

from addnorm.errors import InputError, SavedError
from addnorm.layers.heads import TokenHead
from addnorm.models.build import Model

ENGINES = ("fbgemm", "x86", "qnnpack")
"""torch's engines for int8, in the order in which they are looked for."""


def quantise(model: Model) -> Model:
    """A copy of a model, for inference on a CPU, with all linear layers and the output in int8.

    A quarter of the memory, and up to several times the speed; embeddings, norms and attention
    scores stay in float32. The model itself is left alone.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> bool((quantise(model)(ids) - model(ids)).abs().max() < 0.05)
    True
    """
    engine = find_engine()
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise InputError(f"int8 is for models on a CPU: got {', '.join(sorted(devices))}.")
    linears = [part for part in model.modules() if type(part) is nn.Linear]
    # Matrices that are about to be replaced need not be copied first.
    shared = {id(part): part for linear in linears for part in linear.parameters()}
    clone = copy.deepcopy(model, shared)
    for parent in list(clone.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child.weight, child.bias, engine))
    if isinstance(clone.head, TokenHead):
        clone.head = Int8Head(clone.head, clone.embedding(), engine)
    return clone.float().eval().requires_grad_(False)


def find_engine() -> str:
    """The engine that this build of torch has for int8."""
    known = torch.backends.quantized.supported_engines
    for engine in ENGINES:
        if engine in known and hasattr(torch, "quantize_per_channel"):
            return engine
    raise InputError(
        f"int8 needs a torch with one of the engines {', '.join(ENGINES)}: this one has "
        f"{', '.join(known) or 'none'}. Decode in float32."
    )


class Int8Linear(nn.Module):
    """What nn.Linear computes, in int8; for use, not for training or saving."""

    def __init__(self, weight: Tensor, bias: Tensor | None, engine: str) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape
        # Without these instructions a sum of two products may overflow 16 bits: then x gets 7 bits.
        self.short = engine != "qnnpack" and not torch.cpu._is_vnni_supported()
        own = None if bias is None else bias.detach().float().clone()
        self.packed = pack(weight.detach().float(), own, engine)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed, self.short)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"

    def _save_to_state_dict(self, *rest: object) -> None:
        raise SavedError(
            "an int8 model cannot be saved. Save the model that it was made from, and quantise "
            "after loading."
        )


class Int8Head(TokenHead):
    """The next-token head with its output matrix in int8, a copy of the embedding where tied."""

    def __init__(self, head: TokenHead, embedding: Tensor, engine: str) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.scale = None, None, head.scale
        self.output = Int8Linear(head.matrix(embedding), head.bias, engine)
        head.weight = None
        self.inner = head

    def prepare(self, x: Tensor) -> Tensor:
        return self.inner.prepare(x)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.output(self.prepare(x))


def pack(weight: Tensor, bias: Tensor | None, engine: str) -> object:
    """A matrix in whole numbers, laid out as the engine wants it."""
    scales = (weight.abs().amax(dim=1).double() / 127).clamp(min=1e-30)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            # torch will one day have another way to make these; its engines take no other yet.
            warnings.filterwarnings("ignore", ".*quantize_per_channel.*deprecated", UserWarning)
            whole = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(whole, bias)
    finally:
        torch.backends.quantized.engine = before
