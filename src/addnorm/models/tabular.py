"""Transformers for tables: FT-Transformer, TabTransformer, SAINT, from the same Block and AddNorm.

    numbers, codes ─► columns.py ─► [summary; tokens] ─► stack ─► head of each member
                                                                  (batch, members, outputs)

A model may have several members: predictors that share the trunk but not the head, and see the
tokens each through a scale of its own, learned, that starts as signs at random:

    t ← r_m ⊙ t,   y_m = head_m(trunk([summary; t]))

Their losses are averaged in training and their answers in use. Gorishniy et al. 2024 (2410.24210),
§3.3, TabM-mini, where the trunk is an MLP. Every member is a pass through the trunk.
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
from addnorm.layers.attention import Attention
from addnorm.layers.columns import NUMBERS, Categories, Columns, NamedCategories, uniform
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FEEDFORWARDS, FeedForward
from addnorm.layers.init import INITS, init_stack_, torch_linear_
from addnorm.layers.positions import Positions
from addnorm.layers.rows import ROW_FEEDFORWARDS, RowAttention
from addnorm.models.build import (
    head_width_of,
    make_norm,
    make_positions,
    make_stack,
    make_sublayer,
    pick_options,
)
from addnorm.models.transformer import Maps, Side

TRUNKS: dict[str, Callable[..., Any]] = {
    "ft": presets.ft_transformer,
    "tab": presets.tab_transformer,
    "saint": presets.saint,
}
"""The published trunk of each kind of model."""


@dataclass(frozen=True, kw_only=True)
class TabularConfig:
    """What a model for tables is: its columns, its embeddings, its trunk."""

    kind: str
    """ft, tab or saint."""
    numbers: int
    """Number columns."""
    categories: tuple[int, ...]
    """Codes of each category column."""
    outputs: int
    """Classes, or 1 for a number."""
    trunk: ModelConfig
    embedding: str = "linear"
    """How a number becomes a vector: linear, periodic, piecewise or hidden."""
    embedding_options: dict[str, Any] = field(default_factory=dict)
    missing: bool = True
    """Whether a missing number has a learned vector."""
    members: int = 1
    """Predictors that share the trunk."""

    def replace(self, **changes: Any) -> "TabularConfig":
        return dataclasses.replace(self, **changes)


def trunk_of(kind: str, **changes: Any) -> ModelConfig:
    """The published trunk of a kind of model, with some fields changed.

    >>> trunk_of("ft", depth=1).width
    192
    """
    preset = choose("model", kind, TRUNKS)
    return preset().model.replace(summary=False, head="none", **changes)


class TabularModel(nn.Module):
    """What the models share: `forward(numbers, codes)` gives (batch, members, outputs)."""

    columns: Columns
    along_rows = False
    """Whether the answer to a row depends on the rows that it comes with."""

    def __init__(self, config: TabularConfig) -> None:
        super().__init__()
        self.config = config

    def count(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def undecayed(self) -> set[nn.Parameter]:
        """What weight decay leaves alone: the tokenizer, norms and biases (2106.11959, §E.2)."""
        columns = getattr(self, "columns", None)
        kept = set() if columns is None else set(columns.parameters())
        return kept | {parameter for parameter in self.parameters() if parameter.ndim < 2}

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimizer: decayed and not."""
        kept = self.undecayed()
        return [
            {
                "params": [p for p in self.parameters() if p not in kept],
                "weight_decay": weight_decay,
            },
            {"params": [p for p in self.parameters() if p in kept], "weight_decay": 0.0},
        ]


class TokenModel(TabularModel):
    """Every column a token; the summary comes first.

    FT-Transformer: Gorishniy et al. 2021 (2106.11959), §3.3: y = W ReLU(N(summary)) + b, and in the
    last block the summary alone asks.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        c = config.trunk
        self.columns = make_columns(config, c.width, Categories)
        self.summary = uniform(1, c.width, width=c.width)
        self.scale = make_scale(config) if config.members > 1 else None
        self.side = self.make_side(config)
        self.head = MemberHead(c.width, config.outputs, config.members)
        init_side_(self.side, c)

    def make_side(self, config: TabularConfig) -> Side:
        return make_side(config.trunk)

    def undecayed(self) -> set[nn.Parameter]:
        own = {self.summary, self.head.bias}
        return super().undecayed() | own | (set() if self.scale is None else {self.scale})

    def asking(self, maps: Maps | None) -> int | None:
        """How many positions the last block answers; all, where a norm looks beyond one."""
        along = self.config.trunk.norm in ("batch", "instance")
        return None if maps is not None or along else 1

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """The columns as vectors, (batch, columns, width)."""
        return self.columns(numbers, codes)

    def hidden(self, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """The summary of each member after the stack, (batch, members, width)."""
        return self.run(tokens, maps, self.asking(maps))[:, :, 0]

    def states(self, tokens: Tensor) -> Tensor:
        """The columns after the stack, the mean over members, (batch, columns, width)."""
        return self.run(tokens, None, None)[:, :, 1:].mean(dim=1)

    def run(self, tokens: Tensor, maps: Maps | None, asking: int | None) -> Tensor:
        """The stream after the stack, (batch, members, 1 + columns or what asks, width)."""
        if self.scale is not None:
            tokens = (tokens[:, None] * self.scale).flatten(0, 1)
        x = torch.cat((self.summary.expand(len(tokens), 1, -1), tokens), dim=1)
        context = Context(maps=None if maps is None else {})
        x = self.side(x, context, asking)
        name_maps(self, context, maps)
        return x.unflatten(0, (-1, self.config.members))

    def read(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        return self.read(self.hidden(self.tokens(numbers, codes), maps))


class SaintModel(TokenModel):
    """Attention over columns, then over the rows of the batch, in every block.

    SAINT: Somepalli et al. 2021 (2106.01342), eq. 1–4. The paper's arrangement is addnorm=res-post.
    """

    along_rows = True

    def make_side(self, config: TabularConfig) -> Side:
        length = 1 + config.numbers + len(config.categories)
        roles = ("attention", "ffn", "row_attention", "row_ffn")
        return make_side(config.trunk, roles, partial(make_saint_sublayer, length))

    def asking(self, maps: Maps | None) -> int | None:
        return None


class ContextModel(TabularModel):
    """Categories through the stack; beside them the numbers, normed; then a plain network.

        y = MLP([stack(categories) flattened; N(numbers)]), hidden 4l and 2l for l inputs

    TabTransformer: Huang et al. 2020 (2012.06678), §2. A missing number is a learned number. A
    table without categories has the plain network alone. One or two numbers go in as they are: the
    norm would leave nothing of one, and of two which is the greater.
    """

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        c, numbers, categories = config.trunk, config.numbers, len(config.categories)
        if not numbers + categories:
            raise ConfigError("a table must have a column to learn from: got none.")
        if categories:
            self.columns = Columns(None, NamedCategories(config.categories, c.width))
            self.side = make_side(c)
            init_side_(self.side, c)
        self.norm = make_norm(c)(numbers) if numbers > 2 else nn.Identity()
        self.missing = nn.Parameter(torch.zeros(numbers)) if numbers and config.missing else None
        inputs = categories * c.width + numbers
        self.head = nn.Sequential(
            nn.Linear(inputs, 4 * inputs),
            nn.ReLU(),
            nn.Linear(4 * inputs, 2 * inputs),
            nn.ReLU(),
            nn.Linear(2 * inputs, config.outputs * config.members),
        )

    def tokens(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """The categories as vectors, (batch, columns, width)."""
        return self.columns(numbers, codes)

    def states(self, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """The categories in the context of one another, (batch, columns, width)."""
        context = Context(maps=None if maps is None else {})
        x = self.side(tokens, context)
        name_maps(self, context, maps)
        return x

    def fill(self, numbers: Tensor) -> Tensor:
        """Numbers with the learned one where one is missing."""
        return numbers if self.missing is None else numbers.where(~numbers.isnan(), self.missing)

    def read(self, numbers: Tensor, tokens: Tensor, maps: Maps | None = None) -> Tensor:
        """The answer to numbers that are all there, and tokens of the categories."""
        parts = [self.states(tokens, maps).flatten(1)] if self.config.categories else []
        parts += [self.norm(numbers)] if self.config.numbers else []
        answer = self.head(torch.cat(parts, dim=1))
        return answer.unflatten(1, (self.config.members, self.config.outputs))

    def forward(self, numbers: Tensor, codes: Tensor, maps: Maps | None = None) -> Tensor:
        tokens = self.tokens(numbers, codes) if self.config.categories else numbers
        return self.read(self.fill(numbers), tokens, maps)


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


MODELS: dict[str, type[TabularModel]] = {"ft": TokenModel, "tab": ContextModel, "saint": SaintModel}


def build_tabular(config: TabularConfig) -> TabularModel:
    """The model that a configuration describes, with fresh weights.

    >>> trunk = trunk_of("ft", width=16, depth=1, ffn_width=8)
    >>> config = TabularConfig(kind="ft", numbers=2, categories=(3,), outputs=1, trunk=trunk)
    >>> build_tabular(config)(torch.zeros(5, 2), torch.zeros(5, 1, dtype=torch.long)).shape
    torch.Size([5, 1, 1])
    """
    if config.members < 1 or config.outputs < 1:
        raise ConfigError(
            "members and outputs must be 1 or more: "
            f"got members={config.members}, outputs={config.outputs}."
        )
    return choose("model", config.kind, MODELS)(config)


def make_columns(
    config: TabularConfig, width: int, categories: Callable[[Sequence[int], int], Categories]
) -> Columns:
    """The tokenizer of a configuration."""
    kind = choose("embedding", config.embedding, NUMBERS)
    pick_options("embedding_options", _plain(config.embedding_options), [kind])
    numbers = None
    if config.numbers:
        numbers = kind(config.numbers, width, **config.embedding_options)
    missing = None
    if config.numbers and config.missing:
        missing = uniform(config.numbers, width, width=width)
    sizes = config.categories
    return Columns(numbers, categories(sizes, width) if sizes else None, missing)


def make_scale(config: TabularConfig) -> nn.Parameter:
    """What each member sees the tokens through: +1 or −1 at random, (members, columns, width)."""
    columns = config.numbers + len(config.categories)
    signs = torch.randint(2, (config.members, columns, config.trunk.width)) * 2 - 1
    return nn.Parameter(signs.to(torch.get_default_dtype()))


def make_side(c: ModelConfig, roles: Sequence[str] | None = None, make: Any = None) -> Side:
    """The stack of a table: without dropout on what enters it, as the tokenizer has none."""
    positions = make_positions(c, "encoder")
    stack = make_stack(c, "encoder", positions, roles, make)
    norm = make_norm(c)(c.width) if c.embed_norm else nn.Identity()
    return Side(positions, norm, nn.Identity(), stack)


def make_saint_sublayer(
    length: int, c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> Attention | FeedForward:
    """A sublayer over columns as usual, or one over rows of `length` columns."""
    if not place.role.startswith("row_"):
        return make_sublayer(c, place, inside, positions)
    width = length * c.width
    if place.role == "row_attention":
        head = head_width_of(c)
        return RowAttention(width, c.heads, c.heads, head, place.layer, dropout=c.attention_dropout)
    kind, activation = FEEDFORWARDS[c.ffn]
    return ROW_FEEDFORWARDS[kind](width, width, activation, dropout=c.ffn_dropout)


def init_side_(side: Side, c: ModelConfig) -> None:
    """Fresh weights of the stack by the configured rule, then by the arrangement."""
    init_stack_(side.stack, lambda weight: INITS[c.init](weight, c.init_std))


def name_maps(model: nn.Module, context: Context, maps: Maps | None) -> None:
    """Fill `maps` with the attention weights under the name of their place: `2.attention`."""
    if maps is None or context.maps is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module in context.maps:
            *_, layer, _, role = name.split(".")
            maps[f"{layer}.{role}"] = context.maps[module]


def _plain(options: dict[str, Any]) -> Any:
    return {name: value for name, value in options.items() if name != "edges"}
