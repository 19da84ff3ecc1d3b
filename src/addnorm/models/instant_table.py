"""The instant model with the known rows of one table: what estimators predict from.

    network's answer: mean of the members     number: (1 − trust) · network + trust · process

The network is models/instant.py; the Gaussian process of a number, instant_process.py.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from addnorm.models.bins import bin_means
from addnorm.models.instant import InstantConfig, InstantModel, KnownRows, RowStates
from addnorm.models.instant_cells import (
    bits_of,
    cell_features,
    column_identities,
    column_stats,
    mix_bits,
)
from addnorm.models.instant_process import Process, fit_process
from addnorm.models.instant_solvers import count_parts, solver_features
from addnorm.models.tabular import TabularConfig, TabularModel
from addnorm.models.transformer import Maps

UNNAMED = 2
"""Codes of a category that are not values: missing, and rare or unknown."""
MANY_CELLS = 8_000
"""Known cells above which more than two members gain next to nothing (docs/results/instant.md)."""
ATTENTION_LIMIT = 64_000_000
"""Rows² · (1 + columns) above which a table is large: attention takes time in proportion. There is
one member, which reads as many rows as fit; closed-form models use all rows."""
MAX_CACHED = 2**27
"""Numbers that are kept of the known rows of one table: 512 MB."""
MISSING_CELL = -1e30
"""Stands for a missing cell where rows are ordered by their content."""
PIECES = 4
"""Into how many a bin of the network is cut, so that the process can be precise."""


class InstantPredictor(TabularModel):
    """An instant model together with the known rows of one table: `forward(numbers, codes)`.

    Answers are averaged over `members`: in each, classes are numbered in another order, and so are
    the values of categories, and other random numbers tell the columns apart; on all of these the
    network depends a little. The order of columns makes no difference, so it is not varied.

    The distribution of a number is a mixture: the share `trust` of it is that of a Gaussian process
    over the known rows (instant_process.py), the rest the network's.

    The configuration's `embedding_options` are the sizes that `predictor_config` sets. The known
    rows are buffers, so they are saved with the weights.
    """

    known_numbers: Tensor
    known_codes: Tensor
    known_target: Tensor
    kept: Tensor
    trust: Tensor
    fine_edges: Tensor

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.sizes = PredictorSizes(**config.embedding_options)
        sizes, categories = self.sizes, len(config.categories)
        dtype = torch.int64 if sizes.classes else torch.float32
        self.network = InstantModel(
            InstantConfig(
                trunk=config.trunk,
                identity=sizes.identity,
                solvers=sizes.solvers,
                classes=sizes.most_classes,
                bins=sizes.bins,
                reach=sizes.reach,
            )
        )
        self.register_buffer("known_numbers", torch.zeros(sizes.known, config.numbers))
        self.register_buffer("known_codes", torch.zeros(sizes.known, categories, dtype=torch.int64))
        self.register_buffer("known_target", torch.zeros(sizes.known, dtype=dtype))
        self.register_buffer("kept", torch.zeros(sizes.columns, dtype=torch.int64))
        self.register_buffer("trust", torch.tensor(0.5 if self.has_process() else 0.0))
        self.register_buffer("fine_edges", cut(self.network.edges, PIECES), persistent=False)
        self.read_rows: dict[int, KnownRows] = {}
        self.fitted: tuple[Process | None] | None = None

    def has_process(self) -> bool:
        """Return whether the process takes part: for numbers, if the network has solvers."""
        return self.sizes.solvers and not self.sizes.classes

    def process(self) -> Process | None:
        """Return the Gaussian process of the known rows, fitted once; None if there is none."""
        if self.fitted is None:
            found = None
            if self.has_process():
                # As ordinary tensors: a later call may need gradients of the unknown rows.
                with torch.inference_mode(False), torch.no_grad():
                    features = self.features(*self.known_cells()).cpu()
                    is_category = (self.kept >= self.config.numbers).cpu()
                    found = fit_process(features, is_category, self.known_target.cpu())
            self.fitted = (found,)
        return self.fitted[0]

    def features(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return what the process sees of rows, (rows, kept columns, parts)."""
        cells, known = self.cells(numbers, codes, 0), self.cells(*self.known_cells(), 0)
        is_category = (self.kept >= self.config.numbers)[None]
        features = cell_features(cells, column_stats(known), is_category)
        return solver_features(cells, features, is_category, count_parts(known, is_category))[0]

    def known_cells(self) -> tuple[Tensor, Tensor]:
        """Return numbers and codes of the known rows."""
        return self.known_numbers, self.known_codes

    def cells(self, numbers: Tensor, codes: Tensor, member: int) -> Tensor:
        """Return the kept columns of rows as cells, (1, rows, columns), for one member."""
        named = codes
        if member and self.config.categories:
            named = torch.stack(
                [
                    names[column]
                    for names, column in zip(self.value_names(member), codes.T, strict=True)
                ],
                dim=1,
            )
        return torch.cat((numbers, values_of(named).to(numbers.dtype)), dim=1)[None, :, self.kept]

    def value_names(self, member: int) -> list[Tensor]:
        """Return the code that each code of a categorical column has in one member.

        The order of a column's values follows from its own known cells, so it is the same wherever
        the column stands.
        """
        stats = column_stats(values_of(self.known_codes)[None])
        most = max(self.config.categories) - UNNAMED
        draws = column_identities(stats, most, self.sizes.seed + member)[0]
        first = torch.arange(UNNAMED, device=draws.device)
        return [
            torch.cat((first, UNNAMED + own[: size - UNNAMED].argsort(stable=True)))
            for size, own in zip(self.config.categories, draws, strict=True)
        ]

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
            known = self.network.read(
                cells, target[None], is_category, seed=seed, context=self.context()
            )
        if sum(part.numel() for part in (*self.read_rows.values(), known)) <= MAX_CACHED:
            self.read_rows[member] = known
        return known

    def context(self) -> Tensor | None:
        """Return the rows of a large table that the stack reads, spread over the targets."""
        count = math.isqrt(ATTENTION_LIMIT // (1 + self.sizes.columns))
        if self.sizes.known <= count:
            return None
        order = content_order(self.known_numbers, self.known_codes, self.known_target)
        return order[(torch.arange(count) * len(order)) // count]

    def outputs(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the probabilities of classes, (rows, classes), or of bins, (rows, fine bins)."""
        mean = self.network_outputs(numbers, codes)
        if self.sizes.classes:
            return mean
        features = None
        if float(self.trust) > 0 and self.process() is not None:
            features = self.features(numbers, codes)
        return self.with_process(mean, features)

    def with_process(self, bins: Tensor, features: Tensor | None) -> Tensor:
        """Return the mixture of the network's bins with the process, (rows, fine bins).

        `features` are those of the rows for the process; None to leave it out.
        """
        fine = (bins / PIECES).repeat_interleave(PIECES, dim=1)
        process = None if features is None else self.process()
        if process is None or features is None:
            return fine
        latent = process.latent(features.cpu())  # in double precision: not for every device
        other = process.probabilities(*latent, self.fine_edges.cpu()).to(fine)
        return fine + self.trust * (other - fine)

    def network_outputs(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the mean probabilities of the members: (rows, classes), or (rows, bins)."""
        total: Tensor | None = None
        members = self.different_members()
        for member in range(members):
            known = self.read(member)
            cells = self.cells(numbers, codes, member)
            states = self.network.states_of(cells, known)
            probabilities = self.probabilities(states, member, known)
            total = probabilities if total is None else total + probabilities
        assert total is not None
        return total / members

    def different_members(self) -> int:
        """Return how many members are averaged: those that differ; of larger tables fewer."""
        sizes, members = self.sizes, self.config.members
        if sizes.known**2 * (1 + sizes.columns) > ATTENTION_LIMIT:
            return 1
        if sizes.known * sizes.columns > MANY_CELLS:
            members = min(members, 2)
        if sizes.identity or bool((self.kept >= self.config.numbers).any()):
            return members
        return min(members, max(sizes.classes, 1))

    def probabilities(self, states: RowStates, member: int, known: KnownRows) -> Tensor:
        """Return probabilities, (rows, outcomes), with the classes in the table's order."""
        if not self.sizes.classes:
            return self.network.bin_logits(states, known.states, known.target)[0].softmax(dim=-1)
        classes = self.sizes.classes
        logits = self.network.class_logits(states, known.states, known.target, classes)
        return logits[0].softmax(dim=-1)[:, self.class_order(member)]

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        """Return logits of classes or a standardised number, (rows, 1, outputs)."""
        if maps is not None:
            self.look(numbers, codes, maps)
        return self.outputs_from_probabilities(self.outputs(numbers, codes))

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the cells as the first member sees them, (rows, all columns, width and parts).

        Columns that are not kept are 0.
        """
        kept = self.network.tokens_of(self.cells(numbers, codes, 0), self.read(0))[0]
        count = self.config.numbers + len(self.config.categories)
        return kept.new_zeros(len(kept), count, kept.shape[2]).index_copy(1, self.kept, kept)

    def from_tokens(self, tokens: Tensor) -> Tensor:
        """Return the first member's answers, (rows, 1, outputs), from tokens."""
        kept = tokens[:, self.kept]
        states = self.network.states_of_tokens(kept[None], self.read(0))
        probabilities = self.probabilities(states, 0, self.read(0))
        if not self.sizes.classes:
            features = kept[..., self.network.config.trunk.width :]
            probabilities = self.with_process(
                probabilities, features if float(self.trust) > 0 else None
            )
        return self.outputs_from_probabilities(probabilities)

    def look(self, numbers: Tensor, codes: Tensor, maps: Maps) -> None:
        """Store the attention of the first member over the target and all columns of a row."""
        own: Maps = {}
        tokens = self.network.tokens_of(self.cells(numbers, codes, 0), self.read(0))
        self.network.states_of_tokens(tokens, self.read(0), own)
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
            return (probabilities @ bin_means(self.fine_edges))[:, None, None]
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
    most_classes, bins, reach, identity, solvers
        As in the network's InstantConfig.
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
    identity: int
    solvers: bool


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
                solvers=network.config.solvers,
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


def values_of(codes: Tensor) -> Tensor:
    """Return codes of categories as numbers, NaN where they are missing, rare or unknown."""
    return codes.to(torch.float32).masked_fill(codes < UNNAMED, float("nan"))


def content_order(numbers: Tensor, codes: Tensor, target: Tensor) -> Tensor:
    """Return an order of rows by their targets, then by their content: not by how they came.

    A row's key is a hash of its cells, each with the hash of its column, and that is one of the
    column's cells, with the targets and keys of their rows. After two rounds hardly any rows tie
    that are not alike. Whole numbers are added, so the order of rows and columns changes no bit.
    """
    bits = bits_of(torch.cat((numbers.nan_to_num(nan=MISSING_CELL), codes.to(numbers)), dim=1))
    key = mix_bits(bits_of(target.to(numbers)))
    for _ in range(2):
        columns = mix_bits(mix_bits(bits + key[:, None]).sum(dim=0))
        key = mix_bits(key + mix_bits(bits + columns).sum(dim=1))
    order = key.argsort()
    return order[target[order].argsort(stable=True)]


def cut(edges: Tensor, pieces: int) -> Tensor:
    """Return the edges of bins each of which is cut into equal pieces.

    >>> cut(torch.tensor([0.0, 1.0, 3.0]), 2)
    tensor([0.0000, 0.5000, 1.0000, 2.0000, 3.0000])
    """
    along = torch.arange(pieces, dtype=edges.dtype, device=edges.device) / pieces
    inner = edges[:-1, None] + edges.diff()[:, None] * along
    return torch.cat((inner.flatten(), edges[-1:]))
