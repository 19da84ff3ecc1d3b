"""Transformers for tables: FT-Transformer, TabTransformer, SAINT, from the same Block and AddNorm.

    numbers, codes ─► columns.py ─► [summary; tokens] ─► stack ─► head of each member
                                                                  (batch, members, outputs)

A model may be an ensemble: its members share the trunk, but each has its own head and multiplies
the tokens by its own learned scale r_m, initially random signs:

    t ← r_m ⊙ t,   y_m = head_m(trunk([summary; t]))

Their losses are averaged in training, their outputs in prediction. Gorishniy et al. 2024
(2410.24210), §3.3, TabM-mini, where the trunk is an MLP. Each member costs one pass through the
trunk.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import presets
from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, choose
from addnorm.layers.addnorm import Place
from addnorm.layers.columns import NUMBERS, Categories, Columns, NamedCategories, uniform
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FEEDFORWARDS
from addnorm.layers.init import INITS, init_stack_, torch_linear_
from addnorm.layers.positions import Positions
from addnorm.layers.rows import ROW_FEEDFORWARDS, RowAttention
from addnorm.layers.stack import AnySublayer
from addnorm.models.bins import EXTRA_OUTPUTS, bin_means, recalibrated_mean, shaped_logits
from addnorm.models.build import (
    MakeSublayer,
    make_norm,
    make_positions,
    make_stack,
    make_sublayer,
    pick_options,
)
from addnorm.models.transformer import Maps, Side, name_maps
from addnorm.section import Options

TRUNKS: dict[str, Callable[..., Any]] = {
    "ft": presets.ft_transformer,
    "tab": presets.tab_transformer,
    "saint": presets.saint,
}
"""The published trunk for each kind of model."""


@dataclass(frozen=True, kw_only=True)
class TabularConfig:
    """The configuration of a model for tables: its columns, embeddings and trunk.

    Parameters
    ----------
    kind
        ft (FT-Transformer), tab (TabTransformer) or saint (SAINT).
    numbers
        Number of numeric columns.
    categories
        Number of codes of each categorical column.
    outputs
        Number of classes, or of bins of a number; 1 for two classes.
    trunk
        Configuration of the stack.
    embedding, embedding_options
        How a number becomes a vector: linear, periodic, piecewise, mixed or hidden; its options.
    missing
        Whether missing numbers have a learned vector.
    members
        Number of predictors that share the trunk.
    folds
        Number of separate models, each trained without one fold of the rows; 1 for one model. With
        more, `edges` in `embedding_options` has one list of columns for each.
    edges
        Edges of the bins of a standardised number; empty for classes, and for a model that
        predicts one number.
    calibration
        (stated, observed) of a number's distribution, found on held-out rows; see models/bins.py.
    widening
        (stated, used) levels of its intervals, found on held-out rows, if single values of the
        target have bins of their own.
    """

    kind: str
    numbers: int
    categories: tuple[int, ...]
    outputs: int
    trunk: ModelConfig
    embedding: str = "linear"
    embedding_options: dict[str, Any] = field(default_factory=dict)
    missing: bool = True
    members: int = 1
    folds: int = 1
    edges: tuple[float, ...] = ()
    calibration: tuple[tuple[float, float], ...] = ()
    widening: tuple[tuple[float, float], ...] = ()

    @property
    def head_outputs(self) -> int:
        """Number of outputs of the last matrix."""
        return self.outputs + (EXTRA_OUTPUTS if self.edges else 0)

    @property
    def columns(self) -> int:
        """Number of feature columns."""
        return self.numbers + len(self.categories)

    def replace(self, **changes: Any) -> "TabularConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def trunk_of(kind: str, **changes: Any) -> ModelConfig:
    """Return the published trunk for a kind of model, with some fields changed.

    >>> trunk_of("ft", depth=1).width
    192
    """
    preset = choose("model", kind, TRUNKS)
    return preset().model.replace(summary=False, head="none", **changes)


class TabularModel(nn.Module):
    """Base class of the models: `forward(numbers, codes)` returns (batch, members, outputs)."""

    columns: Columns
    along_rows: bool = False
    """Whether the prediction for a row depends on the other rows of its batch."""

    edges: Tensor | None
    """(bins + 1,): edges of the bins of a standardised number, if it predicts bins."""

    def __init__(self, config: TabularConfig) -> None:
        super().__init__()
        self.config = config
        edges = torch.tensor(config.edges) if config.edges else None
        self.register_buffer("edges", edges, persistent=False)

    def outputs_of(self, raw: Tensor) -> Tensor:
        """Return the outputs (batch, members, outputs) of those of the last matrix."""
        return raw if self.edges is None else shaped_logits(raw)

    def bin_probabilities(self, outputs: Tensor) -> Tensor:
        """Return probabilities of bins, (batch, bins), the mean over the members.

        They are as the network predicts them; `recalibrated` applies the calibration.
        """
        return outputs.softmax(dim=-1).mean(dim=1)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the answer for (batch, members, outputs): mean logits, or the mean number.

        Logits have the shape (batch, outputs), a number (batch, 1).
        """
        if self.edges is None:
            return outputs.mean(dim=1)
        probabilities, edges = self.bin_probabilities(outputs), self.edges.to(outputs.dtype)
        if self.config.calibration:
            return recalibrated_mean(probabilities, edges, self.config.calibration)[:, None]
        return (probabilities @ bin_means(edges))[:, None]

    def count(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def no_decay(self) -> set[nn.Parameter]:
        """Return the parameters without weight decay: columns, norms, biases (2106.11959, §E.2)."""
        columns = getattr(self, "columns", None)
        exempt = set() if columns is None else set(columns.parameters())
        return exempt | {parameter for parameter in self.parameters() if parameter.ndim < 2}

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return two groups for an optimizer: with weight decay and without."""
        exempt = self.no_decay()
        decayed = [p for p in self.parameters() if p not in exempt]
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p in exempt], "weight_decay": 0.0},
        ]


class FTTransformerModel(TabularModel):
    """One token for each column, after a summary token: y = W ReLU(N(summary)) + b.

    FT-Transformer: Gorishniy et al. 2021 (2106.11959), §3.3. In the last block only the summary is
    a query.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        c = config.trunk
        self.columns = make_columns(config, c.width, Categories)
        self.summary = uniform(1, c.width, width=c.width)
        self.scale = make_scale(config) if config.members > 1 else None
        self.side = self.make_trunk(config)
        self.head = MemberHead(c.width, config.head_outputs, config.members)
        init_side_(self.side, c)

    def make_trunk(self, config: TabularConfig) -> Side:
        """Return the stack."""
        return make_trunk(config.trunk)

    def no_decay(self) -> set[nn.Parameter]:
        own = {self.summary, self.head.bias}
        return super().no_decay() | own | (set() if self.scale is None else {self.scale})

    def output_length(self) -> int | None:
        """Return how many positions the stack must compute; all if a norm averages over them."""
        return None if self.config.trunk.norm in ("batch", "instance") else 1

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the columns as vectors, (batch, columns, width)."""
        return self.columns(numbers, codes)

    def hidden(self, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the summary of each member after the stack, (batch, members, width)."""
        length = self.output_length() if maps is None else None
        return self.run_stack(tokens, maps, length)[:, :, 0]

    def states(self, tokens: Tensor) -> Tensor:
        """Return the columns after the stack, the mean over members, (batch, columns, width)."""
        return self.run_stack(tokens, None, None)[:, :, 1:].mean(dim=1)

    def run_stack(self, tokens: Tensor, maps: Maps | None, output_length: int | None) -> Tensor:
        """Return the output of the stack, (batch, members, 1 + columns or less, width)."""
        if self.scale is not None:
            tokens = (tokens[:, None] * self.scale).flatten(0, 1)
        x = torch.cat((self.summary.expand(tokens.shape[0], 1, -1), tokens), dim=1)
        context = Context(maps=None if maps is None else {}, output_length=output_length)
        x = self.side(x, context)
        name_maps(self, context, maps)
        return x.unflatten(0, (-1, self.config.members))

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the outputs of each member, (batch, members, outputs)."""
        return self.from_hidden(self.hidden(self.tokens(numbers, codes), maps))

    def from_hidden(self, hidden: Tensor) -> Tensor:
        """Return the outputs of each member from its summary, (batch, members, outputs)."""
        return self.outputs_of(self.head(hidden))


class SaintModel(FTTransformerModel):
    """Attention over columns, then over the rows of the batch, in every block.

    SAINT: Somepalli et al. 2021 (2106.01342), eq. 1–4. The paper's arrangement is addnorm=res-post.
    """

    along_rows = True

    def make_trunk(self, config: TabularConfig) -> Side:
        if config.trunk.ffn not in FEEDFORWARDS:
            raise ConfigError(
                "SAINT needs a feed-forward network over columns and one over rows: got "
                f"ffn={config.trunk.ffn}. Try ffn=geglu, or model=ft."
            )
        roles = ("attention", "ffn", "row_attention", "row_ffn")
        make = partial(make_saint_sublayer, 1 + config.columns)
        return make_trunk(config.trunk, roles, make)

    def output_length(self) -> int | None:
        """Return None: attention over rows needs every position."""
        return None


class TabTransformerModel(TabularModel):
    """Categories go through the stack; numbers are normed; an MLP reads both.

        y = MLP([stack(categories) flattened; N(numbers)]), hidden 4l and 2l for l inputs

    TabTransformer: Huang et al. 2020 (2012.06678), §2. Missing numbers are replaced by a learned
    number. Without categories only the MLP remains. One or two numbers are not normed: the norm
    would reduce one to a constant, and two to the sign of their difference.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        c, numbers, categories = config.trunk, config.numbers, len(config.categories)
        if not config.columns:
            raise ConfigError("a table must have at least one feature column: got none.")
        if categories:
            self.columns = Columns(None, NamedCategories(config.categories, c.width))
            self.side = make_trunk(c)
            init_side_(self.side, c)
        self.norm = make_norm(c)(numbers) if numbers > 2 else nn.Identity()
        self.missing = nn.Parameter(torch.zeros(numbers)) if numbers and config.missing else None
        inputs = categories * c.width + numbers
        self.head = nn.Sequential(
            nn.Linear(inputs, 4 * inputs),
            nn.ReLU(),
            nn.Linear(4 * inputs, 2 * inputs),
            nn.ReLU(),
            nn.Linear(2 * inputs, config.head_outputs * config.members),
        )

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the categories as vectors, (batch, columns, width)."""
        return self.columns(numbers, codes)

    def states(self, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the categories after the stack, (batch, columns, width)."""
        context = Context(maps=None if maps is None else {})
        x = self.side(tokens, context)
        name_maps(self, context, maps)
        return x

    def impute(self, numbers: Tensor) -> Tensor:
        """Return the numbers with missing ones replaced by the learned ones."""
        return numbers if self.missing is None else numbers.where(~numbers.isnan(), self.missing)

    def from_tokens(self, numbers: Tensor, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the outputs for imputed numbers and the tokens of the categories."""
        parts = [self.states(tokens, maps).flatten(1)] if self.config.categories else []
        parts += [self.norm(numbers)] if self.config.numbers else []
        outputs = self.head(torch.cat(parts, dim=1))
        raw = outputs.unflatten(1, (self.config.members, self.config.head_outputs))
        return self.outputs_of(raw)

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the outputs of each member, (batch, members, outputs)."""
        tokens = self.tokens(numbers, codes) if self.config.categories else numbers
        return self.from_tokens(self.impute(numbers), tokens, maps)


class FoldModel(TabularModel):
    """K models of one kind, for K folds: the outputs of all their members side by side.

    (batch, folds · members, outputs), so that the mean over members is the mean over models, too.
    Attention maps are those of the last model.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.models = nn.ModuleList(build_tabular(each) for each in fold_configs(config))
        self.along_rows = any(model.along_rows for model in self.models)

    def no_decay(self) -> set[nn.Parameter]:
        return set().union(*(model.no_decay() for model in self.parts()))

    def parts(self) -> list[TabularModel]:
        """Return the model of each fold."""
        return [model for model in self.models if isinstance(model, TabularModel)]

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        """Return the outputs of each member of each model, (batch, folds · members, outputs)."""
        return torch.cat([model(numbers, codes, maps) for model in self.models], dim=1)


def fold_configs(config: TabularConfig) -> list[TabularConfig]:
    """Return the configuration of the model of each fold."""
    edges = config.embedding_options.get("edges")
    return [
        config.replace(
            folds=1,
            calibration=(),
            widening=(),
            embedding_options=config.embedding_options
            | ({} if edges is None else {"edges": edges[fold]}),
        )
        for fold in range(config.folds)
    ]


class MemberHead(nn.Module):
    """y_m = W_m ReLU(x_m) + b_m for each member m: (batch, members, width) to outputs."""

    def __init__(self, width: int, outputs: int, members: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, width))
        self.bias = nn.Parameter(torch.zeros(members, outputs))
        with torch.no_grad():
            for member in self.weight:
                torch_linear_(member)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bmw,mow->bmo", x.relu(), self.weight) + self.bias


TABULAR_MODELS: dict[str, type[TabularModel]] = {
    "ft": FTTransformerModel,
    "tab": TabTransformerModel,
    "saint": SaintModel,
}


def build_tabular(config: TabularConfig) -> TabularModel:
    """Return the model that a configuration describes, with newly initialised weights.

    >>> trunk = trunk_of("ft", width=16, depth=1, ffn_width=8)
    >>> config = TabularConfig(kind="ft", numbers=2, categories=(3,), outputs=1, trunk=trunk)
    >>> build_tabular(config)(torch.zeros(5, 2), torch.zeros(5, 1, dtype=torch.long)).shape
    torch.Size([5, 1, 1])
    """
    if config.members < 1 or config.outputs < 1 or config.folds < 1:
        raise ConfigError(
            "members, outputs and folds must be 1 or more: got "
            f"members={config.members}, outputs={config.outputs}, folds={config.folds}."
        )
    if config.folds > 1:
        return FoldModel(config)
    return choose("model", config.kind, TABULAR_MODELS)(config)


def make_columns(
    config: TabularConfig, width: int, categories: Callable[[Sequence[int], int], Categories]
) -> Columns:
    """Return the embeddings of all columns; `categories` makes that of the categorical ones."""
    kind = choose("embedding", config.embedding, NUMBERS)
    plain = {name: value for name, value in config.embedding_options.items() if name != "edges"}
    pick_options("embedding_options", Options(plain), [kind])
    numbers = None
    if config.numbers:
        numbers = kind(config.numbers, width, **config.embedding_options)
    missing = None
    if config.numbers and config.missing:
        missing = uniform(config.numbers, width, width=width)
    sizes = config.categories
    return Columns(numbers, categories(sizes, width) if sizes else None, missing)


def make_scale(config: TabularConfig) -> nn.Parameter:
    """Return the scale of each member, initially random signs, (members, columns, width)."""
    signs = torch.randint(2, (config.members, config.columns, config.trunk.width)) * 2 - 1
    return nn.Parameter(signs.to(torch.get_default_dtype()))


def make_trunk(
    c: ModelConfig, roles: Sequence[str] | None = None, make: MakeSublayer | None = None
) -> Side:
    """Return the stack with its positions, without dropout on its input."""
    positions = make_positions(c, "encoder")
    stack = make_stack(c, "encoder", positions, roles, make)
    norm = make_norm(c)(c.width) if c.embed_norm else nn.Identity()
    return Side(positions, norm, nn.Identity(), stack)


def make_saint_sublayer(
    length: int, c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> AnySublayer:
    """Return the usual sublayer over columns, or one over rows, by the role of the place.

    Parameters
    ----------
    length
        Number of tokens in a row.
    c, place, inside, positions
        As for `make_sublayer`.
    """
    if not place.role.startswith("row_"):
        return make_sublayer(c, place, inside, positions)
    width = length * c.width
    if place.role == "row_attention":
        sizes = (width, c.heads, c.heads, c.effective_head_width)
        return RowAttention(*sizes, place.layer, dropout=c.attention_dropout)
    kind, activation = FEEDFORWARDS[c.ffn]
    return ROW_FEEDFORWARDS[kind](width, width, activation, dropout=c.ffn_dropout)


def init_side_(side: Side, c: ModelConfig) -> None:
    """Initialise the stack by the configured rule, then by the arrangement."""
    init_stack_(side.stack, lambda weight: INITS[c.init](weight, c.init_std))
