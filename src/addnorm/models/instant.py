"""The instant model: a Transformer that predicts the rows of a small table from its other rows.

    cells, target ─► features ─► tokens ─► [columns ► rows ► ffn] × depth ─► target token ─► heads

Every cell is a token, and the target is the first token of its row; that of an unknown row is a
learned vector. In each block the tokens of a row attend to one another, then each token attends to
the tokens of its own column in the known rows. Nothing tells columns or rows apart but their
content, so their order changes nothing. The last block computes the target token only.

A cell x of a numeric column becomes a few features, from the known rows alone:

    z  = (x − mean) / deviation, clipped smoothly: z / √(1 + (z/4)²)
    u  = 2 · (share of known cells below x, ties counted half) − 1
    sin, cos of π k u for k = ½, 1, 2, 4;  1 if missing (the others are 0);  1 if a category

Prior-fitted networks: Müller et al. 2022 (2112.10510). Cells as tokens with attention over columns,
then over rows: Hollmann et al. 2025, Pfefferle et al. 2025 (2511.03634), whose cells are numbers
without these features.

The heads vote: an unknown row weights the known rows by the similarity of their target tokens, and
the weights of the known rows of a class add up to its probability (matching networks: Vinyals et
al. 2016, 1606.04080, eq. 1). So no class has weights of its own, and with equal weights the answer
is the share of each class. Numbers vote for bins, and a linear map of the target token is added to
the logarithm of the votes.

Shapes: cells (tables, rows, columns); stream (tables · rows, 1 + columns, width).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.config import Config, ModelConfig
from addnorm.errors import AddnormError, InputError, SavedError
from addnorm.files import INSTANT_MODEL
from addnorm.layers.addnorm import Place
from addnorm.layers.attention import Attention
from addnorm.layers.feedforward import FeedForward
from addnorm.layers.init import INITS, init_stack_
from addnorm.layers.key_value import ProductKeyMemory
from addnorm.layers.masks import Mask
from addnorm.layers.positions import Positions
from addnorm.layers.rows import KnownRowAttention, RowCache, RowContext
from addnorm.layers.stack import Stack
from addnorm.models.build import make_positions, make_qk_norm, make_score, make_stack, make_sublayer
from addnorm.models.saved import read_tensors, require_matching_tensors, write_tensors
from addnorm.models.tabular import TabularConfig, TabularModel
from addnorm.models.transformer import Maps

FREQUENCIES = (0.5, 1.0, 2.0, 4.0)
FEATURES = 4 + 2 * len(FREQUENCIES)
"""Numbers that describe a cell."""
CLIP = 4.0
UNNAMED = 2
"""Codes of a category that are not values: missing, and rare or unknown."""
MAX_CACHED = 2**27
"""Numbers that are kept of the known rows of one table: 512 MB."""


@dataclass(frozen=True, kw_only=True)
class InstantConfig:
    """The configuration of an instant model.

    Parameters
    ----------
    trunk
        Configuration of the stack over cells, with positions "none".
    rows
        Configuration of the stack over rows that follows it; None for none.
    identity
        Random numbers that tell a column from the others; 0 for none.
    classes
        Most classes of a table.
    bins, reach
        Bins of a predicted number, and the standardised value at which the last of them ends.
    """

    trunk: ModelConfig
    rows: ModelConfig | None = None
    identity: int = 0
    classes: int = 10
    bins: int = 64
    reach: float = 8.0


@dataclass(frozen=True)
class ColumnStats:
    """What is known of each column from the known rows of its table."""

    mean: Tensor
    """(tables, 1, columns)"""
    deviation: Tensor
    """(tables, 1, columns), above 0."""
    ordered: Tensor
    """(tables, columns, known): the cells in ascending order, then infinities for missing ones."""
    count: Tensor
    """(tables, 1, columns): cells that are not missing."""


def column_stats(known: Tensor) -> ColumnStats:
    """Return the statistics of columns from (tables, known, columns), NaN where missing."""
    present = ~known.isnan()
    count = present.sum(dim=1, keepdim=True)
    filled = known.masked_fill(~present, 0.0)
    divisor = count.clamp(min=1)
    mean = filled.sum(dim=1, keepdim=True) / divisor
    centred = (filled - mean).masked_fill(~present, 0.0)
    deviation = (centred.square().sum(dim=1, keepdim=True) / divisor).sqrt()
    tiny = 1e-6 * (1 + mean.abs())
    deviation = torch.where(deviation > tiny, deviation, torch.ones_like(deviation))
    ordered = known.masked_fill(~present, float("inf")).transpose(1, 2).contiguous()
    return ColumnStats(mean, deviation, ordered.sort(dim=-1).values, count)


def cell_features(x: Tensor, stats: ColumnStats, is_category: Tensor | None = None) -> Tensor:
    """Return (tables, rows, columns, FEATURES) for cells (tables, rows, columns)."""
    missing = x.isnan()
    filled = torch.where(missing, stats.mean, x)
    z = (filled - stats.mean) / stats.deviation
    z = z / (1 + (z / CLIP).square()).sqrt()
    along = filled.transpose(1, 2).contiguous()
    below = torch.searchsorted(stats.ordered, along)
    upto = torch.searchsorted(stats.ordered, along, right=True)
    share = (below + upto).transpose(1, 2) / (2 * stats.count.clamp(min=1))
    u = torch.where(stats.count > 0, 2 * share.clamp(max=1.0) - 1, torch.zeros_like(z))
    angles = u[..., None] * (math.pi * torch.tensor(FREQUENCIES, device=x.device))
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
    known = (~missing).to(z.dtype)[..., None]
    values = torch.cat((z[..., None], u[..., None], waves), dim=-1) * known
    if is_category is None:
        category = torch.zeros_like(known)
    else:
        category = is_category.to(z.dtype)[:, None, :, None].expand_as(known)
    return torch.cat((values, 1 - known, category), dim=-1)


def column_identities(stats: ColumnStats, count: int, seed: int = 0) -> Tensor:
    """Return `count` standard normal numbers for each column, (tables, columns, count).

    They are a function of the sorted known cells of the column, bit for bit, and of the seed: so
    they follow the column wherever it stands, the order of the rows changes nothing, and other
    columns get others. (In TabPFN they are drawn anew for each prediction: Hollmann et al. 2025.)
    """
    bits = (stats.ordered.float() + 0.0).view(torch.int32).to(torch.int64)
    places = torch.arange(bits.shape[-1], device=bits.device) * _GOLDEN
    column = _mix(_mix(bits + places).sum(dim=-1) + seed)
    draws = _mix(column[..., None] + torch.arange(1, count + 1, device=bits.device) * _GOLDEN)
    share = ((draws & (2**24 - 1)).float() + 0.5) / 2**24
    return math.sqrt(2) * torch.special.erfinv(2 * share - 1)


_GOLDEN = -7046029254386353131
"""2^64 / golden ratio, as a signed number: consecutive multiples are far apart."""


def _mix(x: Tensor) -> Tensor:
    """Return 64 bits, each of which depends on all of x (splitmix64: Steele et al. 2014)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


@dataclass(frozen=True)
class KnownRows:
    """The known rows of a batch of tables, read once: what many unknown rows are predicted from."""

    columns: ColumnStats
    is_category: Tensor | None
    real: Tensor | None
    identity: Tensor | None
    caches: tuple[RowCache, RowCache]
    """Of the stack over cells, and of the stack over rows."""
    hidden: Tensor
    """(tables, known, width): the states of the known rows after the stack."""
    target: Tensor
    """(tables, known): classes, or standardised numbers."""
    count: int

    def numel(self) -> int:
        """Return how many numbers are cached."""
        both = (*self.caches[0].values(), *self.caches[1].values())
        return sum(keys.numel() + values.numel() for keys, values in both)


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
        width = c.width
        self.row_stack: Stack | None = None
        if (r := config.rows) is not None:
            width, roles = r.width, roles[1:]
            self.widen = nn.Linear(c.width, width)
            self.row_stack = make_stack(
                r, "encoder", make_positions(r, "encoder"), roles, make_instant_sublayer
            )
            init_stack_(self.row_stack, lambda weight: INITS[r.init](weight, r.init_std))
        self.class_vote, self.class_head = Vote(width), nn.Linear(width, config.classes)
        self.number_vote, self.number_head = Vote(width), nn.Linear(width, config.bins)
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
    ) -> Tensor:
        """Return (tables, rows, columns, width)."""
        tokens = self.cells(cell_features(cells, stats, is_category))
        if self.identities is None or identity is None:
            return tokens
        return tokens + self.identities(identity)[:, None]

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
        caches: tuple[RowCache, RowCache] | None = None,
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
        caches
            Those of the two stacks, as in RowContext.
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
            row_cache=None if caches is None else caches[0],
            mask=mask,
            maps=None if maps is None else {},
            output_length=1 if maps is None else None,
        )
        hidden = self.stack(x, context)[:, :1]
        if self.row_stack is not None:
            after = RowContext(rows=rows, known=known, row_cache=caches and caches[1])
            hidden = self.row_stack(self.widen(hidden), after)
        hidden = hidden[:, 0].reshape(tables, rows, -1)
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
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of unknown and of known rows, (tables, rows, width) each.

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
        tokens = self.cell_tokens(cells, stats, is_category, self.identity_of(stats, seed))
        unknown = self.unknown_tokens(tables, rows - known, target.is_floating_point())
        first = torch.cat((self.target_tokens(target), unknown), dim=1)
        hidden = self.run(first, tokens, known, real)
        return hidden[:, known:], hidden[:, :known]

    # ── Known rows once, unknown rows often ───────────────────────────────────────────────────────

    def read(
        self,
        cells: Tensor,
        target: Tensor,
        is_category: Tensor | None = None,
        real: Tensor | None = None,
        seed: int = 0,
    ) -> KnownRows:
        """Return the known rows as `hidden_of` needs them; parameters as for `hidden`."""
        stats, caches = column_stats(cells), (RowCache(), RowCache())
        identity = self.identity_of(stats, seed)
        tables, count = cells.shape[:2]
        hidden = self.unknown_tokens(tables, count, target.is_floating_point())
        if count:
            tokens = self.cell_tokens(cells, stats, is_category, identity)
            hidden = self.run(self.target_tokens(target), tokens, count, real, caches)
        elif self.row_stack is not None:
            hidden = self.widen(hidden)
        return KnownRows(stats, is_category, real, identity, caches, hidden, target, count)

    def hidden_of(self, cells: Tensor, known: KnownRows, is_number: bool) -> Tensor:
        """Return the hidden states of unknown rows, (tables, rows, width), from known rows."""
        return self.hidden_of_tokens(self.tokens_of(cells, known), known, is_number)

    def tokens_of(self, cells: Tensor, known: KnownRows) -> Tensor:
        """Return the tokens of the cells of unknown rows, (tables, rows, columns, width)."""
        return self.cell_tokens(cells, known.columns, known.is_category, known.identity)

    def hidden_of_tokens(
        self, tokens: Tensor, known: KnownRows, is_number: bool, maps: Maps | None = None
    ) -> Tensor:
        """Return the hidden states of unknown rows from the tokens of their cells."""
        first = self.unknown_tokens(tokens.shape[0], tokens.shape[1], is_number)
        return self.run(first, tokens, known.count, known.real, known.caches, maps)

    # ── Heads ─────────────────────────────────────────────────────────────────────────────────────

    def check_classes(self, classes: int) -> None:
        """Raise InputError if the model cannot predict that many classes."""
        if not 1 <= classes <= self.config.classes:
            raise InputError(
                f"this model predicts up to {self.config.classes} classes: got {classes}. "
                "Try one of the estimators that are fitted, such as FTTransformerClassifier."
            )

    def class_logits(self, hidden: Tensor, known: Tensor, target: Tensor, classes: int) -> Tensor:
        """Return log-probabilities, (tables, unknown, classes).

        Parameters
        ----------
        hidden, known
            The hidden states of unknown and of known rows, (tables, rows, width).
        target
            (tables, known): the classes of the known rows.
        classes
            Number of classes.
        """
        self.check_classes(classes)
        ballots = F.one_hot(target, classes).to(hidden.dtype)
        return self.class_vote(hidden, known, ballots) + self.class_head(hidden)[..., :classes]

    def bin_logits(self, hidden: Tensor, known: Tensor, target: Tensor) -> Tensor:
        """Return (tables, unknown, bins); parameters as for `class_logits`.

        A known number votes for the bins around it: for each with the probability that a normal
        distribution with a learned deviation gives to it.
        """
        z = (self.edges[1:-1] - target[..., None]) * (-self.bandwidth).exp()
        below = F.pad(F.pad(torch.special.ndtr(z), (1, 0)), (0, 1), value=1.0)
        return self.number_vote(hidden, known, below.diff(dim=-1)) + self.number_head(hidden)

    def bins_of(self, target: Tensor) -> Tensor:
        """Return the bin of each standardised number."""
        return torch.searchsorted(self.edges[1:-1], target.contiguous(), right=True)


def bin_edges(config: InstantConfig) -> Tensor:
    """Return bins + 1 edges, narrow in the middle: reach · sinh(3.5 t) / sinh(3.5), t in ±1."""
    t = torch.linspace(-1, 1, config.bins + 1, dtype=torch.float64)
    return (config.reach * torch.sinh(3.5 * t) / math.sinh(3.5)).float()


def make_instant_sublayer(
    c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> Attention | FeedForward | ProductKeyMemory:
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


# ── One table ─────────────────────────────────────────────────────────────────────────────────────


class InstantPredictor(TabularModel):
    """An instant model together with the known rows of one table: `forward(numbers, codes)`.

    Answers are averaged over `members`: in each, classes are numbered in another order, and so are
    the values of categories, on which the network depends a little. The order of columns makes no
    difference, so it is not varied.

    The configuration's `embedding_options` are the sizes that `predictor_config` sets. The known
    rows are buffers, so they are saved with the weights.
    """

    known_numbers: Tensor
    known_codes: Tensor
    known_target: Tensor
    kept: Tensor

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.sizes = PredictorSizes(**config.embedding_options)
        sizes, categories = self.sizes, len(config.categories)
        dtype = torch.int64 if sizes.classes else torch.float32
        rows = sizes.rows and Config.parse(sizes.rows, source="the stack over rows").model
        self.network = InstantModel(
            InstantConfig(
                trunk=config.trunk,
                rows=rows or None,
                identity=sizes.identity,
                classes=sizes.most_classes,
                bins=sizes.bins,
                reach=sizes.reach,
            )
        )
        self.register_buffer("known_numbers", torch.zeros(sizes.known, config.numbers))
        self.register_buffer("known_codes", torch.zeros(sizes.known, categories, dtype=torch.int64))
        self.register_buffer("known_target", torch.zeros(sizes.known, dtype=dtype))
        self.register_buffer("kept", torch.zeros(sizes.columns, dtype=torch.int64))
        self.read_rows: dict[int, KnownRows] = {}

    def cells(self, numbers: Tensor, codes: Tensor, member: int) -> Tensor:
        """Return the kept columns of rows as cells, (1, rows, columns), for one member."""
        named = codes
        if member:
            generator = torch.Generator().manual_seed(self.sizes.seed + member)
            named = codes.clone()
            for column, size in enumerate(self.config.categories):
                order = torch.randperm(size - UNNAMED, generator=generator) + UNNAMED
                names = torch.cat((torch.arange(UNNAMED), order)).to(codes.device)
                named[:, column] = names[codes[:, column]]
        known = named.to(numbers.dtype).masked_fill(named < UNNAMED, float("nan"))
        return torch.cat((numbers, known), dim=1)[None, :, self.kept]

    def class_order(self, member: int) -> Tensor:
        """Return the number that each class has in one member: a rotation."""
        count = self.sizes.classes
        return (torch.arange(count, device=self.kept.device) + member) % count

    def read(self, member: int) -> KnownRows:
        """Return the known rows as one member sees them; kept for later unless they are large."""
        if member in self.read_rows:
            return self.read_rows[member]
        # As ordinary tensors: a later call may need gradients of the unknown rows.
        with torch.inference_mode(False), torch.no_grad():
            cells = self.cells(self.known_numbers, self.known_codes, member)
            target = self.known_target
            if self.sizes.classes:
                target = self.class_order(member)[target]
            is_category = (self.kept >= self.config.numbers)[None]
            seed = self.sizes.seed + member
            known = self.network.read(cells, target[None], is_category, seed=seed)
        if sum(part.numel() for part in (*self.read_rows.values(), known)) <= MAX_CACHED:
            self.read_rows[member] = known
        return known

    def outputs(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the mean probabilities of the members: (rows, classes), or (rows, bins)."""
        total: Tensor | None = None
        members = self.different_members()
        for member in range(members):
            known = self.read(member)
            cells = self.cells(numbers, codes, member)
            hidden = self.network.hidden_of(cells, known, not self.sizes.classes)
            probabilities = self.probabilities(hidden, member, known)
            total = probabilities if total is None else total + probabilities
        assert total is not None
        return total / members

    def different_members(self) -> int:
        """Return how many members differ: without categories there may be as many as classes."""
        if self.sizes.identity or bool((self.kept >= self.config.numbers).any()):
            return self.config.members
        return min(self.config.members, max(self.sizes.classes, 1))

    def probabilities(self, hidden: Tensor, member: int, known: KnownRows) -> Tensor:
        """Return probabilities, (rows, outcomes), with the classes in the table's order."""
        if not self.sizes.classes:
            return self.network.bin_logits(hidden, known.hidden, known.target)[0].softmax(dim=-1)
        classes = self.sizes.classes
        logits = self.network.class_logits(hidden, known.hidden, known.target, classes)
        return logits[0].softmax(dim=-1)[:, self.class_order(member)]

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        """Return logits of classes or a standardised number, (rows, 1, outputs)."""
        if maps is not None:
            self.look(numbers, codes, maps)
        return self.outputs_from_probabilities(self.outputs(numbers, codes))

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the cells as the first member sees them, (rows, all columns, width).

        Columns that are not kept are 0.
        """
        kept = self.network.tokens_of(self.cells(numbers, codes, 0), self.read(0))[0]
        count = self.config.numbers + len(self.config.categories)
        return kept.new_zeros(len(kept), count, kept.shape[2]).index_copy(1, self.kept, kept)

    def from_tokens(self, tokens: Tensor) -> Tensor:
        """Return the first member's answers, (rows, 1, outputs), from tokens."""
        is_number = not self.sizes.classes
        hidden = self.network.hidden_of_tokens(tokens[None, :, self.kept], self.read(0), is_number)
        return self.outputs_from_probabilities(self.probabilities(hidden, 0, self.read(0)))

    def look(self, numbers: Tensor, codes: Tensor, maps: Maps) -> None:
        """Store the attention of the first member over the target and all columns of a row."""
        own: Maps = {}
        tokens = self.network.tokens_of(self.cells(numbers, codes, 0), self.read(0))
        self.network.hidden_of_tokens(tokens, self.read(0), not self.sizes.classes, own)
        count = 1 + self.config.numbers + len(self.config.categories)
        place = torch.cat((self.kept.new_zeros(1), 1 + self.kept))
        for name, weights in own.items():
            if name.endswith(".attention"):
                wide = weights.new_zeros(*weights.shape[:2], count, count)
                wide[:, :, place[:, None], place] = weights
                maps[name] = wide

    def outputs_from_probabilities(self, probabilities: Tensor) -> Tensor:
        """Return logits of classes or a standardised number, (rows, 1, outputs)."""
        if not self.sizes.classes:
            return (probabilities @ bin_means(self.network.edges))[:, None, None]
        logits = probabilities.clamp(min=1e-7).log()
        if self.sizes.classes == 2:
            logits = logits[:, 1:] - logits[:, :1]
        return logits[:, None]


@dataclass(frozen=True, kw_only=True)
class PredictorSizes:
    """The sizes of an InstantPredictor that are not columns.

    Parameters
    ----------
    known, columns
        Known rows, and columns that are looked at.
    classes
        Classes of the table; 0 for numbers.
    most_classes, bins, reach, identity
        As in the network's InstantConfig.
    rows
        The configuration of the network's stack over rows, as plain values.
    seed
        Of the orders in which members see the values of categories, and of what tells columns
        apart.
    """

    known: int
    columns: int
    classes: int
    most_classes: int
    bins: int
    reach: float
    seed: int
    identity: int = 0
    rows: dict[str, Any] | None = None


def make_predictor(
    network: InstantModel,
    numbers: Tensor,
    codes: Tensor,
    target: Tensor,
    *,
    categories: Sequence[int],
    classes: int,
    kept: Tensor,
    members: int = 4,
    seed: int = 0,
) -> InstantPredictor:
    """Return the predictor of one table.

    Parameters
    ----------
    network
        The trained network; its weights are shared, not copied.
    numbers, codes
        The known rows, encoded: (known, numbers) with NaN where missing, (known, categories) with
        0 for missing, 1 for unknown and the values from 2 on.
    target
        (known,): classes as integers, or standardised numbers.
    categories
        Number of codes of each categorical column.
    classes
        Number of classes; 0 for numbers.
    kept
        The columns to look at, numbers first.
    members
        How many orders of classes and values of categories are averaged.
    seed
        Of these orders.
    """
    config = TabularConfig(
        kind="instant",
        numbers=numbers.shape[1],
        categories=tuple(categories),
        outputs=classes if classes > 2 else 1,
        trunk=network.config.trunk,
        embedding_options=asdict(
            PredictorSizes(
                known=len(numbers),
                columns=len(kept),
                classes=classes,
                most_classes=network.config.classes,
                bins=network.config.bins,
                reach=network.config.reach,
                seed=seed,
                identity=network.config.identity,
                rows=_dump(network.config.rows),
            )
        ),
        members=members,
    )
    network.check_classes(max(classes, 1))  # raises where there are too many
    with torch.random.fork_rng(devices=[]):
        predictor = InstantPredictor(config)
    predictor.network = network
    predictor.known_numbers, predictor.known_codes = numbers, codes
    predictor.known_target, predictor.kept = target, kept
    return predictor.eval()


def bin_means(edges: Tensor) -> Tensor:
    """Return the middle of each bin."""
    return (edges[1:] + edges[:-1]) / 2


def quantiles_of(probabilities: Tensor, edges: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles, (rows, levels), of distributions that are uniform within each bin."""
    below = torch.cat((torch.zeros_like(probabilities[:, :1]), probabilities.cumsum(dim=1)), dim=1)
    below = below / below[:, -1:]
    targets = levels.expand(len(probabilities), -1).contiguous()
    place = torch.searchsorted(below, targets, right=True).clamp(1, probabilities.shape[1]) - 1
    low, high = below.gather(1, place), below.gather(1, place + 1)
    share = ((targets - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return edges[place] + share * (edges[place + 1] - edges[place])


# ── On disk ───────────────────────────────────────────────────────────────────────────────────────


def _dump(trunk: ModelConfig | None) -> dict[str, Any] | None:
    """Return the configuration of a stack as plain values."""
    return None if trunk is None else Config(model=trunk).dump()


PLAIN_SIZES = ("identity", "classes", "bins", "reach")


def write_instant(model: InstantModel, state: Mapping[str, Tensor], path: Path) -> None:
    """Write the weights `state` of a model with its configuration and a digest of both."""
    config = model.config
    content = {
        "trunk": Config(model=config.trunk).dump(),
        "rows": _dump(config.rows),
        **{name: getattr(config, name) for name in PLAIN_SIZES},
    }
    write_tensors(path, state, *INSTANT_MODEL, content)


def read_instant(path: Path) -> InstantModel:
    """Return the model that `write_instant` wrote, in evaluation mode."""
    tensors, content = read_tensors(path, *INSTANT_MODEL)
    try:
        trunk, rows = (
            content[name] and Config.parse(content[name], source=str(path)).model
            for name in ("trunk", "rows")
        )
        sizes = {name: content[name] for name in PLAIN_SIZES}
        with torch.random.fork_rng(devices=[]):
            model = InstantModel(InstantConfig(trunk=trunk, rows=rows, **sizes))
    except KeyError as error:
        raise SavedError(f"{str(path)!r} cannot be loaded: it has no {error}.") from None
    except (TypeError, ValueError, RuntimeError, AddnormError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(path)!r} cannot be loaded: {reason}") from None
    require_matching_tensors(model, tensors, path, any_float=False)
    model.load_state_dict(tensors)
    return model.eval()
