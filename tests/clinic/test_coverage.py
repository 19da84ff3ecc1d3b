"""Every check ends as passed, found, or not examined with a reason."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import Examination, examine, input_experiments
from addnorm.clinic.coverage import ESSENTIAL, PLANNED, RULES_OF_CHECKS
from addnorm.clinic.examination import JSON_SCHEMA
from addnorm.clinic.rules import RULES
from tests.clinic.subjects import Language, decoder, ids, next_token


def quick(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> Examination:
    return examine(model, batch, loss, sharpness=False, **options)


def test_every_rule_belongs_to_one_check() -> None:
    listed = [rule for rules in RULES_OF_CHECKS.values() for rule in rules]
    assert len(listed) == len(set(listed))
    assert set(listed) <= {rule.name for rule in RULES}
    assert set(RULES_OF_CHECKS) >= ESSENTIAL


def test_text_json_and_page_show_the_checks(tmp_path: Any) -> None:
    result = quick(decoder(), ids())
    outcomes = {check.name: check for check in result.checks}
    assert outcomes["future"].outcome == "passed" and outcomes["future"].essential
    assert outcomes["source"].outcome == "not examined" and outcomes[PLANNED].reason
    assert "not examined    source: the model has no source" in result.text()
    plain = json.loads(result.json())
    assert plain["schema"] == JSON_SCHEMA and plain["verdict"] == "healthy" and plain["healthy"]
    assert {check["name"] for check in plain["checks"]} == set(outcomes)
    assert plain["evidence"]["arrangement"]["name"] == "pre"
    html = result.write_page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What was examined" in html and "Data: 8 × 16. Loss: cross-entropy" in html
    assert result.evidence.version in html and result.evidence.date in html


def test_a_failing_experiment_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("of the model")

    monkeypatch.setattr(input_experiments, "row_change", fail)
    result = quick(decoder(), ids())
    (check,) = [check for check in result.checks if check.name == "rows of the batch"]
    assert check.outcome == "not examined" and "KeyError" in check.reason
    assert result.healthy  # this check is not essential


def test_what_could_not_be_examined_is_not_healthy() -> None:
    result = quick(decoder(), ids())
    reasons = {**result.evidence.not_examined, "gradients": "no gradient"}
    evidence = dataclasses.replace(result.evidence, not_examined=reasons)
    other = dataclasses.replace(result, evidence=evidence)
    assert other.names() == [] and not other.healthy and other.verdict == "not examined"
    assert "not examined: gradients" in other.text().splitlines()[0]
    assert quick(decoder(addnorm="none"), ids()).findings[0].name == "no residual connections"


# ── Rules by intervention ─────────────────────────────────────────────────────────────────────────

CAUSAL = torch.ones(64, 64, dtype=torch.bool).triu(1)


def test_losses_and_labels() -> None:
    model = Language(CAUSAL)

    def smoothed(output: Tensor, tokens: Tensor) -> Tensor:
        logits, targets = output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return F.cross_entropy(logits, targets, label_smoothing=0.8)

    assert quick(model, ids(), smoothed).names() == ["label smoothing too large"]
    facts = quick(model, ids(), smoothed).evidence.experiments.labels
    assert facts is not None and facts.smoothing == pytest.approx(0.8, abs=0.05)
    other = quick(model, ids(), lambda out, x: next_token(out, x.roll(1, 0)))
    assert other.names() == ["labels of another row"]
    twice = quick(model, ids(), lambda out, x: next_token(out.softmax(-1), x))
    assert twice.names() == []  # the loss, not the model, applies the first softmax


def test_a_loss_without_softmax() -> None:
    def raw(output: Tensor, tokens: Tensor) -> Tensor:
        return F.nll_loss(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    assert quick(Language(CAUSAL), ids(), raw).names() == ["loss without softmax"]
    proper = quick(Language(CAUSAL), ids(), lambda out, x: raw(out.log_softmax(-1), x))
    assert proper.names() == []


def test_linear_feed_forward_and_small_weights() -> None:
    model = Language(CAUSAL)
    for layer in model.stack.layers:
        layer.activation = nn.Identity()
    assert quick(model, ids(), next_token).names() == ["feed-forward is linear"]
    model = Language(CAUSAL)
    with torch.no_grad():
        for parameter in model.stack.layers.parameters():
            if parameter.ndim == 2:
                parameter.mul_(1e-3)
    assert "initial weights too small" in quick(model, ids(), next_token).names()


def test_an_output_layer_that_starts_at_zero_is_a_note() -> None:
    model = Language(CAUSAL)
    nn.init.zeros_(model.output.weight)
    result = quick(model, ids(), next_token)
    assert result.names() == [] and "starts at zero" in result.text(), result.text()


def test_softmax_before_the_loss() -> None:
    class Twice(Language):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).softmax(-1)

    assert quick(Twice(CAUSAL), ids(), next_token).names() == ["softmax before the loss"]


def test_masks_rows_and_dropout() -> None:
    strict = torch.ones(64, 64, dtype=torch.bool).triu(0)
    strict[0, 0] = False
    assert quick(Language(strict), ids(), next_token).names() == ["own token hidden"]

    class Mixed(Language):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) - super().forward(ids).mean(0, keepdim=True)

    assert "rows of the batch mixed" in quick(Mixed(CAUSAL), ids(), next_token).names()
    model = Language(CAUSAL)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.9
    assert quick(model, ids(), next_token).names() == ["dropout too high"]


def test_frozen_and_equal_parameters() -> None:
    model = Language(CAUSAL)
    model.tokens.requires_grad_(False)
    assert quick(model, ids(), next_token).names() == ["frozen embeddings"]
    model = Language(CAUSAL)
    model.output.requires_grad_(False)
    assert quick(model, ids(), next_token).names() == ["frozen head"]
    assert quick(model.requires_grad_(False), ids(), next_token).names() == ["nothing is trained"]
    model = Language(CAUSAL)
    with torch.no_grad():
        model.stack.layers[0].linear1.weight.fill_(0.1)
    assert "equal initial weights" in quick(model, ids(), next_token).names()


def test_a_gradient_that_is_not_finite() -> None:
    class Rooted(Language):
        def forward(self, ids: Tensor) -> Tensor:
            x = super().forward(ids)
            return x + torch.sqrt((x * 0).pow(2))

    result = quick(Rooted(CAUSAL), ids(), next_token)
    assert "gradient not finite" in result.names()


@pytest.mark.parametrize(
    ("settings", "names"),
    (
        ({}, []),
        ({"weight_decay": 5.0}, ["weight decay too large"]),
        ({"betas": (0.9, 0.5)}, ["β₂ out of range"]),
        ({"lr": 0.0}, ["learning rate is zero"]),
        ({"lr": 2.0}, ["learning rate out of range"]),
        ({"eps": 0.1}, ["ε out of range"]),
    ),
)
def test_settings_of_the_optimizer(settings: dict[str, Any], names: list[str]) -> None:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), **({"lr": 1e-3} | settings))
    assert quick(model, ids(), optimizer=optimizer).names() == names


def test_parameters_of_the_optimizer() -> None:
    model, other = decoder(), decoder()
    half = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    assert quick(model, ids(), optimizer=half).names() == ["parameters not in the optimizer"]
    wrong = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "optimizer of another model" in quick(model, ids(), optimizer=wrong).names()
    upwards = torch.optim.Adam(model.parameters(), lr=1e-3, maximize=True)
    assert quick(model, ids(), optimizer=upwards).names() == ["loss is maximised"]
