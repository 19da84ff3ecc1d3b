"""Classification by a few labelled examples, without training: a linear classifier of text vectors.

    minimise  C Σ_i −log softmax(W v_i + b)_{y_i} + ½ ‖W‖²     ‖v_i‖ = 1

v_i is the vector of example i. With ten labels of each class this was better than nearest
neighbours and nearest means of the same vectors (docs/interop.md). More labels are used better by
fine-tuning: `addnorm train classify`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from addnorm.errors import InputError

EXAMPLE_WEIGHT = 5.0
"""C: the weight of the examples against the norm of W."""


class ExampleClassifier:
    """Classes of vectors, fitted to a few of them.

    Parameters
    ----------
    vectors : one row for each example.
    labels : the label of each.

    >>> few = ExampleClassifier(np.eye(2, dtype=np.float32), ["no", "yes"])
    >>> few.names, int(few.probabilities(np.array([[0.0, 1.0]])).argmax())
    (('no', 'yes'), 1)
    """

    def __init__(self, vectors: NDArray[Any], labels: Sequence[str]) -> None:
        if len(vectors) != len(labels):
            raise InputError(
                f"each example needs one label: got {len(labels)} for {len(vectors)} examples."
            )
        self.names = tuple(sorted(set(labels)))
        if len(self.names) < 2:
            raise InputError(
                f"examples must have two distinct labels or more: got {list(self.names)}."
            )
        numbers = {name: number for number, name in enumerate(self.names)}
        targets = torch.tensor([numbers[label] for label in labels])
        self.weight, self.bias = fit_on_vectors(torch.from_numpy(np.array(vectors)), targets)

    def probabilities(self, vectors: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probability of each label for each row, (rows, labels)."""
        x = torch.from_numpy(np.array(vectors)).double()
        return functional.linear(x, self.weight, self.bias).softmax(-1).numpy()


def fit_on_vectors(vectors: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return W, (classes, width), and b, which minimise the formula of this file, by L-BFGS."""
    x, classes = vectors.double(), int(targets.max()) + 1
    weight = torch.zeros(classes, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=300, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        errors = functional.cross_entropy(functional.linear(x, weight, bias), targets)
        total = EXAMPLE_WEIGHT * len(x) * errors + weight.square().sum() / 2
        torch.autograd.backward(total)
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
