"""What the tasks share: parts of an epoch for each worker, held-out loss, the tokenizers."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.batches import shard
from addnorm.data.special import IGNORE, PAD
from addnorm.data.tokenizer import Tokenizer, train_tokenizer
from addnorm.errors import ConfigError
from addnorm.train import parallel
from addnorm.train.loop import Batch

Tokenizers = dict[str, Tokenizer]
"""One for both sides under "text", or one each under "source" and "target"."""


class TextTask(ABC):
    """Text to learn from and text to validate with, as the training loop wants them.

    Made by `read`, from files. `prepare` comes next, when the sizes of batches are settled.
    """

    name: ClassVar[str]
    mode: ClassVar[str]
    """The mode of model it trains."""
    head: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """What may decide which weights are best."""
    longest: ClassVar[int | None] = None
    """Tokens a text may have, unless told; None for as many as the model reads."""
    ends: ClassVar[int] = 0
    """Positions that a text takes besides its `longest` tokens."""
    most_held_out: int = 200_000
    """Held-out tokens that an evaluation reads at most."""

    tokenizers: Tokenizers
    notes: list[str]
    """What was read, found and decided, in sentences."""
    rows: int
    """Examples to learn from."""
    size: int
    """Tokens to learn from in an epoch, both sides counted."""

    @classmethod
    @abstractmethod
    def read(cls, config: Config, known: Tokenizers | None = None) -> Self:
        """Read the files of a configuration; `known` are the tokenizers of a run that goes on."""

    def fields(self) -> dict[str, Any]:
        """What the data decide about the model."""
        vocab = next(iter(self.tokenizers.values())).size
        return {"mode": self.mode, "head": self.head, "vocab": vocab, "pad": PAD}

    def prepare(self, config: Config) -> None:
        """Make ready for an epoch, once batch size, smoothing and metric are settled."""
        self.config = config
        self.metric = config.train.metric
        if self.metric not in self.metrics:
            raise ConfigError(
                f"train.metric must be one of {', '.join(self.metrics)} for {self.name}: "
                f"got {self.metric!r}."
            )

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "loss"

    @abstractmethod
    def epoch(self, number: int) -> Sequence[Sequence[Any]]:
        """The batches of an epoch, before they are dealt to the workers."""

    @abstractmethod
    def reach(self) -> int:
        """Positions that the longest text takes."""

    @abstractmethod
    def held_out(self) -> Sequence[Sequence[Any]]:
        """The batches to validate with."""

    @abstractmethod
    def collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        """The tensors of some examples; `targets` is IGNORE where nothing is to be learnt."""

    def plan(self, epoch: int) -> Sequence[tuple[int, int, Sequence[Any]]]:
        """Every part with its place, so that what is drawn at random for it can depend on it."""
        mine = shard(self.epoch(epoch), parallel.rank(), parallel.world())
        return [(epoch, place, part) for place, part in enumerate(mine)]

    def batch(self, part: tuple[int, int, Sequence[Any]]) -> Batch:
        self.place = part[:2]
        return self._collate(part[2], train=True)

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    @abstractmethod
    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        """The sum of a batch's losses divided by `total`."""

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        return self.total_loss(model, batch, total, self.config.train.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The mean loss of held-out tokens, and what else the task measures."""
        device = next(model.parameters()).device
        total = tokens = 0.0
        for part in shard(self.held_out(), parallel.rank(), parallel.world()):
            batch = {k: v.to(device) for k, v in self._collate(part, train=False).items()}
            total += float(self.total_loss(model, batch, 1, 0.0))
            tokens += self.tokens(batch)
        total, tokens = parallel.add_up(total, tokens)
        mean = total / max(tokens, 1)
        return {"loss": mean, **self.figures(model, mean)}

    def figures(self, model: nn.Module, loss: float) -> dict[str, float]:
        """More figures about the held-out text."""
        return {"perplexity": math.exp(min(loss, 700.0))}

    def _collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        if len(part):
            return self.collate(part, train=train)
        # A worker without examples takes part in the step, and has nothing to say.
        parts = self.epoch(0) if train else self.held_out()
        batch = self.collate(parts[0][:1], train=train)
        batch["targets"] = torch.full_like(batch["targets"], IGNORE)
        return batch

    def fingerprint(self) -> str:
        """A digest of all that is learnt from, to know it again when the run goes on."""
        total = hashlib.sha256()
        for piece in self.contents():
            total.update(repr(piece).encode())
        return total.hexdigest()

    @abstractmethod
    def contents(self) -> Iterable[object]:
        """What the fingerprint is of."""


def need_source(config: Config, what: str) -> str:
    """The file to learn from, or an error that says which flag gives it."""
    if config.data.source is None:
        raise ConfigError(f"data.source must name {what}: nothing was given.")
    return config.data.source


def make_tokenizer(lines: Iterable[str], config: Config, kind: str, size: int) -> Tokenizer:
    """The tokenizer a configuration asks for, or else the kind and size that fit the task."""
    data = config.data
    return train_tokenizer(
        lines, data.tokenizer or kind, data.vocab or size, lower=data.lower, seed=config.run.seed
    )


def suit_vocab(characters: int, *, least: int = 500, most: int = 32000) -> int:
    """A vocabulary for so much text: about one piece for 250 characters, rounded to 500.

    >>> suit_vocab(3_700_000), suit_vocab(10_000), suit_vocab(10**9)
    (15000, 500, 32000)
    """
    return min(most, max(least, round(characters / 250 / 500) * 500))


def sides_of(tokenizers: Mapping[str, Tokenizer]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target, which may be one."""
    if "text" in tokenizers:
        return tokenizers["text"], tokenizers["text"]
    return tokenizers["source"], tokenizers["target"]
