"""Tables: scikit-learn estimators made of Transformers."""

from addnorm.errors import require

require("sklearn", "tables")
require("narwhals", "tables")

from addnorm.tabular.estimators import (  # noqa: E402 (the packages are asked for first)
    RECOMMENDED,
    FTTransformerClassifier,
    FTTransformerRegressor,
    SAINTClassifier,
    SAINTRegressor,
    TabTransformerClassifier,
    TabTransformerRegressor,
)
from addnorm.tabular.instant import InstantClassifier, InstantRegressor  # noqa: E402
from addnorm.tabular.saved import load, save  # noqa: E402

__all__ = [
    "RECOMMENDED",
    "FTTransformerClassifier",
    "FTTransformerRegressor",
    "InstantClassifier",
    "InstantRegressor",
    "SAINTClassifier",
    "SAINTRegressor",
    "TabTransformerClassifier",
    "TabTransformerRegressor",
    "load",
    "save",
]
