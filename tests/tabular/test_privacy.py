"""What docs/tables.md promises: texts that identify rows are not in a saved model."""

import random
from pathlib import Path

import pytest

from addnorm.tabular.estimators import FTTransformerClassifier
from addnorm.tabular.saved import load_estimator, save_estimator


@pytest.mark.trains
@pytest.mark.parametrize("rows", (20, 60))
def test_names_are_not_in_the_saved_model(rows: int, tmp_path: Path) -> None:
    draw = random.Random(0)
    names = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(rows)]
    table = {
        "name": names,
        "size": [draw.random() for _ in range(rows)],
        "city": [draw.choice(["Aachen", "Bonn", "Celle"]) for _ in range(rows)],
    }
    labels = [draw.choice(["yes", "no"]) for _ in range(rows)]
    model = FTTransformerClassifier(epochs=1, random_state=0).fit(table, labels)
    save_estimator(model, tmp_path)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert [name for name in names if name.encode() in content] == []
    assert b"Aachen" in content  # the values of a category are stored
    assert load_estimator(tmp_path).encoder_.schema.kinds()["name"] == "ignore"
