"""Contributions of a table's columns to an output, and interactions between columns.

Both compare a row with a background: rows like those that the model was trained on. The
contribution c_j is the mean, over background rows b, of the integrated gradients from b to the row
(expected gradients: Erion et al. 2021, 1906.10670), over the tokens t of the columns:

    c_j = mean_b (t_j − b_j) · ∫₀¹ ∂f/∂t_j (b + α (t − b)) dα,   Σ_j c_j = f(t) − mean f(b)

An interaction is the joint effect of two columns beyond the sum of their single effects, by partial
dependence PD_J(t) = mean_b f(t_J, b_rest) − mean_b f(b) (Friedman, Popescu 2008, eq. 44):

    I_jk(t) = PD_jk(t) − PD_j(t) − PD_k(t),   H²_jk = Σ I_jk² / Σ PD_jk²
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.lens.attribution import gauss_legendre
from addnorm.models.instant_table import InstantPredictor
from addnorm.models.tabular import (
    FoldModel,
    FTTransformerModel,
    TabTransformerModel,
    TabularModel,
)

CHUNK = 1024
"""Rows in one forward pass."""


@dataclass(frozen=True)
class ColumnContributions:
    """Contributions of tokens to the outputs for some rows.

    Parameters
    ----------
    contributions
        (rows, tokens)
    output
        f of each row, (rows,).
    baseline
        Mean of f over the background rows that a row was compared with, (rows,).
    output_index
        Which output of the network f is, (rows,).
    """

    contributions: Tensor
    output: Tensor
    baseline: Tensor
    output_index: Tensor

    @property
    def completeness(self) -> float:
        """Largest |Σ_j c_j − (output − baseline)| of a row: 0 if the integral were exact."""
        return float((self.contributions.sum(dim=1) - (self.output - self.baseline)).abs().max())


def embed_columns(model: TabularModel, numbers: Tensor, codes: Tensor) -> Tensor:
    """Return one vector for each token of a row, (rows, tokens, width).

    Numbers that do not pass through the stack (TabTransformer) are tokens with the number in the
    first element. The vectors of the models of several folds are joined.
    """
    if isinstance(model, FoldModel):
        return torch.cat([embed_columns(each, numbers, codes) for each in model.parts()], dim=-1)
    if isinstance(model, FTTransformerModel | InstantPredictor):
        return model.tokens(numbers, codes)
    assert isinstance(model, TabTransformerModel)
    width = model.config.trunk.width
    number_tokens = torch.nn.functional.pad(model.impute(numbers)[..., None], (0, width - 1))
    if not model.config.categories:
        return number_tokens
    return torch.cat((number_tokens, model.tokens(numbers, codes)), dim=1)


def outputs_from(model: TabularModel, tokens: Tensor) -> Tensor:
    """Return the mean output of the members, or the number they predict, (rows, outputs)."""
    if isinstance(model, FoldModel):
        parts = zip(model.parts(), tokens.chunk(model.config.folds, dim=-1), strict=True)
        return torch.stack([outputs_from(each, part) for each, part in parts]).mean(dim=0)
    if isinstance(model, FTTransformerModel):
        return model.answers(model.from_hidden(model.hidden(tokens)))
    if isinstance(model, InstantPredictor):
        return model.from_tokens(tokens)[:, 0]
    assert isinstance(model, TabTransformerModel)
    count = model.config.numbers
    return model.answers(model.from_tokens(tokens[:, :count, 0], tokens[:, count:]))


def scores_from(model: TabularModel, tokens: Tensor) -> Tensor:
    """Return what is explained, (rows, outputs): the output, or of several classes their margins.

    The margin of a class is its logit minus the mean of the other logits. Probabilities depend on
    margins alone: what is added to all logits has no effect, and no contribution.
    """
    outputs = outputs_from(model, tokens)
    count = outputs.shape[1]
    if count == 1:
        return outputs
    return (outputs - outputs.mean(dim=1, keepdim=True)) * (count / (count - 1))


def column_contributions(
    model: TabularModel, tokens: Tensor, background: Tensor, *, draws: int = 64, steps: int = 8
) -> ColumnContributions:
    """Return the contribution of every token to the output for each row, by expected gradients.

    Parameters
    ----------
    model
        The model; with several outputs, f is the largest one of the row.
    tokens, background
        Rows to explain and rows to compare them with, both from `embed_columns`.
    draws
        Background rows for each row; the row's index determines which ones. If the background is
        the rows themselves, none is compared with itself, unless all are drawn.
    steps
        Nodes of the integral.
    """
    if not len(background):
        raise InputError("a background must have at least one row: got none.")
    count, draws = len(tokens), min(draws, len(background))
    model.eval()
    tokens, background = tokens.detach(), background.detach()
    with torch.no_grad():
        outputs = scores_from(model, tokens)
        index = outputs.argmax(dim=1, keepdim=True)
        output = outputs.gather(1, index)[:, 0]
    contributions = torch.zeros(tokens.shape[:2], dtype=tokens.dtype)
    baseline = torch.zeros(count, dtype=tokens.dtype)
    # In a shuffled order, so that what repeats from row to row is drawn as everything else is.
    order = torch.randperm(len(background), generator=torch.Generator().manual_seed(0))
    place = order.argsort()[torch.arange(count) % len(background)]
    # Rows of one batch may attend to one another (SAINT): there, one draw at a time.
    together = 1 if model.along_rows else max(1, CHUNK // count)
    for first in range(0, draws, together):
        chunk = range(first, min(first + together, draws))
        steps_on = [(2 * draw + 1) * len(background) // (2 * draws) for draw in chunk]
        drawn = torch.cat([(place + step) % len(background) for step in steps_on])
        start = background[order[drawn]]
        end, index_of_end = tokens.repeat(len(chunk), 1, 1), index.repeat(len(chunk), 1)
        integral, start_output = _integrate(model, start, end, index_of_end, steps)
        contributions += integral.view(len(chunk), count, -1).sum(dim=0)
        baseline += start_output.view(len(chunk), count).sum(dim=0)
    return ColumnContributions(contributions / draws, output, baseline / draws, index[:, 0])


def _integrate(
    model: TabularModel, start: Tensor, end: Tensor, index: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the contributions along straight paths, (rows, tokens), and f at their starts."""
    total = torch.zeros_like(end)
    for node, weight in zip(*gauss_legendre(steps), strict=True):
        point = (start + node * (end - start)).requires_grad_()
        with torch.enable_grad():
            value = scores_from(model, point).gather(1, index).sum()
        total += weight * torch.autograd.grad(value, point)[0]
    with torch.no_grad():
        start_output = scores_from(model, start).gather(1, index)[:, 0]
    return ((end - start) * total).sum(dim=2), start_output


# ── Interactions ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Interactions:
    """Joint effects of pairs of columns beyond the sum of their single effects.

    Parameters
    ----------
    pairs
        Indices of the two columns.
    values
        I_jk of every row, (pairs, rows), in units of the output.
    strength
        √(mean I²) over the rows, (pairs,).
    h
        Friedman's H, from 0 (the effects are additive) to about 1, (pairs,).
    """

    pairs: tuple[tuple[int, int], ...]
    values: Tensor
    strength: Tensor
    h: Tensor


@torch.no_grad()
def column_interactions(
    model: TabularModel,
    tokens: Tensor,
    background: Tensor,
    column_of_token: Sequence[int],
    columns: Sequence[int],
    output_index: Tensor | None = None,
) -> Interactions:
    """Return the interactions of all pairs of some columns.

    Parameters
    ----------
    model
        The model.
    tokens, background
        Rows to explain and rows to compare them with, both from `embed_columns`.
    column_of_token
        The column that each token belongs to.
    columns
        Columns whose pairs are measured.
    output_index
        Which output f is, (rows,); by default the largest for each row.
    """
    model.eval()
    if output_index is None:
        output_index = scores_from(model, tokens).argmax(dim=1)
    owner = torch.tensor(list(column_of_token))

    def dependence(kept: Tensor) -> Tensor:
        return _partial_dependence(model, tokens, background, kept, output_index)

    mean = dependence(torch.zeros_like(owner, dtype=torch.bool))
    single = {j: dependence(owner == j) - mean for j in columns}
    pairs = tuple(combinations(columns, 2))
    joint = {(j, k): dependence((owner == j) | (owner == k)) - mean for j, k in pairs}
    empty = torch.zeros(0, len(tokens))
    values = [joint[j, k] - single[j] - single[k] for j, k in pairs]
    interaction = torch.stack(values) if values else empty
    effect = torch.stack(list(joint.values())) if joint else empty
    strength = interaction.square().mean(dim=1).sqrt()
    size = effect.square().mean(dim=1).sqrt()
    return Interactions(pairs, interaction, strength, strength / size.clamp(min=1e-12))


def _partial_dependence(
    model: TabularModel, tokens: Tensor, background: Tensor, kept: Tensor, index: Tensor
) -> Tensor:
    """Return mean_b f(t_J, b_rest) of each row, J the tokens that are kept, (rows,)."""
    total = torch.zeros(len(tokens), dtype=tokens.dtype)
    together = 1 if model.along_rows else max(1, CHUNK // len(tokens))
    for first in range(0, len(background), together):
        rest = background[first : first + together]
        mixed = torch.where(kept[:, None], tokens[None], rest[:, None])
        outputs = scores_from(model, mixed.flatten(0, 1))
        chosen = outputs.gather(1, index.repeat(len(rest))[:, None])
        total += chosen.view(len(rest), len(tokens)).sum(dim=0)
    return total / len(background)
