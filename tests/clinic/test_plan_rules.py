"""Findings about the planned training; most rehearsals are supplied, for how a real one ends
depends on the CPU."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch, Evidence, Examination, TrainingPlan, examine
from addnorm.clinic.plan_rules import working_remedies
from addnorm.clinic.prediction import (
    CANNOT_TELL,
    WILL_NOT_TRAIN,
    WILL_TRAIN,
    Rehearsal,
    predict_outcome,
)
from addnorm.clinic.rehearsal import REHEARSAL_BATCHES, Alternative
from addnorm.clinic.rules import Finding, apply_rules
from tests.clinic.subjects import decoder, ids
from tests.clinic.test_prediction import LEARNS, STALLS, rehearsal

OPEN = dataclasses.replace(LEARNS, trivial=())


@cache
def post_norm() -> Evidence:
    """Evidence for a deep post-norm decoder, without a rehearsal."""
    torch.manual_seed(0)
    return examine(decoder(addnorm="post", depth=8), ids(), sharpness=False).evidence


def evidence_of(
    rehearsals: dict[str, Rehearsal],
    alternatives: dict[str, Rehearsal] | None = None,
    lr: float = 0.3,
) -> Evidence:
    return dataclasses.replace(
        post_norm(),
        plan=TrainingPlan(lr=lr),
        prediction=predict_outcome(rehearsals["planned"]),
        rehearsals=rehearsals,
        alternatives={name: Alternative(0.1, r) for name, r in (alternatives or {}).items()},
    )


def plan_finding(evidence: Evidence) -> Finding | None:
    known = {f.name for f in apply_rules(post_norm())}
    return next((f for f in apply_rules(evidence) if f.name not in known), None)


@pytest.mark.parametrize(
    ("tries", "name", "severity"),
    (
        ({"planned": LEARNS}, None, None),
        ({"planned": OPEN}, "cannot tell whether it trains", "note"),
        ({"planned": STALLS, "with warm-up 100": LEARNS}, "needs warm-up", "problem"),
        (
            {"planned": STALLS, "with warm-up 100": STALLS, "at lr 0.03": LEARNS},
            "learning rate too high", "problem",
        ),
        ({"planned": STALLS, "at lr 0.03": STALLS, "at lr 3": LEARNS},
         "learning rate too low", "problem"),
        ({"planned": STALLS, "at lr 0.03": OPEN}, "will not train", "problem"),
    ),
)  # fmt: skip
def test_the_first_remedy_that_works_decides_the_finding(
    tries: dict[str, Rehearsal], name: str | None, severity: str | None
) -> None:
    finding = plan_finding(evidence_of(tries))
    if name is None:
        assert finding is None
    else:
        assert finding is not None and (finding.name, finding.severity) == (name, severity)
        assert finding.reason.endswith(".") and finding.remedy.endswith(".")


def test_only_remedies_that_are_predicted_to_work_are_listed() -> None:
    evidence = evidence_of(
        {"planned": STALLS, "with warm-up 100": STALLS, "at lr 0.03": LEARNS},
        {"addnorm=admin": STALLS, "addnorm=pre": LEARNS},
    )
    finding = plan_finding(evidence)
    assert finding is not None
    assert list(working_remedies(evidence)) == ["at lr 0.03", "addnorm=pre"]
    assert finding.remedy.startswith("Lr 0.03 (will train: 2.")
    assert "addnorm=pre (will train" in finding.remedy
    assert "warm-up" not in finding.remedy and "admin" not in finding.remedy
    assert finding.evidence.startswith("post-norm, 16 branches, which are 0.")
    assert "At lr 0.3 with no warm-up, rehearsed for 64 of 160 steps" in finding.evidence
    assert "steps: the loss goes from 4.00 to 3.00 (a constant answer: 3.00)" in finding.evidence


def test_nothing_is_advised_that_is_not_ahead_of_the_plan() -> None:
    """The plan will not train; a remedy that ends where the plan does is not advised."""
    barely = rehearsal(3.1, 3.0, 0.5, planned_progress=9999.0)
    other = dataclasses.replace(barely, losses=(3.0,) * 64)
    assert working_remedies(evidence_of({"planned": other, "at lr 0.03": barely})) == {}
    finding = plan_finding(evidence_of({"planned": STALLS}))
    assert finding is not None and finding.remedy.startswith("Nothing that was rehearsed works.")


def test_prediction_and_curves_are_in_text_json_and_page(tmp_path: Path) -> None:
    examination = Examination(evidence_of({"planned": STALLS, "at lr 0.03": LEARNS}), [])
    text = examination.text()
    assert "prediction      will not train: the loss goes from 4.00 to 3.00 (a constant" in text
    assert "rehearsal       planned: will not train, 4.00 to 3.00" in text
    assert "rehearsal       at lr 0.03: will train" in text
    evidence = json.loads(examination.json())["evidence"]
    assert evidence["prediction"]["answer"] == "will not train"
    assert len(evidence["rehearsals"]["planned"]["trivial"]) == 64
    page = examination.write_page(tmp_path / "page.html").read_text()
    assert "Will not train: " in page and "constant answer" in page
    assert "What the answers say about their input" in page


# ── Real rehearsals: English, and ways to fail that do not depend on the CPU ──────────────────────

TEXT = Path(__file__).parents[2] / "docs" / "clinic.md"


class Small(nn.Module):
    """A hand-written pre-norm language model, with or without residual connections."""

    def __init__(self, vocab: int, depth: int = 2, residual: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(32),
                    "attention": nn.MultiheadAttention(32, 4, batch_first=True),
                    "norm2": nn.LayerNorm(32),
                    "ffn": nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)),
                }
            )
            for _ in range(depth)
        )
        self.last, self.output, self.residual = nn.LayerNorm(32), nn.Linear(32, vocab), residual

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            y = block["norm"](x)
            y = block["attention"](y, y, y, attn_mask=mask, need_weights=False)[0]
            x = x + y if self.residual else y
            y = block["ffn"](block["norm2"](x))
            x = x + y if self.residual else y
        return self.output(self.last(x))


def english(rows: int = 12, length: int = 32, shuffled: bool = False) -> tuple[list[Any], int]:
    """Return batches of characters of this project's own documentation, and their number."""
    text = TEXT.read_text(encoding="utf-8")
    known = sorted(set(text))
    ids = torch.tensor([known.index(character) for character in text])
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(REHEARSAL_BATCHES):
        starts = torch.randint(len(ids) - length - 1, (rows, 1), generator=generator)
        part = ids[starts + torch.arange(length + 1)]
        targets = part[:, 1:].roll(1, 0) if shuffled else part[:, 1:]
        batches.append(ClinicBatch(part[:, :-1], targets))
    return batches, len(known)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def predicted(model: nn.Module, batches: list[Any], **plan: Any) -> Examination:
    return examine(
        model,
        batches[0],
        loss,
        more_batches=batches[1:],
        plan=TrainingPlan(steps=300, **plan),
        sharpness=False,
    )


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("lr", (1e-3, 3e-3))
def test_a_small_model_of_english_will_train_without_warmup(lr: float) -> None:
    batches, vocab = english()
    torch.manual_seed(0)
    examination = predicted(Small(vocab), batches, lr=lr)
    assert examination.evidence.prediction is not None
    assert examination.evidence.prediction.answer == WILL_TRAIN, examination.text()
    assert examination.names() == []


@pytest.mark.slow
@pytest.mark.trains
def test_labels_of_another_row_will_not_train() -> None:
    batches, vocab = english(shuffled=True)
    torch.manual_seed(0)
    examination = predicted(Small(vocab), batches, lr=3e-3)
    assert examination.evidence.prediction is not None
    assert examination.evidence.prediction.answer == WILL_NOT_TRAIN, examination.text()
    assert "will not train" in examination.names()


@pytest.mark.slow
@pytest.mark.trains
def test_six_blocks_without_a_residual_connection_will_not_train() -> None:
    batches, vocab = english()
    torch.manual_seed(0)
    examination = predicted(Small(vocab, depth=6, residual=False), batches, lr=1e-3)
    assert examination.evidence.prediction is not None
    assert examination.evidence.prediction.answer == WILL_NOT_TRAIN, examination.text()


@pytest.mark.slow
@pytest.mark.trains
def test_an_absurd_learning_rate_is_found_and_arrangements_are_rehearsed() -> None:
    """Which remedy works may depend on the CPU; that the plan fails does not."""
    batches, vocab = english()
    model = decoder(addnorm="post", depth=8, vocab=vocab, length=64)
    examination = predicted(model, batches, lr=1e4)
    names = {"needs warm-up", "learning rate too high", "learning rate too low", "will not train"}
    assert names & set(examination.names())
    assert set(examination.evidence.alternatives) == {"addnorm=admin", "addnorm=pre"}
    own = examination.evidence.amplification[-1] ** 0.5
    assert all(other.output_change < own for other in examination.evidence.alternatives.values())
    assert "rehearsal       addnorm=pre: " in examination.text()


@pytest.mark.slow
@pytest.mark.trains
def test_a_single_batch_leaves_the_question_open() -> None:
    torch.manual_seed(0)
    examination = examine(decoder(), ids(), plan=TrainingPlan(lr=3e-3), sharpness=False)
    assert examination.evidence.prediction is not None
    assert examination.evidence.prediction.answer == CANNOT_TELL
    assert examination.healthy
