"""The subject of an examination: which model, which batches, which loss and plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import Config, ModelConfig
from addnorm.clinic import TrainingPlan
from addnorm.clinic.random_batch import draw_batch
from addnorm.clinic.rehearsal import REHEARSAL_STEPS
from addnorm.clinic.subject import (
    SUBJECT_ROWS,
    batch_count,
    plan_from_config,
    subject_from_config,
    subject_from_task,
    subject_from_transformers,
    subject_with_random_batches,
)
from addnorm.errors import InputError
from tests.clinic import models
from tests.clinic.subjects import decoder, ids
from tests.clinic.test_prediction import LEARNS

SMALL = ModelConfig(mode="decoder", vocab=32, width=16, depth=1, heads=2, dropout=0.0)


def test_a_configuration_becomes_an_untrained_model_with_random_batches() -> None:
    config = Config(model=SMALL).override("train.lr=0.01", "train.warmup=7")
    subject = subject_from_config(config)
    assert subject.config is config and subject.loss is None
    assert len(subject.batches) == batch_count(subject.plan)
    assert subject.plan == plan_from_config(config) and subject.plan is not None
    planned = subject.plan.lr, subject.plan.warmup, subject.plan.schedule, subject.plan.optimizer
    assert planned == (0.01, 7, "cosine", "adamw")
    assert (subject.plan.betas, subject.plan.eps, subject.plan.clip) == ((0.9, 0.98), 1e-9, 1.0)
    alone = subject_from_config(Config(model=SMALL))
    assert alone.source == "the batch was drawn at random: 8 × 32 tokens of 32"
    assert len(alone.batches) == 1 and alone.plan is None
    again = subject_from_config(config, TrainingPlan(lr=0.1))
    assert again.plan == TrainingPlan(lr=0.1) and len(again.batches) == batch_count(again.plan) > 1
    for one, two in zip(subject.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert plan_from_config(Config(model=SMALL)) is None


def test_admin_is_measured_on_the_first_batch() -> None:
    subject = subject_from_config(Config(model=SMALL.replace(addnorm="admin")))
    omegas = [p for name, p in subject.model.named_parameters() if name.endswith("omega")]
    assert omegas and not all(bool((omega == 1).all()) for omega in omegas)


def test_a_task_becomes_rows_with_their_targets() -> None:
    model, inputs = decoder(), ids(20, 8)
    targets = inputs.roll(-1, dims=1)
    targets[:, -1] = -100
    subject = subject_from_task(model, [{"inputs": inputs, "targets": targets}], "a test")
    (batch,) = subject.batches
    assert batch.row_count == SUBJECT_ROWS and batch.targets is not None
    assert torch.equal(batch.targets, targets[:SUBJECT_ROWS])
    examination = subject.examine(sharpness=False)
    expected = torch.nn.functional.cross_entropy(
        model.eval()(inputs[:SUBJECT_ROWS]).flatten(0, 1), targets[:SUBJECT_ROWS].flatten()
    )
    assert examination.evidence.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert examination.evidence.loss_description == "cross-entropy of the task's targets"
    assert examination.evidence.uniform_loss == pytest.approx(float(torch.tensor(32.0).log()))
    pair = {"source": inputs, "target_in": inputs[:, :4], "targets": targets[:, :4]}
    (batch,) = subject_from_task(model, [pair], "a test").batches
    assert [tensor.shape[1] for tensor in batch.tensors] == [8, 4]


def test_the_first_batch_is_examined_and_the_others_are_for_the_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_with_random_batches(decoder(), TrainingPlan(lr=1e-3))
    lengths = []
    monkeypatch.setattr(
        "addnorm.clinic.evidence.rehearse_plan",
        lambda model, batches, *_: lengths.append(len(batches)) or {"planned": LEARNS},
    )
    subject.examine(sharpness=False)
    assert lengths == [len(subject.batches)] == [batch_count(subject.plan)]
    replace(subject, plan=None).examine(sharpness=False)
    assert len(lengths) == 1


@pytest.mark.slow
def test_a_transformers_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "theirs"
    theirs: Any = models.gpt2()[0]
    theirs.save_pretrained(folder)
    subject = subject_from_transformers(folder)
    assert type(subject.model).__name__ == "GPT2LMHeadModel" and len(subject.batches) == 1
    with pytest.raises(InputError, match=r"a\.txt must hold lines that are not empty"):
        subject_from_transformers(folder, lines=["", " "], text_name="a.txt")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "the": 2, "cat": 3, "sat": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    subject = subject_from_transformers(folder, lines=["the cat sat", "", "the"], text_name="a.txt")
    assert subject.source == "the batches are lines of a.txt"
    assert subject.batches[0].arguments["input_ids"].tolist() == [[2, 3, 4], [2, 0, 0]]
    assert subject.batches[0].arguments["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_random_batches_of_texts_and_images_for_a_dual_encoder() -> None:
    class Dual(nn.Module):
        def __init__(self, **config: object) -> None:
            super().__init__()
            self.config = SimpleNamespace(**config)

        def forward(self, input_ids: Tensor, pixel_values: Tensor, return_loss: bool) -> None: ...

    text = SimpleNamespace(vocab_size=40, max_position_embeddings=12)
    vision = SimpleNamespace(image_size=8)
    batch, description = draw_batch(Dual(text_config=text, vision_config=vision))
    assert isinstance(batch, dict) and batch["return_loss"]
    assert batch["input_ids"].shape == (8, 12) and batch["pixel_values"].shape == (8, 3, 8, 8)
    assert "12 tokens of 40, 8 images" in description
    with pytest.raises(InputError, match="the text_config and vision_config in it"):
        draw_batch(Dual(text_config=text))


def test_the_cost_of_a_rehearsal_is_estimated_before_it_runs() -> None:
    without = subject_from_config(Config(model=SMALL))
    assert without.rehearsal_estimate() == (0, 0.0)
    steps, seconds = replace(without, plan=TrainingPlan(lr=1e-3)).rehearsal_estimate()
    assert steps == REHEARSAL_STEPS and seconds > 0
    assert all(p.grad is None for p in without.model.parameters())
