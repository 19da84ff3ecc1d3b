"""Base classes of tasks: defaults, data, loss, metrics, evaluation, and the verb of a trained run.

    read(config) ─► facts() ─► resolve ─► bind(config) ─► the training loop ─► finish
                    what the    (runs)    ready to train
                    data decide

`read` returns a task that has its data; `bind` returns a copy that also has the complete
configuration and yields batches. Nothing else changes a task.
"""

import copy
import hashlib
import math
import statistics
import sys
import time
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
from addnorm.data.text.special_tokens import IGNORE
from addnorm.data.text.tokenizer import IMPORTED, Tokenizer, train_tokenizer
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.generate import pack, quantise
from addnorm.generate.frozen import can_pack
from addnorm.layers.init import measure_
from addnorm.layers.span import mean_span
from addnorm.lens.explain import explain_sequence, explanation_bytes
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.look import LARGE_CAPTURE, LIMIT
from addnorm.models.adapters import (
    Adapter,
    adapt_,
    freeze_,
    merged_state,
    save_adapter,
)
from addnorm.models.build import Model, build
from addnorm.models.saved import load_model, save
from addnorm.models.size import cost
from addnorm.report import Page
from addnorm.tasks.page_parts import PAGE_SECONDS, within_seconds
from addnorm.training import optimizer, parallel
from addnorm.training.loop import Batch, TrainingState

Fields = dict[str, Any]
Metrics = dict[str, Any]
Say = Callable[[str], None]
"""Receives a message for the user."""
Tokenizers = dict[str, Tokenizer]
"""One for both sides under "text", or one each under "source" and "target"."""
ADAPTER_FILE = "adapter.safetensors"
"""The adapters of a model, in its directory."""
BEST = "best"
"""Folder of the best model in a run directory."""


TUNING_STEPS = 300
"""Steps of fine-tuning, if that is neither below 3 epochs nor above 15."""
TUNING_EVALUATIONS = 8
"""Evaluations of a run that starts from a published model, each of which writes a checkpoint."""


def fine_tuning(width: int, size: int, batch: int, *, adapters: bool = False) -> Fields:
    """Return settings for training that starts from a published model.

    The rates that Devlin et al. (2019, A.3) found best for BERT are 2e-5 to 5e-5, in small batches
    of whole sentences; narrower models take more. Adapters take ten times as much (Hu et al. 2021,
    table 9: 4e-4 to 5e-4). Few texts are read more often, in smaller batches: too few steps are the
    usual cause of bad results (Mosbach et al. 2021, 2006.04884; Zhang et al. 2021, 2006.05987).

    Parameters
    ----------
    width : width of the model.
    size : tokens in an epoch.
    batch : tokens in a batch for large data.
    adapters : whether low-rank adapters are trained, rather than all weights.

    >>> fine_tuning(384, size=150_000, batch=1024)["epochs"]
    3.0
    """
    batch = max(min(batch, size // 10), min(batch, 256))
    rate = float(f"{(7e-4 if adapters else 7e-5) * (768 / width) ** 0.5:.2g}")
    return {
        "lr": rate,
        "batch": batch,
        "epochs": round(min(max(3.0, TUNING_STEPS * batch / max(size, 1)), 15.0), 1),
        "weight_decay": 0.01,
        "beta2": 0.999,
        "eps": 1e-8,
        "average_checkpoints": 0,
    }


def say_nothing(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True)
class DataFacts:
    """What the data decide about a configuration; `resolve` knows nothing else about them.

    Parameters
    ----------
    size : number of tokens (rows, for a table) in an epoch.
    batches : function from a configuration to the number of batches in an epoch.
    longest : function from a configuration to the number of positions of the longest example.
    model : fields of the model that follow from the data and cannot be chosen.
    data : values for fields of the data section that were left out.
    start : configuration of the model whose weights training starts from.
    evaluations : how many times the held-out data are evaluated by default, at most.
    evaluation : function from a configuration to the number of steps that cost as much as an
        evaluation; a forward pass costs about a third of a step.
    details : facts that are only read by the defaults of the task itself.
    """

    size: int
    batches: Callable[[Config], int]
    longest: Callable[[Config], int]
    model: Fields = field(default_factory=dict)
    data: Fields = field(default_factory=dict)
    start: ModelConfig | None = None
    evaluations: int = 40
    evaluation: Callable[[Config], float] = lambda config: 0.0
    details: Fields = field(default_factory=dict)


class Trained(ABC):
    """A trained model with everything that prediction needs: the verbs of a run are its methods.

    Parameters
    ----------
    task : class of the task that the model was trained for.
    path : directory of the run.
    config : complete configuration of the run.
    labels : class names, if the model predicts classes.
    int8 : whether weights are held as 8-bit integers.
    """

    engine: Any = None
    """An engine of `addnorm.interop.engines` that computes in place of torch; None for torch."""
    find_engine: Callable[[str | None, Any], Any] | None = None
    """Returns an engine for translation by its name (None: the fastest) and the settings of the
    search; a run gives it."""

    def __init__(
        self,
        task: type["Task"],
        path: Path,
        config: Config,
        labels: Sequence[str],
        *,
        int8: bool = False,
    ) -> None:
        self.task: type[Any] = task
        self.path, self.config, self.labels, self.int8 = path, config, list(labels), int8
        self.opened: dict[str, Any] = {}
        """Engines that were opened, by name."""

    @property
    def class_names(self) -> list[str]:
        """Names of the classes that the model predicts; none if it predicts something else."""
        return self.labels

    @property
    def model_path(self) -> Path:
        """Directory of the model: of a run its best one; a saved model is there itself."""
        return self.path / BEST if (self.path / BEST).is_dir() else self.path

    @property
    @abstractmethod
    def model(self) -> Any:
        """The network with the best weights."""

    @abstractmethod
    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        """Return metrics on data that the model was not trained on."""


class Task(ABC):
    """Training and held-out data, and everything that is specific to what is learnt from them.

    Created by `read`; `bind` adds what training needs.
    """

    name: ClassVar[str]
    trained: ClassVar[type[Trained]]
    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    """Names of the metrics that can decide which weights are best."""
    train_defaults: ClassVar[Fields] = {}
    epochs: ClassVar[float]
    """Default number of epochs; large data are read fewer times (`MAX_TOKENS` in resolve.py)."""
    unit: ClassVar[str] = "tokens"
    """The unit of batch sizes."""

    needs_training = True
    """Whether the model is trained; if not, it is evaluated and saved as it is."""
    has_limited_page: ClassVar[bool] = False
    """Whether each costly part of the summary ends after `page_limit` seconds."""
    deadline: float = math.inf
    """Time of `time.perf_counter()` before which the page of the run must be computed."""
    notes: list[str]
    """Sentences on what was read, detected and decided."""
    labels: Sequence[str] = ()
    config: Config

    @classmethod
    @abstractmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        """Return the task for the files of a configuration.

        Parameters
        ----------
        config : configuration with the values that the user set.
        assets : result of `load_assets`, for a run that is resumed.
        start : result of `load_start`: the model that training starts from, and its assets.
        """

    @classmethod
    @abstractmethod
    def load_assets(cls, path: Path) -> Any:
        """Return the assets that `save_assets` wrote to a run directory."""

    @abstractmethod
    def save_assets(self, path: Path) -> None:
        """Write what prediction needs besides the model: tokenizers, column encoders."""

    @classmethod
    def load_start(cls, path: Path) -> tuple[nn.Module, Any]:
        """Return the best model of a run, and its assets, to start another run from."""
        return load_model(path / BEST), cls.load_assets(path)

    @abstractmethod
    def facts(self) -> DataFacts:
        """Return what the data decide about a configuration."""

    @classmethod
    @abstractmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        """Return the default configuration, which the values of the request then override."""

    def bind(self, config: Config) -> Self:
        """Return a copy of this task that is ready to train with a complete configuration."""
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
        """Set up the batches; called on the copy that `bind` returns."""

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
        """Write a model in the format that `trained` reads."""

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer."""
        return optimizer.parameter_groups(model, weight_decay)

    @abstractmethod
    def epoch(self, number: int) -> Sequence[Any]:
        """Return the batches of an epoch, each as the indices of its examples."""

    @abstractmethod
    def plan(self, epoch: int) -> Sequence[Any]:
        """Return this process's part of every batch of an epoch."""

    @abstractmethod
    def batch(self, part: Any) -> Batch:
        """Return the tensors of one part."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """Return the number of targets in a batch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        """Return the sum of a batch's losses divided by `total`."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics on the held-out examples, among them `metric`."""

    def time_evaluation(self, model: nn.Module, seconds: float) -> float:
        """Return the expected seconds of an evaluation; measuring may end after some seconds."""
        start = time.perf_counter()
        self.evaluate(model)
        return time.perf_counter() - start

    def prepare(self, config: Config, say: Say) -> Self:
        """Return this task with the work done that a time budget includes and no model changes.

        Called before the steps of a run in minutes are measured.
        """
        return self

    def until(self, deadline: float) -> Self:
        """Return a copy whose page is computed before a time of `time.perf_counter()`."""
        limited = copy.copy(self)
        limited.deadline = deadline
        return limited

    @property
    def page_limit(self) -> float:
        """Most seconds of each part of the page that is computed; a second for each run.minutes."""
        return min(PAGE_SECONDS, self.config.run.minutes or PAGE_SECONDS)

    @property
    def page_seconds(self) -> float:
        """Time limit of the next part of the page, before the deadline."""
        left = self.deadline - time.perf_counter()
        return max(0.0, min(self.page_limit, left / 2))

    @abstractmethod
    def cost(self, model: nn.Module) -> Metrics:
        """Return the parameters, operations of a step and bytes of activations, by formula."""

    def describe_model(self, parameters: int) -> str:
        """Return a one-line description of the model."""
        model = self.config.model
        sizes = f"width {model.width}, depth {model.depth}, {model.heads} heads"
        kind = f"{self.config.run.size} {model.mode}"
        return f"{kind}: {sizes}, {model.addnorm}-norm; {parameters:,} parameters."

    def finish(self, path: Path, progress: TrainingState, say: Say) -> Metrics:
        """Do the work after the last step; return entries for the summary."""
        return {}

    def add_to_page(  # noqa: B027 (not every task adds something)
        self, page: Page, summary: Metrics, trained: Any
    ) -> None:
        """Add sections that are specific to the task to the page of a run, in a few seconds.

        Parameters
        ----------
        page : the page of the run.
        summary : the summary of the run.
        trained : the best model, of the class `trained`; None if there is none yet.
        """

    def fingerprint(self) -> str:
        """Return a digest of the training and held-out examples."""
        total = hashlib.sha256()
        for piece in self.contents():
            total.update(piece if isinstance(piece, bytes) else repr(piece).encode())
        return total.hexdigest()

    @abstractmethod
    def contents(self) -> Iterable[object]:
        """Yield everything that the fingerprint covers."""


class TextTask(Task):
    """A task whose examples are sequences of tokens."""

    mode: ClassVar[str]
    """Mode of the model: encoder, decoder or encoder-decoder."""
    head: ClassVar[str]
    sizes: ClassVar[dict[str, Fields]]
    """Fields of the model for each size: tiny, small, base, big."""
    size_limits: ClassVar[tuple[tuple[int, str], ...]]
    """The largest number of training tokens for each size; for more, the size is base."""
    max_length: ClassVar[int | None] = None
    """Default of data.max_length; None for the length of the model."""
    ends: ClassVar[int] = 0
    """Positions that a text takes in addition to its tokens."""
    max_held_out: int = 200_000
    """The largest number of held-out tokens that an evaluation reads."""

    tokenizers: Tokenizers
    size: int
    """Training tokens in an epoch, of both sides together."""
    start: ModelConfig | None = None

    @classmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        model, tokenizers = start or (None, None)
        start_config: ModelConfig | None = None if model is None else model.config
        completed = config.replace(data=cls.complete_data(config, start_config))
        task = cls.read_files(completed, assets or tokenizers)
        task.start = start_config
        return task

    @classmethod
    @abstractmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        """Return the task for the files of a configuration; without tokenizers, train them."""

    @classmethod
    def complete_data(cls, config: Config, start: ModelConfig | None) -> Any:
        """Return the data section with max_length and valid_fraction filled in.

        A model to start from may have fewer learned positions than the default length needs.
        """
        data, max_length = config.data, cls.max_length
        if start is not None and max_length is not None and start.positions == "learned":
            max_length = min(max_length, start.length - cls.ends)
        share = 0.1 if data.valid_fraction is None else data.valid_fraction
        if not share and data.valid_source is None:
            raise ConfigError(
                "data.valid_fraction must be above 0 without a validation file: got 0. Try 0.1."
            )
        return data.replace(max_length=data.max_length or max_length, valid_fraction=share)

    @classmethod
    def load_assets(cls, path: Path) -> Tokenizers:
        sides = [side for side in ("text", "source", "target") if _folder(path, side).is_dir()]
        if not sides:
            raise SavedError(
                f"{str(path)!r} has no tokenizer: the folder is missing. Open a run, not its model."
            )
        return {side: Tokenizer.load(_folder(path, side)) for side in sides}

    def save_assets(self, path: Path) -> None:
        save_tokenizers(path, self.tokenizers)

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
            evaluations=TUNING_EVALUATIONS if self.start and kind in IMPORTED else 40,
            evaluation=lambda config: self.bind(config).evaluation_passes() / 3,
        )

    def evaluation_passes(self) -> float:
        """Return the number of forward passes of a training batch that an evaluation costs."""
        return len(self.held_out())

    def model_fields(self) -> Fields:
        """Return the fields of the model that follow from the data."""
        tokenizer = next(iter(self.tokenizers.values()))
        pad = tokenizer.pad if self.hides_padding(tokenizer) else None
        return {"mode": self.mode, "head": self.head, "vocab": tokenizer.size, "pad": pad}

    @staticmethod
    def hides_padding(tokenizer: Tokenizer) -> bool:
        """Return whether the id of padding has no other use, so that it may be hidden."""
        special = tokenizer.special
        return special.pad not in (special.begin, special.end)

    @classmethod
    def choose_size(cls, tokens: int) -> str:
        """Return the size of the model for a number of training tokens."""
        return next((size for most, size in cls.size_limits if tokens <= most), "base")

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        size = request.run.size or cls.choose_size(facts.size)
        fields = cls.sizes[size]
        model = ModelConfig(vocab=1).replace(**fields)
        if preset is not None:
            model = presets.find(preset).model
        imported = facts.data.get("tokenizer") in IMPORTED
        if facts.start is not None:
            # A published model keeps its dropout; one of ours takes that of the size.
            dropout = facts.start.dropout if imported else fields.get("dropout", 0.1)
            model = facts.start.replace(dropout=dropout)
            if imported:  # the fused kernel needs it; a step of MiniLM takes 14 % less time
                model = model.replace(attention_dropout=0.0)
            if imported and cls.head == "class" and facts.start.head != "class":
                model = model.replace(pool="mean", pooler="none")
        base = Config().replace(model=model.replace(**facts.model))
        train = cls.train_defaults
        if imported and facts.start is not None:
            batch, adapters = train.get("batch", 1024), request.train.lora is not None
            train = train | fine_tuning(model.width, facts.size, batch, adapters=adapters)
            if cls.head == "class" and not adapters and not request.train.unfreeze:
                train["freeze"] = 0  # the embeddings: 10 % less time, and half of the memory
        data = cls.complete_data(request, facts.start)
        known = {
            "max_length": data.max_length,
            "valid_fraction": data.valid_fraction,
            **facts.data,
        }
        return base.replace(
            data=base.data.replace(**known),
            train=base.train.replace(**train),
            run=base.run.replace(size=size),
        )

    def with_all_held_out(self) -> Self:
        """Return a copy whose evaluations read all held-out examples."""
        whole = copy.copy(self)
        whole.max_held_out = sys.maxsize
        return whole

    @abstractmethod
    def positions_needed(self, config: Config) -> int:
        """Return the number of positions of the longest text under a configuration."""

    def make_model(self, start: nn.Module | None, say: Say) -> Model:
        torch.manual_seed(self.config.run.seed)
        model = build(self.config)
        if self.config.model.has_admin and start is None:
            batch = self.batch((0, self.epoch(0)[0]))  # not sharded: all workers measure the same
            measure_(model, lambda: self.loss(model, batch, 1))
        if start is not None:
            say(load_matching_weights_(model, start))
        self._freeze(model, say)
        return model

    def empty_model(self) -> Model:
        model = build(self.config)
        self._freeze(model, say_nothing)
        return model

    @property
    def adapter(self) -> Adapter | None:
        """The low-rank adapters of the configuration, if it has any."""
        train = self.config.train
        if train.lora is None:
            return None
        return Adapter(
            roles=train.lora,
            rank=train.lora_rank,
            alpha=train.lora_alpha,
            dora=train.dora,
            dropout=train.lora_dropout,
        )

    def _freeze(self, model: Model, say: Say) -> None:
        """Put adapters over a model, or freeze its first blocks, as configured."""
        if self.adapter is not None:
            layers = adapt_(model, self.adapter)
            what = f"adapters over {len(layers)} layers"
        elif self.config.train.freeze is not None:
            freeze_(model, self.config.train.freeze)
            what = f"embeddings and {self.config.train.freeze} blocks frozen"
        else:
            return
        trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
        share = trained / sum(part.numel() for part in model.parameters())
        say(f"{what}: {trained:,} parameters are trained, {share:.2%} of all.")

    def before_step(self, model: nn.Module, step: int) -> None:
        """Freeze the blocks that `train.unfreeze` does not train yet at a step, from 1."""
        epochs = self.config.train.unfreeze
        if epochs:
            every = max(1, round(epochs * len(self.epoch(0)) / self.config.train.accumulate))
            optimizer.unfreeze_(model, (step - 1) // every)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        train = self.config.train
        if train.layer_decay == 1.0:
            return super().parameter_groups(model, weight_decay)
        assert train.lr is not None
        return optimizer.layer_groups(model, weight_decay, train.lr, train.layer_decay)

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        """Write the model; of one with adapters, also the adapters alone: adapter.safetensors."""
        if self.adapter is None:
            save(model, directory, state)
            return
        save(model, directory, merged_state(model, state))
        save_adapter(model, self.adapter, directory / ADAPTER_FILE, state)

    def cost(self, model: nn.Module) -> Metrics:
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
        """Return the batches of held-out examples."""

    @abstractmethod
    def collate(self, part: Sequence[Any], *, epoch: int | None) -> Batch:
        """Return the tensors of some examples; `targets` is IGNORE where there is no target.

        Parameters
        ----------
        part : indices of the examples.
        epoch : the training epoch, which random choices depend on; None for held-out examples.
        """

    def plan(self, epoch: int) -> Sequence[tuple[int, Sequence[Any]]]:
        """Return this process's part of every batch, each with the number of the epoch."""
        own = shard(self.epoch(epoch), parallel.rank(), parallel.world_size())
        return [(epoch, part) for part in own]

    def batch(self, part: tuple[int, Sequence[Any]]) -> Batch:
        epoch, examples = part
        return self._collate(examples, epoch=epoch)

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def tokens_read(self, batch: Batch) -> int:
        """Return the number of tokens that the model reads, of both sides, without padding."""
        if not self.tokens(batch):
            return 0  # a worker without examples
        sides = [batch[name] for name in ("inputs", "source", "target_in") if name in batch]
        pad = self.config.model.pad
        return sum(side.numel() if pad is None else int(side.ne(pad).sum()) for side in sides)

    @abstractmethod
    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        """Return the sum of a batch's losses divided by `total`."""

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        loss = self.total_loss(model, batch, total, self.config.train.label_smoothing)
        if self.config.model.span is None:
            return loss
        # The parts of a batch add up to one penalty.
        share = self.tokens(batch) / max(total, 1)
        return loss + self.config.train.span_penalty * share * mean_span(model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss of the held-out tokens, and further metrics of the task."""
        device = next(model.parameters()).device
        total = tokens = 0.0
        for part in shard(self.held_out(), parallel.rank(), parallel.world_size()):
            batch = {k: v.to(device) for k, v in self._collate(part, epoch=None).items()}
            total += float(self.total_loss(model, batch, 1, 0.0))
            tokens += self.tokens(batch)
        total, tokens = parallel.sum_over_workers(total, tokens)
        mean = total / max(tokens, 1)
        return {"loss": mean, **self.further_metrics(model, mean)}

    def time_evaluation(self, model: nn.Module, seconds: float) -> float:
        """Return the expected seconds of the loss of all held-out parts, by a median over parts."""
        device = next(model.parameters()).device
        parts = shard(self.held_out(), parallel.rank(), parallel.world_size())
        times = []
        for part in within_seconds(parts, seconds):
            start = time.perf_counter()
            batch = {k: v.to(device) for k, v in self._collate(part, epoch=None).items()}
            self.total_loss(model, batch, 1, 0.0)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * len(parts) if times else 0.0

    def further_metrics(self, model: nn.Module, loss: float) -> dict[str, float]:
        """Return metrics on the held-out text besides its loss."""
        return {"perplexity": math.exp(min(loss, 700.0))}

    def _collate(self, part: Sequence[Any], *, epoch: int | None) -> Batch:
        if len(part):
            return self.collate(part, epoch=epoch)
        # A worker without examples takes part in the step with an example without targets.
        parts = self.held_out() if epoch is None else self.epoch(0)
        batch = self.collate(parts[0][:1], epoch=epoch)
        batch["targets"] = torch.full_like(batch["targets"], IGNORE)
        return batch


class TrainedText(Trained):
    """A trained text model with its tokenizers.

    With `int8`, decoding is several times faster on a CPU, and a little less exact.
    """

    task: type[TextTask]

    @cached_property
    def tokenizers(self) -> Tokenizers:
        return self.task.load_assets(self.path)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; that of the source, if source and target have their own."""
        return sides_of(self.tokenizers)[0]

    @cached_property
    def model(self) -> Model:
        model = load_model(self.model_path)
        return quantise(model) if self.int8 else model

    def preload(self, model: Model, tokenizers: Tokenizers) -> None:
        """Use a model and tokenizers that are in memory, not those of the directory."""
        self.__dict__["model"] = quantise(model) if self.int8 else model
        self.__dict__["tokenizers"] = tokenizers

    @cached_property
    def decoder(self) -> Model:
        """The model in the form that decodes fastest on this machine, in the same precision."""
        is_float32 = {parameter.dtype for parameter in self.model.parameters()} == {torch.float32}
        return pack(self.model) if is_float32 and not self.int8 and can_pack() else self.model

    def explain(
        self,
        text: str | Sequence[str],
        row: int | None = None,
        *,
        limit: int | None = None,
        say: Say = say_nothing,
        **options: Any,
    ) -> SequenceExplanation:
        """Return an explanation of the output for a text: attention, pieces, layers, inputs.

        Parameters
        ----------
        text : a text, or a list of texts of which one is explained.
        row : which one of a list, counted from 1; the first by default.
        limit : bytes above which the explanation is refused, with its size; 1 GB by default.
        say : receives messages for the user.
        options : `target`, a translation to explain instead of the model's own.
        """
        if self.int8:
            raise ConfigError("explanations need the float weights: leave out int8.")
        texts = list(list_of_texts(text))
        number = choose_row(len(texts), row, "text", say)
        chosen = require_text(texts[number - 1], number)
        if is_blank(chosen):
            raise InputError(f"a text to explain must not be blank: text {number} is.")
        arguments = self.explain_arguments(chosen, **options)
        limit = LIMIT if limit is None else limit
        state_memory(self.model, arguments["inputs"], limit, say)
        return explain_sequence(self.model, **arguments, limit=limit)

    def explain_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of `explain_sequence` for a text that is one input."""
        ids = self.tokenizer.encode(text)
        return {
            "inputs": torch.tensor([ids]),
            "tokens": {self.task.mode: [self.tokenizer.piece(i) for i in ids]},
            "name_of": self.tokenizer.piece,
            "title": text,
            "special": {self.task.mode: self.tokenizer.special.ids()},
        }

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        if not data and not options.get("source"):
            return self._loss(self.task.read(self.config, self.tokenizers))
        for value in (*data, options.get("source"), options.get("target")):
            if not isinstance(value, str | Path | None):
                raise InputError(
                    f"texts to evaluate on must be in a file: got a {type(value).__name__}. "
                    "Write them to a file first."
                )
        return self.evaluate_files(*data, say=say, **options)

    @abstractmethod
    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        """Return metrics on the examples of files."""

    @torch.no_grad()
    def _loss(self, task: TextTask) -> Metrics:
        config = self.config
        bound = task.bind(config.replace(train=config.train.replace(metric="loss")))
        return dict(bound.evaluate(self.model))

    def _read_held_out(self, source: str, target: str | None = None) -> Any:
        """Return a task whose held-out examples are all examples of the files."""
        data = self._config_for_all_rows().data.replace(
            source=source, target=target, valid_source=source, valid_target=target
        )
        task = self.task.read(self.config.replace(data=data), self.tokenizers)
        return task.with_all_held_out()

    def _config_for_all_rows(self) -> Config:
        """Return the configuration of the run without its limit on the number of rows."""
        return self.config.replace(data=self.config.data.replace(max_rows=None))


def choose_row(count: int, row: int | None, what: str, say: Say) -> int:
    """Return which of several inputs is explained, counted from 1: the first by default.

    Parameters
    ----------
    count : number of inputs.
    row : the one asked for.
    what : what an input is: a text, an image.
    say : receives a message if there are others.
    """
    if not count:
        raise InputError(f"there must be one {what} or more to explain: got none.")
    number = 1 if row is None else row
    if not 1 <= number <= count:
        raise InputError(f"row must be 1 to {count}: got {number}.")
    if row is None and count > 1:
        say(f"{what} 1 of {count:,} is explained; choose another with row (--row N).")
    return number


def state_memory(model: Any, inputs: Any, limit: int, say: Say) -> None:
    """Say how much memory an explanation needs, if that is much and not refused for its size."""
    size = explanation_bytes(model, inputs)
    if LARGE_CAPTURE < size <= limit:
        say(f"this explanation needs about {size / 2**20:,.0f} MB.")


def count_rows_within(lengths: Sequence[Sequence[int]], tokens: int) -> int:
    """Return the number of leading rows with at most `tokens` tokens together; at least one.

    Parameters
    ----------
    lengths : tokens of each row, for each side.
    tokens : the limit.

    >>> count_rows_within([[3, 4, 5], [3, 4, 5]], 15)
    2
    """
    total = 0
    for count, row in enumerate(zip(*lengths, strict=True)):
        total += sum(row)
        if total > tokens:
            return max(count, 1)
    return len(lengths[0])


def list_of_texts(texts: str | Iterable[Any]) -> Iterable[Any]:
    """Return texts unchanged, and a single text as a list of one; InputError for anything else.

    >>> list_of_texts("great")
    ['great']
    >>> list_of_texts(None)
    Traceback (most recent call last):
    addnorm.errors.InputError: texts must be a str or a list of str: got None. Try ['a text'].
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise InputError(
            f"texts must be a str or a list of str: got {texts!r:.60}. Try ['a text']."
        )
    return texts


def require_text(text: object, place: int) -> str:
    """Return a text, or raise InputError if it is not a str; `place` is counted from 1."""
    if not isinstance(text, str):
        raise InputError(f"every text must be a str: item {place} is {type(text).__name__}.")
    return text


def is_blank(text: str) -> bool:
    """Return whether a text has no characters besides spaces: verbs pass it through unanswered."""
    return not text.strip()


def require_source(config: Config, what: str) -> str:
    """Return the training file, or raise ConfigError with what it must contain."""
    if config.data.source is None:
        raise ConfigError(f"data.source must name {what}: it is not set.")
    return config.data.source


def load_matching_weights_(model: nn.Module, other: nn.Module) -> str:
    """Copy the tensors of another model whose names and shapes match; return a message about it."""
    own, source = model.state_dict(), other.state_dict()
    same = {
        name: tensor
        for name, tensor in source.items()
        if name in own and own[name].shape == tensor.shape
    }
    model.load_state_dict(same, strict=False)
    new = sorted({name.split(".")[0] for name in own if name not in same})
    rest = f"; newly initialised: {', '.join(new)}" if new else ""
    return f"loaded {len(same)} of {len(own)} tensors from the starting model{rest}."


def make_tokenizer(lines: Iterable[str], config: Config, kind: str, size: int) -> Tokenizer:
    """Return a tokenizer trained on lines.

    Parameters
    ----------
    lines : the text to train on.
    config : the configuration; its kind and size of tokenizer are used if they are set.
    kind, size : kind and size of the tokenizer otherwise.
    """
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
    """Return the tokenizers of source and target; they may be the same."""
    if "text" in tokenizers:
        return tokenizers["text"], tokenizers["text"]
    return tokenizers["source"], tokenizers["target"]


def save_tokenizers(path: Path, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Write tokenizers to a run directory, as `TextTask.load_assets` reads them."""
    for side, tokenizer in tokenizers.items():
        tokenizer.save(_folder(path, side))


def _folder(path: Path, side: str) -> Path:
    return path / ("tokenizer" if side == "text" else f"tokenizer-{side}")
