"""The subject of an examination: a model, batches for it, its loss and the planned training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import ClinicBatch, Objective, answer_of, call_model
from addnorm.clinic.examination import Examination, examine
from addnorm.clinic.failed_step import cross_entropy
from addnorm.clinic.random_batch import draw_batches
from addnorm.clinic.rehearsal import REHEARSAL_STEPS, TrainingPlan
from addnorm.config import Config
from addnorm.errors import InputError, SavedError, require
from addnorm.files import read_json
from addnorm.layers.init import measure_
from addnorm.models.build import build

SUBJECT_ROWS = 16
"""Sequences of a text batch that are examined."""
MAX_LENGTH = 128
"""Tokens of a line that are examined, for a model of transformers."""


@dataclass(frozen=True)
class Subject:
    """A model to examine, with what the examination needs.

    Parameters
    ----------
    model : the model
    batches : the first is examined, a rehearsal learns from the others
    source : where the batches are from, as a sentence
    plan : the planned training, if it is to be rehearsed
    loss : the loss; by default the one that `examine` chooses
    config : the whole configuration, if the model was built from one
    """

    model: nn.Module
    batches: Sequence[ClinicBatch]
    source: str
    plan: TrainingPlan | None = None
    loss: Objective | None = None
    config: Config | None = None

    def examine(self, *, sharpness: bool = True) -> Examination:
        """Examine the model."""
        first, *more = self.batches
        return examine(
            self.model, first, self.loss, plan=self.plan, more_batches=more, sharpness=sharpness
        )


def batch_count(plan: TrainingPlan | None) -> int:
    """Return the batches to take: one to examine, and with a plan one for each rehearsed step."""
    return 1 if plan is None else 1 + REHEARSAL_STEPS


def plan_from_config(config: Config) -> TrainingPlan | None:
    """Return learning rate and warm-up of a configuration, if it has a learning rate."""
    lr = config.train.lr
    return None if lr is None else TrainingPlan(lr=lr, warmup=config.train.warmup or 0)


def subject_with_random_batches(model: nn.Module, plan: TrainingPlan | None) -> Subject:
    """Return a model with batches drawn at random."""
    batches, source = draw_batches(model, batch_count(plan))
    return Subject(model, [ClinicBatch(inputs) for inputs in batches], source, plan)


def subject_from_config(config: Config, plan: TrainingPlan | None = None) -> Subject:
    """Return an untrained model of a configuration with batches drawn at random."""
    torch.manual_seed(config.run.seed)
    model = build(config)
    subject = subject_with_random_batches(model, plan)
    if config.model.has_admin:
        measure_(model, lambda: call_model(model, subject.batches[0]))
    return replace(subject, plan=plan or plan_from_config(config), config=config)


def subject_from_task(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    source: str,
    plan: TrainingPlan | None = None,
    config: Config | None = None,
) -> Subject:
    """Return a model with batches of a text task and the task's targets.

    Parameters
    ----------
    model : the model of the task
    batches : `source` and `target_in`, or `inputs`, and `targets`, of each batch
    source : where the batches are from, as a sentence
    plan : the planned training, if it is to be rehearsed
    config : the whole configuration, if the model was built from one
    """
    first_rows = [ClinicBatch.from_task(batch).rows(0, SUBJECT_ROWS) for batch in batches]
    name = "cross-entropy of the task's targets"
    # The rule thresholds and documented figures are those of whole batches.
    loss = Objective(_task_loss, name, cross_entropy=True, by_rows=False)
    return Subject(model, first_rows, source, plan, loss, config)


def _task_loss(output: Any, targets: Tensor) -> Tensor:
    return cross_entropy(answer_of(output), targets) / (targets >= 0).sum()


# ── Models of transformers ────────────────────────────────────────────────────────────────────────


def is_transformers_directory(path: Path) -> bool:
    """Return whether a directory holds a model of the library transformers."""
    return (path / "config.json").is_file() and not (path / "config.toml").exists()


def subject_from_transformers(
    path: Path,
    plan: TrainingPlan | None = None,
    *,
    lines: Sequence[str] | None = None,
    text_name: str = "the text",
) -> Subject:
    """Return a local model of transformers, from safetensors only.

    Parameters
    ----------
    path : its directory
    plan : the planned training, if it is to be rehearsed
    lines : text to examine it with; by default batches are drawn at random
    text_name : what messages call the text
    """
    library = require("transformers", "huggingface")
    try:
        name = read_json(path / "config.json")["architectures"][0]
        kind = getattr(library, name)
        model: nn.Module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = _short_reason(error)
        raise SavedError(f"{str(path)!r} is not a model of transformers: {reason}") from None
    if lines is None:
        return subject_with_random_batches(model, plan)
    used = [line for line in lines if line.strip()][: batch_count(plan) * SUBJECT_ROWS]
    if not used:
        raise InputError(f"{text_name} must hold lines that are not empty: it has none.")
    batches = _encode_lines(library, path, model, used)
    return Subject(model, batches, f"the batches are lines of {text_name}", plan)


def _encode_lines(
    library: Any, path: Path, model: nn.Module, lines: Sequence[str]
) -> list[ClinicBatch]:
    """Return lines of text as batches, encoded by the directory's own tokenizer."""
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise SavedError(
            f"{str(path)!r} has no tokenizer for text: {_short_reason(error)}"
        ) from None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batches = []
    max_length = min(getattr(tokenizer, "model_max_length", MAX_LENGTH), MAX_LENGTH)
    for start in range(0, len(lines), SUBJECT_ROWS):
        encoded = tokenizer(
            lines[start : start + SUBJECT_ROWS],
            padding=True,
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        inputs = dict(encoded)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        batches.append(ClinicBatch(inputs))
    return batches


def _short_reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
