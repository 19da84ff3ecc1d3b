"""A model trained on repetitions grows an induction head; every view of the lens finds it."""

import pytest
from bench.induction import find, train

from tests.portable import training


@pytest.mark.slow
@pytest.mark.trains
def test_an_induction_head_is_found() -> None:
    model, history = train(400, training.seed, every=20)
    assert history.second[-1] < 0.5 * history.second[0]  # repetitions are predicted ...
    assert history.first[-1] > 0.8 * history.first[0]  # ... and new tokens cannot be
    found = find(model)
    head, score = found["by attention"]  # type: ignore[misc]
    assert head.startswith("decoder.1.attention.") and score > 0.3
    # Its circuits: it copies what it attends to, and its keys read the previous-token head.
    assert found["copying of the head"] > 0.6  # type: ignore[operator]
    previous, _ = found["previous token"]  # type: ignore[misc]
    assert previous.startswith("decoder.0.attention.")
    # Several heads may share the work, so which one is missed most differs from seed to seed. Seeds
    # 0 to 5 gave scores of .62 to .67, effects of .89 to 2.05, and .12 to .26 of the head itself.
    _, effect = found["by ablation"]  # type: ignore[misc]
    assert effect > 0.3
    assert found["ablation of the head"] > 0.02  # type: ignore[operator]
    # The score rises as the loss falls: both pass half of their way at nearly the same step.
    half = next(i for i, s in enumerate(history.induction) if s > 0.5 * max(history.induction))
    low = (max(history.second) + min(history.second)) / 2
    dropped = next(i for i, loss in enumerate(history.second) if loss < low)
    assert abs(half - dropped) <= 6
