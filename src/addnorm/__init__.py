"""addnorm builds, trains, examines and explains Transformers.

The names below are imported when they are first used, so `import addnorm` is quick and does not
wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from addnorm import lens, presets
    from addnorm.clinic.examination import examine
    from addnorm.config import Config, ModelConfig
    from addnorm.cpu import keep_memory
    from addnorm.errors import AddnormError
    from addnorm.layers.cache import Cache
    from addnorm.layers.embeddings import shift_right
    from addnorm.layers.init import measure_
    from addnorm.layers.masks import Mask
    from addnorm.models.build import build
    from addnorm.models.fold_admin import fold
    from addnorm.models.saved import save
    from addnorm.models.size import cost
    from addnorm.races.run import race
    from addnorm.races.tune import tune
    from addnorm.runs.front_door import explain, load, open, train
    from addnorm.runs.imported import import_model
    from addnorm.runs.run import Run
    from addnorm.training.loss import token_loss

_HOMES = {
    "AddnormError": "addnorm.errors",
    "Cache": "addnorm.layers.cache",
    "Config": "addnorm.config",
    "Mask": "addnorm.layers.masks",
    "ModelConfig": "addnorm.config",
    "Run": "addnorm.runs.run",
    "build": "addnorm.models.build",
    "cost": "addnorm.models.size",
    "examine": "addnorm.clinic.examination",
    "explain": "addnorm.runs.front_door",
    "fold": "addnorm.models.fold_admin",
    "import_model": "addnorm.runs.imported",
    "keep_memory": "addnorm.cpu",
    "lens": "addnorm",
    "load": "addnorm.runs.front_door",
    "measure_": "addnorm.layers.init",
    "open": "addnorm.runs.front_door",
    "presets": "addnorm",
    "race": "addnorm.races.run",
    "save": "addnorm.models.saved",
    "shift_right": "addnorm.layers.embeddings",
    "token_loss": "addnorm.training.loss",
    "train": "addnorm.runs.front_door",
    "tune": "addnorm.races.tune",
}

__all__ = [
    "AddnormError",
    "Cache",
    "Config",
    "Mask",
    "ModelConfig",
    "Run",
    "build",
    "cost",
    "examine",
    "explain",
    "fold",
    "import_model",
    "keep_memory",
    "lens",
    "load",
    "measure_",
    "open",
    "presets",
    "race",
    "save",
    "shift_right",
    "token_loss",
    "train",
    "tune",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'addnorm' has no attribute {name!r}")
    if _HOMES[name] == "addnorm":
        return importlib.import_module(f"addnorm.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
