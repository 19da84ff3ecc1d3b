"""The instant model: a Transformer that predicts the rows of a small table from its other rows.

    cells, target ─► features ─► tokens ─► [columns ► rows ► ffn] × depth ─► target token ─► heads

Every cell is a token, and the target is the first token of its row; that of an unknown row is a
learned vector. In each block the tokens of a row attend to one another, then each token attends to
the tokens of its own column in the known rows. Nothing tells columns or rows apart but their
content, so their order changes nothing. The last block computes the target token only. The features
of a cell, and random numbers that identify its column: instant_cells.py.

Prior-fitted networks: Müller et al. 2022 (2112.10510). Cells as tokens with attention over columns,
then over rows: Hollmann et al. 2025, Pfefferle et al. 2025 (2511.03634), whose cells are numbers
without these features.

The heads vote: an unknown row weights the known rows by the similarity of their target tokens, and
the weights of the known rows of a class add up to its probability (matching networks: Vinyals et
al. 2016, 1606.04080, eq. 1). With equal weights the answer is the share of each class. Numbers vote
for bins. A linear map of the target token is added to the logarithm of the votes, so that the
answer is not bound to be a mean of known ones. It is a function of the number of a class, which the
prior draws at random and over whose rotations predictions are averaged.

Shapes: cells (tables, rows, columns); stream (tables · rows, 1 + columns, width).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.config import Config, ModelConfig
from addnorm.errors import AddnormError, InputError, SavedError
from addnorm.files import INSTANT_MODEL
from addnorm.layers.addnorm import Place
from addnorm.layers.attention import Attention
from addnorm.layers.init import INITS, init_stack_
from addnorm.layers.masks import Mask
from addnorm.layers.positions import Positions
from addnorm.layers.rows import KnownRowAttention, RowCache, RowContext
from addnorm.layers.stack import AnySublayer
from addnorm.models.bins import bin_means
from addnorm.models.build import make_positions, make_qk_norm, make_score, make_stack, make_sublayer
from addnorm.models.instant_cells import (
    FEATURES,
    ColumnStats,
    cell_features,
    column_identities,
    column_stats,
)
from addnorm.models.instant_solvers import SOLVERS, Solved, count_parts, solve, solver_features
from addnorm.models.saved import read_tensors, require_matching_tensors, write_tensors
from addnorm.models.transformer import Maps


@dataclass(frozen=True, kw_only=True)
class InstantConfig:
    """The configuration of an instant model.

    Parameters
    ----------
    trunk
        Configuration of the stack, with positions "none".
    identity
        Random numbers that tell a column from the others; 0 for none.
    solvers
        Whether the predictions of closed-form models are inputs; see instant_solvers.py.
    classes
        Most classes of a table.
    bins, reach
        Bins of a predicted number, and the standardised value at which the last of them ends.
    """

    trunk: ModelConfig
    identity: int = 0
    solvers: bool = False
    classes: int = 10
    bins: int = 64
    reach: float = 8.0


class RowStates(NamedTuple):
    """What is known of rows after the stack."""

    hidden: Tensor
    """(tables, rows, width)"""
    answers: Tensor | None
    """(tables, rows, SOLVERS, outcomes): the solvers' predictions, of known rows without them."""


@dataclass(frozen=True)
class KnownRows:
    """The known rows of a batch of tables, read once: what many unknown rows are predicted from."""

    columns: ColumnStats
    is_category: Tensor | None
    real: Tensor | None
    identity: Tensor | None
    solved: Solved | None
    cache: RowCache
    states: RowStates
    """Of the known rows after the stack."""
    target: Tensor
    """(tables, known): classes, or standardised numbers."""
    count: int

    def numel(self) -> int:
        """Return how many numbers are cached."""
        return sum(keys.numel() + values.numel() for keys, values in self.cache.values())


class Vote(nn.Module):
    """The known rows vote with weights softmax(q k / √width) for what an unknown row is.

        share_j = (n Σ_i a_i b_ij + s / m) / (n + s)

    where a is (unknown, known), b_ij the part of known row i's vote that is for outcome j of m, n
    the number of known rows, and s learned: no outcome is impossible. Without a known row every
    outcome has the same share.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.smoothing = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor, known: Tensor, ballots: Tensor) -> Tensor:
        """Return the logarithms of the shares, (tables, unknown, outcomes).

        `hidden` and `known` are states of unknown and known rows, (tables, rows, width); `ballots`
        is (tables, known, outcomes).
        """
        count, outcomes = ballots.shape[1:]
        scores = self.query(hidden) @ self.key(known).transpose(1, 2) * hidden.shape[-1] ** -0.5
        votes = scores.softmax(dim=-1) @ ballots if count else ballots.new_zeros(())
        smoothing = self.smoothing.exp()
        shares = (count * votes + smoothing / outcomes) / (count + smoothing)
        return shares.log().expand(*hidden.shape[:2], outcomes)


class SolverInputs(nn.Module):
    """What the network makes of the solvers' predictions, before and after the stack."""

    def __init__(self, config: InstantConfig) -> None:
        super().__init__()
        width = config.trunk.width
        self.classes = nn.Linear(SOLVERS * width, width, bias=False)
        self.numbers = nn.Linear(SOLVERS * 5, width, bias=False)
        self.quality = nn.Linear(SOLVERS, width)
        self.class_trust = nn.Linear(width, 2 * SOLVERS)
        self.number_trust = nn.Linear(width, SOLVERS)
        for layer in (self.classes, self.numbers, self.class_trust, self.number_trust):
            nn.init.normal_(layer.weight, std=0.02)
        with torch.no_grad():
            self.class_trust.bias[:SOLVERS] = 2 / SOLVERS
            self.class_trust.bias[SOLVERS:] = 0.5 / SOLVERS
            self.number_trust.bias.fill_(math.log(2 / SOLVERS))

    def forward(self, answers: Tensor, quality: Tensor, labels: Tensor) -> Tensor:
        """Return what to add to the tokens of targets, (tables, rows, width).

        Parameters
        ----------
        answers
            (tables, rows, SOLVERS, outcomes).
        quality
            (tables, SOLVERS): how well each predicts the known rows.
        labels
            The vectors of the classes, (classes, width).
        """
        general = self.quality(quality)[:, None]
        if answers.shape[-1] > 1:
            return general + self.classes((answers @ labels).flatten(2))
        v = answers[..., 0].clamp(-6, 6)
        waves = torch.cat((v, v.sin(), v.cos(), (2 * v).sin(), (2 * v).cos()), dim=-1)
        return general + self.numbers(waves)

    def class_logits(self, hidden: Tensor, answers: Tensor) -> Tensor:
        """Return Σ_s a_s p_s + b_s log p_s, (tables, rows, classes); a, b linear in the states.

        Below about 0.05 and for negative p, log p bends smoothly to log 0.01.
        """
        positive = 0.01 + F.softplus(40 * answers) / 40
        shares = torch.cat((answers, positive.log()), dim=2)
        return (self.class_trust(hidden)[..., None] * shares).sum(dim=2)

    def bin_logits(self, hidden: Tensor, answers: Tensor, middle: Tensor) -> Tensor:
        """Return −½ Σ_s exp(a_s) (y − y_s)², (tables, rows, bins): a product of densities."""
        precision = self.number_trust(hidden).clamp(max=6.0).exp()
        gap = middle - answers.clamp(middle[0].item(), middle[-1].item())[..., None]
        return -0.5 * (precision[..., None] * gap.square()).sum(dim=2)


class InstantModel(nn.Module):
    """Predicts the unknown rows of tables from the known rows, in one forward pass."""

    edges: Tensor

    def __init__(self, config: InstantConfig) -> None:
        super().__init__()
        self.config = config
        c = config.trunk
        self.cells = nn.Linear(FEATURES, c.width)
        self.labels = nn.Embedding(config.classes, c.width)
        self.numbers = nn.Linear(FEATURES, c.width)
        self.unknown = nn.Parameter(torch.zeros(2, c.width))
        positions = make_positions(c, "encoder")
        roles = ("attention", "row_attention", "ffn")
        self.stack = make_stack(c, "encoder", positions, roles, make_instant_sublayer)
        init_stack_(self.stack, lambda weight: INITS[c.init](weight, c.init_std))
        self.identities: nn.Linear | None = None
        if config.identity:
            self.identities = nn.Linear(config.identity, c.width, bias=False)
        self.class_vote, self.class_head = Vote(c.width), nn.Linear(c.width, config.classes)
        self.number_vote, self.number_head = Vote(c.width), nn.Linear(c.width, config.bins)
        self.solvers = SolverInputs(config) if config.solvers else None
        self.bandwidth = nn.Parameter(torch.tensor(math.log(0.2)))
        self.register_buffer("edges", bin_edges(config), persistent=False)
        with torch.no_grad():
            self.labels.weight.normal_(std=0.5)
            self.unknown.normal_(std=0.5)
            if self.identities is not None:  # at first hardly any: learning would not start
                self.identities.weight.normal_(std=0.01)
            for head in (self.class_head, self.number_head):
                head.weight.normal_(std=0.02)
                head.bias.zero_()

    def count(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    # ── Tokens ────────────────────────────────────────────────────────────────────────────────────

    def target_tokens(self, target: Tensor) -> Tensor:
        """Return the tokens of known targets: classes (integers) or standardised numbers."""
        if not target.is_floating_point():
            return self.labels(target)
        stats = column_stats(target[..., None])
        return self.numbers(cell_features(target[..., None], stats)[:, :, 0])

    def unknown_tokens(self, tables: int, rows: int, is_number: bool) -> Tensor:
        """Return the token of an unknown class, or of an unknown number."""
        return self.unknown[int(is_number)].expand(tables, rows, -1)

    def cell_tokens(
        self,
        cells: Tensor,
        stats: ColumnStats,
        is_category: Tensor | None,
        identity: Tensor | None,
        parts: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of cells, (tables, rows, columns, width), and their solver features."""
        features = cell_features(cells, stats, is_category)
        tokens = self.cells(features)
        if self.identities is not None and identity is not None:
            tokens = tokens + self.identities(identity)[:, None]
        if self.solvers is None:
            return tokens, None
        return tokens, solver_features(cells, features, is_category, parts)

    def solve(
        self, features: Tensor | None, target: Tensor, real: Tensor | None
    ) -> tuple[Solved | None, Tensor | None]:
        """Return the solvers fitted to known rows, and what they predict for these."""
        if features is None:
            return None, None
        is_number = target.is_floating_point()
        wanted = target[..., None] if is_number else F.one_hot(target, self.config.classes)
        return solve(features, wanted.to(features.dtype), real)

    def with_answers(self, first: Tensor, answers: Tensor | None, solved: Solved | None) -> Tensor:
        """Return tokens of targets with what the solvers say of them."""
        if self.solvers is None or answers is None or solved is None:
            return first
        return first + self.solvers(answers, solved.quality, self.labels.weight)

    def identity_of(self, stats: ColumnStats, seed: int) -> Tensor | None:
        """Return what tells columns apart, (tables, columns, identity), if anything does."""
        count = self.config.identity
        return column_identities(stats, count, seed) if count else None

    def run(
        self,
        first: Tensor,
        cells: Tensor,
        known: int,
        real: Tensor | None = None,
        cache: RowCache | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return the target tokens after the stack, (tables, rows, width).

        Parameters
        ----------
        first, cells
            Tokens of the targets, (tables, rows, width), and of the cells, (tables, rows, columns,
            width).
        known
            Leading rows that the others see, or that the cache is of.
        real
            (tables, columns): False for columns that are padding.
        cache
            As in RowContext.
        maps
            If given, attention weights are stored in it by name.
        """
        tables, rows = first.shape[:2]
        x = torch.cat((first[:, :, None], cells), dim=2).flatten(0, 1)
        mask = None
        if real is not None:
            is_real = F.pad(real, (1, 0), value=True)
            mask = Mask.padding(is_real.repeat_interleave(rows, dim=0))
        context = RowContext(
            rows=rows,
            known=known,
            row_cache=cache,
            mask=mask,
            maps=None if maps is None else {},
            output_length=1 if maps is None else None,
        )
        hidden = self.stack(x, context)[:, 0].reshape(tables, rows, -1)
        if maps is not None and context.maps is not None:
            for sublayer, box in self.stack.steps():
                if sublayer in context.maps:
                    maps[f"{box.place.layer}.{box.place.role}"] = context.maps[sublayer]
        return hidden

    def hidden(
        self,
        cells: Tensor,
        target: Tensor,
        is_category: Tensor | None = None,
        real: Tensor | None = None,
        seed: int = 0,
    ) -> tuple[RowStates, RowStates]:
        """Return the states of unknown and of known rows.

        Parameters
        ----------
        cells
            (tables, rows, columns), the known rows first; NaN where missing.
        target
            (tables, known): classes as integers, or numbers standardised on the known rows.
        is_category
            (tables, columns): which columns hold codes without an order.
        real
            (tables, columns): False for columns that are padding.
        seed
            Of what tells columns apart.
        """
        tables, rows = cells.shape[:2]
        known = target.shape[1]
        stats = column_stats(cells[:, :known])
        parts = count_parts(cells[:, :known], is_category)
        identity = self.identity_of(stats, seed)
        tokens, features = self.cell_tokens(cells, stats, is_category, identity, parts)
        solved, answers = self.solve(
            None if features is None else features[:, :known], target, real
        )
        if features is not None and solved is not None and answers is not None:
            answers = torch.cat((answers, solved.predict(features[:, known:])), dim=1)
        unknown = self.unknown_tokens(tables, rows - known, target.is_floating_point())
        first = torch.cat((self.target_tokens(target), unknown), dim=1)
        hidden = self.run(self.with_answers(first, answers, solved), tokens, known, real)
        if answers is None:
            return RowStates(hidden[:, known:], None), RowStates(hidden[:, :known], None)
        return (
            RowStates(hidden[:, known:], answers[:, known:]),
            RowStates(hidden[:, :known], answers[:, :known]),
        )

    # ── Known rows once, unknown rows often ───────────────────────────────────────────────────────

    def read(
        self,
        cells: Tensor,
        target: Tensor,
        is_category: Tensor | None = None,
        real: Tensor | None = None,
        seed: int = 0,
        context: Tensor | None = None,
    ) -> KnownRows:
        """Return the known rows as `states_of` needs them; parameters as for `hidden`.

        `context` are the rows that the stack reads, by default all; the solvers use all.
        """
        stats, cache = column_stats(cells), RowCache()
        identity, parts = self.identity_of(stats, seed), count_parts(cells, is_category)
        tokens, features = self.cell_tokens(cells, stats, is_category, identity, parts)
        solved, answers = self.solve(features, target, real)
        if context is not None:
            tokens, target = tokens[:, context], target[:, context]
            answers = None if answers is None else answers[:, context]
        hidden = self.target_tokens(target)
        count = target.shape[1]
        if count:
            first = self.with_answers(hidden, answers, solved)
            hidden = self.run(first, tokens, count, real, cache)
        states = RowStates(hidden, answers)
        return KnownRows(stats, is_category, real, identity, solved, cache, states, target, count)

    def states_of(self, cells: Tensor, known: KnownRows) -> RowStates:
        """Return the states of unknown rows from known rows."""
        return self.states_of_tokens(self.tokens_of(cells, known), known)

    def tokens_of(self, cells: Tensor, known: KnownRows) -> Tensor:
        """Return the tokens of the cells of unknown rows, then what solvers see of the cells.

        (tables, rows, columns, width + parts): all that predictions depend on.
        """
        parts = known.solved.parts if known.solved is not None else 0
        tokens, features = self.cell_tokens(
            cells, known.columns, known.is_category, known.identity, parts
        )
        return tokens if features is None else torch.cat((tokens, features), dim=-1)

    def states_of_tokens(
        self, tokens: Tensor, known: KnownRows, maps: Maps | None = None
    ) -> RowStates:
        """Return the states of unknown rows from what `tokens_of` returned."""
        is_number = known.target.is_floating_point()
        first = self.unknown_tokens(tokens.shape[0], tokens.shape[1], is_number)
        width, answers = self.config.trunk.width, None
        if known.solved is not None:
            answers = known.solved.predict(tokens[..., width:])
        first = self.with_answers(first, answers, known.solved)
        cells = tokens[..., :width]
        return RowStates(
            self.run(first, cells, known.count, known.real, known.cache, maps), answers
        )

    # ── Heads ─────────────────────────────────────────────────────────────────────────────────────

    def check_classes(self, classes: int) -> None:
        """Raise InputError if the model cannot predict that many classes."""
        if not 1 <= classes <= self.config.classes:
            raise InputError(
                f"this model predicts up to {self.config.classes} classes: got {classes}. "
                "Try one of the estimators that are fitted, such as FTTransformerClassifier."
            )

    def class_logits(
        self, unknown: RowStates, known: RowStates, target: Tensor, classes: int
    ) -> Tensor:
        """Return logits, (tables, unknown, classes).

        Parameters
        ----------
        unknown, known
            The states of unknown and of known rows.
        target
            (tables, known): the classes of the known rows.
        classes
            Number of classes.
        """
        self.check_classes(classes)
        hidden = unknown.hidden
        ballots = F.one_hot(target, classes).to(hidden.dtype)
        logits = self.class_vote(hidden, known.hidden, ballots)
        logits = logits + self.class_head(hidden)[..., :classes]
        if self.solvers is None or unknown.answers is None:
            return logits
        return logits + self.solvers.class_logits(hidden, unknown.answers[..., :classes])

    def bin_logits(self, unknown: RowStates, known: RowStates, target: Tensor) -> Tensor:
        """Return (tables, unknown, bins); parameters as for `class_logits`.

        A known number votes for the bins around it: for each with the probability that a normal
        distribution with a learned deviation gives to it.
        """
        hidden = unknown.hidden
        z = (self.edges[1:-1] - target[..., None]) * (-self.bandwidth).exp()
        below = F.pad(F.pad(torch.special.ndtr(z), (1, 0)), (0, 1), value=1.0)
        votes = self.number_vote(hidden, known.hidden, below.diff(dim=-1))
        logits = votes + self.number_head(hidden)
        if self.solvers is None or unknown.answers is None:
            return logits
        middle = bin_means(self.edges)
        return logits + self.solvers.bin_logits(hidden, unknown.answers[..., 0], middle)

    def bins_of(self, target: Tensor) -> Tensor:
        """Return the bin of each standardised number."""
        return torch.searchsorted(self.edges[1:-1], target.contiguous(), right=True)


def bin_edges(config: InstantConfig) -> Tensor:
    """Return bins + 1 edges, narrow in the middle: reach · sinh(3.5 t) / sinh(3.5), t in ±1."""
    t = torch.linspace(-1, 1, config.bins + 1, dtype=torch.float64)
    return (config.reach * torch.sinh(3.5 * t) / math.sinh(3.5)).float()


def make_instant_sublayer(
    c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> AnySublayer:
    """Return the usual sublayer over columns, or attention over known rows, by the place's role."""
    if place.role != "row_attention":
        return make_sublayer(c, place, inside, positions)
    usual = make_sublayer(c, place, inside, positions)
    assert isinstance(usual, Attention)
    return KnownRowAttention(
        c.width,
        c.heads,
        c.effective_kv_heads,
        c.effective_head_width,
        place.layer,
        bias=c.attention_bias,
        dropout=c.attention_dropout,
        score=make_score(c),
        query_norm=make_qk_norm(c, c.heads),
        key_norm=make_qk_norm(c, c.effective_kv_heads),
        inner=usual.inner,
    )


def standardise_target(target: Tensor, known: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers with mean 0 and deviation 1 over the known rows, that mean, that deviation.

    `target` is (tables, rows), the known rows first.
    """
    stats = column_stats(target[:, :known, None])
    mean, deviation = stats.mean[:, 0], stats.deviation[:, 0]
    return (target - mean) / deviation, mean, deviation


# ── On disk ───────────────────────────────────────────────────────────────────────────────────────


PLAIN_SIZES = ("identity", "solvers", "classes", "bins", "reach")


def write_instant(model: InstantModel, state: Mapping[str, Tensor], path: Path) -> None:
    """Write the weights `state` of a model with its configuration and a digest of both."""
    config = model.config
    content = {
        "trunk": Config(model=config.trunk).dump(),
        **{name: getattr(config, name) for name in PLAIN_SIZES},
    }
    write_tensors(path, state, *INSTANT_MODEL, content)


def read_instant(path: Path) -> InstantModel:
    """Return the model that `write_instant` wrote, in evaluation mode."""
    tensors, content = read_tensors(path, *INSTANT_MODEL)
    try:
        trunk = Config.parse(content["trunk"], source=str(path)).model
        sizes = {name: content[name] for name in PLAIN_SIZES}
        with torch.random.fork_rng(devices=[]):
            model = InstantModel(InstantConfig(trunk=trunk, **sizes))
    except KeyError as error:
        raise SavedError(f"{str(path)!r} cannot be loaded: it has no {error}.") from None
    except (TypeError, ValueError, RuntimeError, AddnormError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(path)!r} cannot be loaded: {reason}") from None
    require_matching_tensors(model, tensors, path, any_float=False)
    model.load_state_dict(tensors)
    return model.eval()
