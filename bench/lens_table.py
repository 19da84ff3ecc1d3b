"""The picture of the table in docs/lens.md: the joint effect of two columns, beyond their sum.

    python -m bench.lens_table --out docs/results/pictures

Trains the model of that page (y = 1.5 main + 2 a b), prints its measures, and draws

    I_ab = PD_ab − PD_a − PD_b,   PD the mean prediction over other rows, minus the overall mean

for values of a and b; planted is 2 a b. Takes seconds.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from addnorm.data.table.frame import Array
from addnorm.report import heat_map, write_picture
from addnorm.tabular import FTTransformerRegressor
from addnorm.tabular.explain import explain_table

VALUES = np.linspace(-2, 2, 9)
OTHERS = 64
"""Rows that the mean is over."""

Table = dict[str, Array]


def planted() -> tuple[Table, Array]:
    """Return the table of docs/lens.md and its target."""
    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=1200) for name in ("main", "a", "b", "noise")}
    y = 1.5 * table["main"] + 2 * table["a"] * table["b"] + 0.1 * rng.normal(size=1200)
    return table, y


def joint_effect(model: FTTransformerRegressor, table: Table) -> Array:
    """Return I_ab for every value of a (rows) and b (columns)."""
    rest = {name: column[:OTHERS] for name, column in table.items()}

    def mean(**fixed: float) -> float:
        known = {name: np.full(OTHERS, value) for name, value in fixed.items()}
        return float(model.predict(rest | known).mean())

    overall = mean()
    one, other = ([mean(**{name: v}) - overall for v in VALUES] for name in ("a", "b"))
    both = np.array([[mean(a=a, b=b) - overall for b in VALUES] for a in VALUES])
    return both - np.array(one)[:, None] - np.array(other)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder for the picture")
    args = parser.parse_args(arguments)
    table, y = planted()
    sizes = {"width": 16, "depth": 1, "heads": 2, "ffn_width": 32, "epochs": 20, "batch_size": 128}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    model = FTTransformerRegressor(**sizes, **still, learning_rate=1e-2, random_state=0)
    model.fit(table, y)
    some = {name: column[:200] for name, column in table.items()}
    print(explain_table(model, some, y[:200], shap=False))
    joint = joint_effect(model, table)
    gap = np.abs(joint - 2 * np.outer(VALUES, VALUES)).mean()
    print(f"joint effect: differs from 2 a b by {gap:.2f} on average, of up to 8")
    if args.out is not None:
        names = [f"{value:g}" for value in VALUES]
        picture = heat_map(
            joint.tolist(), names, names, title="Joint effect of a and b", x="b", y="a"
        )
        args.out.mkdir(parents=True, exist_ok=True)
        print(write_picture(picture, args.out / "lens-table.svg"))


if __name__ == "__main__":
    main()
