"""One temperature for all logits, learnt on held-out rows: softmax(z / T).

Guo et al. 2017 (1706.04599), §4.2. The order of the classes, and so accuracy, stays as it is.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST, MOST = 0.05, 20.0


def logits_of(answers: Tensor) -> Tensor:
    """(rows, outputs) of a model as logits of all classes; one output is that of two classes."""
    if answers.shape[1] > 1:
        return answers
    return torch.cat((torch.zeros_like(answers), answers), dim=1)


def fit_temperature(answers: Tensor, target: Tensor, weight: Tensor) -> float:
    """The T at which held-out rows are likeliest; 1 if there is too little to learn it from.

    In β = 1/T the mean loss is convex, so its derivative has one zero, found by halving.
    """
    logits = logits_of(answers).double()
    if len(logits) < 20 or not bool((target != target[0]).any()):
        return 1.0

    def slope(beta: float) -> float:
        # d/dβ of −log softmax(βz)[y] is Σ_k p_k z_k − z_y.
        probabilities = F.softmax(beta * logits, dim=1)
        told = logits.gather(1, target[:, None])[:, 0]
        return float(((probabilities * logits).sum(dim=1) - told) @ weight.double())

    low, high = 1 / MOST, 1 / LEAST
    if slope(low) >= 0:
        return MOST
    if slope(high) <= 0:
        return LEAST
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / middle


def probabilities_of(answers: Tensor, temperature: float) -> Tensor:
    """Class probabilities in float64, (rows, classes)."""
    return F.softmax(logits_of(answers).double() / temperature, dim=1)
