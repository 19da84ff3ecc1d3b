"""Soft targets for small tables: the instant model teaches the network that is trained.

    tᵢ = ½ [yᵢ] + ½ q₋ᵢ(xᵢ)    of a row; q₋ᵢ: the instant model of the rows of other parts
    t'ᵢ = q(x'ᵢ)               of a second row x'ᵢ, which is xᵢ with 3 of 10 cells of other rows

A network has too few rows here to find out by itself what the instant model brings from the tables
it was trained on. What is trained, saved and explained is the network alone. Soft targets: Hinton
et al. 2015 (1503.02531), §2; made-up rows with a teacher's targets: Bucilă et al. 2006, "Model
compression", §3. A row's own class does not enter q₋ᵢ: the instant model would repeat it.
"""

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from addnorm.data.table.encode import TableEncoder
from addnorm.data.table.frame import Array, Frame
from addnorm.data.table.schema import Schema
from addnorm.tabular.choices import SMALL_TABLE, is_recommended
from addnorm.tabular.fitting import Lesson
from addnorm.tabular.holdout import make_folds
from addnorm.tabular.instant import PACKAGE_WEIGHTS, InstantClassifier, load_network

if TYPE_CHECKING:
    from addnorm.tabular.base import TableEstimator

MIN_TAUGHT_ROWS = 300
"""For fewer rows the instant model itself is the better choice, and a fit takes less than the
teacher's second."""
TEACHER_PARTS = 4
"""Parts of the rows, each predicted from the others."""
OWN_SHARE = 0.5
"""Weight of the class of a row in its soft target."""
SWAPPED_SHARE = 0.3
"""Cells of a second row that come from other rows."""


def wants_teacher(estimator: "TableEstimator", target: Array, classes: int, weight: Array) -> bool:
    """Return whether the instant model should teach: a small table of classes, evenly weighted.

    Parameters
    ----------
    estimator : the estimator.
    target : class index of each row.
    classes : number of classes; 0 for numbers, which have no teacher.
    weight : weight of each row.
    """
    if not is_recommended(estimator.kind, estimator.effort) or estimator.effort == "low":
        return False
    if not classes or estimator.ordered or not MIN_TAUGHT_ROWS <= len(target) <= SMALL_TABLE:
        return False
    if len(np.unique(weight)) > 1 or getattr(estimator, "pretrained_", None) is not None:
        return False
    return PACKAGE_WEIGHTS.exists() and classes <= load_network().config.classes


def teach(
    frame: Frame, target: Array, classes: int, encoder: TableEncoder, seed: int
) -> Lesson | None:
    """Return soft targets of the training rows, and second rows with theirs.

    None if a class has too few rows for one in every part.

    Parameters
    ----------
    frame : the training rows.
    target : their class indices.
    classes : number of classes.
    encoder : the column encoder of the network, which encodes the second rows.
    seed : seed of the parts and of the swapped cells.
    """
    if np.bincount(target, minlength=classes).min() < TEACHER_PARTS:
        return None
    part = make_folds(len(frame), TEACHER_PARTS, classes=target, seed=seed)
    crossed = np.zeros((len(frame), classes))
    for number in range(TEACHER_PARTS):
        inside, outside = np.flatnonzero(part == number), np.flatnonzero(part != number)
        known = frame.take(outside), target[outside]
        crossed[inside] = _ask(known, frame.take(inside), encoder.schema, members=1)
    own = np.eye(classes)[target]
    second = _second_rows(frame, np.random.default_rng(seed))
    answers = _ask((frame, target), second, encoder.schema, members=2)
    soft = OWN_SHARE * own + (1 - OWN_SHARE) * crossed
    return Lesson(
        torch.from_numpy(soft).float(), encoder.encode(second), torch.from_numpy(answers).float()
    )


def _ask(known: tuple[Frame, Array], unknown: Frame, schema: Schema, *, members: int) -> Array:
    """Return the instant model's probabilities of unknown rows, (rows, classes)."""
    teacher = InstantClassifier(
        members=members, calibrate=members > 1, schema=schema, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns that are too many for it
        return teacher.fit(*known).predict_proba(unknown)


def _second_rows(frame: Frame, rng: np.random.Generator) -> Frame:
    """Return the rows with a share of their cells from other rows, column by column."""
    rows = np.arange(len(frame))
    columns = {
        name: values[np.where(rng.random(len(rows)) < SWAPPED_SHARE, rng.permutation(rows), rows)]
        for name, values in frame.columns.items()
    }
    return Frame(frame.name, columns, frame.notes, frame.named)
