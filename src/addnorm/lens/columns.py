"""Tables: shares of columns in an answer, and interactions between columns.

Both compare a row with a background: rows such as the model was trained on. A share is the mean,
over background rows b, of the integrated gradients from b to the row (expected gradients: Erion et
al. 2021, 1906.10670), over the tokens t of the columns:

    share_j = mean_b (t_j − b_j) · ∫₀¹ ∂f/∂t_j (b + α (t − b)) dα,   Σ_j share_j = f(t) − mean f(b)

An interaction is what two columns do together beyond what each does alone, by partial dependence
PD_J(t) = mean_b f(t_J, b_rest), less the mean answer (Friedman, Popescu 2008, eq. 44):

    I_jk(t) = PD_jk(t) − PD_j(t) − PD_k(t),   H²_jk = Σ I_jk² / Σ PD_jk²
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.lens.attribution import gauss_legendre
from addnorm.models.tabular import FTTransformerModel, TabTransformerModel, TabularModel

CHUNK = 1024
"""Rows that pass the model together."""


@dataclass(frozen=True)
class Shares:
    """Shares of tokens in the answers for some rows.

    Parameters
    ----------
    shares
        (rows, tokens)
    answer
        f of each row, (rows,).
    baseline
        Mean of f over the background rows that a row was compared with, (rows,).
    output
        Which output f is, (rows,).
    """

    shares: Tensor
    answer: Tensor
    baseline: Tensor
    output: Tensor

    @property
    def completeness(self) -> float:
        """Largest |Σ shares − (answer − baseline)| of a row: 0 if the integral were exact."""
        return float((self.shares.sum(dim=1) - (self.answer - self.baseline)).abs().max())


def embed_columns(model: TabularModel, numbers: Tensor, codes: Tensor) -> Tensor:
    """Return one vector for each token of a row, (rows, tokens, width).

    Numbers that pass beside the stack (TabTransformer) are the first entry of theirs.
    """
    if isinstance(model, FTTransformerModel):
        return model.tokens(numbers, codes)
    assert isinstance(model, TabTransformerModel)
    width = model.config.trunk.width
    beside = torch.nn.functional.pad(model.impute(numbers)[..., None], (0, width - 1))
    if not model.config.categories:
        return beside
    return torch.cat((beside, model.tokens(numbers, codes)), dim=1)


def answer_from(model: TabularModel, tokens: Tensor) -> Tensor:
    """Return the mean answer of the members, (rows, outputs), from tokens."""
    if isinstance(model, FTTransformerModel):
        return model.head(model.hidden(tokens)).mean(dim=1)
    assert isinstance(model, TabTransformerModel)
    count = model.config.numbers
    return model.from_tokens(tokens[:, :count, 0], tokens[:, count:]).mean(dim=1)


def column_shares(
    model: TabularModel, tokens: Tensor, background: Tensor, *, draws: int = 64, steps: int = 8
) -> Shares:
    """Return the share of every token in the answer for each row, by expected gradients.

    Parameters
    ----------
    model
        The model; of several outputs, f is the largest for the row.
    tokens, background
        Rows to explain and rows to compare with, both from `embed_columns`.
    draws
        Background rows for each row; which ones follows from the row's number.
    steps
        Nodes of the integral.
    """
    if not len(background):
        raise InputError("a background must have one row or more: got none.")
    count, draws = len(tokens), min(draws, len(background))
    model.eval()
    tokens, background = tokens.detach(), background.detach()
    with torch.no_grad():
        output = answer_from(model, tokens).argmax(dim=1, keepdim=True)
        answer = answer_from(model, tokens).gather(1, output)[:, 0]
    shares = torch.zeros(tokens.shape[:2], dtype=tokens.dtype)
    baseline = torch.zeros(count, dtype=tokens.dtype)
    # Rows of one batch may attend to one another (SAINT): there, one draw at a time.
    together = 1 if model.along_rows else max(1, CHUNK // count)
    for first in range(0, draws, together):
        each = range(first, min(first + together, draws))
        index = [(row + draw * len(background) // draws) for draw in each for row in range(count)]
        start = background[torch.tensor(index) % len(background)]
        end, which = tokens.repeat(len(each), 1, 1), output.repeat(len(each), 1)
        found, low = _integrate(model, start, end, which, steps)
        shares += found.view(len(each), count, -1).sum(dim=0)
        baseline += low.view(len(each), count).sum(dim=0)
    return Shares(shares / draws, answer, baseline / draws, output[:, 0])


def _integrate(
    model: TabularModel, start: Tensor, end: Tensor, output: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the shares along straight paths, (rows, tokens), and f at their starts."""
    total = torch.zeros_like(end)
    for node, weight in zip(*gauss_legendre(steps), strict=True):
        at = (start + node * (end - start)).requires_grad_()
        with torch.enable_grad():
            value = answer_from(model, at).gather(1, output).sum()
        total += weight * torch.autograd.grad(value, at)[0]
    with torch.no_grad():
        low = answer_from(model, start).gather(1, output)[:, 0]
    return ((end - start) * total).sum(dim=2), low


# ── Interactions ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Interactions:
    """What pairs of columns do together beyond what each does alone.

    Parameters
    ----------
    pairs
        Numbers of the two columns.
    values
        I_jk of every row, (pairs, rows), in units of the answer.
    strength
        √(mean I²) over the rows, (pairs,).
    h
        Friedman's H, from 0 (they only add up) to about 1, (pairs,).
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
    owners: Sequence[int],
    columns: Sequence[int],
    output: Tensor | None = None,
) -> Interactions:
    """Return the interactions of all pairs of some columns.

    Parameters
    ----------
    model
        The model.
    tokens, background
        Rows to explain and rows to compare with, both from `embed_columns`.
    owners
        The column that each token is a part of.
    columns
        Columns whose pairs are measured.
    output
        Which output is meant, (rows,); by default the largest for each row.
    """
    model.eval()
    if output is None:
        output = answer_from(model, tokens).argmax(dim=1)
    owner = torch.tensor(list(owners))
    mean = _dependence(model, tokens, background, torch.zeros_like(owner, dtype=torch.bool), output)
    alone = {j: _dependence(model, tokens, background, owner == j, output) - mean for j in columns}
    pairs = tuple(combinations(columns, 2))
    values, joint = [], []
    for j, k in pairs:
        both = (owner == j) | (owner == k)
        effect = _dependence(model, tokens, background, both, output) - mean
        joint.append(effect)
        values.append(effect - alone[j] - alone[k])
    shape = (0, len(tokens))
    rows = torch.stack(values) if values else torch.zeros(shape)
    whole = torch.stack(joint) if joint else torch.zeros(shape)
    strength = rows.square().mean(dim=1).sqrt()
    size = whole.square().mean(dim=1).sqrt()
    return Interactions(pairs, rows, strength, strength / size.clamp(min=1e-12))


def _dependence(
    model: TabularModel, tokens: Tensor, background: Tensor, kept: Tensor, output: Tensor
) -> Tensor:
    """Return PD_J of each row, J the tokens that are kept, (rows,)."""
    total = torch.zeros(len(tokens), dtype=tokens.dtype)
    together = 1 if model.along_rows else max(1, CHUNK // len(tokens))
    for first in range(0, len(background), together):
        rest = background[first : first + together]
        mixed = torch.where(kept[:, None], tokens[None], rest[:, None])
        answers = answer_from(model, mixed.flatten(0, 1))
        chosen = answers.gather(1, output.repeat(len(rest))[:, None])
        total += chosen.view(len(rest), len(tokens)).sum(dim=0)
    return total / len(background)
