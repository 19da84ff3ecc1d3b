"""The summary of a run: summary.json and summary.html."""

import json
from pathlib import Path

import pytest

from addnorm.config import Config
from addnorm.runs.run import Run, RunRecord
from addnorm.runs.summary import write_summary
from addnorm.runs.train import plan_run
from addnorm.training.loop import TrainingState
from tests.runs.common import Trained, quiet, request_for


@pytest.mark.trains
def test_the_summary_is_of_the_best_evaluation(trained: Trained) -> None:
    run = Run.open(trained["classify"])
    summary, rows = run.summary, run.history
    evaluations = [row for row in rows if "valid_loss" in row]
    best = max(evaluations, key=lambda r: (r["valid_accuracy"], -r["valid_loss"]))
    assert summary["best_step"] == best["step"] and summary["metric"] == "accuracy"
    assert summary["best"]["accuracy"] == best["valid_accuracy"]
    assert set(summary["best"]) == {"loss", "accuracy", "f1", "ece"}
    assert summary["steps"] == 60 and summary["parameters"] == run.model.count()
    assert summary["tokens"] == max(row["tokens"] for row in rows if "tokens" in row)


@pytest.mark.trains
def test_summary_page(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    page = (run.path / "summary.html").read_text(encoding="utf-8")
    assert "<title>Run translate" in page and "<svg" in page
    assert "Loss of training batches, and of held-out data." in page
    assert "best on held-out data" in page and "split by source" in page
    assert "steps = 60" in page and "https://" not in page
    assert "Masked self-attention" in page  # the drawing of the model


def test_a_run_without_an_evaluation_has_a_summary_too(data: Path, tmp_path: Path) -> None:
    task = plan_run(request_for("language", data), say=quiet).task
    run = Run.create(tmp_path / "run", Config(), RunRecord("language", ""))
    summary = write_summary(
        run, task, TrainingState(step=3, training_seconds=1.25, evaluation_seconds=0.5), 7, quiet
    )
    assert summary["best"] == {} and summary["seconds"] == 1.8 and not summary["finished"]
    assert json.loads((run.path / "summary.json").read_text()) == summary == run.summary
    assert "no evaluation yet" in (run.path / "summary.html").read_text()
