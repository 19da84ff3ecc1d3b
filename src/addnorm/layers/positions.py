"""Position schemes: added to the embedding, a rotation of queries and keys, or a score bias.

A scheme can act in three places: on the embedding (`embed`), on queries and keys (`rotate`) and on
the scores (`bias`). Positions on the embedding count real tokens only; the other two depend on
differences of positions, which padding on the left does not change.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError, InputError


class Positions(nn.Module):
    """Base class of the position schemes; it changes nothing.

    Parameters
    ----------
    width
        Width of the stream.
    heads, head_width
        Number of query heads, and the width of each.
    length
        Largest number of positions; only learned positions have this limit.
    causal
        Whether the stack is a decoder.
    """

    rotates = False
    """Whether queries and keys are rotated."""
    has_bias = False
    """Whether something is added to the scores."""
    bias_per_layer = False
    """Whether what is added differs from layer to layer."""

    def embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Return the embedding, (batch, length, width), with the positions added."""
        return x

    def rotate(self, x: Tensor, indices: Tensor, windowed: bool = False) -> Tensor:
        """Return queries or keys, (batch, heads, length, head_width), rotated by position.

        `windowed` is for layers that see a window where others see everything (full_every).
        """
        return x

    def shift_queries(self, q: Tensor, local: nn.Module) -> Tensor:
        """Return queries after adding what the layer learned for all of them."""
        return q

    def bias(
        self, q: Tensor, queries: Tensor, keys: Tensor, local: nn.Module, scale: float
    ) -> Tensor | None:
        """Return what is added to the scaled scores, (batch or 1, heads, query, key).

        Parameters
        ----------
        q
            Queries, (batch, heads, query, head_width).
        queries, keys
            Positions of the queries and of the keys.
        local
            Parameters of the scheme that belong to the layer.
        scale
            Factor of the scores.
        """
        return None

    def local(self, width: int, heads: int, head_width: int) -> nn.Module:
        """Return the parameters of the scheme that belong to one attention layer."""
        return nn.Identity()


class NoPositions(Positions):
    """No positions: an encoder is then equivariant under permutation.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    """

    def __init__(self, width: int, heads: int, head_width: int, length: int, causal: bool) -> None:
        super().__init__()


def sinusoids(indices: Tensor, width: int, base: float, layout: str) -> Tensor:
    """Return the table PE(p, 2i) = sin(p / base^(2i/width)), PE(p, 2i+1) = cos of the same.

    Vaswani et al. 2017, §3.5. Three layouts are in use: `interleaved`, as the paper writes it;
    `halves`, all sines and then all cosines (Transformer-XL, Marian); and `tensor2tensor`, halves
    with the exponent i / (width/2 − 1), so that the last wavelength is exactly base · 2π (fairseq).

    Parameters
    ----------
    indices
        Positions p, of any shape.
    width
        Width of the table.
    base
        Ratio of the longest wavelength to the shortest.
    layout
        interleaved, halves or tensor2tensor.

    >>> sinusoids(torch.arange(2), 4, 1e4, "interleaved")[1].tolist()  # doctest: +ELLIPSIS
    [0.8414..., 0.5403..., 0.0099..., 0.9999...]
    """
    half = width // 2
    steps = max(half - 1, 1) if layout == "tensor2tensor" else half
    exponents = torch.arange(half, dtype=torch.float64, device=indices.device) / steps
    angles = indices.double()[..., None] * base**-exponents
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)


class Sinusoidal(Positions):
    """x ← x + PE(p), a fixed table for any length; see `sinusoids`.

    PE(p + k) = R_k PE(p) with R_k a rotation that does not depend on p.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    base, layout
        As for `sinusoids`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        base: float = 10000.0,
        layout: str = "interleaved",
    ) -> None:
        super().__init__()
        _check_position_choice("layout", layout, ("interleaved", "halves", "tensor2tensor"))
        if width % 2:
            raise ConfigError(
                f"sinusoidal positions need an even width: width={width}. Try {width + 1}."
            )
        _check_position_option(base > 0, "base", "above 0", base)
        self.width, self.base, self.layout = width, base, layout

    def embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x + sinusoids(position_ids, self.width, self.base, self.layout).to(x.dtype)


class Index(Positions):
    """x ← x + p / length, the plain index added to every coordinate: the baseline that fails.

    Unbounded beyond `length`, and one direction of the stream for all positions; with
    `normalised = false` it is x + p. Vaswani et al. 2017, §3.5 have sinusoids in its place.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        normalised: bool = True,
    ) -> None:
        super().__init__()
        self.step = 1 / length if normalised else 1.0

    def embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x + (self.step * position_ids[..., None]).to(x.dtype)


class Concatenated(Positions):
    """x ← (x₁ … x_(d−k), PE(p)), sinusoids of width k in place of the last coordinates.

    Concatenation, the alternative to addition: tokens and positions each have coordinates of their
    own. `share` is k / d. See `sinusoids`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        share: float = 0.25,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        _check_position_option(0 < share < 1, "share", "above 0 and below 1", share)
        _check_position_option(base > 0, "base", "above 0", base)
        self.columns, self.base = max(2, int(share * width) // 2 * 2), base
        if self.columns >= width:
            raise ConfigError(
                f"concatenated positions need a width above 2: width={width}. Try 8 or more."
            )

    def embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        table = sinusoids(position_ids, self.columns, self.base, "interleaved").to(x.dtype)
        tokens = x[..., : -self.columns]
        return torch.cat((tokens, table.expand(*tokens.shape[:-1], -1)), dim=-1)


class Learned(Positions):
    """x ← x + P[p + offset], P learned, for at most `length` positions. Gehring et al. 2017.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    offset
        First rows of the table that are unused: 2 in BART and RoBERTa.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        offset: int = 0,
    ) -> None:
        super().__init__()
        _check_position_option(offset >= 0, "offset", "0 or more", offset)
        self.length, self.offset = length, offset
        self.weight = nn.Parameter(torch.empty(length + offset, width).normal_(std=0.02))

    def embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        # Compiled code cannot read values, so there the padded length is checked instead.
        compiling = torch.compiler.is_compiling()
        length = position_ids.shape[-1] if compiling else int(position_ids.max()) + 1
        if length > self.length:
            raise InputError(
                f"learned positions hold {self.length} positions: got a sequence of {length}. "
                f"Shorten it, or build with length={length}."
            )
        return x + nn.functional.embedding(position_ids + self.offset, self.weight)


class Rotary(Positions):
    """Rotate the pair (x_2i, x_2i+1) of a query or key by the angle p · base^(−2i/head_width).

    Su et al. 2021 (2104.09864), eq. 15. Scores then depend on differences of positions only. Pairs
    are neighbours in `interleaved` (the paper, GPT-J) and i, i + head_width/2 in `halves` (Llama).

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    base, layout
        Base of the angles, and which numbers are pairs.
    share
        Fraction of each head that is rotated, its first numbers (GPT-NeoX: 0.25).
    window_base
        Base in the blocks with a window, where blocks with and without alternate (Gemma 3).
    stretch
        Factor on the wavelengths, for positions beyond those of training: on all of them
        (Chen et al. 2023, 2306.15595), or only on long ones, see `stretch_from`.
    stretch_from, stretch_full
        Wavelengths below the first are not stretched, above the second fully, and in between the
        frequency is interpolated linearly in the number of turns (Llama 3.1: 2048 and 8192).
    """

    rotates = True

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        base: float = 10000.0,
        layout: str = "halves",
        share: float = 1.0,
        window_base: float = 0.0,
        stretch: float = 1.0,
        stretch_from: float = 0.0,
        stretch_full: float = 0.0,
    ) -> None:
        super().__init__()
        _check_position_choice("layout", layout, ("interleaved", "halves"))
        _check_position_option(0 < share <= 1, "share", "above 0 and at most 1", share)
        self.rotated = int(head_width * share)
        if self.rotated % 2 or not self.rotated:
            raise ConfigError(
                "rotary positions rotate pairs, so head_width must be even: "
                f"head_width={head_width}. Try {head_width + 1}."
                if share == 1
                else "rotary positions rotate pairs, so share of a head must be an even number: "
                f"share={share}, head_width={head_width}. Try share=0.5."
            )
        _check_position_option(base > 0, "base", "above 0", base)
        rule = "above 0, or 0 for none"
        _check_position_option(window_base >= 0, "window_base", rule, window_base)
        _check_position_option(stretch > 0, "stretch", "above 0", stretch)
        rule = "above 0 and below stretch_full, or both 0"
        holds = stretch_from == stretch_full == 0 or 0 < stretch_from < stretch_full
        _check_position_option(holds, "stretch_from", rule, stretch_from)
        self.base, self.window_base, self.layout = base, window_base or base, layout
        self.stretch, self.stretch_from, self.stretch_full = stretch, stretch_from, stretch_full

    def frequencies(self, device: torch.device, windowed: bool) -> Tensor:
        """Return the angle of each pair for one position, (rotated / 2,), in float64."""
        half = self.rotated // 2
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        plain = (self.window_base if windowed else self.base) ** -exponents
        if self.stretch == 1.0 or (windowed and self.window_base != self.base):
            return plain
        if not self.stretch_full:
            return plain / self.stretch
        # Turns in stretch_full positions: 1 at the longest wavelength that is kept in part.
        turns = plain * self.stretch_full / (2 * math.pi)
        most = self.stretch_full / self.stretch_from
        kept = ((turns - 1) / (most - 1)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.stretch

    def rotate(self, x: Tensor, indices: Tensor, windowed: bool = False) -> Tensor:
        angles = indices.double()[:, None] * self.frequencies(indices.device, windowed)
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)  # (length, rotated / 2)
        rest = x[..., self.rotated :]
        x = x[..., : self.rotated]
        if self.layout == "halves":
            a, b = x.chunk(2, dim=-1)
            turned = (a * cos - b * sin, b * cos + a * sin)
            return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((pairs, rest), dim=-1) if rest.shape[-1] else pairs


class LinearBias(Positions):
    """score ← score − m_h |i − j|, a fixed slope m_h = 2^(−8h/heads) for head h = 1, 2, ...

    ALiBi: Press, Smith, Lewis 2022 (2108.12409), §3. Where heads is not a power of two, the slopes
    of the power below come first, then every other slope of the power above.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    """

    has_bias = True

    def __init__(self, width: int, heads: int, head_width: int, length: int, causal: bool) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
        slopes += [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
        self.slopes = tuple(slopes[:heads])

    def bias(
        self, q: Tensor, queries: Tensor, keys: Tensor, local: nn.Module, scale: float
    ) -> Tensor | None:
        distance = (queries[:, None] - keys[None, :]).abs()
        slopes = torch.tensor(self.slopes, dtype=q.dtype, device=q.device)
        return (-slopes[:, None, None] * distance)[None]


class Buckets(Positions):
    """score ← score + B[bucket(j − i), head], B learned, one table for all layers of a stack.

    T5: Raffel et al. 2020, §2.1. Near offsets have a bucket each; farther ones share buckets that
    widen logarithmically up to `furthest`. In an encoder, half of the buckets are for the future.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    buckets
        Number of buckets.
    furthest
        Distance from which all positions share the last bucket.
    """

    has_bias = True

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        buckets: int = 32,
        furthest: int = 128,
    ) -> None:
        super().__init__()
        near = buckets // 2 if causal else buckets // 4
        _check_position_option(near > 0, "buckets", "at least 2, or 4 in an encoder", buckets)
        _check_position_option(
            furthest > near, "furthest", f"more than the {near} nearest", furthest
        )
        self.buckets, self.furthest, self.causal = buckets, furthest, causal
        self.weight = nn.Parameter(torch.empty(buckets, heads).normal_(std=0.02))

    def bucket(self, offset: Tensor) -> Tensor:
        """Return the bucket of each offset key − query."""
        count = self.buckets if self.causal else self.buckets // 2
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        start = 0 if self.causal else (offset > 0) * count
        near = count // 2
        steps = (distance.clamp(min=1) / near).log() / math.log(self.furthest / near)
        far = (near + (steps * (count - near)).long()).clamp(max=count - 1)
        return start + torch.where(distance < near, distance, far)

    def bias(
        self, q: Tensor, queries: Tensor, keys: Tensor, local: nn.Module, scale: float
    ) -> Tensor | None:
        rows = self.bucket(keys[None, :] - queries[:, None])
        # (query, key, heads) -> (1, heads, query, key)
        return nn.functional.embedding(rows, self.weight).permute(2, 0, 1)[None]


class Relative(Positions):
    """score(i, j) = (q_i + u)·k_j + (q_i + v)·W r_(i−j), r the sinusoid of the distance.

    Transformer-XL: Dai et al. 2019 (1901.02860), eq. after (5). W belongs to the layer; u and v,
    too, here (the authors' `untie_r`). `shift_queries` returns q + u for the kernel; `bias` is the
    second term.

    Parameters
    ----------
    width, heads, head_width, length, causal
        As for `Positions`.
    base
        As for `sinusoids`.
    """

    has_bias = True
    bias_per_layer = True

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        length: int,
        causal: bool,
        *,
        base: float = 10000.0,
    ) -> None:
        super().__init__()
        if width % 2:
            raise ConfigError(
                f"relative positions need an even width: width={width}. Try {width + 1}."
            )
        _check_position_option(base > 0, "base", "above 0", base)
        self.width, self.base = width, base

    def local(self, width: int, heads: int, head_width: int) -> nn.Module:
        return RelativePart(width, heads, head_width)

    def shift_queries(self, q: Tensor, local: nn.Module) -> Tensor:
        assert isinstance(local, RelativePart)
        return q + local.u[:, None]

    def bias(
        self, q: Tensor, queries: Tensor, keys: Tensor, local: nn.Module, scale: float
    ) -> Tensor | None:
        assert isinstance(local, RelativePart)
        q = (q - local.u[:, None] + local.v[:, None]) * scale  # undoes `shift_queries`
        distance = queries[:, None] - keys[None, :]  # (query, key)
        least = queries[0] - keys[-1]
        spread = torch.arange(queries.shape[0] + keys.shape[0] - 1, device=q.device)
        table = sinusoids(spread + least, self.width, self.base, "halves").to(q.dtype)
        r = local.project(table).view(-1, q.shape[1], q.shape[3]).transpose(0, 1)
        by_distance = q @ r.transpose(-1, -2)  # (batch, heads, query, distance)
        index = (distance - least).expand(*q.shape[:2], -1, -1)
        return by_distance.gather(-1, index)


class RelativePart(nn.Module):
    """The parameters of Transformer-XL's positions in one layer: W, u and v."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, heads * head_width, bias=False)
        nn.init.xavier_uniform_(self.project.weight)
        self.u = nn.Parameter(torch.zeros(heads, head_width))
        self.v = nn.Parameter(torch.zeros(heads, head_width))


POSITIONS: dict[str, Callable[..., Positions]] = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "linear-bias": LinearBias,
    "buckets": Buckets,
    "relative": Relative,
    "index": Index,
    "concatenated": Concatenated,
    "none": NoPositions,
}


def _check_position_option(holds: bool, option: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"model.position_options.{option} must be {rule}: got {value!r}.")


def _check_position_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    _check_position_option(value in choices, option, f"one of {', '.join(choices)}", value)
