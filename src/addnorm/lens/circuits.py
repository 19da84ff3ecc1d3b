"""What the weights say by themselves: circuits of heads, virtual weights, neurons.

    QK circuit   W_Eᵀ W_Qᵀ W_K W_E   which token attends to which
    OV circuit   W_U W_O W_V W_E     what attending to a token does to the logits
    virtual      W_read W_write      what one sublayer reads of what another wrote

Elhage et al. 2021, "A mathematical framework for transformer circuits". All of them are products of
a tall and a wide matrix and stay factored, so a vocabulary of 50 000 is no problem. What one writes
reaches another through the norms between them, each x → γ ⊙ x with its scale and centring left out
(they depend on the input), and past all other branches: a vector g, so W_read diag(g) W_write. In
pre-norm g is γ of the reader's norm; in post-norm the product of γ from the writer's box to the one
before the reader; in DeepNorm and Admin also of α and ω (path_gains.py). Biases are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.attention import Attention
from addnorm.layers.embeddings import Tokens
from addnorm.layers.feedforward import FeedForward
from addnorm.layers.heads import MaskedHead, TokenHead
from addnorm.lens.look import Look
from addnorm.lens.path_gains import (
    closing_gain,
    memory_gain,
    path_gain,
    read_gain,
    with_gains,
)
from addnorm.lens.places import NamedSublayer, find_sides, find_step, find_sublayers, split_head
from addnorm.models.transformer import Base, EncoderDecoder


@dataclass(frozen=True)
class Factored:
    """The matrix left @ right: (rows, rank) and (rank, columns)."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """Return the whole matrix."""
        return self.left @ self.right

    @property
    def T(self) -> "Factored":
        return Factored(self.right.T, self.left.T)

    def __matmul__(self, other: "Factored") -> "Factored":
        return Factored(self.left @ (self.right @ other.left), other.right)

    def norm(self) -> float:
        """Return the Frobenius norm, from the two small Gram matrices."""
        square = ((self.left.T @ self.left) * (self.right @ self.right.T)).sum()
        return math.sqrt(max(float(square), 0.0))

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues that may differ from 0: those of right @ left."""
        return torch.linalg.eigvals(self.right @ self.left)

    def singular_values(self) -> Tensor:
        """Return the singular values that may differ from 0."""
        (_, a), (_, b) = torch.linalg.qr(self.left), torch.linalg.qr(self.right.T)
        return torch.linalg.svdvals(a @ b.T)

    def top(self, count: int = 10) -> list[tuple[int, int, float]]:
        """Return the largest entries as (row, column, value), largest a few rows at a time."""
        best: list[tuple[int, int, float]] = []
        chunk = max(1, 2**22 // self.right.shape[1])
        for start in range(0, len(self.left), chunk):
            part = self.left[start : start + chunk] @ self.right
            values, places = part.flatten().topk(min(count, part.numel()))
            rows, columns = places // part.shape[1] + start, places % part.shape[1]
            best += zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
        return sorted(best, key=lambda entry: -entry[2])[:count]


# ── Reading and writing ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class HeadWeights:
    """The four matrices of one head: query, key, value (head_width, width), output (width, ...)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @property
    def qk(self) -> Factored:
        """W_Qᵀ W_K: the score of a query and a key is x_q · (W_Qᵀ W_K x_k), without the scale."""
        return Factored(self.query.T, self.key)

    @property
    def ov(self) -> Factored:
        """W_O W_V: what the head writes for what it attends to."""
        return Factored(self.output, self.value)


def head_weights(
    model: nn.Module, head: str, *, fold: bool = True, writer: str | None = None
) -> HeadWeights:
    """Return the matrices of a head, such as `decoder.0.attention.3`.

    Parameters
    ----------
    model
        A model of addnorm.
    head
        A place and a number.
    fold
        Whether queries, keys and values include the gain of the norm that they are read through.
    writer
        A place, or INPUT: they include the gain of the whole path from there. Keys and values of
        encoder-decoder attention are on the path of the encoder, queries on that of the decoder.
    """
    place, number = split_head(head)
    step = find_step(model, place)
    if number is None or not 0 <= number < step.heads:
        raise InputError(
            f"a head is a place and a number below {step.heads}: got {head!r}. "
            f"Try {place + '.0'!r}."
        )
    sublayer = step.sublayer
    assert isinstance(sublayer, Attention)
    size, matrices = sublayer.head_width, sublayer.matrices()
    shared = number * sublayer.kv_heads // sublayer.heads
    query_rows, shared_rows = (slice(n * size, (n + 1) * size) for n in (number, shared))
    gain, memory = _reading_gains(model, step, writer)
    gain, memory = (g if fold else torch.ones_like(g) for g in (gain, memory))
    with torch.no_grad():
        return HeadWeights(
            matrices["query"][query_rows] * gain,
            matrices["key"][shared_rows] * memory,
            matrices["value"][shared_rows] * memory,
            matrices["output"][:, query_rows].clone(),
        )


INPUT = "input"
"""As a writer: what enters the stack, the embedding."""


def _reading_gains(
    model: nn.Module, step: NamedSublayer, writer: str | None
) -> tuple[Tensor, Tensor]:
    """Return the gains of the stream that a sublayer reads, and of its keys and values."""
    source = None if writer == INPUT else writer
    gain = read_gain(model, step) if writer is None else path_gain(model, source, step.name)
    if step.role != "memory":
        return gain, gain
    if writer is None:
        return gain, closing_gain(model, "encoder")
    return gain, memory_gain(model, source)


def embedding_matrix(model: nn.Module, side: str | None = None) -> Tensor:
    """Return W_E, (width, vocab), with its scale and the gain of an embedding norm (BERT's).

    Of a side, by default the last.
    """
    tokens = getattr(model, "tokens", None)
    if isinstance(model, EncoderDecoder) and side == "encoder":
        tokens = model.source_tokens or tokens
    if not isinstance(tokens, Tokens):
        raise InputError("this circuit needs a model that reads token ids.")
    own = find_sides(model).get(side or "", list(find_sides(model).values())[-1])
    embedding = with_gains(own.norm)(tokens.weight * tokens.scale).detach().T
    project = own.project
    return project.weight.detach() @ embedding if isinstance(project, nn.Linear) else embedding


def unembedding_matrix(model: nn.Module, *, fold: bool = True) -> Tensor:
    """Return W_U, (vocab, width); with `fold`, times the gain of the last norm.

    That is the final norm of the arrangement, in post-norm the norm of the last box; in ResiDual
    the mean of both.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, TokenHead) or not isinstance(model, Base):
        raise InputError("this circuit needs a model with a token head.")
    weight = (head.matrix(model.embedding()) * head.scale).detach()
    if isinstance(head, MaskedHead):  # its layer before W_U, without the activation
        weight = (with_gains(head.norm)(weight) @ head.transform.weight).detach()
    return weight * closing_gain(model, list(find_sides(model))[-1]) if fold else weight


def qk_circuit(model: nn.Module, head: str) -> Factored:
    """Return which token attends to which: (query token, key token), without scale and positions.

    The keys of encoder-decoder attention are tokens of the source, on the direct path through the
    encoder.
    """
    weights = head_weights(model, head, writer=INPUT)
    queries, keys = embedding_matrix(model, _side_of(head)), _attended_embedding(model, head)
    return Factored(queries.T @ weights.query.T, weights.key @ keys)


def ov_circuit(model: nn.Module, head: str) -> Factored:
    """Return what attending to a token adds to every logit: (output token, attended token)."""
    weights = head_weights(model, head, writer=INPUT)
    effect = _direct_effect(model, split_head(head)[0])
    return Factored(effect @ weights.output, weights.value @ _attended_embedding(model, head))


def _attended_embedding(model: nn.Module, head: str) -> Tensor:
    is_memory = find_step(model, split_head(head)[0]).role == "memory"
    return embedding_matrix(model, "encoder" if is_memory else _side_of(head))


def _direct_effect(model: nn.Module, place: str) -> Tensor:
    """Return what a vector that a place writes does to the logits directly, (vocab, width)."""
    if find_step(model, place).side != list(find_sides(model))[-1]:
        return unembedding_matrix(model)  # the encoder of two: no direct path
    return unembedding_matrix(model, fold=False) * path_gain(model, place, None)


def _side_of(name: str) -> str | None:
    first = name.split(".")[0]
    return first if first in ("encoder", "decoder") else None


def copying_score(model: nn.Module, head: str) -> float:
    """Return Σλ / Σ|λ| over the eigenvalues of the OV circuit: 1 if it copies what it attends to.

    Elhage et al. 2021, "Copying / primitive OV".
    """
    values = ov_circuit(model, head).eigenvalues()
    return float(values.real.sum() / values.abs().sum().clamp(min=1e-30))


# ── Between sublayers ─────────────────────────────────────────────────────────────────────────────


def write_matrix(model: nn.Module, name: str) -> Tensor:
    """Return what a sublayer or head writes with: (width, inner)."""
    place, head = split_head(name)
    if head is not None:
        return head_weights(model, name).output
    return find_step(model, place).sublayer.output.weight.detach()


def read_matrices(model: nn.Module, name: str, *, writer: str | None = None) -> dict[str, Tensor]:
    """Return what a sublayer or head reads with: query, key, value; or input and gate of an FFN.

    `writer` is that of `head_weights`.
    """
    place, head = split_head(name)
    if head is not None:
        weights = head_weights(model, name, writer=writer)
        return {"query": weights.query, "key": weights.key, "value": weights.value}
    step = find_step(model, place)
    gain, memory = _reading_gains(model, step, writer)
    return {
        matrix: weight.detach() * (memory if matrix in ("key", "value") else gain)
        for matrix, weight in step.sublayer.matrices().items()
        if matrix not in ("output", "relative")
    }


def virtual_weights(model: nn.Module, writer: str, reader: str, matrix: str) -> Tensor:
    """Return W_read diag(g) W_write: how one sublayer reads what another wrote, (inner, inner).

    g is the gain of the direct path between them (`path_gain`).

    Parameters
    ----------
    model
        A model of addnorm.
    writer, reader
        Places or heads; the writer comes first in the forward pass.
    matrix
        Which of the reader's matrices: query, key, value, input or gate.
    """
    order = [step.name for step in find_sublayers(model)]
    one, other = split_head(writer)[0], split_head(reader)[0]
    find_step(model, one), find_step(model, other)
    if order.index(one) >= order.index(other):
        raise InputError(f"the writer must come before the reader: got {writer!r}, {reader!r}.")
    readers = read_matrices(model, reader, writer=one)
    if matrix not in readers:
        raise InputError(f"{reader} reads with {', '.join(readers)}: got {matrix!r}.")
    return readers[matrix] @ write_matrix(model, writer)


def composition(
    model: nn.Module, writer: str, reader: str, *, fold: bool = True
) -> dict[str, float]:
    """Return how much queries, keys and values of one head read what an earlier head wrote.

        Q: ‖W_QKᵀ W_OV‖ / (‖W_QK‖ ‖W_OV‖)   K: ‖W_QK W_OV‖ / ...   V: ‖W_OV′ W_OV‖ / ...

    Frobenius norms. Elhage et al. 2021, "Composition". With `fold`, what reads the writer includes
    the gain of the path between them (`path_gain`).
    """
    one, other = (head_weights(model, name, fold=fold) for name in (writer, reader))
    along = head_weights(model, reader, fold=fold, writer=split_head(writer)[0])
    written = one.ov
    parts = {
        "query": Factored(other.key.T, along.query),
        "key": Factored(other.query.T, along.key),
        "value": along.ov,
    }
    scale = written.norm()
    return {
        name: (part @ written).norm() / max(part.norm() * scale, 1e-30)
        for name, part in parts.items()
    }


def random_composition(width: int, rank: int, *, draws: int = 20, seed: int = 0) -> float:
    """Return the mean composition score of random matrices of this width and rank: the baseline."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Factored:
        return Factored(
            torch.randn(width, rank, generator=generator),
            torch.randn(rank, width, generator=generator),
        )

    pairs = [(draw(), draw()) for _ in range(draws)]
    scores = [(a @ b).norm() / (a.norm() * b.norm()) for a, b in pairs]
    return sum(scores) / draws


# ── Neurons ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """One unit of a feed-forward network as a memory: what it detects, what it then writes.

    Geva et al. 2021 (2012.14913): rows of the first matrix are keys, columns of the second values.

    Parameters
    ----------
    place, number
        Which neuron.
    fired_by
        Tokens whose embedding alone has the largest product with its key, with that product.
    promotes, demotes
        Tokens whose logits it raises and lowers most, by how much for an activation of 1.
    """

    place: str
    number: int
    fired_by: list[tuple[int, float]]
    promotes: list[tuple[int, float]]
    demotes: list[tuple[int, float]]


def neuron(model: nn.Module, place: str, number: int, count: int = 10) -> Neuron:
    """Return what a neuron of a feed-forward network detects and writes, in tokens."""
    sublayer = find_step(model, place).sublayer
    if not isinstance(sublayer, FeedForward):
        raise InputError(f"{place} is not a feed-forward network. Try a place that ends in ffn.")
    size = sublayer.output.in_features
    if not 0 <= number < size:
        raise InputError(f"{place} has {size} neurons, numbered from 0: got {number}.")
    readers = read_matrices(model, place, writer=INPUT)
    key = readers.get("gate", readers["input"])[number]
    fires = key @ embedding_matrix(model, _side_of(place))
    effect = _direct_effect(model, place) @ sublayer.output.weight.detach()[:, number]
    return Neuron(
        place=place,
        number=number,
        fired_by=_largest(fires, count),
        promotes=_largest(effect, count),
        demotes=[(token, -value) for token, value in _largest(-effect, count)],
    )


def top_activations(
    capture: Look, place: str, number: int, count: int = 10
) -> list[tuple[int, int, float]]:
    """Return where a neuron fired most in a look at `neurons`: (row, position, activation)."""
    if place not in capture.neurons:
        raise InputError(f"this look has no neurons of {place!r}. Ask for 'neurons:{place}'.")
    values = capture.neurons[place][..., number]
    largest = values.flatten().topk(min(count, values.numel()))
    length = values.shape[1]
    pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return [(place // length, place % length, value) for place, value in pairs]


def _largest(values: Tensor, count: int) -> list[tuple[int, float]]:
    largest = values.topk(min(count, len(values)))
    return list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))


def name_entries(
    entries: Sequence[tuple[int, int, float]], names: Sequence[str]
) -> list[tuple[str, str, float]]:
    """Return entries of a token-by-token matrix with the names of the tokens."""
    return [(names[row], names[column], value) for row, column, value in entries]
