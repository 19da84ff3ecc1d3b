"""The instant model: what its order of rows and columns, padding and batching must not change."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig
from addnorm.errors import InputError, SavedError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.models.bins import bin_means, quantiles_of
from addnorm.models.instant import (
    InstantConfig,
    InstantModel,
    Vote,
    read_instant,
    standardise_target,
    write_instant,
)
from addnorm.models.instant_cells import (
    FEATURES,
    cell_features,
    column_identities,
    column_stats,
)
from tests.conftest import slow_except

NEAR = 1e-5
FAST = ("pre", "post", "dual")


def unknown_states(model: InstantModel, *arguments: Any, **named: Any) -> Tensor:
    """The hidden states of the unknown rows."""
    return model.hidden(*arguments, **named)[0].hidden


def make(*, identity: int = 6, **changes: object) -> InstantModel:
    """A small model, none of whose weights is at a special value."""
    sizes = {"width": 16, "depth": 2, "heads": 2, "ffn_width": 32} | changes
    plain = {"mode": "encoder", "input": "vectors", "positions": "none", "head": "none"}
    trunk = ModelConfig(**{**plain, "dropout": 0.0, "addnorm": "pre", **sizes})  # type: ignore[arg-type]
    model = InstantModel(InstantConfig(trunk=trunk, identity=identity, solvers=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def draw(tables: int = 2, known: int = 8) -> tuple[Tensor, Tensor]:
    """Cells with missing ones, and classes of the known rows."""
    cells = torch.randn(tables, 12, 4)
    cells[torch.rand(cells.shape) < 0.1] = float("nan")
    return cells, torch.randint(0, 3, (tables, known))


@pytest.mark.parametrize("addnorm", slow_except(FAST, ADDNORMS))
def test_the_order_of_rows_and_columns_changes_nothing(addnorm: str) -> None:
    model = make(addnorm=addnorm)
    cells, target = draw()
    is_category = torch.tensor([[True, False, False, True], [False, True, False, False]])
    before = unknown_states(model, cells, target, is_category)
    columns = torch.tensor([2, 0, 3, 1])
    moved = unknown_states(model, cells[:, :, columns], target, is_category[:, columns])
    assert torch.allclose(moved, before, atol=NEAR)
    rows = torch.randperm(8)
    shuffled = torch.cat((cells[:, rows], cells[:, 8:]), dim=1)
    assert torch.allclose(
        unknown_states(model, shuffled, target[:, rows], is_category), before, atol=NEAR
    )
    unknown = torch.tensor([3, 1, 0, 2])
    other = torch.cat((cells[:, :8], cells[:, 8 + unknown]), dim=1)
    assert torch.allclose(
        unknown_states(model, other, target, is_category), before[:, unknown], atol=NEAR
    )


@pytest.mark.parametrize("addnorm", slow_except(FAST, ADDNORMS))
def test_an_unknown_row_does_not_see_the_others(addnorm: str) -> None:
    model = make(addnorm=addnorm)
    cells, target = draw()
    alone = unknown_states(model, cells[:, :9], target)
    changed = cells.clone()
    changed[:, 9:] = 7.0
    assert torch.allclose(unknown_states(model, changed, target)[:, :1], alone, atol=NEAR)


def test_padded_columns_change_nothing() -> None:
    model = make()
    cells, target = draw()
    padded = torch.cat((cells, torch.randn(2, 12, 3)), dim=2)
    real = torch.tensor([True] * 4 + [False] * 3).expand(2, -1)
    before = unknown_states(model, cells, target)
    assert torch.allclose(unknown_states(model, padded, target, real=real), before, atol=NEAR)
    seen = unknown_states(model, padded, target)
    assert not torch.allclose(seen, before, atol=1e-3)  # columns that are real do change it


def test_tables_of_a_batch_are_independent() -> None:
    model = make()
    cells, target = draw(tables=3)
    together = unknown_states(model, cells, target)
    for table in range(3):
        alone = unknown_states(model, cells[table : table + 1], target[table : table + 1])
        assert torch.allclose(alone[0], together[table], atol=NEAR)


@pytest.mark.parametrize("is_number", (False, True))
def test_known_rows_that_were_read_once_give_the_same(is_number: bool) -> None:
    model = make()
    cells, target = draw()
    wanted = torch.randn(2, 8) if is_number else target
    whole = unknown_states(model, cells, wanted)
    known = model.read(cells[:, :8], wanted)
    parts = [model.states_of(cells[:, 8 + i : 9 + i], known).hidden for i in range(4)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=NEAR)


@pytest.mark.parametrize(
    ("known", "columns"),
    ((0, 1), (0, 3), (1, 1), (2, 60), pytest.param(2000, 60, marks=pytest.mark.slow)),
)
def test_sizes_from_none_to_the_largest(known: int, columns: int) -> None:
    model = make()
    cells = torch.randn(1, known + 2, columns)
    cells[:, :, 0] = 3.0  # constant
    if columns > 2:
        cells[:, :, 1] = float("nan")  # all missing
        cells[:, :known, 2] = float("nan")  # missing in all known rows
    target = torch.randint(0, 10, (1, known))
    with torch.no_grad():
        logits = model.class_logits(*model.hidden(cells, target), target, 10)
        rows = model.read(cells[:, :known], target)
        again = model.states_of(cells[:, known:], rows)
        cached = model.class_logits(again, rows.states, rows.target, 10)
        bins = model.bin_logits(*model.hidden(cells, target.float()), target.float())
    assert logits.shape == (1, 2, 10) and bool(logits.isfinite().all())
    assert torch.allclose(cached, logits, atol=NEAR)
    assert bins.shape == (1, 2, 64) and bool(bins.isfinite().all())


def test_votes_against_a_loop() -> None:
    vote = Vote(4).double().requires_grad_(False)
    vote.smoothing.fill_(0.3)
    hidden, known = (torch.randn(1, rows, 4, dtype=torch.float64) for rows in (2, 5))
    ballots = torch.rand(1, 5, 3, dtype=torch.float64)
    ballots /= ballots.sum(dim=-1, keepdim=True)
    shares = vote(hidden, known, ballots).exp()[0]
    s = math.exp(0.3)
    for row in range(2):
        q = vote.query.weight @ hidden[0, row]
        weights = [math.exp(float(q @ (vote.key.weight @ k)) / 2) for k in known[0]]
        for outcome in range(3):
            votes = sum(w * float(b[outcome]) for w, b in zip(weights, ballots[0], strict=True))
            wanted = (5 * votes / sum(weights) + s / 3) / (5 + s)
            assert float(shares[row, outcome]) == pytest.approx(wanted, abs=1e-12)
    none = vote(hidden, known[:, :0], ballots[:, :0]).exp()
    assert torch.allclose(none, torch.full_like(none, 1 / 3))


def test_the_numbers_of_the_classes_are_nothing_to_the_votes() -> None:
    model = make()
    cells, target = draw()
    hidden, known = (states.hidden for states in model.hidden(cells, target))
    order = torch.tensor([2, 0, 1])
    before = model.class_vote(hidden, known, F.one_hot(target, 3).float())
    renamed = model.class_vote(hidden, known, F.one_hot(order[target], 3).float())
    assert torch.allclose(renamed[..., order], before, atol=NEAR)


def test_a_number_votes_for_the_bins_around_it() -> None:
    model = make()
    with torch.no_grad():
        for parameter in model.number_head.parameters():
            parameter.zero_()
        model.number_vote.smoothing.fill_(-9.0)
        model.bandwidth.fill_(-3.0)
    cells, _ = draw(tables=1)
    target = torch.full((1, 8), 1.5)
    states = model.hidden(cells, target)
    chances = model.bin_logits(*states, target).softmax(dim=-1)
    assert bool((chances.argmax(dim=-1) == int(model.bins_of(torch.tensor([1.5])))).all())
    assert torch.allclose(chances @ bin_means(model.edges), torch.tensor(1.5), atol=0.05)


def test_features_of_a_cell() -> None:
    known = torch.tensor([1.0, 2.0, 2.0, 3.0, float("nan")])[None, :, None]
    stats = column_stats(known)
    cells = torch.tensor([0.0, 2.0, 9.0, float("nan")])[None, :, None]
    features = cell_features(cells, stats, torch.tensor([[True]]))[0, :, 0]
    assert features.shape == (4, FEATURES)
    z = (torch.tensor([0.0, 2.0, 9.0]) - 2.0) / 0.5**0.5
    assert torch.allclose(features[:3, 0], z / (1 + (z / 4) ** 2).sqrt())
    assert torch.allclose(features[:3, 1], torch.tensor([-1.0, 0.0, 1.0]))
    assert features[3, :-2].abs().sum() == 0
    assert features[:, -2].tolist() == [0, 0, 0, 1] and features[:, -1].tolist() == [1] * 4


def test_identities_follow_their_columns() -> None:
    known = torch.randn(2, 30, 5)
    known[0, 3, 1] = known[:, :, 3] = float("nan")
    known[:, :, 4] = known[:, :, 0]
    before = column_identities(column_stats(known), 4)
    rows, columns = torch.randperm(30), torch.tensor([2, 0, 3, 1, 4])
    moved = column_identities(column_stats(known[:, rows][:, :, columns]), 4)
    assert torch.equal(moved, before[:, columns])
    assert torch.equal(before[:, 0], before[:, 4])  # of equal columns
    assert not torch.equal(before, column_identities(column_stats(known), 4, seed=1))
    zeros = torch.zeros(1, 3, 1)
    assert torch.equal(*(column_identities(column_stats(z), 4) for z in (zeros, -zeros)))


def test_identities_are_normal() -> None:
    numbers = column_identities(column_stats(torch.randn(40, 9, 60)), 8).flatten(0, 1)
    assert torch.allclose(numbers.mean(dim=0), torch.tensor(0.0), atol=0.1)
    covariance = numbers.T @ numbers / len(numbers)
    assert torch.allclose(covariance, torch.eye(8), atol=0.15)


def test_identities_tell_columns_apart() -> None:
    """Rows that swap the values of two columns with equal cells differ, if columns do."""
    model = make()
    values = torch.randn(1, 8)
    cells = torch.stack((values, values.flip(1) + 1e-3), dim=2)
    asked = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]])
    wide, target = torch.cat((cells, asked), dim=1), torch.zeros(1, 8, dtype=torch.int64)

    def gap() -> float:
        first, second = unknown_states(model, wide, target)[0]
        return float((first - second).abs().max().detach())

    with_identity = gap()
    model.config = replace(model.config, identity=0)
    assert gap() < 0.2 * with_identity


def test_too_many_classes_are_refused() -> None:
    with pytest.raises(InputError, match="up to 10 classes: got 11"):
        make().check_classes(11)


def test_bins_hold_their_numbers() -> None:
    model = make()
    middle = bin_means(model.edges)
    assert model.bins_of(middle).tolist() == list(range(64))
    assert model.bins_of(torch.tensor([-99.0, 99.0])).tolist() == [0, 63]


def test_quantiles_of_a_uniform_distribution() -> None:
    edges = torch.linspace(0.0, 10.0, 11)
    chances = torch.full((2, 10), 0.1)
    found = quantiles_of(chances, edges, torch.tensor([0.05, 0.5, 0.95]))
    assert torch.allclose(found, torch.tensor([0.5, 5.0, 9.5]).expand(2, -1), atol=1e-4)
    sure = torch.zeros(1, 10)
    sure[0, 3] = 1.0
    found = quantiles_of(sure, edges, torch.tensor([0.25, 0.75]))
    assert torch.allclose(found, torch.tensor([[3.25, 3.75]]), atol=1e-4)


def test_targets_are_standardised_on_the_known_rows() -> None:
    target = torch.tensor([[1.0, 3.0, 99.0]])
    scaled, mean, deviation = standardise_target(target, 2)
    assert scaled[0].tolist() == [-1.0, 1.0, 97.0] and (float(mean), float(deviation)) == (2.0, 1.0)


def test_a_file_of_weights_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, path = make(), tmp_path / "w.safetensors"
    write_instant(model, model.state_dict(), path)
    cells, target = draw()
    read = read_instant(path)
    assert torch.equal(unknown_states(read, cells, target), unknown_states(model, cells, target))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(SavedError):
        read_instant(path)
