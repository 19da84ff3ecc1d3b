"""Integrated gradients are complete, and exact where the model is linear."""

import pytest
import torch

from addnorm.errors import InputError
from addnorm.lens.attribution import gauss_legendre, integrated_gradients
from addnorm.lens.patching import logit_metric
from tests.conftest import MODES, inputs, make
from tests.lens.planted import planted


@pytest.mark.parametrize("baseline", ("mean", "zero"))
@pytest.mark.parametrize("mode", MODES)
def test_contributions_are_complete(mode: str, baseline: str) -> None:
    model, batch = make(mode, ffn="gelu", tie_embeddings="none"), inputs(mode)
    found = integrated_gradients(model, batch, logit_metric(3), baseline=baseline, steps=64)
    assert abs(found.completeness) < 1e-3 * abs(found.value - found.baseline)
    assert found.value == pytest.approx(float(model(*batch).detach()[:, -1, 3].sum()))
    expected = {
        side: tuple(ids.shape) for side, ids in zip(found.contributions, batch, strict=True)
    }
    assert {side: tuple(each.shape) for side, each in found.contributions.items()} == expected


def test_a_planted_copy_is_attributed_to_its_source() -> None:
    model, ids = planted(), torch.tensor([[4, 7, 1, 2]])
    (contributions,) = integrated_gradients(
        model, ids, logit_metric(1), baseline="zero"
    ).contributions.values()
    assert contributions[0].tolist() == pytest.approx([0, 0, 1, 0], abs=1e-9)


def test_the_summary_is_not_moved() -> None:
    model, batch = make("encoder", head="class", outputs=2, summary=True), inputs("encoder")
    (contributions,) = integrated_gradients(model, batch, logit_metric(1)).contributions.values()
    assert contributions.shape == (2, 7) and float(contributions[:, 0].abs().max()) == 0


def test_nodes_integrate_polynomials() -> None:
    nodes, weights = gauss_legendre(4)
    total = sum(w * x**7 for x, w in zip(nodes, weights, strict=True))
    assert total == pytest.approx(1 / 8)


def test_mistakes_are_explained() -> None:
    model, batch = make("decoder"), inputs("decoder")
    with pytest.raises(InputError, match="baseline must be mean or zero: got 'x'"):
        integrated_gradients(model, batch, logit_metric(1), baseline="x")
    with pytest.raises(InputError, match="steps must be 1 or more"):
        integrated_gradients(model, batch, logit_metric(1), steps=0)
    vectors = make("encoder", input="vectors", vocab=0, pad=None, head="class", outputs=2)
    with pytest.raises(InputError, match="needs token ids"):
        integrated_gradients(vectors, torch.zeros(1, 2, 16).double(), logit_metric(1))
