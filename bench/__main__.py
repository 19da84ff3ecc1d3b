"""Run all benchmarks with `python -m bench`, or some of them by name."""

import argparse

from bench import gpt, ragged, ragged_gpt, translate
from bench.harness import dump, machine, peak_gflops, race, show

NAMES = ["gpt", "translate", "ragged", "loss", "long", "decode", "tables"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[*NAMES, []])
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds; every library is timed once in each"
    )
    parser.add_argument("--out", help="write the tables to this JSON file too")
    args = parser.parse_args()
    names = args.name or NAMES
    peak = peak_gflops()
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    print(f"{facts}; best matrix product {peak:.0f} GFLOP/s")
    tables = []
    for dropout in (0.0, 0.1):
        if "gpt" in names:
            results = race(gpt.contenders(dropout), args.rounds, steps=2)
            title = f"GPT training, dropout {dropout}: tokens per second"
            tables.append(show(title, results, gpt.tokens_per_step(), gpt.flops_per_step(), peak))
        if "translate" in names:
            results = race(
                translate.contenders(dropout),
                args.rounds,
                steps=translate.BATCHES,
                warm=translate.BATCHES,
            )
            title = f"Encoder-decoder training, dropout {dropout}: real tokens per second"
            work, flops = translate.tokens_per_step(), translate.flops_per_step()
            tables.append(show(title, results, work, flops, peak))
    if "ragged" in names:
        results = race(ragged.contenders(), args.rounds, steps=1, warm=1)
        work = ragged.tokens_per_step()
        title = "Ragged pairs, batching and training, dropout 0.3: real tokens per second"
        tables.append(show(title, results, work, work * ragged.FLOPS, peak))
        results = race(ragged_gpt.contenders(), args.rounds, steps=1, warm=1)
        work, flops = ragged_gpt.tokens_per_step(), ragged_gpt.flops_per_step()
        title = "Ragged texts, batching and training of a GPT, dropout 0.1: real tokens per second"
        tables.append(show(title, results, work, flops, peak))
    if "loss" in names:
        from bench import loss

        tables += loss.run(args.rounds, peak)
    if "long" in names:
        from bench import long

        tables.append(long.run())
    if "decode" in names:
        from bench import decode

        tables += decode.run(args.rounds, peak)
    if "tables" in names:
        from bench import tables as rows

        tables += rows.run(args.rounds, peak)
    if args.out:
        dump(args.out, tables, peak)


if __name__ == "__main__":
    main()
