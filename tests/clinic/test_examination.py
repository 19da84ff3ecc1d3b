"""Examining leaves the model unchanged; text, JSON and page of an examination agree."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import ModelConfig, build
from addnorm.clinic import ClinicBatch, Evidence, Finding, TrainingPlan, examine
from addnorm.clinic.call_model import (
    NotExamined,
    answer_of,
    choose_objective,
    sees_future,
    unchanged,
)
from addnorm.clinic.padding_experiments import padding_change
from addnorm.clinic.position_experiments import swappable_positions
from addnorm.clinic.random_batch import draw_batch, draw_batches
from addnorm.errors import ConfigError, InputError
from tests.clinic import models
from tests.clinic.subjects import PAD, Language, decoder, ids


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "needs": [p.requires_grad for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "modes": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "random": torch.get_rng_state(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", ("ours", "bert", "batch norm"))
def test_the_model_is_left_unchanged(name: str) -> None:
    if name == "bert":
        model, batch = models.bert()
    else:
        model, batch = decoder(norm="batch" if name == "batch norm" else "layer"), ids()
    model.train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    list(model.parameters())[3].requires_grad_(False)
    before = state(model)
    examine(model, batch, plan=TrainingPlan(lr=0.01))
    after = state(model)
    for part, value in before.items():
        assert same(value, after[part]), part


def test_text_json_and_page_agree(tmp_path: Path) -> None:
    examination = examine(decoder(width=64, scale_embedding=False), ids(), sharpness=False)
    text = examination.text()
    assert (
        "✗ token embeddings too small: only" in text and "try  model.scale_embedding=true" in text
    )
    assert "decoder.1.ffn" in text
    plain = json.loads(examination.json())
    assert plain["findings"][0]["name"] == "token embeddings too small"
    assert len(plain["evidence"]["sites"]) == 4
    page = examination.write_page(tmp_path / "clinic.html")
    html = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 2_000_000 and "src=" not in html and "@import" not in html
    for word in (
        "token embeddings too small",
        "Dependency map",
        "Gradient norm",
        "Entropy by head",
    ):
        assert word in html
    assert html.index("Findings") < html.index("The residual stream")


def test_an_examination_has_a_repr_and_an_html_repr() -> None:
    examination = examine(decoder(width=64, scale_embedding=False), ids(), sharpness=False)
    first, second = repr(examination).splitlines()
    assert first.endswith(" parameters, untrained: 1 problem.")
    assert second.startswith("✗ token embeddings too small: only ")
    html = examination._repr_html_()
    assert html.startswith("<div><p><b>not healthy</b>") and html.endswith("</table></div>")
    assert "problem: token embeddings too small" in html and "Try: model.scale_embedding" in html
    hostile = Finding("<script>", "note", "a < b", "reason.", "x & y.")
    html = dataclasses.replace(examination, findings=[hostile])._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and "x &amp; y." in html
    assert html.startswith("<div><p><b>healthy</b>")
    assert "<ul>" not in dataclasses.replace(examination, findings=[])._repr_html_()


def test_a_loss_compares_with_the_targets_of_its_batch() -> None:
    """Targets passed with the batch and targets computed from it give the same result."""
    model, inputs = decoder(), ids()
    targets = inputs.roll(-1, dims=1)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    with_targets = examine(model, ClinicBatch(inputs, targets), loss).evidence
    computed = examine(model, inputs, lambda out, x: loss(out, x.roll(-1, dims=1))).evidence
    assert with_targets.loss == computed.loss
    assert with_targets.sharpness == computed.sharpness
    assert with_targets.loss_description == "the loss passed in"
    with pytest.raises(InputError, match=r"must also work for 2 rows .* ClinicBatch\(inputs, tar"):
        examine(model, inputs, lambda out, x: loss(out, targets))


def test_a_model_without_a_residual_stream() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    examination = examine(model, torch.randn(4, 8))
    assert "no residual stream was found" in examination.text()
    assert isinstance(examination.evidence, Evidence) and examination.evidence.sites == []


def test_invalid_models_losses_and_plans() -> None:
    with pytest.raises(InputError, match="must have parameters"):
        examine(nn.Identity(), torch.randn(2, 2))
    with pytest.raises(InputError, match="must return a floating-point tensor"):
        answer_of(("words",))
    model = decoder()
    with pytest.raises(InputError, match=r"the loss must be one number .* Try its mean"):
        examine(model, ids(), lambda output, batch: output)
    with pytest.raises(ConfigError, match=r"a positive learning rate .* got lr=0, warmup=0"):
        TrainingPlan(lr=0)
    with pytest.raises(InputError, match="a random batch needs a model whose"):
        draw_batch(nn.Linear(2, 2))


# ── Experiments ───────────────────────────────────────────────────────────────────────────────────


def causal_mask(diagonal: int = 1) -> Tensor:
    return torch.ones(64, 64, dtype=torch.bool).triu(diagonal)


def test_future_leaks_are_detected() -> None:
    batch = ids()
    for mask, expected in ((causal_mask(), False), (causal_mask(2), True), (None, True)):
        model = Language(mask).eval()
        assert sees_future(model, ClinicBatch(batch)) is expected
    assert sees_future(decoder().eval(), ClinicBatch(batch)) is False


def test_attention_to_padding_is_detected() -> None:
    batch = ids()
    batch[1, 9:] = PAD
    leaky, tight = Language(None).eval(), decoder(mode="encoder", head="masked", pad=PAD).eval()
    with torch.no_grad():
        assert padding_change(leaky, ClinicBatch(batch), PAD) > 0.01
        assert padding_change(tight, ClinicBatch(batch), PAD) < 1e-4
        with pytest.raises(NotExamined, match="no row of the batch is padded"):
            padding_change(tight, ClinicBatch(ids()), PAD)


def test_missing_positions_are_detected() -> None:
    batch = ClinicBatch(ids())
    with torch.no_grad():
        for positions in ("sinusoidal", "learned", "rotary", "linear-bias", "buckets"):
            assert swappable_positions(decoder(positions=positions).eval(), batch) == (), positions
        small = decoder(positions="rotary", init="normal", addnorm="post", scale_embedding=False)
        assert swappable_positions(small.eval(), batch) == ()
        assert swappable_positions(decoder(positions="none").eval(), batch) == (0, 1, 2, 3)


def test_the_default_loss_depends_on_the_shape_of_the_answer() -> None:
    batch = ClinicBatch(ids())
    next_token = choose_objective(decoder().eval(), batch, None)
    assert next_token.description == "cross-entropy of the next token"
    masked = decoder(mode="encoder", head="masked").eval()
    assert (
        choose_objective(masked, batch, None).description
        == "cross-entropy of the tokens themselves"
    )
    classes = decoder(mode="encoder", head="class", outputs=3).eval()
    assert "classes drawn at random" in choose_objective(classes, batch, None).description
    bare = decoder(mode="encoder", head="none").eval()
    noise = choose_objective(bare, batch, None)
    assert noise.description == "half the mean squared distance from noise"


def test_batches_are_split_into_arguments_and_rebuilt() -> None:
    one = torch.zeros(2)
    assert ClinicBatch(one).replace({"0": one + 1}).tensors[0].tolist() == [1, 1]
    assert ClinicBatch((one, "a")).replace({"0": one + 1}).inputs[1] == "a"
    assert ClinicBatch({"x": one}, one).replace({"x": 3}).inputs == {"x": 3}
    assert ClinicBatch({"x": one}, one).replace({"x": 3}).targets is one


@pytest.mark.parametrize("name", ("gpt2", "t5", "vit"))
def test_random_batches_for_other_libraries(name: str) -> None:
    model, _ = getattr(models, name)()
    batch, description = draw_batch(model, rows=2, length=8)
    assert description.startswith("the batch was drawn at random")
    with unchanged(model):
        model(**batch)


def test_most_random_tokens_are_successors() -> None:
    batches, _ = draw_batches(decoder(vocab=500, pad=3), 4)
    pairs = [(int(a), int(b)) for batch in batches for row in batch for a, b in pairwise(row)]
    followers: dict[int, Counter[int]] = {}
    for a, b in pairs:
        followers.setdefault(a, Counter())[b] += 1
    usual = sum(counts.most_common(1)[0][1] for counts in followers.values())
    assert 0.85 < usual / len(pairs) < 0.97 and len(followers) <= 65
    assert not torch.equal(batches[0], batches[1])


def test_padding_is_ignored_by_the_default_loss() -> None:
    batch = ids()
    model = decoder(pad=PAD).eval()
    whole = choose_objective(model, ClinicBatch(batch), None)(model, ClinicBatch(batch))
    batch[1, 9:] = PAD
    logits = model(batch)[:, :-1]
    kept = batch[:, 1:] != PAD
    expected = torch.nn.functional.cross_entropy(logits[kept], batch[:, 1:][kept])
    loss_value = choose_objective(model, ClinicBatch(batch), None)(model, ClinicBatch(batch))
    assert torch.allclose(loss_value, expected) and not torch.allclose(loss_value, whole)


@pytest.mark.parametrize("mode", ("encoder", "decoder", "encoder-decoder"))
def test_random_batches_for_addnorm(mode: str) -> None:
    config = ModelConfig(mode=mode, vocab=19, width=16, depth=1, heads=2, pad=3, length=12)
    batch, _ = draw_batch(build(config))
    first = batch[0] if isinstance(batch, tuple) else batch
    assert first.shape == (8, 12) and int((first == 3).sum()) == 3


def test_a_notebook_shows_every_check_of_a_healthy_model() -> None:
    result = examine(decoder(), ids(), sharpness=False)
    html = result._repr_html_()
    assert result.healthy
    assert all(f"<td>{check.name}</td><td>{check.outcome}</td>" in html for check in result.checks)
