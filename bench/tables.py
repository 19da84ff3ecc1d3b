"""FT-Transformer on rows like those of Adult: addnorm and the authors' package in a plain loop.

Batch 256, 6 numbers and 8 categories, the published default of 3 blocks with its dropouts, AdamW.

    python -m bench.tables --rounds 4 --out F.json
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gpt import Step
from bench.harness import Contender, dump, machine, peak_gflops, race, show

NUMBERS, SIZES, BATCH = 6, (9, 16, 7, 15, 6, 5, 2, 42), 256


def run(rounds: int, peak: float) -> list[dict[str, Any]]:
    tables = []
    for training in (True, False):
        rows = [
            Contender("addnorm", "bench.tables:ours", {"training": training}, True, ours=True),
            Contender("rtdl_revisiting_models", "bench.tables:theirs", {"training": training}),
        ]
        results = race(rows, rounds, steps=10, warm=3)
        title = f"FT-Transformer, {'training' if training else 'prediction'}: rows per second"
        tables.append(show(title, results, BATCH, flops_per_row(training) * BATCH, peak))
    return tables


def flops_per_row(training: bool) -> int:
    """Return the operations of two whole blocks, and of keys and values of the third."""
    width, length = 192, 1 + NUMBERS + len(SIZES)
    block = 2 * length * (4 * width**2 + 3 * width * 256) + 4 * length**2 * width
    last = 2 * length * 2 * width**2
    return (2 * block + last) * (3 if training else 1)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.stack([torch.randint(size, (BATCH,)) for size in SIZES], dim=1)
    return torch.randn(BATCH, NUMBERS), codes, torch.randint(2, (BATCH,)).float()


def _step(model: nn.Module, groups: list[dict[str, Any]], training: bool, fused: bool) -> Step:
    numbers, codes, target = batch()
    model.train(training)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-5, fused=fused)

    def train() -> None:
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(numbers, codes).flatten(), target).backward()
        optimizer.step()

    def predict() -> None:
        with torch.inference_mode():
            model(numbers, codes)

    return train if training else predict


def ours(training: bool) -> Step:
    from addnorm.models.tabular import TabularConfig, build_tabular, trunk_of

    config = TabularConfig(
        kind="ft", numbers=NUMBERS, categories=SIZES, outputs=1, trunk=trunk_of("ft")
    )
    model = build_tabular(config)
    return _step(model, model.parameter_groups(1e-5), training, fused=True)


def theirs(training: bool) -> Step:
    from rtdl_revisiting_models import FTTransformer

    settings = FTTransformer.get_default_kwargs()
    model = FTTransformer(
        n_cont_features=NUMBERS, cat_cardinalities=list(SIZES), d_out=1, **settings
    )
    return _step(model, model.make_parameter_groups(), training, fused=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds; every library is timed once in each"
    )
    parser.add_argument("--out", help="write the tables to this JSON file too")
    args = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    peak = peak_gflops()
    tables = run(args.rounds, peak)
    if args.out:
        dump(args.out, tables, peak)


if __name__ == "__main__":
    main()
