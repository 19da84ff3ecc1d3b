"""The temperature at its ends, and of rows that are few."""

import math

import pytest
import torch

from addnorm.tabular.calibration import LEAST, MOST, fit_temperature, logits_of, probabilities_of


def test_one_output_is_the_log_odds_of_the_second_class() -> None:
    answers = torch.tensor([[0.0], [2.0], [-1.5]])
    found = probabilities_of(answers, 0.5)
    for row, z in enumerate((0.0, 2.0, -1.5)):
        second = 1 / (1 + math.exp(-z / 0.5))
        assert found[row].tolist() == pytest.approx([1 - second, second], rel=1e-12)
    many = torch.randn(4, 3)
    assert logits_of(many) is many and found.dtype == torch.float64


@pytest.mark.parametrize("rows", (1, 2, 40))
def test_probabilities_of_several_classes(rows: int) -> None:
    answers = 3 * torch.randn(rows, 4)
    found = probabilities_of(answers, 1.7)
    for row in range(rows):
        each = [math.exp(float(z) / 1.7) for z in answers[row]]
        assert found[row].tolist() == pytest.approx([e / sum(each) for e in each], rel=1e-5)


def test_logits_that_are_always_right_or_always_wrong_go_to_the_ends() -> None:
    """Right in every row, the surer the better; wrong in every row, the less sure the better."""
    target = torch.arange(40) % 3
    sure = torch.nn.functional.one_hot(target, 3).float()
    assert fit_temperature(sure, target, torch.ones(40)) == LEAST
    assert fit_temperature(-sure, target, torch.ones(40)) == MOST
    assert LEAST < 1 < MOST


@pytest.mark.parametrize(("rows", "learnt"), ((19, False), (20, True)))
def test_twenty_rows_are_enough_to_learn_it_from(rows: int, learnt: bool) -> None:
    """Said three times too surely: of rows at odds of 3, one in four is wrong."""
    target = (torch.arange(rows) % 4 > 0).long()
    answers = torch.full((rows, 1), 3 * math.log(3))
    found = fit_temperature(answers, target, torch.ones(rows))
    assert found == pytest.approx(3.0, rel=1e-6) if learnt else found == 1.0


def test_the_temperature_is_exact_where_it_can_be_computed() -> None:
    """All rows with logit z, a share p of the second class: z / T = log p / (1 − p)."""
    for wrong, z in ((1, 0.3), (3, 2.0), (9, 4.0)):
        target = (torch.arange(40) >= wrong).long()
        found = fit_temperature(torch.full((40, 1), z), target, torch.ones(40))
        assert found == pytest.approx(z / math.log((40 - wrong) / wrong), rel=1e-6)
