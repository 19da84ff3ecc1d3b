"""The training loop: it knows steps, not what is learnt. A task gives batches and losses.

    each step:   g ← Σ over its parts of the gradient of (sum of the part's losses / all its tokens)
                 clip ‖g‖;   w ← optimizer(w, g, peak · schedule(step))

Parts that are accumulated therefore equal one big batch exactly, token by token. A step whose loss
or gradient is not finite is not applied; it is kept as a case, and said. Everything that decides
the next step is in the checkpoint, so a run that was killed and resumed equals an unbroken one bit
for bit. Whoever wants to look observes: the loop does not know who.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.errors import AddnormError
from addnorm.models.saved import write_tensors
from addnorm.train import checkpoint, parallel
from addnorm.train.optimizer import set_rate
from addnorm.train.schedule import Schedule

Batch = dict[str, Tensor]


class DivergedError(AddnormError, ArithmeticError):
    """Too many steps in a row whose loss or gradient was not finite."""


class Task(Protocol):
    """What the loop asks of a task."""

    metric: str
    """The figure of `evaluate` that decides which weights are best."""

    @property
    def higher_is_better(self) -> bool: ...

    def plan(self, epoch: int) -> Sequence[Any]:
        """The parts of an epoch in order, the same every time for the same epoch."""

    def batch(self, part: Any) -> Batch:
        """The tensors of one part."""

    def tokens(self, batch: Batch) -> int:
        """How many targets a batch has: what its loss is a mean over."""

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        """The sum of the batch's losses divided by `total`."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data; one of them is the metric."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know."""

    steps: int
    schedule: Schedule
    accumulate: int = 1
    clip: float = 0.0
    evaluate_every: int = 0
    save_every: int = 0
    keep: int = 2
    patience: int = 0
    """Evaluations without a better metric before stopping; 0 for never."""
    average: int = 0
    """Mean of the weights at the last so many evaluations; 0 for none."""
    ema: float = 0.0
    """Decay of the exponential average of the weights; 0 for none."""
    most_bad_steps: int = 20
    seconds: float = 0.0
    """Time after which it stops, evaluated and saved, whatever is left to do; 0 for never."""
    precision: torch.dtype = torch.float32
    """What matrix products are computed in: float32, or bfloat16 where that is fast."""


@dataclass
class Progress:
    """Where a run is: saved whole in every checkpoint."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Spent in steps."""
    evaluating: float = 0.0
    """Seconds spent in evaluations."""
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    bad_in_a_row: int = 0
    finished: bool = False
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What observers learn of one step."""

    number: int
    loss: float
    tokens: int
    rate: float
    norm: float
    """Norm of the gradient before clipping."""
    seconds: float
    applied: bool


class Observer:
    """Something that watches a run. Every method may be left as it is."""

    def begin(self, loop: "Loop") -> None: ...

    def gradients(self, loop: "Loop", step: int) -> None:
        """After the backward pass, before the optimizer's step."""

    def stepped(self, loop: "Loop", step: Step) -> None: ...

    def evaluated(self, loop: "Loop", figures: dict[str, float], better: bool) -> None: ...

    def said(self, loop: "Loop", text: str) -> None: ...

    def end(self, loop: "Loop") -> None: ...


class Loop:
    """One run: a model, a task, an optimizer, and where it is."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        settings: Settings,
        *,
        run: Path | None = None,
        observers: Sequence[Observer] = (),
        on_best: Callable[[nn.Module], None] | None = None,
        forward: nn.Module | None = None,
    ) -> None:
        """`forward` is the model as `parallel.spread` gives it, if there are several workers."""
        self.model, self.task, self.optimizer, self.settings = model, task, optimizer, settings
        self.run_directory, self.observers, self.on_best = run, list(observers), on_best
        self.forward = forward or parallel.Inside(model)
        self.device = next(model.parameters()).device
        self.progress = Progress()
        self.averages: dict[str, Tensor] = {}
        self.stop_asked = False

    def run(self) -> Progress:
        """Train to the end, or until asked to stop; returns where it got to."""
        at = self.progress
        self.tell("begin")
        try:
            with self._stop_on_signals(), parallel.watch():
                for parts in self._parts():
                    self._step(parts)
                    stop = self._is_to_stop()
                    if self._due(self.settings.evaluate_every) or at.finished:
                        self.evaluate()
                    if self._due(self.settings.save_every) or stop or at.finished:
                        self.save()
                    if stop or at.finished:
                        break
        finally:
            self.tell("end")
        return at

    def _is_to_stop(self) -> bool:
        """Whether a worker was asked to stop; also, whether all is done or the time is up.

        Clocks differ and signals come when they like: all workers must stop after the same step.
        """
        at, limit = self.progress, self.settings.seconds
        done = at.step >= self.settings.steps
        late = bool(limit) and not done and at.seconds + at.evaluating > limit
        asked, over = parallel.add_up(float(self.stop_asked), float(late))
        if over:
            self.say(f"the time is up after {at.step} steps.")
        at.finished = done or over > 0
        return asked > 0

    def _due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _parts(self) -> Iterator[list[Any]]:
        """The parts of each step still to do, epoch after epoch."""
        at = self.progress
        while at.step < self.settings.steps and not at.finished:
            plan = self.task.plan(at.epoch)
            while at.index < len(plan) and at.step < self.settings.steps and not at.finished:
                parts = list(plan[at.index : at.index + self.settings.accumulate])
                at.index += len(parts)
                yield parts
            if at.index >= len(plan):
                at.epoch, at.index = at.epoch + 1, 0

    def _step(self, parts: list[Any]) -> None:
        began = time.perf_counter()
        at, number = self.progress, self.progress.step + 1
        self.model.train()
        batches = [self._place(self.task.batch(part)) for part in parts]
        (count,) = parallel.add_up(sum(self.task.tokens(batch) for batch in batches))
        total, loss = int(count), 0.0
        for place, batch in enumerate(batches, start=1):
            with parallel.hold_back(self.forward, last=place == len(batches)), self._autocast():
                part = self.forward(partial(self.task.loss, batch=batch, total=total))
            torch.autograd.backward(part if parallel.world() == 1 else part * parallel.world())
            loss += float(part.detach())
        (loss,) = parallel.add_up(loss)
        self.tell("gradients", number)
        limit = self.settings.clip or math.inf
        norm = float(parallel.whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        rate = set_rate(self.optimizer, self.settings.schedule(number))
        good = math.isfinite(loss) and math.isfinite(norm)
        if good:
            self.optimizer.step()
            self._average()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        at.step, at.tokens, at.seconds = number, at.tokens + total, at.seconds + seconds
        at.bad_in_a_row = 0 if good else at.bad_in_a_row + 1
        self.tell("stepped", Step(number, loss, total, rate, norm, seconds, good))
        if not good:
            self._bad_step(number, loss, norm, batches)

    def _place(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.settings.precision)

    def _bad_step(self, number: int, loss: float, norm: float, batches: list[Batch]) -> None:
        """Keep what a step that was not applied was given, and stop after too many."""
        what = "loss" if not math.isfinite(loss) else "gradient"
        own = ((name, parallel.whole(p)) for name, p in self.model.named_parameters())
        bad = [name for name, tensor in own if not bool(tensor.isfinite().all())]
        where = f"; weights of {bad[0]} are not finite" if bad else ""
        text = f"step {number}: the {what} is {loss if what == 'loss' else norm}{where}"
        if self.run_directory is not None:
            folder = self.run_directory / "cases" / f"step-{number:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            for i, batch in enumerate(batches):
                name = (
                    f"batch-{i}.safetensors"
                    if parallel.world() == 1
                    else f"batch-{parallel.rank()}-{i}.safetensors"
                )
                write_tensors(folder / name, batch, {"step": str(number)})
            state = parallel.gathered(self.model.state_dict())
            if parallel.rank() == 0:
                write_tensors(folder / "weights.safetensors", state, {})
            text += f"; the step was not applied, its batch is in {folder}"
        self.say(text)
        if self.progress.bad_in_a_row >= self.settings.most_bad_steps:
            raise DivergedError(
                f"{self.progress.bad_in_a_row} steps in a row were not finite, the last: {text}. "
                "Try a lower learning rate, warm-up, or addnorm=pre."
            )

    def _average(self) -> None:
        decay = self.settings.ema
        if not decay:
            return
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                kept = self.averages.setdefault(f"ema.{name}", tensor.detach().clone())
                if tensor.is_floating_point():
                    kept.lerp_(tensor, 1 - decay)
                else:
                    kept.copy_(tensor)

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, with averaged weights if the settings ask for them."""
        at, began = self.progress, time.perf_counter()
        self._remember()
        own = self._swap_in_averages()
        self.model.eval()
        try:
            with torch.no_grad():
                figures = parallel.quietly(self.forward)(self.task.evaluate)
            at.evaluating += time.perf_counter() - began
            at.history.append({"step": at.step, **figures})
            value = figures[self.task.metric]
            better = math.isfinite(value) and (
                at.best is None
                or (value > at.best if self.task.higher_is_better else value < at.best)
            )
            if better:
                at.best, at.best_step, at.since_best = value, at.step, 0
                if self.on_best is not None:
                    self.on_best(self.model)
            else:
                at.since_best += 1
        finally:
            if own is not None:
                self.model.load_state_dict(own)
        self.tell("evaluated", figures, better)
        if self.settings.patience and at.since_best >= self.settings.patience:
            self.say(f"no better {self.task.metric} for {at.since_best} evaluations: stopping.")
            at.finished = True
        return figures

    def _remember(self) -> None:
        """Keep the weights of this evaluation among the last few, for their mean."""
        if not self.settings.average:
            return
        numbers = sorted({int(name.split(".")[1]) for name in self.averages if name[:5] == "last."})
        while len(numbers) >= self.settings.average:
            gone = f"last.{numbers.pop(0)}."
            self.averages = {k: v for k, v in self.averages.items() if not k.startswith(gone)}
        for name, tensor in self.model.state_dict().items():
            self.averages[f"last.{self.progress.step}.{name}"] = tensor.detach().clone()

    def _swap_in_averages(self) -> dict[str, Tensor] | None:
        """Give the model its averaged weights; returns its own, to be put back."""
        wanted = self.averaged()
        if wanted is None:
            return None
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(wanted)
        return own

    def averaged(self) -> dict[str, Tensor] | None:
        """The averaged weights that the settings ask for."""
        if self.settings.average:
            kept: dict[str, list[Tensor]] = {}
            for name, tensor in self.averages.items():
                if name.startswith("last."):
                    kept.setdefault(_of(name), []).append(tensor)
            return {
                name: torch.stack(found).mean(dim=0) if found[0].is_floating_point() else found[-1]
                for name, found in kept.items()
            }
        if self.settings.ema and self.averages:
            return {_of(name): tensor for name, tensor in self.averages.items()}
        return None

    def save(self) -> None:
        """Write a checkpoint, if the run has a directory."""
        if self.run_directory is not None:
            checkpoint.write(
                self.run_directory,
                self.progress.step,
                self.model,
                self.optimizer,
                {"progress": json.loads(json.dumps(vars(self.progress)))},
                self.averages,
                self.settings.keep,
            )

    def resume(self) -> bool:
        """Go back to the newest whole checkpoint; False if there is none."""
        if self.run_directory is None:
            return False
        notes: list[str] = []
        found = checkpoint.newest(self.run_directory, notes)
        for note in notes:
            self.say(note)
        if found is None:
            return False
        own = self.model.state_dict()
        self.averages = {
            name: parallel.cut_like(tensor, own.get(_of(name), tensor))
            for name, tensor in checkpoint.restore_(found, self.model, self.optimizer).items()
        }
        self.progress = Progress(**found.plain["progress"])
        return True

    def tell(self, event: str, *facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(self, *facts)

    def say(self, text: str) -> None:
        self.tell("said", text)

    def _stop_on_signals(self) -> "_Signals":
        return _Signals(self)


def _of(average: str) -> str:
    """The name of the weights that an average is of."""
    return average.removeprefix("ema.") if average[:4] == "ema." else average.split(".", 2)[2]


class _Signals:
    """While a run goes on, Ctrl-C and SIGTERM finish the step; a second one stops at once."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._asked)
        except ValueError:
            pass  # not the main thread: whoever runs us there handles signals

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.loop.stop_asked:
            raise KeyboardInterrupt
        self.loop.stop_asked = True
        self.loop.say("stopping after this step; once more stops at once.")
