"""Heads, layers and pieces of one row: they agree with the prediction; columns are tokens."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.files import to_json
from addnorm.lens.explain import SUMMARY
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    SAINTClassifier,
    TabTransformerClassifier,
)
from addnorm.tabular.explain import explain_row
from addnorm.tabular.page import row_page
from tests.tabular.data import QUICK, people

pytestmark = pytest.mark.trains

X, Y = people(120)
THREE = np.where(X.columns["noise"] > 0.4, "high", Y)
NUMBER = 60 * X.columns["noise"]


@pytest.mark.parametrize(
    "y", (pytest.param(Y, id="two", marks=pytest.mark.slow), pytest.param(THREE, id="three"))
)
def test_pieces_and_layers_of_a_class(y: Any) -> None:
    model = FTTransformerClassifier(**QUICK | {"members": 2, "depth": 2}).fit(X, y)
    one = explain_row(model, X, 5, shap=False)
    network = one.network
    assert network is not None and network.kind in one.output_name
    assert float(network.pieces[1].sum()) == pytest.approx(one.output, abs=1e-4)
    assert network.probabilities[0] == pytest.approx(one.probability, abs=1e-5)
    (last,) = network.layers[1][-1]
    assert last[0][1] == pytest.approx(model.predict_proba(X)[5].max(), abs=1e-5)
    names = [SUMMARY, *model.encoder_.names]
    assert network.tokens == {"columns": names}
    first = network.maps["columns.0.attention"]
    assert first.shape[1:] == (len(names), len(names))
    assert torch.allclose(first.sum(dim=-1), torch.ones(()), atol=1e-5)
    total = float(network.contributions["columns"].sum())
    assert total == pytest.approx(sum(one.contributions), abs=1e-4)
    assert json.loads(to_json(one.to_dict()))["network"]["outputs"][0]["probability"] > 0
    (data,) = re.findall(r'id="w0-data">(.*?)</script>', row_page(one).html(), re.DOTALL)
    assert json.loads(data)["maps"][0]["columns"] == names


def test_a_number_has_attention_and_contributions() -> None:
    model = FTTransformerRegressor(**QUICK).fit(X, NUMBER)
    one = explain_row(model, X, 5, shap=False)
    assert one.network is not None and one.network.pieces[0] == [] and one.network.layers[0] == []
    assert one.network.outputs == ["the target"] and one.network.kind == "prediction"
    assert json.loads(to_json(one.to_dict()))["network"]["outputs"][0]["probability"] is None
    assert "Layers and heads" in row_page(one).html()


@pytest.mark.parametrize(
    "kind", (TabTransformerClassifier, pytest.param(SAINTClassifier, marks=pytest.mark.slow))
)
def test_models_without_a_summary_of_one_row_have_none(kind: Any) -> None:
    one = explain_row(kind(**QUICK).fit(X, Y), X, 5, shap=False)
    assert one.network is None and one.to_dict()["network"] is None
    assert "Layers and heads" not in row_page(one).html()
