"""The views of the lens for one row of a table: heads, layers and pieces; columns are tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.errors import InputError
from addnorm.lens.explain import SUMMARY
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.look import look
from addnorm.lens.readout import attribute_logits, logit_lens
from addnorm.lens.stream import decompose
from addnorm.models.tabular import FTTransformerModel
from addnorm.tabular.base import TableEstimator
from addnorm.training.calibration import probabilities_of

SIDE = "columns"
"""Stands before the names of places: `columns.0.attention`."""


def explain_network(
    estimator: TableEstimator,
    table: EncodedTable,
    contributions: Tensor,
    *,
    title: str = "",
) -> SequenceExplanation | None:
    """Return attention, pieces and layers of one row, or None if the model has no summary to read.

    Pieces and layers are those of classes: a number is the mean of a distribution, of which no
    piece has a share. Members of an ensemble are averaged.

    Parameters
    ----------
    estimator
        The fitted estimator.
    table
        The row, encoded.
    contributions
        Those of its tokens, (1, tokens), in units of the network's output.
    title
        What is explained.
    """
    model, names = estimator.model_, list(estimator.encoder_.names)
    if type(model) is not FTTransformerModel:  # rows of SAINT attend to one another
        return None
    rows = (table.numbers, table.codes)
    try:
        maps = look(model, rows).maps
    except InputError:  # a table of thousands of columns has too large maps
        return None
    classes = [str(each) for each in getattr(estimator, "classes_", ())]
    scale = float(getattr(estimator, "scale_", 1.0)) / float(estimator.temperature_)
    outputs, probabilities = [estimator.encoder_.schema.target or "the target"], [float("nan")]
    pieces: tuple[list[str], Tensor] = ([], torch.zeros(0, 1))
    layers: tuple[list[str], list[list[list[tuple[str, float]]]]] = ([], [])
    kind = "prediction"
    candidates: list[list[tuple[str, float]]] = [[]]
    if classes:
        binary = len(classes) == 2
        found = attribute_logits(decompose(model, rows), None, None if binary else "others")
        chosen = 1 if binary else int(found.outputs[0])
        kind = "log-odds" if binary else "margin"
        pieces = list(found.names), found.values.float() * scale
        table_of_layers = logit_lens(model, rows)
        shares = [_ranked(each, estimator, classes) for each in table_of_layers.logits]
        layers = list(table_of_layers.names), [[each[:3]] for each in shares]
        outputs, candidates = [classes[chosen]], [shares[-1]]
        probabilities = [dict(shares[-1])[classes[chosen]]]
    return SequenceExplanation(
        title=title,
        tokens={SIDE: [SUMMARY, *names]},
        outputs=outputs,
        probabilities=probabilities,
        candidates=candidates,
        maps={f"{SIDE}.{place}": each.mean(dim=0) for place, each in maps.items()},
        statistics={},
        pieces=pieces,
        layers=layers,
        contributions={SIDE: torch.nn.functional.pad(contributions.float() * scale, (1, 0))},
        completeness=0.0,
        kind=kind,
    )


def _ranked(
    logits: Tensor, estimator: TableEstimator, classes: Sequence[str]
) -> list[tuple[str, float]]:
    """Return every class with its calibrated probability, the most probable first."""
    values = probabilities_of(logits.float(), float(estimator.temperature_)).numpy()[0]
    return [(classes[i], float(values[i])) for i in np.argsort(-values)]
