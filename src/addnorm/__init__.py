"""addnorm builds, trains, examines and explains Transformers.

The names below are imported when they are first used, so `import addnorm` is quick and does not
wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from addnorm import presets
    from addnorm.config import Config, ModelConfig
    from addnorm.errors import AddnormError
    from addnorm.layers.context import Cache, Mask
    from addnorm.layers.init import measure_
    from addnorm.layers.tokens import shift_right
    from addnorm.machine import keep_memory
    from addnorm.models.build import build
    from addnorm.models.fold import fold
    from addnorm.models.saved import load
    from addnorm.models.size import cost
    from addnorm.train.loss import token_loss

_HOMES = {
    "AddnormError": "addnorm.errors",
    "Cache": "addnorm.layers.context",
    "Config": "addnorm.config",
    "Mask": "addnorm.layers.context",
    "ModelConfig": "addnorm.config",
    "build": "addnorm.models.build",
    "cost": "addnorm.models.size",
    "fold": "addnorm.models.fold",
    "keep_memory": "addnorm.machine",
    "load": "addnorm.models.saved",
    "measure_": "addnorm.layers.init",
    "presets": "addnorm",
    "shift_right": "addnorm.layers.tokens",
    "token_loss": "addnorm.train.loss",
}

__all__ = [
    "AddnormError",
    "Cache",
    "Config",
    "Mask",
    "ModelConfig",
    "build",
    "cost",
    "fold",
    "keep_memory",
    "load",
    "measure_",
    "presets",
    "shift_right",
    "token_loss",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'addnorm' has no attribute {name!r}")
    if _HOMES[name] == "addnorm":
        return importlib.import_module(f"addnorm.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
