"""Rows drawn from an encoder have the distribution of each column of the training rows."""

from dataclasses import replace

import numpy as np
import pytest

from addnorm.data.table.draw_rows import draw_rows, has_distributions
from addnorm.data.table.encode import TableEncoder, fit_encoder
from addnorm.data.table.frame import Frame
from addnorm.data.table.infer import infer
from addnorm.data.table.scaling import SCALINGS

ROWS = 400


def table() -> Frame:
    rng = np.random.default_rng(0)
    size = np.exp(rng.normal(size=ROWS))
    size[: ROWS // 4] = np.nan
    switch = (np.arange(ROWS) % 10 == 0).astype(float)  # 0 in nine rows of ten
    city = np.array(["Bonn"] * 340 + ["Celle"] * 40 + [None] * 20, dtype=object)
    return Frame("t", {"size": size, "switch": switch, "city": city})


def encoder_of(scaling: str = "quantile") -> tuple[TableEncoder, Frame]:
    frame = table()
    return fit_encoder(frame, infer(frame), scaling=scaling), frame


@pytest.mark.parametrize("scaling", SCALINGS)
def test_columns_have_their_training_distributions(scaling: str) -> None:
    encoder, frame = encoder_of(scaling)
    drawn, true = draw_rows(encoder, 200, np.random.default_rng(1)), encoder.encode(frame)
    for column in range(2):
        one, other = drawn.numbers[:, column].numpy(), true.numbers[:, column].numpy()
        assert np.isnan(one).mean() == pytest.approx(np.isnan(other).mean(), abs=0.006)
        shares = [np.mean(one <= np.nanquantile(other, q)) for q in (0.25, 0.5, 0.75)]
        expected = [np.mean(other <= np.nanquantile(other, q)) for q in (0.25, 0.5, 0.75)]
        assert shares == pytest.approx(expected, abs=0.04)
    assert set(drawn.numbers[:, 1].tolist()) <= set(true.numbers[:, 1].tolist())  # 0 or 1
    counts = np.bincount(drawn.codes[:, 0].numpy(), minlength=4) / 200
    assert counts == pytest.approx([0.05, 0, 0.85, 0.1], abs=0.006)


def test_an_encoder_without_distributions_draws_evenly() -> None:
    encoder, _ = encoder_of("standard")
    assert has_distributions(encoder)
    old = replace(
        encoder,
        numbers=tuple(replace(rule, quantiles=(), missing=None) for rule in encoder.numbers),
        categories=tuple(replace(rule, shares=()) for rule in encoder.categories),
    )
    assert not has_distributions(old)
    drawn = draw_rows(old, 200, np.random.default_rng(1))
    assert np.bincount(drawn.codes[:, 0].numpy()).tolist() == [0, 0, 100, 100]
    assert drawn.numbers.isfinite().all()
    unscaled = replace(old, numbers=tuple(replace(r, scaling="none") for r in old.numbers))
    values = draw_rows(unscaled, 200, np.random.default_rng(1)).numbers[:, 1]
    assert 0 <= float(values.min()) < 0.01 < 0.99 < float(values.max()) <= 1


def test_the_distributions_are_saved_and_may_be_absent() -> None:
    encoder, _ = encoder_of("robust")
    plain = encoder.dump()
    assert TableEncoder.parse(plain) == encoder
    for rule in plain["numbers"]:
        del rule["quantiles"], rule["missing"]
    for rule in plain["categories"]:
        del rule["shares"]
    assert not has_distributions(TableEncoder.parse(plain))
