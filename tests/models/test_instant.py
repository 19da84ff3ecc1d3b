"""The instant model: what its order of rows and columns, padding and batching must not change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from addnorm import ModelConfig
from addnorm.errors import InputError, SavedError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.models.instant import (
    FEATURES,
    InstantConfig,
    InstantModel,
    bin_means,
    cell_features,
    column_stats,
    make_predictor,
    quantiles_of,
    read_instant,
    standardise_target,
    write_instant,
)
from tests.conftest import slow_except

NEAR = 1e-5
FAST = ("pre", "post", "dual")


def make(**changes: object) -> InstantModel:
    """A small model, none of whose weights is at a special value."""
    sizes = {"width": 16, "depth": 2, "heads": 2, "ffn_width": 32} | changes
    plain = {"mode": "encoder", "input": "vectors", "positions": "none", "head": "none"}
    trunk = ModelConfig(**{**plain, "dropout": 0.0, "addnorm": "pre", **sizes})  # type: ignore[arg-type]
    model = InstantModel(InstantConfig(trunk=trunk)).eval()
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
    before = model.hidden(cells, target, is_category)
    columns = torch.tensor([2, 0, 3, 1])
    moved = model.hidden(cells[:, :, columns], target, is_category[:, columns])
    assert torch.allclose(moved, before, atol=NEAR)
    rows = torch.randperm(8)
    shuffled = torch.cat((cells[:, rows], cells[:, 8:]), dim=1)
    assert torch.allclose(model.hidden(shuffled, target[:, rows], is_category), before, atol=NEAR)
    unknown = torch.tensor([3, 1, 0, 2])
    other = torch.cat((cells[:, :8], cells[:, 8 + unknown]), dim=1)
    assert torch.allclose(model.hidden(other, target, is_category), before[:, unknown], atol=NEAR)


@pytest.mark.parametrize("addnorm", slow_except(FAST, ADDNORMS))
def test_an_unknown_row_does_not_see_the_others(addnorm: str) -> None:
    model = make(addnorm=addnorm)
    cells, target = draw()
    alone = model.hidden(cells[:, :9], target)
    changed = cells.clone()
    changed[:, 9:] = 7.0
    assert torch.allclose(model.hidden(changed, target)[:, :1], alone, atol=NEAR)


def test_padded_columns_change_nothing() -> None:
    model = make()
    cells, target = draw()
    padded = torch.cat((cells, torch.randn(2, 12, 3)), dim=2)
    real = torch.tensor([True] * 4 + [False] * 3).expand(2, -1)
    before = model.hidden(cells, target)
    assert torch.allclose(model.hidden(padded, target, real=real), before, atol=NEAR)
    seen = model.hidden(padded, target)
    assert not torch.allclose(seen, before, atol=1e-3)  # columns that are real do change it


def test_tables_of_a_batch_are_independent() -> None:
    model = make()
    cells, target = draw(tables=3)
    together = model.hidden(cells, target)
    for table in range(3):
        alone = model.hidden(cells[table : table + 1], target[table : table + 1])
        assert torch.allclose(alone[0], together[table], atol=NEAR)


@pytest.mark.parametrize("is_number", (False, True))
def test_known_rows_that_were_read_once_give_the_same(is_number: bool) -> None:
    model = make()
    cells, target = draw()
    wanted = torch.randn(2, 8) if is_number else target
    whole = model.hidden(cells, wanted)
    known = model.read(cells[:, :8], wanted)
    parts = [model.hidden_of(cells[:, 8 + i : 9 + i], known, is_number) for i in range(4)]
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
        logits = model.class_logits(model.hidden(cells, target), 10)
        again = model.hidden_of(cells[:, known:], model.read(cells[:, :known], target), False)
    assert logits.shape == (1, 2, 10) and bool(logits.isfinite().all())
    assert torch.allclose(model.class_logits(again, 10), logits, atol=NEAR)


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


def test_too_many_classes_are_refused() -> None:
    with pytest.raises(InputError, match="up to 10 classes: got 11"):
        make().class_matrix(11)


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


def test_members_see_classes_and_categories_in_other_orders() -> None:
    model = make()
    numbers, codes = torch.randn(9, 2), torch.randint(0, 6, (9, 1))
    target = torch.randint(0, 3, (9,))
    predictor = make_predictor(
        model,
        numbers,
        codes,
        target,
        categories=[6],
        classes=3,
        kept=torch.arange(3),
        members=3,
    )
    with torch.inference_mode():
        chances = predictor.outputs(numbers[:4], codes[:4])
    by_hand = []
    for member in range(3):
        order = (torch.arange(3) + member) % 3
        known = predictor.cells(numbers, codes, member)
        cells = torch.cat((known, known[:, :4]), dim=1)
        is_category = torch.tensor([[False, False, True]])
        with torch.no_grad():
            hidden = model.hidden(cells, order[target][None], is_category)[0]
            by_hand.append(model.class_logits(hidden, 3).softmax(dim=-1)[:, order])
    assert torch.allclose(chances, torch.stack(by_hand).mean(dim=0), atol=NEAR)
    assert torch.allclose(chances.sum(dim=1), torch.ones(4), atol=NEAR)
    first, second = (predictor.cells(numbers, codes, member)[0, :, 2] for member in (0, 1))
    assert first.isnan().tolist() == (codes[:, 0] < 2).tolist() == second.isnan().tolist()
    assert len(set(zip(first.tolist(), second.tolist(), strict=True)) - {(None, None)}) <= 9


def test_a_file_of_weights_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, path = make(), tmp_path / "w.safetensors"
    write_instant(model, model.state_dict(), path)
    cells, target = draw()
    assert torch.equal(read_instant(path).hidden(cells, target), model.hidden(cells, target))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(SavedError):
        read_instant(path)
