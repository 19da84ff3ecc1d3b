"""The training loop, independent of tasks: a task provides batches and losses.

    each step:   g ← Σ over its parts of the gradient of (sum of the part's losses / all its tokens)
                 clip ‖g‖;   w ← optimizer(w, g, peak · schedule(step))

Accumulated parts therefore equal one large batch exactly, token by token. A step whose loss or
gradient is not finite is skipped and saved for inspection, with a message. The checkpoint holds
everything that decides the next step, so that a run that was killed and resumed equals an unbroken
one bit for bit. A run with a time budget is refitted to it (see `pace`), and the number of threads
may follow the load of the machine (see `threads`); each such change is recorded with its step, in
the checkpoint as well, so that a resumed run continues with it. Observers are notified of each
event.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.errors import AddnormError, SavedError
from addnorm.files import FAILED_STEP_BATCH, FAILED_STEP_MODEL, parse_typed
from addnorm.models.saved import write_tensors
from addnorm.training import checkpoint, parallel
from addnorm.training.optimizer import set_rate
from addnorm.training.pace import Extension, Pace, Segment, complete, refit
from addnorm.training.schedule import Schedule
from addnorm.training.threads import ThreadTuner

MAX_CASES = 3
"""Skipped steps that are saved: more would show the same."""

Batch = dict[str, Tensor]


class DivergedError(AddnormError, ArithmeticError):
    """Too many steps in a row whose loss or gradient was not finite."""


class LoopTask(Protocol):
    """What the loop needs from a task."""

    @property
    def metric(self) -> str:
        """The metric of `evaluate` that decides which weights are best."""

    @property
    def higher_is_better(self) -> bool: ...

    def plan(self, epoch: int) -> Sequence[Any]:
        """Return the parts of an epoch in order; the same epoch always has the same parts."""

    def batch(self, part: Any) -> Batch:
        """Return the tensors of one part."""

    def tokens(self, batch: Batch) -> int:
        """Return the number of targets in a batch, over which its loss is a mean."""

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        """Return the sum of the batch's losses divided by `total`."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics on held-out data; `metric` is one of them."""


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, and what to do in between.

    Parameters
    ----------
    steps : Optimizer steps in total.
    schedule : Factor on the peak learning rate at each step.
    accumulate : Parts whose gradients are accumulated in one step.
    clip : Largest norm of the gradient; 0 for no clipping.
    evaluate_every : Steps between evaluations; 0 for only one, at the end.
    save_every : Steps between checkpoints; 0 for only one, at the end; None for one after each
        evaluation.
    keep_checkpoints : Number of checkpoints to keep.
    patience : Evaluations without an improvement before stopping early; 0 for never.
    average : Number of last evaluations whose weights are averaged; 0 for none.
    ema : Decay of the exponential moving average of the weights; 0 for none.
    max_skipped_steps : Skipped steps in a row before training fails with DivergedError.
    max_seconds : Time limit, after which the run is evaluated, saved and finished; 0 for none.
    refit : Whether the schedule and the evaluations are refitted to the time limit, so that it
        holds for all of the run, from `began` to the end of its summary.
    max_steps : Largest number of steps that a refit may choose; None for any.
    fixed_evaluations : Whether a refit keeps `evaluate_every`.
    part_limit : Time limit of each part of the summary, which is part of the time.
    extensions : Further training after the schedule, in order, each with its own schedule.
    precision : What matrix products are computed in: float32, or bfloat16 where that is fast.
    """

    steps: int
    schedule: Schedule
    accumulate: int = 1
    clip: float = 0.0
    evaluate_every: int = 0
    save_every: int | None = 0
    keep_checkpoints: int = 2
    patience: int = 0
    average: int = 0
    ema: float = 0.0
    max_skipped_steps: int = 20
    max_seconds: float = 0.0
    refit: bool = False
    max_steps: int | None = None
    fixed_evaluations: bool = False
    part_limit: float = math.inf
    extensions: tuple[tuple[Extension, Schedule], ...] = ()
    precision: torch.dtype = torch.float32


@dataclass
class TrainingState:
    """Progress of a run. All of it is saved in every checkpoint.

    Parameters
    ----------
    step : Steps done.
    epoch : Number of the epoch, from 0.
    index : Parts of the epoch that are done.
    tokens : Tokens trained on, without padding.
    training_seconds : Time spent in steps.
    evaluation_seconds : Time spent in evaluations, and in writing the best model.
    saving_seconds : Time spent in checkpoints.
    other_seconds : Time spent on all else, such as reading the data, measuring and observers.
    best : Best value of the task's metric so far; None before the first evaluation.
    best_step : Step of the best value.
    evaluations_since_best : Evaluations without an improvement.
    skipped_in_a_row : Skipped steps since the last one that was applied.
    finished : Whether training is complete.
    history : Step and metrics of each evaluation.
    segments : Refits and extensions of the schedule; empty if it is as the settings have it.
    pace : Recent durations, which refits are computed from.
    extensions : Number of extensions that have begun.
    threads : Step and number of threads of each choice; empty if the number is not chosen.
    threads_pace : Seconds of a step just after the last choice.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    other_seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    skipped_in_a_row: int = 0
    finished: bool = False
    history: list[dict[str, float]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    extensions: int = 0
    threads: list[dict[str, int]] = field(default_factory=list)
    threads_pace: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.training_seconds + self.other_seconds + self.excluded_seconds

    @property
    def fit_seconds(self) -> float:
        """Seconds of steps and evaluations."""
        return self.training_seconds + self.evaluation_seconds

    @property
    def excluded_seconds(self) -> float:
        """Seconds of evaluations and checkpoints."""
        return self.evaluation_seconds + self.saving_seconds

    @classmethod
    def parse(cls, plain: Any, saved: checkpoint.Checkpoint) -> "TrainingState":
        """Return the state that a checkpoint holds; SavedError if it is not a complete state."""
        where = f"the training state in {str(saved.path)!r}"
        if not isinstance(plain, dict) or plain.keys() != asdict(cls()).keys():
            raise SavedError(f"{where} must have the fields of this addnorm. Train again.")
        state: TrainingState = parse_typed(cls, plain, where)
        if state.step != saved.plain["step"]:
            raise SavedError(
                f"{where} must be of step {saved.plain['step']}: it is of step {state.step}. "
                "Use a backup."
            )
        return state


@dataclass(frozen=True)
class Step:
    """One step, as observers receive it.

    Parameters
    ----------
    number : Number of the step, from 1.
    loss : Mean loss over its targets.
    tokens : Number of its tokens, without padding: `tokens_read` of the task, or its targets.
    rate : Learning rate of the first parameter group.
    norm : Norm of the gradient before clipping.
    seconds : Time it took.
    applied : False for a step that was skipped because its loss or gradient was not finite.
    """

    number: int
    loss: float
    tokens: int
    rate: float
    norm: float
    seconds: float
    applied: bool


class Observer:
    """Base class of observers of a run. Override the events of interest."""

    def on_begin(self, loop: "Loop") -> None: ...

    def on_gradients(self, loop: "Loop", step: int) -> None:
        """After the backward pass, before the optimizer's step."""

    def on_step(self, loop: "Loop", step: Step) -> None: ...

    def on_evaluate(self, loop: "Loop", figures: dict[str, float], better: bool) -> None:
        """After an evaluation; `better` is True if the metric is the best so far."""

    def on_message(self, loop: "Loop", text: str) -> None: ...

    def on_change(self, loop: "Loop", change: str, facts: dict[str, Any]) -> None:
        """After a refit or extension of the schedule, or another number of threads."""

    def on_end(self, loop: "Loop") -> None: ...


class Loop:
    """One training run: a model, a task, an optimizer and a state.

    Parameters
    ----------
    model : the model, trained in place
    task : provides batches, losses and evaluations
    optimizer : one that `make_optimizer` returned, or whose groups have a `peak` rate
    settings : how long to train, and what to do in between
    run_directory : directory for checkpoints and skipped steps; None to write nothing
    observers : notified of each event
    on_best : called with the model whenever an evaluation is the best so far
    forward : the model as `parallel.distribute` returns it, if there are several processes
    tuner : chooses the number of threads; None to leave it alone
    clock : returns the time in seconds
    cpu_clock : returns the CPU time of this process in seconds; None not to measure the load
    began : time of the clock from which this process counts as time of the run; now if None
    """

    def __init__(
        self,
        model: nn.Module,
        task: LoopTask,
        optimizer: Optimizer,
        settings: LoopSettings,
        *,
        run_directory: Path | None = None,
        observers: Sequence[Observer] = (),
        on_best: Callable[[nn.Module], None] | None = None,
        forward: nn.Module | None = None,
        tuner: ThreadTuner | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] | None = None,
        began: float | None = None,
    ) -> None:
        self.model, self.task, self.optimizer, self.settings = model, task, optimizer, settings
        self.run_directory, self.observers, self.on_best = run_directory, list(observers), on_best
        self.forward = forward or parallel.CallWithModel(model)
        self.device = next(model.parameters()).device
        self.state = TrainingState()
        self.averages: dict[str, Tensor] = {}
        self.saved_cases = 0
        self.stop_requested = False
        self.tuner, self.clock, self.cpu_clock, self.began = tuner, clock, cpu_clock, began

    @property
    def segment(self) -> Segment:
        """The present part of the schedule."""
        if self.state.segments:
            return self.state.segments[-1]
        settings = self.settings
        return Segment(
            steps=settings.steps,
            end=settings.steps,
            evaluate_every=settings.evaluate_every,
            until=settings.max_seconds,
        )

    @property
    def steps(self) -> int:
        """Number of the last step, as planned at present."""
        return self.segment.last_step

    def rate_factor(self, step: int) -> float:
        """Return the factor on the peak learning rate at a step of the present segment."""
        segment, schedule = self.segment, self.settings.schedule
        if segment.extension:
            schedule = self.settings.extensions[segment.extension - 1][1]
        return schedule(segment.position(step))

    def run(self) -> TrainingState:
        """Train until finished or until a stop is requested; return the state."""
        state, threads = self.state, torch.get_num_threads()
        self._start_tuner()
        self.notify("on_begin")
        try:
            with _StopOnSignals(self), parallel.detect_lost_workers():
                self._start_clock()
                for parts in self._remaining_parts():
                    self._step(parts)
                    due = self._is_evaluation_due()
                    self._begin_extensions()
                    stop = self._must_stop()
                    if (due or state.finished) and not self._is_evaluated():
                        self.evaluate()
                    if self._is_save_due(due) or stop or state.finished:
                        self.save()
                    self._tune_threads()
                    self._count_other_seconds()
                    if stop or state.finished:
                        break
        finally:
            torch.set_num_threads(threads)
            self.notify("on_end")
        return state

    def finish_untrained(self) -> TrainingState:
        """Evaluate and save a model that needs no training; return the state."""
        self.notify("on_begin")
        self._start_clock()
        try:
            self.state.finished = True
            self.evaluate()
            self.save()
            self._count_other_seconds()
        finally:
            self.notify("on_end")
        return self.state

    def _start_clock(self) -> None:
        """Count the time since `began`; it is not of the steps of the present window."""
        state = self.state
        now = self.clock()
        self._window_clocks = (now, self.cpu_clock() if self.cpu_clock else 0.0)
        self._zero = (now if self.began is None else self.began) - state.total_seconds
        before = state.other_seconds
        self._count_other_seconds()
        state.pace.window_seconds += _mean_over_workers(state.other_seconds - before)

    def _count_other_seconds(self) -> None:
        """Set `other_seconds` so that all seconds add up to those of the clock."""
        self.state.other_seconds += self.clock() - self._zero - self.state.total_seconds

    def _must_stop(self) -> bool:
        """Return whether a stop was requested; also set `finished` at the last step or time limit.

        Clocks differ and signals arrive at any time, but all workers must stop after the same step,
        and refit to the same segment: so they decide by the mean of their clocks.
        """
        state = self.state
        requests, *seconds = parallel.sum_over_workers(
            float(self.stop_requested), state.total_seconds, state.excluded_seconds
        )
        total, excluded = (value / parallel.world_size() for value in seconds)
        if self.settings.refit and self.segment.until:
            self._refit(total, excluded)
        done, limit = state.step >= self.steps, self.segment.until
        reserve = 0.0
        if self.settings.refit:
            reserve = state.pace.evaluation + state.pace.summary(
                limit - self.segment.began, self.settings.part_limit
            )
        late = bool(limit) and not done and total + reserve > limit
        if late and self.settings.refit and total < limit:
            late = not self._complete_schedule()
        if late:
            self.log(f"time limit reached after {state.step} step{'s'[: state.step != 1]}.")
        state.finished = done or late
        return requests > 0

    def _refit(self, total: float, excluded: float) -> None:
        """Append a segment that ends with the time, if the present one does not."""
        state, settings = self.state, self.settings
        if not state.pace.close_window(self.segment, state.step, total, excluded):
            return
        self._measure_slowdown()
        own = not self.segment.extension
        segment = refit(
            self.segment,
            state.pace,
            state.step,
            total,
            max_steps=settings.max_steps if own else None,
            evaluate_every=settings.evaluate_every if settings.fixed_evaluations else None,
            part_limit=settings.part_limit,
        )
        if segment is not None:
            self._append_refit(segment)

    def _complete_schedule(self) -> bool:
        """End the schedule in a few last steps; return False if there is no time for one."""
        segment = complete(self.segment, self.state.pace, self.state.step)
        if segment is not None and segment is not self.segment:
            self._append_refit(segment)
        return segment is not None

    def _append_refit(self, segment: Segment) -> None:
        self.state.segments.append(segment)
        facts = {"steps": segment.last_step, "evaluate_every": segment.evaluate_every}
        self.notify("on_change", "refit", {**facts, "step_seconds": self.state.pace.step})

    def _measure_slowdown(self) -> None:
        """Store how much longer the window took than its CPU time: 1 on idle cores."""
        if self.cpu_clock is None:
            return
        before, self._window_clocks = self._window_clocks, (self.clock(), self.cpu_clock())
        clock, cpu = (now - then for now, then in zip(self._window_clocks, before, strict=True))
        slowdown = max(1.0, clock / cpu) if cpu > 0 else 1.0
        self.state.pace.add("slowdowns", _mean_over_workers(slowdown))

    def _begin_extensions(self) -> None:
        """Begin the extensions whose step is reached; the run is then not finished yet."""
        state = self.state
        while state.extensions < len(self.settings.extensions):
            extension, _ = self.settings.extensions[state.extensions]
            if state.step < extension.step:
                return
            if state.step and self.segment.last_step == state.step and not self._is_evaluated():
                self.evaluate()
            state.extensions += 1
            total = _mean_over_workers(state.total_seconds)
            segment = extension.segment(state.extensions, state.step, total)
            state.segments.append(segment)
            state.pace.windows = 0
            excluded = _mean_over_workers(state.excluded_seconds)
            state.pace.open_window(state.step, total, excluded)
            state.finished, state.evaluations_since_best = False, 0
            facts = {"steps": segment.last_step, "evaluate_every": segment.evaluate_every}
            self.notify("on_change", "extension", facts)

    def _is_evaluated(self) -> bool:
        return bool(self.state.history) and self.state.history[-1]["step"] == self.state.step

    def _is_evaluation_due(self) -> bool:
        """Return whether an evaluation is due; with a time budget only if it is affordable."""
        every, state, settings = self.segment.evaluate_every, self.state, self.settings
        last = int(state.history[-1]["step"]) if state.history else 0
        due = every > 0 and state.step - last >= every
        if not due or not self.segment.until or not settings.refit or settings.fixed_evaluations:
            return due
        total = _mean_over_workers(state.total_seconds)
        return state.pace.may_evaluate(total, _mean_over_workers(state.excluded_seconds))

    def _is_save_due(self, evaluated: bool) -> bool:
        """Return whether a checkpoint is due."""
        every = self.settings.save_every
        return evaluated if every is None else every > 0 and self.state.step % every == 0

    def _start_tuner(self) -> None:
        """Use the number of threads that was chosen, in this process or before the checkpoint."""
        state, tuner = self.state, self.tuner
        if tuner is None:
            return
        if state.threads and state.threads[-1]["threads"] in tuner.candidates:
            tuner.chosen, tuner.pace = state.threads[-1]["threads"], state.threads_pace
        else:
            state.threads.append({"step": state.step, "threads": tuner.chosen})
        torch.set_num_threads(tuner.chosen)

    def _tune_threads(self) -> None:
        """Pass the duration of the last step to the tuner; record another number of threads."""
        if self.tuner is None:
            return
        before, pace = self.tuner.chosen, self.tuner.pace
        changed = self.tuner.after_step(self._step_seconds)
        self.state.threads_pace = self.tuner.pace
        if changed:
            chosen = self.tuner.chosen
            torch.set_num_threads(chosen)
            self.state.threads.append({"step": self.state.step, "threads": chosen})
            self.log(
                f"step {self.state.step}: {chosen} thread{'s'[: chosen != 1]} instead of {before}; "
                f"a step took {self._step_seconds:.3g} s, and {pace:.3g} s before."
            )
            self.notify("on_change", "threads", {"threads": chosen})

    def _remaining_parts(self) -> Iterator[list[Any]]:
        """Yield the parts of each remaining step, epoch after epoch."""
        state = self.state
        while state.step < self.steps and not state.finished:
            plan = self.task.plan(state.epoch)
            while state.index < len(plan) and state.step < self.steps and not state.finished:
                parts = list(plan[state.index : state.index + self.settings.accumulate])
                state.index += len(parts)
                yield parts
            if state.index >= len(plan):
                state.epoch, state.index = state.epoch + 1, 0

    def _step(self, parts: list[Any]) -> None:
        start = self.clock()
        state, number = self.state, self.state.step + 1
        self.model.train()
        if prepare := getattr(self.task, "before_step", None):
            prepare(self.model, number)
        batches = [self._to_device(self.task.batch(part)) for part in parts]
        read = getattr(self.task, "tokens_read", self.task.tokens)
        counts = (sum(count(batch) for batch in batches) for count in (self.task.tokens, read))
        total, tokens = map(int, parallel.sum_over_workers(*counts))
        loss = 0.0
        workers = parallel.world_size()
        for place, batch in enumerate(batches, start=1):
            last = place == len(batches)
            with parallel.defer_gradient_sync(self.forward, last=last), self._autocast():
                part = self.forward(partial(self.task.loss, batch=batch, total=total))
            torch.autograd.backward(part if workers == 1 else part * workers)
            loss += float(part.detach())
        (loss,) = parallel.sum_over_workers(loss)
        self.notify("on_gradients", number)
        limit = self.settings.clip or math.inf
        norm = float(parallel.unshard(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        rate = set_rate(self.optimizer, self.rate_factor(number))
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            self.optimizer.step()
            self._update_ema()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = self._step_seconds = self.clock() - start
        state.step, state.tokens = number, state.tokens + tokens
        state.training_seconds += seconds
        state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
        self.notify("on_step", Step(number, loss, tokens, rate, norm, seconds, applied))
        if not applied:
            self._save_skipped_step(number, loss, norm, batches)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.settings.precision)

    def _save_skipped_step(
        self, number: int, loss: float, norm: float, batches: list[Batch]
    ) -> None:
        """Write the batches and weights of a skipped step; raise after too many in a row."""
        text = f"step {number}: " + (
            f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        )
        weights = ((name, parallel.unshard(p)) for name, p in self.model.named_parameters())
        bad = [name for name, tensor in weights if not bool(tensor.isfinite().all())]
        text += f"; the weights of {bad[0]} are not finite" if bad else ""
        self.saved_cases += 1
        if self.run_directory is not None and self.saved_cases <= MAX_CASES:
            folder = self.run_directory / "cases" / f"step-{number:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            content = {"step": number}
            for i, batch in enumerate(batches):
                name = (
                    f"batch-{i}.safetensors"
                    if parallel.world_size() == 1
                    else f"batch-{parallel.rank()}-{i}.safetensors"
                )
                write_tensors(folder / name, batch, *FAILED_STEP_BATCH, content)
            weights_now = parallel.unshard_all(self.model.state_dict())
            if parallel.rank() == 0:
                write_tensors(
                    folder / "weights.safetensors", weights_now, *FAILED_STEP_MODEL, content
                )
            text += f"; the step was skipped, its batch is in {folder}"
        self.log(text)
        if self.state.skipped_in_a_row >= self.settings.max_skipped_steps:
            raise DivergedError(
                f"{self.state.skipped_in_a_row} steps in a row were not finite; the last: {text}. "
                "Try a lower learning rate, warm-up, or addnorm=pre."
            )

    def _update_ema(self) -> None:
        decay = self.settings.ema
        if not decay:
            return
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                average = self.averages.setdefault(f"ema.{name}", tensor.detach().clone())
                if tensor.is_floating_point():
                    average.lerp_(tensor, 1 - decay)
                else:
                    average.copy_(tensor)

    def evaluate(self) -> dict[str, float]:
        """Return metrics on held-out data, of averaged weights if the settings ask for them."""
        state, start = self.state, self.clock()
        self._store_for_average()
        own = self._swap_in_averages()
        self.model.eval()
        try:
            with torch.no_grad():
                figures = parallel.without_ddp(self.forward)(self.task.evaluate)
            state.history.append({"step": state.step, **figures})
            value = figures[self.task.metric]
            better = _is_better(figures, state, self.task)
            if better:
                state.best, state.best_step, state.evaluations_since_best = value, state.step, 0
                if self.on_best is not None:
                    self.on_best(self.model)
            else:
                state.evaluations_since_best += 1
        finally:
            if own is not None:
                self.model.load_state_dict(own)
        seconds = self.clock() - start
        state.evaluation_seconds += seconds
        state.pace.add_evaluation(_mean_over_workers(seconds))
        self.notify("on_evaluate", figures, better)
        count = state.evaluations_since_best
        if self.settings.patience and count >= self.settings.patience:
            self.log(
                f"stopping early: no improvement in {self.task.metric} for {count} evaluations."
            )
            state.finished = True
        return figures

    def _store_for_average(self) -> None:
        """Store the current weights with those of the last evaluations, for their mean."""
        if not self.settings.average:
            return
        steps = sorted({int(name.split(".")[1]) for name in self.averages if name[:5] == "last."})
        while len(steps) >= self.settings.average:
            oldest = f"last.{steps.pop(0)}."
            self.averages = {k: v for k, v in self.averages.items() if not k.startswith(oldest)}
        for name, tensor in self.model.state_dict().items():
            self.averages[f"last.{self.state.step}.{name}"] = tensor.detach().clone()

    def _swap_in_averages(self) -> dict[str, Tensor] | None:
        """Load the averaged weights into the model; return its own, to be restored."""
        averaged = self.averaged_weights()
        if averaged is None:
            return None
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(averaged)
        return own

    def averaged_weights(self) -> dict[str, Tensor] | None:
        """Return the averaged weights that the settings ask for, or None."""
        if self.settings.average:
            stored: dict[str, list[Tensor]] = {}
            for name, tensor in self.averages.items():
                if name.startswith("last."):
                    stored.setdefault(_weight_name(name), []).append(tensor)
            return {
                name: torch.stack(last).mean(dim=0) if last[0].is_floating_point() else last[-1]
                for name, last in stored.items()
            }
        if self.settings.ema and self.averages:
            return {_weight_name(name): tensor for name, tensor in self.averages.items()}
        return None

    def save(self) -> None:
        """Write a checkpoint, if there is a run directory."""
        if self.run_directory is None:
            return
        start = self.clock()
        checkpoint.write(
            self.run_directory,
            self.state.step,
            self.model,
            self.optimizer,
            {"state": asdict(self.state)},
            self.averages,
            self.settings.keep_checkpoints,
        )
        seconds = self.clock() - start
        self.state.saving_seconds += seconds
        self.state.pace.add("saves", _mean_over_workers(seconds))

    def resume(self) -> bool:
        """Restore the newest intact checkpoint; return False if there is none."""
        if self.run_directory is None:
            return False
        notes: list[str] = []
        saved = checkpoint.newest(self.run_directory, notes)
        for note in notes:
            self.log(note)
        if saved is None:
            return False
        own = self.model.state_dict()
        self.averages = {
            name: parallel.shard_like(tensor, own.get(_weight_name(name), tensor))
            for name, tensor in checkpoint.restore_(saved, self.model, self.optimizer).items()
        }
        self.state = TrainingState.parse(saved.plain.get("state"), saved)
        self._begin_extensions()
        return True

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of every observer."""
        for observer in self.observers:
            getattr(observer, event)(self, *arguments)

    def log(self, text: str) -> None:
        """Send a message to every observer."""
        self.notify("on_message", text)


def _is_better(figures: dict[str, float], state: TrainingState, task: LoopTask) -> bool:
    """Return whether metrics are the best so far; of equal metrics, the smaller loss is better."""
    value, best = figures[task.metric], state.best
    if best is None or value != best:
        better = best is None or (value > best if task.higher_is_better else value < best)
        return math.isfinite(value) and better
    losses = (row.get("loss", math.nan) for row in state.history if row["step"] == state.best_step)
    return figures.get("loss", math.nan) < next(losses, math.nan)


def _mean_over_workers(value: float) -> float:
    """Return the mean over all workers, by which they decide alike."""
    (total,) = parallel.sum_over_workers(value)
    return total / parallel.world_size()


def _weight_name(average: str) -> str:
    """Return the name of the weights that an average is of."""
    return average.removeprefix("ema.") if average[:4] == "ema." else average.split(".", 2)[2]


class _StopOnSignals:
    """Context in which SIGINT and SIGTERM stop after the current step; a second one immediately."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._request_stop)
        except ValueError:
            pass  # not the main thread, which handles signals itself

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self.loop.stop_requested:
            raise KeyboardInterrupt
        self.loop.stop_requested = True
        self.loop.log("stopping after this step; interrupt again to stop immediately.")
