"""What every task owns: defaults, data, loss, metrics, evaluation, and the verb of a trained run.

    read(config) ─► facts() ─► resolve ─► bind(config) ─► the training loop ─► finish
                    what the    (runs)    ready to train
                    data decide

A task that has been read knows its data; `bind` returns a copy that also knows the whole
configuration and can give batches. Nothing else changes a task.
"""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from addnorm import presets
from addnorm.config import Config, ModelConfig
from addnorm.data.text.batches import shard
from addnorm.data.text.special_tokens import IGNORE, PAD
from addnorm.data.text.tokenizer import Tokenizer, train_tokenizer
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.generate import pack, quantise
from addnorm.generate.frozen import can_pack
from addnorm.layers.init import measure_
from addnorm.models.build import Model, build
from addnorm.models.saved import load, save
from addnorm.models.size import cost
from addnorm.report import Page
from addnorm.training import optimizer, parallel
from addnorm.training.loop import Batch, TrainingState

Fields = dict[str, Any]
Figures = dict[str, Any]
Say = Callable[[str], None]
Tokenizers = dict[str, Tokenizer]
"""One for both sides under "text", or one each under "source" and "target"."""
BEST = "best"
"""Folder of the best model in a run directory."""


def say_nothing(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True)
class DataFacts:
    """What the data decide about a configuration, and all that `resolve` may know of them.

    Parameters
    ----------
    size : tokens (rows, of a table) in an epoch.
    batches : batches in an epoch under a configuration.
    longest : positions of the longest example under a configuration.
    model : fields of the model that follow from the data and cannot be chosen.
    data : values for fields of the data section that were left out.
    start : configuration of the model whose weights training starts from.
    details : facts that only the defaults of the task itself read.
    """

    size: int
    batches: Callable[[Config], int]
    longest: Callable[[Config], int]
    model: Fields = field(default_factory=dict)
    data: Fields = field(default_factory=dict)
    start: ModelConfig | None = None
    details: Fields = field(default_factory=dict)


class Trained(ABC):
    """A trained model with what it needs to answer: the verbs of a run are its methods."""

    def __init__(
        self, path: Path, config: Config, labels: Sequence[str], *, int8: bool = False
    ) -> None:
        self.path, self.config, self.labels, self.int8 = path, config, list(labels), int8

    @property
    @abstractmethod
    def model(self) -> Any:
        """The network with the best weights."""

    @abstractmethod
    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Figures:
        """Return figures on data that the model was not trained on."""


class Task(ABC):
    """Data to learn from and to validate with, and everything that is special about them.

    Made by `read`. What training needs is there after `bind`.
    """

    name: ClassVar[str]
    trained: ClassVar[type[Trained]]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Figures that may decide which weights are best."""
    train_defaults: ClassVar[Fields] = {}
    epochs: ClassVar[float]
    """Passes over small data, unless a time is given."""
    unit: ClassVar[str] = "tokens"
    """What a batch is counted in."""

    needs_training = True
    """Whether the model is trained; if not, it is evaluated and saved as it is."""
    notes: list[str]
    """What was read, noticed and decided, in sentences."""
    labels: Sequence[str] = ()
    config: Config

    @classmethod
    @abstractmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        """Return the task for the files of a configuration.

        `assets` is what `load_assets` read from a run that is resumed; `start` the model and
        assets (of `load_start`) that training starts from.
        """

    @classmethod
    @abstractmethod
    def load_assets(cls, path: Path) -> Any:
        """Return what `save_assets` wrote to a run directory."""

    @abstractmethod
    def save_assets(self, path: Path) -> None:
        """Write what prediction needs besides the model: tokenizers, column encoders."""

    @classmethod
    def load_start(cls, path: Path) -> tuple[nn.Module, Any]:
        """Return the best model of a run, and its assets, to start another run from."""
        return load(path / BEST), cls.load_assets(path)

    @abstractmethod
    def facts(self) -> DataFacts:
        """Return what the data decide about a configuration."""

    @classmethod
    @abstractmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        """Return the configuration that the request is then laid over."""

    def bind(self, config: Config) -> Self:
        """Return this task, ready to train under a whole configuration."""
        bound = copy.copy(self)
        bound.config = config
        if config.train.metric not in self.metrics:
            raise ConfigError(
                f"train.metric must be one of {', '.join(self.metrics)} for {self.name}: "
                f"got {config.train.metric!r}."
            )
        bound._bind(config)
        return bound

    @abstractmethod
    def _bind(self, config: Config) -> None:
        """Set up batches, in the copy that `bind` made."""

    @property
    def metric(self) -> str:
        return self.config.train.metric

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "loss"

    @abstractmethod
    def make_model(self, start: nn.Module | None, say: Say) -> Any:
        """Return the model of the configuration with its initial weights."""

    @abstractmethod
    def empty_model(self) -> Any:
        """Return a model whose weights a checkpoint will replace."""

    @abstractmethod
    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        """Write a model that `trained` reads."""

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Return groups of parameters for an optimizer."""
        return optimizer.parameter_groups(model, weight_decay)

    @abstractmethod
    def epoch(self, number: int) -> Sequence[Any]:
        """Return the batches of an epoch, as the numbers of their examples."""

    @abstractmethod
    def plan(self, epoch: int) -> Sequence[Any]:
        """Return this process's part of every batch of an epoch."""

    @abstractmethod
    def batch(self, part: Any) -> Batch:
        """Return the tensors of one part."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """Return how many targets a batch has."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        """Return the sum of a batch's losses divided by `total`."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return figures on the held-out examples; one of them is the metric."""

    @abstractmethod
    def cost(self, model: nn.Module) -> Figures:
        """Return parameters, operations of a step and bytes of activations, by formula."""

    def describe_model(self, parameters: int) -> str:
        """Return one line about the model that is trained."""
        model = self.config.model
        sizes = f"width {model.width}, depth {model.depth}, {model.heads} heads"
        kind = f"{self.config.run.size} {model.mode}"
        return f"{kind}: {sizes}, {model.addnorm}-norm; {parameters:,} parameters."

    def finish(self, path: Path, progress: TrainingState, say: Say) -> Figures:
        """Do what comes after the last step; return figures for the summary."""
        return {}

    def add_to_page(self, page: Page, figures: Figures) -> None:  # noqa: B027 (most add nothing)
        """Add what is special about the task to the page of a run."""

    def fingerprint(self) -> str:
        """Return a digest of the training and held-out examples."""
        total = hashlib.sha256()
        for piece in self.contents():
            total.update(piece if isinstance(piece, bytes) else repr(piece).encode())
        return total.hexdigest()

    @abstractmethod
    def contents(self) -> Iterable[object]:
        """Yield what the fingerprint covers."""


class TextTask(Task):
    """A task whose examples are sequences of tokens."""

    mode: ClassVar[str]
    """The mode of model it trains."""
    head: ClassVar[str]
    sizes: ClassVar[dict[str, Fields]]
    """Fields of the model for each size: tiny, small, base, big."""
    size_limits: ClassVar[tuple[tuple[int, str], ...]]
    """Tokens of text up to which a size is chosen; beyond all of them it is base."""
    longest: ClassVar[int | None] = None
    """Tokens of a text, unless configured; None for as many as the model reads."""
    ends: ClassVar[int] = 0
    """Positions that a text takes besides its tokens."""
    max_held_out: int = 200_000
    """Held-out tokens that an evaluation reads at most."""

    tokenizers: Tokenizers
    size: int
    """Tokens to learn from in an epoch, both sides counted."""
    start: ModelConfig | None = None

    @classmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        model, tokenizers = start or (None, None)
        begun: ModelConfig | None = None if model is None else model.config
        reading = config.replace(data=cls.complete_data(config, begun))
        task = cls.read_files(reading, assets or tokenizers)
        task.start = begun
        return task

    @classmethod
    @abstractmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        """Return the task for the files of a configuration, with new tokenizers if none."""

    @classmethod
    def complete_data(cls, config: Config, start: ModelConfig | None) -> Any:
        """Return the data section with the length of texts and the held-out share filled in.

        A model to start from may have fewer learned positions than the task would read.
        """
        data, longest = config.data, cls.longest
        if start is not None and longest is not None and start.positions == "learned":
            longest = min(longest, start.length - cls.ends)
        share = 0.1 if data.valid_fraction is None else data.valid_fraction
        if not share and data.valid_source is None:
            raise ConfigError(
                "data.valid_fraction must be above 0 without a validation file: got 0. Try 0.1."
            )
        return data.replace(max_length=data.max_length or longest, valid_fraction=share)

    @classmethod
    def load_assets(cls, path: Path) -> Tokenizers:
        sides = [side for side in ("text", "source", "target") if _folder(path, side).is_dir()]
        if not sides:
            raise SavedError(f"the run in {str(path)!r} has no tokenizer: the folder is missing.")
        return {side: Tokenizer.load(_folder(path, side)) for side in sides}

    def save_assets(self, path: Path) -> None:
        for side, tokenizer in self.tokenizers.items():
            tokenizer.save(_folder(path, side))

    def facts(self) -> DataFacts:
        sizes = [tokenizer.size for tokenizer in self.tokenizers.values()]
        kind = next(iter(self.tokenizers.values())).kind
        return DataFacts(
            size=self.size,
            batches=lambda config: len(self.bind(config).epoch(0)),
            longest=self.positions_needed,
            model=self.model_fields(),
            data={"tokenizer": kind, "vocab": max(sizes)},
            start=self.start,
        )

    def model_fields(self) -> Fields:
        """Return the fields of the model that follow from the data."""
        vocab = next(iter(self.tokenizers.values())).size
        return {"mode": self.mode, "head": self.head, "vocab": vocab, "pad": PAD}

    @classmethod
    def choose_size(cls, tokens: int) -> str:
        """Return the size of model for so many tokens of text."""
        return next((size for most, size in cls.size_limits if tokens <= most), "base")

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        size = request.run.size or cls.choose_size(facts.size)
        fields = cls.sizes[size]
        model = ModelConfig(vocab=1).replace(**fields)
        if preset is not None:
            model = presets.find(preset).model
        if facts.start is not None:
            model = facts.start.replace(dropout=fields.get("dropout", 0.1))
        base = Config().replace(model=model.replace(**facts.model))
        data = cls.complete_data(request, facts.start)
        known = {
            "max_length": data.max_length,
            "valid_fraction": data.valid_fraction,
            **facts.data,
        }
        return base.replace(
            data=base.data.replace(**known),
            train=base.train.replace(**cls.train_defaults),
            run=base.run.replace(size=size),
        )

    @abstractmethod
    def positions_needed(self, config: Config) -> int:
        """Return the positions of the longest text under a configuration."""

    def make_model(self, start: nn.Module | None, say: Say) -> Model:
        torch.manual_seed(self.config.run.seed)
        model = build(self.config)
        if self.config.model.addnorm == "admin" and start is None:
            batch = self.batch((0, 0, self.epoch(0)[0]))  # whole: all workers measure the same
            measure_(model, lambda: self.loss(model, batch, 1))
        if start is not None:
            say(load_matching_weights_(model, start))
        return model

    def empty_model(self) -> Model:
        return build(self.config)

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        save(model, directory, state)

    def cost(self, model: nn.Module) -> Figures:
        config = self.config
        assert config.train.batch is not None
        length = min(config.model.length, 64)
        step = cost(config, length, max(1, config.train.batch // length))
        return {
            "parameters": step.parameters,
            "step_flops": step.forward + step.backward,
            "activation_bytes": step.activations,
        }

    @abstractmethod
    def held_out(self) -> Sequence[Sequence[Any]]:
        """Return the batches to validate with."""

    @abstractmethod
    def collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        """Return the tensors of some examples; `targets` is IGNORE where nothing is learnt."""

    def plan(self, epoch: int) -> Sequence[tuple[int, int, Sequence[Any]]]:
        """Return every part with its place, so that random choices for it can depend on it."""
        own = shard(self.epoch(epoch), parallel.rank(), parallel.world_size())
        return [(epoch, place, part) for place, part in enumerate(own)]

    def batch(self, part: tuple[int, int, Sequence[Any]]) -> Batch:
        self.place = part[:2]
        return self._collate(part[2], train=True)

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    @abstractmethod
    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        """Return the sum of a batch's losses divided by `total`."""

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        return self.total_loss(model, batch, total, self.config.train.label_smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss of held-out tokens, and what else the task measures."""
        device = next(model.parameters()).device
        total = tokens = 0.0
        for part in shard(self.held_out(), parallel.rank(), parallel.world_size()):
            batch = {k: v.to(device) for k, v in self._collate(part, train=False).items()}
            total += float(self.total_loss(model, batch, 1, 0.0))
            tokens += self.tokens(batch)
        total, tokens = parallel.sum_over_workers(total, tokens)
        mean = total / max(tokens, 1)
        return {"loss": mean, **self.figures(model, mean)}

    def figures(self, model: nn.Module, loss: float) -> dict[str, float]:
        """Return more figures on the held-out text."""
        return {"perplexity": math.exp(min(loss, 700.0))}

    def _collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        if len(part):
            return self.collate(part, train=train)
        # A worker without examples takes part in the step with an example without targets.
        parts = self.epoch(0) if train else self.held_out()
        batch = self.collate(parts[0][:1], train=train)
        batch["targets"] = torch.full_like(batch["targets"], IGNORE)
        return batch


class TrainedText(Trained):
    """A trained text model with its tokenizers.

    int8 holds the weights as 8-bit numbers: several times faster on a CPU, a little less exact.
    """

    task: ClassVar[type[TextTask]]

    @cached_property
    def tokenizers(self) -> Tokenizers:
        return self.task.load_assets(self.path)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of texts, or of the source where the sides have their own."""
        return sides_of(self.tokenizers)[0]

    @cached_property
    def model(self) -> Model:
        model = load(self.path / BEST)
        return quantise(model) if self.int8 else model

    @cached_property
    def decoder(self) -> Model:
        """The model as it decodes the fastest here, in the same precision."""
        floats = {parameter.dtype for parameter in self.model.parameters()} == {torch.float32}
        return pack(self.model) if floats and not self.int8 and can_pack() else self.model

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Figures:
        if not data and not options.get("source"):
            return self._loss(self.task.read(self.config, self.tokenizers))
        return self.evaluate_files(*data, say=say, **options)

    @abstractmethod
    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Figures:
        """Return figures on the examples of files."""

    @torch.no_grad()
    def _loss(self, task: TextTask) -> Figures:
        config = self.config
        bound = task.bind(config.replace(train=config.train.replace(metric="loss")))
        return dict(bound.evaluate(self.model))

    def _held_out(self, source: str, target: str | None = None) -> Any:
        """Return a task whose held-out part is the given files, read to their end."""
        data = self._reading().data.replace(
            source=source, target=target, valid_source=source, valid_target=target
        )
        task = self.task.read(self.config.replace(data=data), self.tokenizers)
        task.max_held_out = 2**62
        return task

    def _reading(self) -> Config:
        """Return the run's configuration for another file, which is read to its end."""
        return self.config.replace(data=self.config.data.replace(max_rows=None))


def list_of_texts(texts: str | Iterable[str]) -> Iterable[str]:
    """Return texts as they are, and one text as a list of one.

    >>> list_of_texts("great")
    ['great']
    """
    return [texts] if isinstance(texts, str) else texts


def require_text(text: object, place: int) -> str:
    """Return a text that has something in it; `place` is counted from 1."""
    if not isinstance(text, str):
        raise InputError(f"every text must be a str: item {place} is {type(text).__name__}.")
    if not text.strip():
        raise InputError(
            f"there must be a text on each line: line {place} is empty. Leave it out: "
            "grep -v '^\\s*$' FILE"
        )
    return text


def require_source(config: Config, what: str) -> str:
    """Return the file to learn from, or raise an error that says what it should be."""
    if config.data.source is None:
        raise ConfigError(f"data.source must name {what}: nothing was given.")
    return config.data.source


def load_matching_weights_(model: nn.Module, other: nn.Module) -> str:
    """Copy the tensors of another model whose names and shapes agree; return which did not."""
    own, given = model.state_dict(), other.state_dict()
    same = {
        name: tensor
        for name, tensor in given.items()
        if name in own and own[name].shape == tensor.shape
    }
    model.load_state_dict(same, strict=False)
    new = sorted({name.split(".")[0] for name in own if name not in same})
    rest = f"; newly initialised: {', '.join(new)}" if new else ""
    return f"loaded {len(same)} of {len(own)} tensors from the starting model{rest}."


def make_tokenizer(lines: Iterable[str], config: Config, kind: str, size: int) -> Tokenizer:
    """Return the tokenizer of a configuration, or else of the kind and size given."""
    data = config.data
    return train_tokenizer(
        lines,
        data.tokenizer or kind,
        data.vocab or size,
        lower=data.lowercase,
        seed=config.run.seed,
    )


def choose_vocab(characters: int, *, least: int = 500, most: int = 32000) -> int:
    """Return a vocabulary size: about one token for 250 characters, rounded to 500.

    >>> choose_vocab(3_700_000), choose_vocab(10_000), choose_vocab(10**9)
    (15000, 500, 32000)
    """
    return min(most, max(least, round(characters / 250 / 500) * 500))


def sides_of(tokenizers: Mapping[str, Tokenizer]) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizers of source and target, which may be one."""
    if "text" in tokenizers:
        return tokenizers["text"], tokenizers["text"]
    return tokenizers["source"], tokenizers["target"]


def _folder(path: Path, side: str) -> Path:
    return path / ("tokenizer" if side == "text" else f"tokenizer-{side}")
