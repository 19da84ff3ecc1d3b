"""What counts as trained in the benchmark of predictions."""

import json

import pytest
from bench.clinic_predictions import Row
from bench.prediction_set import draw_configurations


@pytest.mark.parametrize(
    ("final", "best", "trains"),
    [
        (3.0, 2.0, True),  # all of the best gain is 2 below the constant answer
        (3.9, 2.0, False),
        (5.0, 2.0, False),
        (4.5, 4.2, False),  # no configuration of the task is below the constant answer
        (4.2, 4.2, False),
    ],
)
def test_only_a_loss_below_the_constant_answer_counts_as_trained(
    final: float, best: float, trains: bool
) -> None:
    outcome = {
        "key": json.dumps(draw_configurations(1)[0]),
        "number": 0,
        "final": final,
        "trivial": 4.0,
        "seconds": 1.0,
    }
    rehearsal = {"losses": [4.0], "planned_steps": 160}
    row = Row(outcome, {"rehearsal": rehearsal, "seconds": 1.0}, best)
    assert row.trains is trains
