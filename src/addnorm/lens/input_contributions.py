"""Contributions of the inputs to every output of one sequence or image.

They are the mean of integrated gradients from one or several backgrounds (expected gradients: Erion
et al. 2021): random texts of the same length, or given ones, such as the mean image. A model
answers anything for a mean embedding, which it has never read.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.lens.attribution import integrated_gradients, token_embedding
from addnorm.lens.look import side_lengths
from addnorm.lens.places import (
    ModelInputs,
    as_tensors,
    find_entries,
    find_sublayers,
    is_recurrent,
)

STEPS, STEPS_OF_FEW, MAX_NODES = 4, 32, 512
"""Nodes of the integrated gradients: at first, at first on few paths, and at most.

They are doubled where the contributions do not sum up: a norm makes a path steep where the
embeddings on it are small. A small classifier was off by 9 % with 64 nodes, by 0.2 % with 256.
"""
MIN_BASELINES, MAX_BASELINES, WORK = 4, 24, 10**11
"""Random texts that a text is compared with; WORK is about the multiplications to spend on it."""
TOLERANCE = 0.02
"""The contributions may miss their sum by this share of it, or by this many logits."""
CHUNK_BYTES = 2**28
"""Memory of one pass of the integrated gradients."""


@dataclass(frozen=True)
class InputContributions:
    """Contributions of the inputs to each output.

    Parameters
    ----------
    values
        Of each side, (outputs, positions).
    error
        Sum of the contributions minus its known value, of the output where it is largest.
    backgrounds
        How many backgrounds they start from.
    """

    values: dict[str, Tensor]
    error: float
    backgrounds: int


@dataclass(frozen=True)
class OutputMetric:
    """The number of each output that is taken apart: a logit, or of classes a margin.

    Parameters
    ----------
    chosen
        Token or class of each output.
    first
        Position of the first output.
    pooled
        Whether the model has one output for the whole sequence.
    contrast
        Whether outputs are classes: their margin is taken apart, the logit minus the mean of the
        others'.
    """

    chosen: Tensor
    first: int
    pooled: bool
    contrast: bool

    def at(self, outputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the metric of a batch whose rows are about these outputs."""
        batch, chosen = torch.arange(len(outputs)), self.chosen[outputs]

        def metric(logits: Tensor) -> Tensor:
            own = logits if self.pooled else logits[batch, self.first + outputs]
            count, value = own.shape[-1], own[batch, chosen]
            return (value - own.mean(dim=-1)) * (count / (count - 1)) if self.contrast else value

        return metric


def input_contributions(
    model: nn.Module,
    inputs: ModelInputs,
    metric: OutputMetric,
    backgrounds: Mapping[str, Tensor],
) -> InputContributions:
    """Return the contributions of the inputs to every output.

    A row of a batch is about one output and one background. Outputs whose contributions do not sum
    up are integrated again with twice the nodes.

    Parameters
    ----------
    model, inputs
        What is called, with what: one row.
    metric
        What is taken apart.
    backgrounds
        Of each side inputs to start from, (backgrounds, ...).
    """
    count, chunk = len(metric.chosen), max(1, CHUNK_BYTES // row_bytes(model, inputs))
    draws = len(next(iter(backgrounds.values())))
    steps = STEPS
    if draws < MIN_BASELINES:  # few paths: more nodes on each, as far as the work allows
        affordable = WORK // (_row_work(model, inputs) * draws * count)
        steps = max(STEPS, min(STEPS_OF_FEW, affordable))
    totals: dict[str, Tensor] = {}
    errors, sizes = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    outputs = torch.arange(count)
    while True:
        for each in (errors, sizes, *totals.values()):
            each[outputs] = 0
        pairs = torch.cartesian_prod(outputs, torch.arange(draws))
        for part in torch.split(pairs, chunk):
            rows = part[:, 0]
            start = {side: other[part[:, 1]] for side, other in backgrounds.items()}
            many = _repeat(inputs, len(part))
            result = integrated_gradients(model, many, metric.at(rows), baseline=start, steps=steps)
            for side, each in result.contributions.items():
                total = totals.setdefault(side, each.new_zeros(count, each.shape[1]))
                total.index_add_(0, rows, each / draws)
            errors.index_add_(0, rows, result.row_errors() / draws)
            change = (result.values - result.baselines).abs().double()
            sizes.index_add_(0, rows, change / draws)
        doubtful = errors.abs() > TOLERANCE * sizes.clamp(min=1)
        outputs, steps = doubtful.nonzero()[:, 0], 2 * steps
        work = _row_work(model, inputs) * len(outputs) * draws * steps
        if not len(outputs) or steps > MAX_NODES or work > WORK:
            return InputContributions(totals, float(errors[errors.abs().argmax()]), draws)


def _repeat(inputs: ModelInputs, count: int) -> ModelInputs:
    if isinstance(inputs, Tensor):
        return inputs.expand(count, *inputs.shape[1:])
    if isinstance(inputs, Mapping):
        return {name: each.expand(count, *each.shape[1:]) for name, each in inputs.items()}
    return [each.expand(count, *each.shape[1:]) for each in inputs]


def random_texts(
    model: nn.Module,
    inputs: ModelInputs,
    special: Mapping[str, Collection[int]],
    *,
    outputs: int = 1,
) -> dict[str, Tensor]:
    """Return of each side random tokens in place of the inputs', special ones kept, (texts, n).

    There are fewer for large models and for many outputs.
    """
    affordable = WORK // (_row_work(model, inputs) * outputs * STEPS)
    draws = max(MIN_BASELINES, min(MAX_BASELINES, affordable))
    generator = torch.Generator().manual_seed(0)
    texts = {}
    for side, ids in zip(find_entries(model), as_tensors(inputs), strict=False):
        embedding, fixed = token_embedding(model, side), set(special.get(side, ()))
        if embedding is None:
            raise InputError(
                "random texts are made of token ids, which this model does not read. Pass "
                "backgrounds: inputs that its contributions start from."
            )
        usual = torch.tensor([i for i in range(embedding.vocab) if i not in fixed] or [0])
        drawn = usual[torch.randint(len(usual), (draws, ids.shape[1]), generator=generator)]
        kept = torch.isin(ids, torch.tensor(sorted(fixed), dtype=ids.dtype))
        texts[side] = torch.where(kept, ids, drawn.to(ids.dtype))
    return texts


def _row_work(model: nn.Module, inputs: ModelInputs) -> int:
    """Return about how many multiplications one row needs: the weights, and the attention."""
    lengths = side_lengths(model, inputs)
    size, longest = sum(each.numel() for each in model.parameters()), max(lengths.values())
    steps = [] if is_recurrent(model) else find_sublayers(model)
    mixing = sum(step.box.place.width * longest for step in steps if step.heads)
    return (size + 2 * mixing) * sum(lengths.values())


def row_bytes(model: nn.Module, inputs: ModelInputs) -> int:
    """Return about how much memory one row of a pass with gradients needs."""
    lengths, item = side_lengths(model, inputs), next(model.parameters()).element_size()
    config, row = model.config, 0
    if is_recurrent(model):  # gates, states and the scores of every source position
        width, depth = int(config.width), int(config.depth)  # type: ignore[union-attr, arg-type]
        row = 16 * depth * width * sum(lengths.values())
        row += lengths["decoder"] * lengths["encoder"] * width
    else:
        for step in find_sublayers(model):
            output = getattr(step.sublayer, "output", None)  # a product-key memory has none
            inner = output.in_features if isinstance(output, nn.Linear) else step.box.place.width
            row += lengths[step.side] * (6 * step.box.place.width + 4 * inner)
    vocab = getattr(config, "vocab", 0) or 0
    row += 3 * list(lengths.values())[-1] * int(vocab)
    return item * row
