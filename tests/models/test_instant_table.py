"""The instant model with the known rows of a table: members, the mixture, and large tables."""

import pytest
import torch
from torch import Tensor

from addnorm.models import instant_table
from addnorm.models.bins import bin_means
from addnorm.models.instant import InstantModel
from addnorm.models.instant_table import (
    PIECES,
    InstantPredictor,
    content_order,
    make_predictor,
)
from tests.models.test_instant import NEAR, make


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
        seed = predictor.sizes.seed + member
        known = predictor.cells(numbers, codes, member)
        cells = torch.cat((known, known[:, :4]), dim=1)
        is_category = torch.tensor([[False, False, True]])
        with torch.no_grad():
            named = order[target][None]
            states = model.hidden(cells, named, is_category, seed=seed)
            logits = model.class_logits(*states, named, 3)[0]
            by_hand.append(logits.softmax(dim=-1)[:, order])
    assert torch.allclose(chances, torch.stack(by_hand).mean(dim=0), atol=NEAR)
    assert torch.allclose(chances.sum(dim=1), torch.ones(4), atol=NEAR)
    first, second = (predictor.cells(numbers, codes, member)[0, :, 2] for member in (0, 1))
    assert first.isnan().tolist() == (codes[:, 0] < 2).tolist() == second.isnan().tolist()
    assert len(set(zip(first.tolist(), second.tolist(), strict=True)) - {(None, None)}) <= 9


@pytest.mark.parametrize(("classes", "categories", "wanted"), ((0, 0, 1), (2, 0, 2), (3, 1, 4)))
def test_members_that_would_be_equal_are_computed_once(
    classes: int, categories: int, wanted: int
) -> None:
    numbers, codes = torch.randn(9, 2), torch.randint(2, 6, (9, categories))
    for identity in (0, 6):
        predictor = make_predictor(
            make(identity=identity),
            numbers,
            codes,
            torch.randint(0, 3, (9,)) % 2 if classes else torch.randn(9),
            categories=[6] * categories,
            classes=classes,
            kept=torch.arange(2 + categories),
        )
        with torch.inference_mode():
            predictor.outputs(numbers, codes)
        members = 4 if identity else wanted
        assert len(predictor.read_rows) == members == predictor.different_members()


def test_two_members_are_enough_for_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, codes = torch.randn(9, 2), torch.zeros(9, 0, dtype=torch.int64)
    target = torch.randint(0, 2, (9,))
    predictor = make_predictor(
        make(), numbers, codes, target, categories=[], classes=2, kept=torch.arange(2)
    )
    assert predictor.different_members() == 4
    monkeypatch.setattr(instant_table, "MANY_CELLS", 17)
    assert predictor.different_members() == 2


def numbers_predictor(model: InstantModel, rows: int = 20) -> InstantPredictor:
    """A predictor of numbers, with two numeric columns and a category."""
    numbers, codes = torch.randn(rows, 2), torch.randint(0, 5, (rows, 1))
    target = numbers[:, 0] + codes[:, 0]
    kept = torch.arange(3)
    scaled = (target - target.mean()) / target.std(correction=0)
    return make_predictor(model, numbers, codes, scaled, categories=[5], classes=0, kept=kept)


def test_numbers_are_a_mixture_of_network_and_process() -> None:
    predictor = numbers_predictor(make())
    rows = torch.randn(6, 2), torch.randint(0, 5, (6, 1))
    found = []
    with torch.inference_mode():
        for trust in (0.0, 0.25, 1.0):
            predictor.trust.fill_(trust)
            found.append(predictor.outputs(*rows))
        bins = predictor.network_outputs(*rows)
    process = predictor.process()
    assert process is not None
    latent = process.latent(predictor.features(*rows))
    other = process.probabilities(*latent, predictor.fine_edges).float()
    assert torch.allclose(found[0].unflatten(1, (-1, PIECES)).sum(dim=2), bins, atol=1e-6)
    assert torch.allclose(found[2], other, atol=1e-6)
    assert torch.allclose(found[1], 0.75 * found[0] + 0.25 * found[2], atol=1e-6)
    middle = bin_means(predictor.network.edges)
    mean = predictor.outputs_from_probabilities(found[0])[:, 0, 0]
    assert torch.allclose(mean, bins @ middle, atol=1e-5)


def test_answers_from_tokens_have_the_process_and_gradients() -> None:
    predictor = numbers_predictor(make())
    rows = torch.randn(4, 2), torch.randint(0, 5, (4, 1))
    predictor.trust.fill_(1.0)  # members differ in the network alone
    with torch.no_grad():
        tokens = predictor.tokens(*rows)
        wanted = predictor(*rows)
    tokens.requires_grad_()
    answers = predictor.from_tokens(tokens)
    assert torch.allclose(answers, wanted, atol=1e-5)
    answers.sum().backward()
    assert tokens.grad is not None and float(tokens.grad.abs().sum()) > 0


def test_the_network_reads_a_sample_of_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    numbers, codes = torch.randn(40, 2), torch.randint(2, 5, (40, 1))
    target, asked = torch.randint(0, 2, (40,)), (torch.randn(5, 2), torch.randint(2, 5, (5, 1)))

    def predictor(rows: Tensor) -> InstantPredictor:
        known = numbers[rows], codes[rows], target[rows]
        return make_predictor(model, *known, categories=[5], classes=2, kept=torch.arange(3))

    whole, every = predictor(torch.arange(40)), torch.arange(40)
    assert whole.context() is None and whole.different_members() == 4
    monkeypatch.setattr(instant_table, "ATTENTION_LIMIT", 10 * 10 * 4)
    assert whole.different_members() == 1
    context = whole.context()
    assert context is not None and len(set(context.tolist())) == 10
    shares = [float(t.float().mean()) for t in (target, target[context])]
    assert abs(shares[0] - shares[1]) < 0.1
    with torch.inference_mode():
        before = whole.outputs(*asked)
        known = whole.read(0)
        again = predictor(every.flip(0)).outputs(*asked)
    assert known.count == 10 and known.solved is not None and known.solved.known[0].shape[1] == 40
    assert torch.allclose(again, before, atol=NEAR)


def test_rows_are_ordered_by_their_content_alone() -> None:
    """A factorial design: all columns have the same values equally often, and rows differ."""
    codes = 2 + torch.cartesian_prod(*[torch.arange(3)] * 4)
    numbers = torch.tensor([0.5, -0.5, float("nan")])[codes[:, :2] - 2]
    target = torch.randint(0, 2, (81,), generator=torch.Generator().manual_seed(0))
    order = content_order(numbers, codes, target)
    assert target[order].diff().min() >= 0
    wanted = torch.cat((numbers, codes), dim=1)[order]
    for seed in range(3):
        rows = torch.randperm(81, generator=torch.Generator().manual_seed(seed))
        again = content_order(numbers[rows].flip(1), codes[rows].flip(1), target[rows])
        found = torch.cat((numbers[rows], codes[rows]), dim=1)[again]
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
