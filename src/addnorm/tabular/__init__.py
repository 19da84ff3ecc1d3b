"""scikit-learn estimators for tables, built from Transformers."""

from addnorm.errors import require

require("sklearn", "tables")
require("narwhals", "tables")

from addnorm.tabular.estimators import (  # noqa: E402 (after the check that the packages are installed)
    FTTransformerClassifier,
    FTTransformerOrdinal,
    FTTransformerRegressor,
    SAINTClassifier,
    SAINTRegressor,
    TabTransformerClassifier,
    TabTransformerRegressor,
)
from addnorm.tabular.instant import InstantClassifier, InstantRegressor  # noqa: E402
from addnorm.tabular.saved import load_estimator, save_estimator  # noqa: E402

__all__ = [
    "FTTransformerClassifier",
    "FTTransformerOrdinal",
    "FTTransformerRegressor",
    "InstantClassifier",
    "InstantRegressor",
    "SAINTClassifier",
    "SAINTRegressor",
    "TabTransformerClassifier",
    "TabTransformerRegressor",
    "load_estimator",
    "save_estimator",
]
