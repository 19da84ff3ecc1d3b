"""Int8 for inference: a copy of a model whose matrices are whole numbers of 8 bits.

    y ≈ a_x Σ_j s_i (q(x)_j − z) q(W)_ij + b_i        q(W)_ij = round(W_ij / s_i)

s_i = max_j |W_ij| / 127 is the scale of one row of W, found once; a_x and z, the scale and zero of
x, are found at every call, for all of the batch together. Sums are exact, in 32 bits. Jacob et al.
2018 (1712.05877), §2; the activations dynamically. Because a batch shares a scale, a sentence may
fare a little differently in another batch.

The arithmetic is torch's own (`quantized::linear_dynamic`), by one of its engines.
"""

import warnings

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.frozen import Frozen, freeze
from addnorm.models.build import Model

ENGINES = {"wide": ("x86", "fbgemm", "qnnpack"), "narrow": ("fbgemm", "x86", "qnnpack")}
"""torch's engines for int8, in the order in which they are looked for: one is the faster at
matrices with more outputs than inputs, such as that of the vocabulary, another at the others."""


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
    return freeze(model, Int8Linear).float()


def find_engine(outputs: int, inputs: int) -> str:
    """The engine of this build of torch for matrices of some shape."""
    known = known_engines()
    wanted = ENGINES["wide" if outputs > inputs else "narrow"]
    for engine in wanted:
        if engine in known:
            return engine
    raise InputError(
        f"int8 needs a torch with one of the engines {', '.join(wanted)}: this one has "
        f"{', '.join(known) or 'none'}. Decode in float32."
    )


def known_engines() -> list[str]:
    """The engines that this build of torch has."""
    can = hasattr(torch, "quantize_per_channel") and hasattr(torch.ops.quantized, "linear_dynamic")
    return list(torch.backends.quantized.supported_engines) if can else []


class Int8Linear(Frozen):
    """What nn.Linear computes, in int8."""

    named, verb = "an int8 model", "quantise"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        engine = find_engine(self.outputs, self.inputs)
        # Without these instructions a sum of two products may overflow 16 bits: then x gets 7 bits.
        self.short = engine != "qnnpack" and not torch.cpu._is_vnni_supported()
        own = None if bias is None else bias.detach().float().clone()
        self.packed = pack_int8(weight.detach().float(), own, engine)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed, self.short)


def pack_int8(weight: Tensor, bias: Tensor | None, engine: str) -> object:
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
