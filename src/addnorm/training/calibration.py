"""Temperature scaling of the logits, fitted on held-out rows: softmax(z / T).

Guo et al. 2017 (1706.04599), §4.2. The order of the classes does not change, nor does accuracy.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm.errors import SavedError
from addnorm.files import FileFormat, read_document, require_regular, write_document
from addnorm.models.saved import WEIGHTS

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
CALIBRATION = FileFormat("calibration", 1)
CALIBRATION_FILE = "calibration.json"


def logits_of(outputs: Tensor) -> Tensor:
    """Return (rows, outputs) as logits of all classes; one output is the log-odds of the second."""
    if outputs.shape[1] > 1:
        return outputs
    return torch.cat((torch.zeros_like(outputs), outputs), dim=1)


def fit_temperature(outputs: Tensor, target: Tensor, weight: Tensor) -> float:
    """Return the T of the smallest held-out loss; 1 if there are fewer than 20 rows, or one class.

    The mean loss is convex in β = 1/T, so its derivative has one zero, found by bisection.
    """
    logits = logits_of(outputs).double()
    if len(logits) < 20 or not bool((target != target[0]).any()):
        return 1.0

    def slope(beta: float) -> float:
        # d/dβ of −log softmax(βz)[y] is Σ_k p_k z_k − z_y.
        probabilities = F.softmax(beta * logits, dim=1)
        target_logits = logits.gather(1, target[:, None])[:, 0]
        return float(((probabilities * logits).sum(dim=1) - target_logits) @ weight.double())

    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    if slope(low) >= 0:
        return MAX_TEMPERATURE
    if slope(high) <= 0:
        return MIN_TEMPERATURE
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / middle


def probabilities_of(outputs: Tensor, temperature: float) -> Tensor:
    """Return class probabilities in float64, (rows, classes)."""
    return F.softmax(logits_of(outputs).double() / temperature, dim=1)


def save_temperature(directory: Path, temperature: float) -> None:
    """Write the temperature of a model next to its weights, with a digest of both."""
    content = {"temperature": temperature, "weights": _digest(directory / WEIGHTS)}
    write_document(directory / CALIBRATION_FILE, *CALIBRATION, content)


def load_temperature(directory: Path) -> float:
    """Return the temperature that was saved with a model; 1 if there is none."""
    path = directory / CALIBRATION_FILE
    if not path.exists():
        return 1.0
    content = read_document(path, *CALIBRATION)
    value = content.get("temperature")
    if type(value) is not float or not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise SavedError(
            f"{str(path)!r} is damaged: temperature must be a number from {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE:g}: got {value!r}. Use a backup."
        )
    if content.get("weights") != _digest(directory / WEIGHTS):
        raise SavedError(
            f"{str(path)!r} was fitted to other weights than those of {WEIGHTS}. Delete it to use "
            "uncalibrated probabilities."
        )
    return value


def remove_temperature(directory: Path) -> None:
    """Delete the temperature of a model whose weights are about to change."""
    (directory / CALIBRATION_FILE).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    require_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
