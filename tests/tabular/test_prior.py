"""The prior: seeded, of every kind it promises, and not degenerate."""

import pytest
import torch

from addnorm.errors import ConfigError
from addnorm.tabular.prior import (
    INPUT_KINDS,
    TARGET_KINDS,
    Draw,
    Tables,
    _class_clusters,
    _flip,
    sample_tables,
)


def sample(seed: int = 0, **changes: object) -> Tables:
    sizes = {"tables": 16, "rows": 80, "columns": 6, "classes": 2} | changes
    return sample_tables(torch.Generator().manual_seed(seed), **sizes)  # type: ignore[arg-type]


def test_equal_seeds_give_equal_tables() -> None:
    one, two, other = sample(1), sample(1), sample(2)
    assert torch.equal(one.cells.nan_to_num(), two.cells.nan_to_num())
    assert torch.equal(one.target, two.target)
    assert not torch.equal(one.cells.nan_to_num(), other.cells.nan_to_num())


@pytest.mark.parametrize("classes", (0, 2, 3, 10))
@pytest.mark.parametrize("difficulty", (0.0, 1.0))
@pytest.mark.parametrize("columns", (1, 9))
def test_tables_are_finite_and_of_their_shape(
    classes: int, difficulty: float, columns: int
) -> None:
    batch = sample(classes=classes, difficulty=difficulty, columns=columns)
    assert batch.cells.shape == (16, 80, columns) and batch.is_category.shape == (16, columns)
    assert not batch.cells.isinf().any()
    assert batch.target.shape == (16, 80)
    if classes:
        assert batch.target.dtype == torch.int64
        assert int(batch.target.min()) >= 0 and int(batch.target.max()) < classes
        assert all(len(set(table.tolist())) > 1 for table in batch.target)
    else:
        assert bool(batch.target.isfinite().all())
        assert bool((batch.target.std(dim=1) > 0).all())


def test_the_whole_prior_has_what_it_promises() -> None:
    batches = [sample(seed, columns=12, classes=3) for seed in range(12)]
    cells = torch.cat([batch.cells for batch in batches])
    is_category = torch.cat([batch.is_category for batch in batches])
    target = torch.cat([batch.target for batch in batches])
    missing = cells.isnan()
    assert 0.005 < float(missing.float().mean()) < 0.2
    assert 0.05 < float(is_category.float().mean()) < 0.5
    codes = cells.transpose(1, 2)[is_category]
    codes = codes[~codes.isnan()]
    assert torch.equal(codes, codes.round()) and codes.min() >= 0 and codes.max() < 12
    filled = cells.nan_to_num(0.0)
    constant = (filled == filled[:, :1]).all(dim=1) & ~missing.any(dim=1)
    assert bool(constant.any())
    copies = (filled[:, :, :, None] == filled[:, :, None, :]).all(dim=1)
    copies &= ~torch.eye(12, dtype=torch.bool) & ~constant[:, :, None]
    assert bool(copies.any())
    whole = (filled == filled.round()).all(dim=1) & ~is_category & ~constant
    assert bool(whole.any())
    shares = torch.stack([(target == k).float().mean(dim=1) for k in range(3)])
    assert float(shares.min()) < 0.1 < 0.25 < float(shares.median())


def test_easy_tables_can_be_separated_by_a_line_or_nearly() -> None:
    batch = sample(difficulty=0.0, rows=200, columns=3)
    right = []
    for cells, target in zip(batch.cells, batch.target, strict=True):
        X = torch.cat((cells, torch.ones(200, 1)), dim=1)
        weights = torch.linalg.lstsq(X, target.float()[:, None] * 2 - 1).solution
        right.append(float(((X @ weights)[:, 0] > 0).eq(target.bool()).float().mean()))
    assert sum(right) / len(right) > 0.85


@pytest.mark.parametrize("name", INPUT_KINDS)
def test_inputs(name: str) -> None:
    x = INPUT_KINDS[name](Draw(torch.Generator().manual_seed(0)), 4, 50, 3)
    assert x.shape == (4, 50, 3) and bool(x.isfinite().all())
    assert bool((x.std(dim=1) > 0.05).all())


@pytest.mark.parametrize("classes", (2, 5))
def test_every_class_has_clusters_of_its_own(classes: int) -> None:
    draw = Draw(torch.Generator().manual_seed(0))
    x, target = _class_clusters(draw, 64, 200, 6, classes)
    assert x.shape == (64, 200, 6) and bool(x.isfinite().all())
    assert target.shape == (64, 200) and set(target.flatten().tolist()) == set(range(classes))
    # The nearest row among the others tells the class more often than the largest class does.
    apart = torch.cdist(x, x) + 1e9 * torch.eye(200)
    right = target.gather(1, apart.argmin(dim=-1)) == target
    largest = torch.stack([(target == k).float().mean(dim=1) for k in range(classes)]).amax(dim=0)
    assert float(right.float().mean()) > float(largest.mean()) + 0.1
    assert bool((right.float().mean(dim=1) > 0.95).any())  # some tables are easy


def test_labels_are_flipped_in_some_tables() -> None:
    target = torch.zeros(200, 100, dtype=torch.int64)
    flipped = (_flip(Draw(torch.Generator().manual_seed(0)), target, 4) != 0).float().mean(dim=1)
    assert 0.5 < float((flipped == 0).float().mean()) < 0.75
    assert 0.08 < float(flipped.max()) < 0.25


@pytest.mark.parametrize("outputs", (1, 4))
@pytest.mark.parametrize("name", TARGET_KINDS)
def test_targets_are_functions_of_the_inputs(name: str, outputs: int) -> None:
    x = torch.randn(4, 60, 3)
    x[:, 1] = x[:, 0]  # equal rows
    score = TARGET_KINDS[name](Draw(torch.Generator().manual_seed(0)), x, outputs)
    assert score.shape == (4, 60, outputs) and bool(score.isfinite().all())
    assert torch.allclose(score[:, 1], score[:, 0], atol=1e-5)
    assert bool((score.std(dim=1) > 0).any())


@pytest.mark.parametrize("sizes", ({"classes": 1}, {"classes": 11}, {"rows": 0}, {"columns": 0}))
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        sample(**sizes)


def test_waves_have_several_peaks_that_another_column_switches() -> None:
    """A line explains little of them; the mean of each twentieth of a column explains more."""
    x = torch.randn(8, 2000, 2)
    score = TARGET_KINDS["waves"](Draw(torch.Generator().manual_seed(3)), x, 1)[..., 0]
    assert bool(score.isfinite().all()) and float(score.std(dim=1).min()) > 0.1
    y = (score - score.mean(dim=1, keepdim=True)) / score.std(dim=1, keepdim=True)
    best = torch.zeros(8)
    for column in range(2):
        order = x[..., column].argsort(dim=1)
        steps = y.gather(1, order).view(8, 20, 100).mean(dim=2)
        best = torch.maximum(best, steps.var(dim=1))
    design = torch.cat((x, torch.ones(8, 2000, 1)), dim=2)
    fitted = design @ torch.linalg.lstsq(design, y[..., None]).solution
    assert float((best - fitted[..., 0].var(dim=1)).median()) > 0.1


def test_the_kinds_of_targets_can_be_chosen() -> None:
    waves, trees = (sample(classes=0, targets={kind: 1.0}) for kind in ("waves", "trees"))
    assert not torch.equal(waves.target, trees.target)
    with pytest.raises(ConfigError, match=r"targets must be among linear, .*: got spirals"):
        sample(targets={"spirals": 1.0})
