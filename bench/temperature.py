"""How far a temperature that is fitted on few rows is from the best one, with priors on log T.

    python -m bench.temperature TABLES

TABLES is the folder of the development tables. Logistic regression, a small neural network and a
random forest are fitted to 80, 400 and 1,600 rows; a temperature is fitted on 20 to 400 of the
other rows, with log T ~ N(0, σ²) for several σ, and its log loss on the rest is compared with that
of the best temperature for the rest.
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.training import calibration

TABLES = {
    "adult_train": ("income", ()),
    "churn_modelling": ("Exited", ("RowNumber", "CustomerId", "Surname")),
    "german_credit": ("class", ()),
    "magic_telescope": ("Class", ()),
    "online_shoppers": ("Revenue", ()),
    "titanic": ("Survived", ("PassengerId", "Name", "Ticket", "Cabin")),
}
"""File, target and columns that identify rows."""
PRIORS = (0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 1e9)
"""Values of σ; the last one is no prior."""
TRAINING_ROWS, FITTING_ROWS = (80, 400, 1600), (20, 50, 100, 400)
DRAWS, REPEATS, MOST_ROWS = 4, 3, 6000


def tables(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the columns and the class indices of each table."""
    import pandas
    from sklearn.datasets import load_digits, load_wine

    for name, (target, identifiers) in TABLES.items():
        frame = pandas.read_csv(folder / f"{name}.csv.gz", skipinitialspace=True)
        labels = np.unique(frame[target].astype(str), return_inverse=True)[1]
        yield frame.drop(columns=[target, *(c for c in identifiers if c in frame)]), labels
    for load in (load_digits, load_wine):
        data = load(as_frame=True)
        yield data.data, data.target.to_numpy()


def models(seed: int) -> dict[str, Any]:
    """Return the models, each with its preparation of the columns."""
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    def with_columns(model: Any) -> Any:
        numbers = make_pipeline(SimpleImputer(), StandardScaler())
        most_frequent = SimpleImputer(strategy="most_frequent")
        categories = make_pipeline(most_frequent, OneHotEncoder(handle_unknown="ignore"))
        select = make_column_selector
        columns = make_column_transformer(
            (numbers, select(dtype_include=np.number)),
            (categories, select(dtype_exclude=np.number)),
        )
        return make_pipeline(columns, model)

    return {
        "logistic regression": with_columns(LogisticRegression(C=10, max_iter=300)),
        "neural network": with_columns(MLPClassifier((64,), max_iter=120, random_state=seed)),
        "random forest": with_columns(RandomForestClassifier(50, random_state=seed)),
    }


def log_loss(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> float:
    """Return the mean log loss of logits over a temperature."""
    chosen = calibration.probabilities_of(logits, temperature)[torch.arange(len(target)), target]
    return -float(chosen.clamp(min=1e-300).log().mean())


def fit(logits: torch.Tensor, target: torch.Tensor, prior: float) -> float:
    """Return the temperature under another prior."""
    before, calibration.PRIOR = calibration.PRIOR, prior
    try:
        return calibration.fit_temperature(logits, target, torch.ones(len(target)))
    finally:
        calibration.PRIOR = before


def main() -> None:
    """Print the mean excess log loss by number of rows and prior."""
    warnings.filterwarnings("ignore")  # of scikit-learn, on convergence
    rng = np.random.default_rng(0)
    excess: dict[tuple[int, str], list[float]] = defaultdict(list)
    for columns, labels in tables(Path(sys.argv[1])):
        for rows in (count for count in TRAINING_ROWS if 2 * count <= len(labels)):
            for draw in range(DRAWS):
                order = rng.permutation(len(labels))
                train, pool = order[:rows], order[rows : rows + MOST_ROWS]
                if len(set(labels[train])) < len(set(labels)):
                    continue
                for model in models(draw).values():
                    model.fit(columns.iloc[train], labels[train])
                    probabilities = model.predict_proba(columns.iloc[pool]).clip(1e-6, 1)
                    logits = torch.from_numpy(np.log(probabilities))
                    target = torch.from_numpy(labels[pool]).long()
                    for count in (n for n in FITTING_ROWS if n + 300 <= len(pool)):
                        for _ in range(REPEATS):
                            mixed = torch.from_numpy(rng.permutation(len(pool)))
                            few, rest = mixed[:count], mixed[count:]
                            best = fit(logits[rest], target[rest], 1e9)
                            least = log_loss(logits[rest], target[rest], best)
                            fitted = {
                                f"{prior:g}": fit(logits[few], target[few], prior)
                                for prior in PRIORS
                            }
                            for name, temperature in {"T = 1": 1.0, **fitted}.items():
                                loss = log_loss(logits[rest], target[rest], temperature)
                                excess[count, name].append(loss - least)
    names = list(dict.fromkeys(name for _, name in excess))
    print("| rows | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for count in FITTING_ROWS:
        print(
            f"| {count} | " + " | ".join(f"{np.mean(excess[count, n]):.4f}" for n in names) + " |"
        )


if __name__ == "__main__":
    main()
