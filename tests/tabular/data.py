"""A small table that is learnt within a second, and settings for that."""

from typing import Any

import numpy as np

from addnorm.data.table.frame import Array, Frame
from tests.portable import training

QUICK: dict[str, Any] = {
    "width": 16,
    "depth": 1,
    "heads": 2,
    "epochs": 8,
    "batch_size": 64,
    "learning_rate": 1e-2,
    "drop_cells": 0.0,
    "random_state": training.seed,
}


def people(rows: int = 240, seed: int = 0) -> tuple[Frame, Array]:
    """Return ages, jobs, dates and a column of noise; the label depends on age and job."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 80, rows).astype(float)
    job = rng.choice(["cook", "nurse", "pilot"], rows).astype(object)
    noise = rng.normal(size=rows)
    start = np.datetime64("2024-01-01") + rng.integers(0, 700, rows)
    age[::17], job[::23] = np.nan, None
    positive = (np.nan_to_num(age, nan=40) > 45) | (job == "pilot")
    columns = {"age": age, "job": job, "noise": noise, "start": start.astype("datetime64[s]")}
    return Frame("people", columns), np.where(positive, "yes", "no")
