"""Every arrangement of residual connection and norm, each with its formula.

x is the stream, F the branch (a sublayer, then dropout), N the norm, L the blocks of the stack.
An arrangement is two classes: the box that joins one branch to the stream (`AddNorm`), and what
happens before the first block and after the last (`Ends`). It depends on its `Place` only, and only
it adjusts the initial weights of its branches. A box takes the branch as a function and
the norm as a factory, so every arrangement works with every norm in every mode.

To add one: a class with its formula and citation, a row in ADDNORMS, a row in the formula test.
The file is long so that arrangements can be read side by side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError
from addnorm.layers.norms import Norm

Stream = Any
"""What flows from box to box: a tensor, or a tuple that an arrangement's Ends opens and closes."""
Branch = Callable[[Tensor], Tensor]
"""A sublayer, then dropout."""


class Sublayer(Protocol):
    """The part of a sublayer that an arrangement may use to adjust its initial weights."""

    @property
    def output(self) -> nn.Linear | nn.EmbeddingBag:
        """The last projection of the branch."""

    def scale_(self, gain: float) -> None:
        """Multiply the weights along the branch (for attention: values and output)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a box in its stack: all that an arrangement may depend on.

    Parameters
    ----------
    width
        Width of the stream.
    layer
        Number of the block, from 0.
    depth
        Blocks in this stack.
    role
        attention, memory or ffn (in SAINT also row_attention and row_ffn).
    step
        Number of the box in the stack, from 0.
    steps
        Boxes in this stack: 2 per block, 3 with encoder-decoder attention, 1 less in a block
        without a feed-forward network.
    side
        encoder or decoder.
    peer_depth
        Blocks in the other stack of an encoder-decoder; 0 if there is none.
    """

    width: int
    layer: int
    depth: int
    role: str
    step: int
    steps: int
    side: str
    peer_depth: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the first box of its block."""
        return self.step % (self.steps // self.depth) == 0

    @property
    def has_memory(self) -> bool:
        """Whether this block has encoder-decoder attention."""
        return self.side == "decoder" and self.peer_depth > 0

    @property
    def last(self) -> bool:
        """Whether this is the last box of its block."""
        return (self.step + 1) % (self.steps // self.depth) == 0


class Ends(nn.Module):
    """What happens before the first block and after the last; in this base class, nothing."""

    closes_with_norm = False
    """Whether `close` applies a norm."""

    def __init__(self, width: int, depth: int, norm: Norm) -> None:
        super().__init__()

    def open(self, x: Tensor) -> Stream:
        """Return the stream that enters the first block."""
        return x

    def close(self, stream: Stream) -> Tensor:
        """Return the output, (batch, length, width)."""
        return stream

    def init_(self, embedding: Tensor) -> None:
        """Adjust the token embedding of the stack, after the common initialisation."""


class FinalNorm(Ends):
    """out = N(x)"""

    closes_with_norm = True

    def __init__(self, width: int, depth: int, norm: Norm) -> None:
        super().__init__(width, depth, norm)
        self.norm = norm(width)

    def close(self, stream: Stream) -> Tensor:
        return self.norm(stream)


class AddNorm(nn.Module):
    """One box of the figure: `forward(stream, f)` joins branch f to the stream."""

    ends: type[Ends] = Ends
    inside: tuple[str, ...] = ()
    """Modules to add inside the sublayers: head-gain, attention-norm, ffn-norm."""

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__()
        self.place = place
        self.norm = norm(place.width)

    def init_(self, sublayer: Sublayer) -> None:
        """Adjust the weights of the branch's sublayer, after the common initialisation."""

    def flops_per_position(self) -> int:
        """Return the operations of the box's own matrix products for one position."""
        return 0

    def saved_per_position(self) -> int:
        """Return how many numbers are saved for backward for one position, without the norms'."""
        return 0

    def extra_repr(self) -> str:
        return f"{self.place.side} {self.place.layer} {self.place.role}"


# ── One norm per box ──────────────────────────────────────────────────────────────────────────────


class Post(AddNorm):
    """x ← N(x + F(x))

    Vaswani et al. 2017, §3.1: the original. `input_gain` multiplies the input of the first block by
    a learned vector, which holds the first ω of a folded Admin model.
    """

    class ends(Ends):
        def __init__(self, width: int, depth: int, norm: Norm, *, input_gain: bool = False) -> None:
            super().__init__(width, depth, norm)
            self.gain = nn.Parameter(torch.ones(width)) if input_gain else None

        def open(self, x: Tensor) -> Stream:
            return x if self.gain is None else self.gain * x

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(x + f(x))


class Pre(AddNorm):
    """x ← x + F(N(x));   out = N(x)

    Xiong et al. 2020 (2002.04745); Wang et al. 2019; Nguyen, Salazar 2019. `shrink` divides the
    initial output projections by √steps (GPT-2: Radford et al. 2019, §2.3); `bare_start` omits the
    first norm of the stack (FT-Transformer: Gorishniy et al. 2021, §3.3).

    Parameters
    ----------
    place, norm
        Where the box is, and what makes its norm.
    shrink, bare_start
        The two variants above.
    """

    ends = FinalNorm

    def __init__(
        self, place: Place, norm: Norm, *, shrink: bool = False, bare_start: bool = False
    ) -> None:
        super().__init__(place, norm)
        self.shrink = shrink
        if bare_start and place.step == 0:
            self.norm = nn.Identity()

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norm(x))

    def init_(self, sublayer: Sublayer) -> None:
        if self.shrink:
            with torch.no_grad():
                sublayer.output.weight.mul_(self.place.steps**-0.5)


class ResPost(AddNorm):
    """x ← x + N(F(x));   out = N(x)

    Swin v2: Liu et al. 2022 (2111.09883), §3.2. `start` is the initial gain of the norm: 0 in Swin
    v2, 1 in OLMo 2 (2501.00656).
    """

    ends = FinalNorm

    def __init__(self, place: Place, norm: Norm, *, start: float = 1.0) -> None:
        super().__init__(place, norm)
        with torch.no_grad():
            for parameter in self.norm.parameters():
                parameter.mul_(start)

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + self.norm(f(x))


class Mix(AddNorm):
    """x ← N(x + F(x)) in the first `share` of the blocks, then x ← x + F(N(x));   out = N(x)

    Mix-LN: Li, Yin, Liu 2024 (2412.13795), eq. 6, share = 0.25.
    """

    ends = FinalNorm

    def __init__(self, place: Place, norm: Norm, *, share: float = 0.25) -> None:
        super().__init__(place, norm)
        _check_option(0 <= share <= 1, "share", "from 0 to 1", share)
        self.is_post = place.layer < math.floor(share * place.depth + 1e-9)

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(x + f(x)) if self.is_post else x + f(self.norm(x))


class NormScaling(AddNorm):
    """x ← x + F(N(x) / √l), l the number of the block from 1;   out = N(x)

    LayerNorm scaling: Sun et al. 2025 (2502.05795), eq. 5.
    """

    ends = FinalNorm

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norm(x) / math.sqrt(self.place.layer + 1))


# ── Two norms per box ─────────────────────────────────────────────────────────────────────────────


class Sandwich(AddNorm):
    """x ← x + N′(F(N(x)));   out = N(x)

    CogView: Ding et al. 2021 (2105.13290), §2.4.
    """

    ends = FinalNorm

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, norm)
        self.outer = norm(place.width)

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + self.outer(f(self.norm(x)))


class Peri(Sandwich):
    """x ← x + N′(F(N(x))), starting from N(x);   out = N(x)

    Peri-LN: Kim et al. 2025 (2502.02732), §3.
    """

    class ends(FinalNorm):
        def __init__(self, width: int, depth: int, norm: Norm) -> None:
            super().__init__(width, depth, norm)
            self.first = norm(width)

        def open(self, x: Tensor) -> Stream:
            return self.first(x)


class NormFormer(AddNorm):
    """attention: x ← x + N′(F(N(x)));   ffn: x ← x + F(N(x));   out = N(x)

    and inside F a gain for each head and a norm after the activation of the feed-forward. Shleifer
    et al. 2021 (2110.09456), eq. 2–6. `residual_gain` multiplies the shortcut of the feed-forward
    by a learned vector, which the authors use in small models.
    """

    ends = FinalNorm
    inside = ("head-gain", "ffn-norm")

    def __init__(self, place: Place, norm: Norm, *, residual_gain: bool = False) -> None:
        super().__init__(place, norm)
        is_ffn = place.role == "ffn"
        self.outer = nn.Identity() if is_ffn else norm(place.width)
        self.gain = nn.Parameter(torch.ones(place.width)) if residual_gain and is_ffn else None

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        shortcut = x if self.gain is None else self.gain * x
        return shortcut + self.outer(f(self.norm(x)))


class SubLN(AddNorm):
    """x ← x + F(N(x));   out = N(x);   inside F a norm before each output projection

    and value, output and feed-forward weights times γ. Magneto: Wang et al. 2022 (2210.06423), fig.
    2: γ = √log 2L for a single stack; with N encoder and M decoder blocks √(⅓ log 3M log 2N) and
    √log 3M. As in the authors' code, encoder-decoder attention is not scaled.
    """

    ends = FinalNorm
    inside = ("attention-norm", "ffn-norm")

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norm(x))

    def init_(self, sublayer: Sublayer) -> None:
        own, other = self.place.depth, self.place.peer_depth
        square = math.log(2 * own)
        if other and self.place.side == "encoder":
            square = math.log(3 * other) * math.log(2 * own) / 3
        elif other:
            square = math.log(3 * own)
        if self.place.role != "memory":
            sublayer.scale_(math.sqrt(square))


# ── A weight on the shortcut or on the branch ─────────────────────────────────────────────────────


class DeepNorm(AddNorm):
    """x ← N(αx + F(x)),   value, output and feed-forward weights times β

    Wang et al. 2022 (2203.00555), fig. 2: α = (2L)^¼, β = (8L)^−¼ for a single stack; with N
    encoder and M decoder blocks α = 0.81 (N⁴M)^1/16, β = 0.87 (N⁴M)^−1/16 in the encoder, (3M)^¼,
    (12M)^−¼ in the decoder.
    """

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, norm)
        own, other = place.depth, place.peer_depth
        self.alpha, self.beta = (2 * own) ** 0.25, (8 * own) ** -0.25
        if other and place.side == "encoder":
            both = (own**4 * other) ** (1 / 16)
            self.alpha, self.beta = 0.81 * both, 0.87 / both
        elif other:
            self.alpha, self.beta = (3 * own) ** 0.25, (12 * own) ** -0.25

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(self.alpha * x + f(x))

    def init_(self, sublayer: Sublayer) -> None:
        sublayer.scale_(self.beta)


class Admin(AddNorm):
    """x ← N(ω ⊙ x + F(x)),   ω²ᵢ = Var[ωᵢ₋₁ x] + Var[Fᵢ₋₁(x)], measured once; then ω is learned

    Liu et al. 2020 (2004.08249), §4.2. ω is 1 until the measuring pass (`init.measure_`) sets it.
    `growth = "log"` needs no pass: ω = √((n+1)/log(n+1) − 1) for all n boxes of the stack,
    the authors' later constant (admin-torch).
    """

    def __init__(self, place: Place, norm: Norm, *, growth: str = "measured") -> None:
        super().__init__(place, norm)
        n = place.steps
        _check_option(growth in ("measured", "log"), "growth", "measured or log", growth)
        start = math.sqrt((n + 1) / math.log(n + 1) - 1) if growth == "log" else 1.0
        self.omega = nn.Parameter(torch.full((place.width,), start))

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(self.omega * x + f(x))


class ReZero(AddNorm):
    """x ← x + a F(x),   one scalar a per block, initially 0;   no norm

    Bachlechner et al. 2021 (2003.04887), eq. 9. The boxes of a block share a: the first box has the
    parameter and passes it on with the stream.
    """

    class ends(Ends):
        def open(self, x: Tensor) -> Stream:
            return x, None

        def close(self, stream: Stream) -> Tensor:
            return stream[0]

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, lambda width: nn.Identity())
        self.a = nn.Parameter(torch.zeros(())) if place.first else None

    def forward(self, stream: Stream, f: Branch) -> Stream:
        x, a = stream
        a = a if self.a is None else self.a
        return x + a * f(x), a

    def saved_per_position(self) -> int:
        return self.place.width


class LayerScale(AddNorm):
    """x ← x + s ⊙ F(N(x)),   s learned, initially small;   out = N(x)

    CaiT: Touvron et al. 2021 (2103.17239), eq. 4, §2. `start` is the initial s, by default 0.1 up
    to 18 blocks, 1e-5 up to 24, then 1e-6.
    """

    ends = FinalNorm

    def __init__(self, place: Place, norm: Norm, *, start: float | None = None) -> None:
        super().__init__(place, norm)
        if start is None:
            start = 0.1 if place.depth <= 18 else 1e-5 if place.depth <= 24 else 1e-6
        self.scale = nn.Parameter(torch.full((place.width,), float(start)))

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + self.scale * f(self.norm(x))

    def saved_per_position(self) -> int:
        return self.place.width


class TFixup(AddNorm):
    """x ← x + F(x),   no norm;   value, output and feed-forward weights and the embedding scaled

    Huang et al. 2020 (T-Fixup), §3.2: weights times 0.67 N^−¼ in an encoder of N blocks, (9M)^−¼ in
    a decoder of M blocks with encoder-decoder attention; embedding ~ N(0, 1/width) times (9L)^−¼. A
    decoder-only stack has two branches per block, like an encoder, and is scaled like one.
    """

    class ends(Ends):
        def __init__(self, width: int, depth: int, norm: Norm) -> None:
            super().__init__(width, depth, norm)
            self.std = width**-0.5 * (9 * max(depth, 1)) ** -0.25

        def init_(self, embedding: Tensor) -> None:
            nn.init.normal_(embedding, std=self.std)

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, lambda width: nn.Identity())

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + f(x)

    def init_(self, sublayer: Sublayer) -> None:
        depth, has_memory = self.place.depth, self.place.has_memory
        sublayer.scale_((9 * depth) ** -0.25 if has_memory else 0.67 * depth**-0.25)


class Fixup(AddNorm):
    """x ← x + a F(x + b) + c,   no norm;   scalars a, b, c, initially 1, 0, 0

    Zhang, Dauphin, Ma 2019 (1901.09321), §3: with n branches of two layers each, the first layer's
    weights times n^−½, the last layer's 0. The paper also sets the classifier to 0, which is not
    part of a stack and keeps its own initial weights here.
    """

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, lambda width: nn.Identity())
        self.multiplier = nn.Parameter(torch.ones(()))
        self.bias_before = nn.Parameter(torch.zeros(()))
        self.bias_after = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return x + self.multiplier * f(x + self.bias_before) + self.bias_after

    def init_(self, sublayer: Sublayer) -> None:
        sublayer.scale_(self.place.steps**-0.5)
        with torch.no_grad():
            sublayer.output.weight.zero_()

    def saved_per_position(self) -> int:
        return self.place.width


class ScaledShortcut(AddNorm):
    """x ← λx + F(N(x));   out = N(x)

    He et al. 2016 (1603.05027), eq. 6–8; Nguyen, Salazar 2019 (1910.05895), §2.1: the gradient at
    block l has the factor ∏λ over the boxes above it, which explodes for λ > 1 and vanishes for
    λ < 1. `shortcut` is λ; `learned` makes it a parameter of each box. With norm=none it is
    x ← λx + F(x).
    """

    ends = FinalNorm

    def __init__(
        self, place: Place, norm: Norm, *, shortcut: float = 0.5, learned: bool = False
    ) -> None:
        super().__init__(place, norm)
        self.shortcut: float | nn.Parameter = shortcut
        if learned:
            self.shortcut = nn.Parameter(torch.tensor(float(shortcut)))
        self.learned = learned

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.shortcut * x + f(self.norm(x))

    def saved_per_position(self) -> int:
        return self.place.width if self.learned else 0


class NoResidual(AddNorm):
    """x ← N(F(x)):   no shortcut at all, for comparison

    The network before He et al. 2015 (1512.03385): what a branch does not pass on is lost, the
    positions of the tokens included.
    """

    def forward(self, x: Tensor, f: Branch) -> Tensor:
        return self.norm(f(x))


# ── More than one stream ──────────────────────────────────────────────────────────────────────────


class B2T(AddNorm):
    """x ← N(x + F(x));   in the last box of a block N(b + x + F(x)), b the block's input

    Bottom-to-top connection: Takase et al. 2022 (2206.00330), eq. 9–10. The stream is (x, b).
    """

    class ends(Ends):
        def open(self, x: Tensor) -> Stream:
            return x, x

        def close(self, stream: Stream) -> Tensor:
            return stream[0]

    def forward(self, stream: Stream, f: Branch) -> Stream:
        x, b = stream
        if not self.place.last:
            return self.norm(x + f(x)), b
        x = self.norm(b + x + f(x))
        return x, x


class ResiDual(AddNorm):
    """x ← N(x + F(x)),   d ← d + F(x);   out = x + N(d)

    Xie et al. 2023 (2304.14802), eq. 3–5. The stream is (x, d).
    """

    class ends(FinalNorm):
        def open(self, x: Tensor) -> Stream:
            return x, x

        def close(self, stream: Stream) -> Tensor:
            return stream[0] + self.norm(stream[1])

    def forward(self, stream: Stream, f: Branch) -> Stream:
        x, d = stream
        branch = f(x)
        return self.norm(x + branch), d + branch


class DLCL(AddNorm):
    """at the start of a block x ← Σₖ Wₗₖ Nₖ(yₖ) over all yₖ so far; x ← x + F(N(x));   out = N(x)

    Dynamic linear combination of layers: Wang et al. 2019 (1906.01787), eq. 7–8, in the pre-norm
    form. y₀ is the embedding (N₀ the identity), yₖ the output of block k; W is initially the mean.
    The stream is (x, the Nₖ(yₖ) so far).
    """

    class ends(FinalNorm):
        def __init__(self, width: int, depth: int, norm: Norm) -> None:
            super().__init__(width, depth, norm)
            self.mix = Combination(width, depth, norm)

        def open(self, x: Tensor) -> Stream:
            return x, ()

        def close(self, stream: Stream) -> Tensor:
            return self.norm(self.mix(*stream)[0])

    def __init__(self, place: Place, norm: Norm) -> None:
        super().__init__(place, norm)
        self.mix = Combination(place.width, place.layer, norm) if place.first else None

    def forward(self, stream: Stream, f: Branch) -> Stream:
        x, history = stream if self.mix is None else self.mix(*stream)
        return x + f(self.norm(x)), history

    def saved_per_position(self) -> int:
        return self.place.width if self.place.first else 0


class Combination(nn.Module):
    """Σₖ wₖ Nₖ(yₖ) over the outputs of the first `count` blocks and the embedding, w learned."""

    def __init__(self, width: int, count: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(width) if count else nn.Identity()
        self.weight = nn.Parameter(torch.full((count + 1,), 1 / (count + 1)))

    def forward(self, x: Tensor, history: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        history = (*history, self.norm(x))
        total = self.weight[0] * history[0]
        for k, y in enumerate(history[1:], start=1):
            total = total + self.weight[k] * y
        return total, history


class Parallel(AddNorm):
    """x ← x + Σᵢ Fᵢ(Nᵢ(x)): all branches of a block read the same x;   out = N(x)

    GPT-J and PaLM (Chowdhery et al. 2022, 2204.02311, §2); each branch with its own norm as in
    GPT-NeoX (Black et al. 2022, 2204.06745, §2.1). The stream is (x, x plus the branches so far).
    """

    class ends(FinalNorm):
        def open(self, x: Tensor) -> Stream:
            return x, x

        def close(self, stream: Stream) -> Tensor:
            return self.norm(stream[0])

    def forward(self, stream: Stream, f: Branch) -> Stream:
        x, total = stream
        total = total + f(self.norm(x))
        return (total, total) if self.place.last else (x, total)

    def saved_per_position(self) -> int:
        return 0 if self.place.first else -self.place.width  # the norms save one and the same x


class HyperConnections(AddNorm):
    """H ← Aᵣᵀ H + b F(N(aᵀ H))ᵀ,   H the n streams;   out = N(sum of the streams)

    Zhu et al. 2024 (2409.19606), eq. 2–4 and 10–13. a (n), Aᵣ (n, n) and b (n) each have a static
    part, initially one stream, the identity and ones, and a dynamic part s tanh(N(H) W), initially
    with W = 0 and s = 0.01. All streams begin as copies of x, so the initial model is pre-norm. The
    stream is (streams, batch, length, width).
    """

    class ends(FinalNorm):
        def __init__(self, width: int, depth: int, norm: Norm, *, streams: int = 4) -> None:
            super().__init__(width, depth, norm)
            _check_option(streams > 0, "streams", "1 or more", streams)
            self.streams = streams

        def open(self, x: Tensor) -> Stream:
            return x.expand(self.streams, *x.shape)

        def close(self, stream: Stream) -> Tensor:
            return self.norm(stream.sum(dim=0))

    def __init__(self, place: Place, norm: Norm, *, streams: int = 4) -> None:
        super().__init__(place, norm)
        _check_option(streams > 0, "streams", "1 or more", streams)
        one = torch.zeros(streams, 1)
        one[place.step % streams] = 1
        # Columns: a, then Aᵣ, then b.
        fixed = torch.cat((one, torch.eye(streams), torch.ones(streams, 1)), dim=1)
        self.fixed = nn.Parameter(fixed)
        self.stream_norm = norm(place.width)
        self.moving = nn.Parameter(torch.zeros(place.width, streams + 2))
        self.strength = nn.Parameter(torch.full((2,), 0.01))

    def forward(self, streams: Tensor, f: Branch) -> Tensor:
        n = streams.shape[0]
        dynamic = torch.tanh(self.stream_norm(streams) @ self.moving)
        strength = torch.cat((self.strength[:1].expand(n + 1), self.strength[1:]))
        weights = self.fixed[:, None, None] + strength * dynamic  # (streams, batch, length, n + 2)
        a, across, b = torch.split(weights, [1, n, 1], dim=-1)
        branch = f(self.norm((a * streams).sum(dim=0)))
        mixed = torch.einsum("iblj,iblw->jblw", across, streams)
        return mixed + b * branch

    def flops_per_position(self) -> int:
        n = len(self.fixed)
        return 2 * n * self.place.width * (n + 2) + 2 * n * n * self.place.width

    def saved_per_position(self) -> int:
        return (2 * len(self.fixed) + 1) * self.place.width


def _check_option(holds: bool, option: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"model.addnorm_options.{option} must be {rule}: got {value!r}.")


ADDNORMS: dict[str, type[AddNorm]] = {
    "post": Post,
    "pre": Pre,
    "res-post": ResPost,
    "sandwich": Sandwich,
    "peri": Peri,
    "admin": Admin,
    "b2t": B2T,
    "dlcl": DLCL,
    "deepnorm": DeepNorm,
    "rezero": ReZero,
    "layerscale": LayerScale,
    "t-fixup": TFixup,
    "fixup": Fixup,
    "scaled": ScaledShortcut,
    "none": NoResidual,
    "normformer": NormFormer,
    "sub-ln": SubLN,
    "dual": ResiDual,
    "mix": Mix,
    "lns": NormScaling,
    "parallel": Parallel,
    "hyper": HyperConnections,
}
