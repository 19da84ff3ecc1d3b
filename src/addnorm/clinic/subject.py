"""The subject of an examination: a model, batches for it, its loss and the planned training."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from addnorm.clinic.call_model import (
    ClinicBatch,
    Objective,
    answer_of,
    call_model,
    choose_objective,
    chosen_answer,
    unchanged,
)
from addnorm.clinic.examination import Examination, examine
from addnorm.clinic.failed_step import cross_entropy
from addnorm.clinic.random_batch import draw_batches
from addnorm.clinic.rehearsal import REHEARSAL_BATCHES, TrainingPlan, affordable_steps
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

    def examine(
        self, *, sharpness: bool = True, say: Callable[[str], object] = lambda text: None
    ) -> Examination:
        """Examine the model."""
        first, *more = self.batches
        return examine(
            self.model,
            first,
            self.loss,
            plan=self.plan,
            more_batches=more,
            sharpness=sharpness,
            data=self.source,
            say=say,
        )

    def memory_estimate(self) -> int:
        """Return about how many bytes an examination needs beside the model.

        A copy of the weights, their gradients, one changed copy, and every activation of one
        forward pass, which the backward pass needs and the tracer keeps.
        """
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return 3 * weights + 2 * activation_bytes(self.model, self.batches[0])

    def rehearsal_estimate(self) -> tuple[int, float]:
        """Return the steps of the rehearsal of the plan, and about how many seconds they take.

        One step, forward and back, is measured on the batch that is examined. A plan that fails is
        followed by rehearsals of remedies, of the same steps each.
        """
        if self.plan is None:
            return 0, 0.0
        batch = self.batches[0]
        steps = affordable_steps(self.model, batch, self.plan)
        with unchanged(self.model), chosen_answer(self.model, batch):
            objective = choose_objective(self.model, batch, self.loss)
            start = time.perf_counter()
            torch.autograd.backward(objective(self.model, batch))
            return steps, steps * (time.perf_counter() - start)


def batch_count(plan: TrainingPlan | None) -> int:
    """Return the batches to take: one to examine, and with a plan those that a rehearsal needs."""
    return 1 if plan is None else REHEARSAL_BATCHES


def plan_from_config(config: Config) -> TrainingPlan | None:
    """Return the planned training of a configuration, if it has a learning rate.

    Optimizers that only training/ knows (adafactor, muon) are rehearsed as AdamW, unless the caller
    replaces `optimizer` by a function.
    """
    t = config.train
    if t.lr is None:
        return None
    return TrainingPlan(
        lr=t.lr,
        warmup=t.warmup or 0,
        steps=t.steps,
        schedule=t.schedule,
        min_lr_ratio=t.min_lr_ratio,
        optimizer="adam" if t.optimizer == "adam" else "adamw",
        betas=(t.beta1, t.beta2),
        eps=t.eps,
        weight_decay=t.weight_decay,
        clip=t.clip,
    )


def subject_with_random_batches(model: nn.Module, plan: TrainingPlan | None) -> Subject:
    """Return a model with batches drawn at random."""
    batches, source = draw_batches(model, batch_count(plan))
    return Subject(model, [ClinicBatch(inputs) for inputs in batches], source, plan)


def subject_from_config(config: Config, plan: TrainingPlan | None = None) -> Subject:
    """Return an untrained model of a configuration with batches drawn at random."""
    torch.manual_seed(config.run.seed)
    model = build(config)
    subject = subject_with_random_batches(model, plan or plan_from_config(config))
    if config.model.has_admin:
        measure_(model, lambda: call_model(model, subject.batches[0]))
    return replace(subject, config=config)


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
    model = _load_transformers(library, path)
    if lines is None:
        return subject_with_random_batches(model, plan)
    used = [line for line in lines if line.strip()][: batch_count(plan) * SUBJECT_ROWS]
    if not used:
        raise InputError(f"{text_name} must hold lines that are not empty: it has none.")
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids":
        raise InputError(
            f"{text_name} can only be used with a model that reads tokens: "
            f"{type(model).__name__} reads {main}. Leave out --data for random input."
        )
    batches = _encode_lines(library, path, model, used)
    return Subject(model, batches, f"the batches are lines of {text_name}", plan)


def _load_transformers(library: Any, path: Path) -> nn.Module:
    """Return a model of any architecture that transformers has, from safetensors only."""
    try:
        content = read_json(path / "config.json")
        name = (content.get("architectures") or ["AutoModel"])[0]
        if not hasattr(library, name):
            remote = "; its own code is not run" if "auto_map" in content else ""
            raise ValueError(f"transformers has no architecture {name!r}{remote}")
        kind = getattr(library, name)
        model: nn.Module = kind.from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # of a library that reads any file: all mean the same here
        reason = _short_reason(error)
        raise SavedError(f"{str(path)!r} is not a model of transformers: {reason}") from None
    return model


def _encode_lines(
    library: Any, path: Path, model: nn.Module, lines: Sequence[str]
) -> list[ClinicBatch]:
    """Return lines of text as batches, encoded by the directory's own tokenizer.

    Language models and encoder-decoders get the tokens as labels, -100 at padding.
    """
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
    except Exception as error:  # as above
        raise SavedError(
            f"{str(path)!r} has no tokenizer for text: {_short_reason(error)}"
        ) from None
    batches = []
    longest = getattr(model.config, "max_position_embeddings", None) or MAX_LENGTH
    limit = min(getattr(tokenizer, "model_max_length", MAX_LENGTH), MAX_LENGTH, longest)
    names = ("CausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
    with_labels = any(name in type(model).__name__ for name in names)
    for start in range(0, len(lines), SUBJECT_ROWS):
        encoded = tokenizer(
            lines[start : start + SUBJECT_ROWS],
            padding=True,
            truncation=True,
            max_length=limit,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        inputs = dict(encoded)
        if with_labels:
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            inputs["labels"] = inputs["input_ids"].masked_fill(mask == 0, -100)
        batches.append(ClinicBatch(inputs))
    return batches


def activation_bytes(model: nn.Module, batch: ClinicBatch) -> int:
    """Return the bytes of what the modules of a model return in one forward pass."""
    total = 0

    def add(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal total
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                total += leaf.numel() * leaf.element_size()

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(add) for module in leaves]
    try:
        with unchanged(model), torch.no_grad():
            call_model(model, batch)
    except Exception:  # `examine` reports what is wrong with the batch
        return total
    finally:
        for hook in hooks:
            hook.remove()
    return total


def _short_reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
