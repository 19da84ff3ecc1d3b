"""Run benchmarks: `python -m bench`, or some of them by name."""

import argparse

from bench import gpt, translate
from bench.harness import dump, machine, peak_gflops, race, show


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="*", choices=["gpt", "translate", "loss", "long", []])
    parser.add_argument("--rounds", type=int, default=6, help="rounds in which all take a turn")
    parser.add_argument("--out", help="write the tables to this JSON file too")
    args = parser.parse_args()
    names = args.name or ["gpt", "translate", "loss", "long"]
    peak = peak_gflops()
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    print(f"{facts}; best matrix product {peak:.0f} GFLOP/s")
    tables = []
    for dropout in (0.0, 0.1):
        if "gpt" in names:
            results = race(gpt.contenders(dropout), args.rounds, steps=2)
            title = f"GPT training, dropout {dropout}: tokens a second"
            tables.append(show(title, results, gpt.tokens_per_step(), gpt.flops_per_step(), peak))
        if "translate" in names:
            results = race(
                translate.contenders(dropout),
                args.rounds,
                steps=translate.BATCHES,
                warm=translate.BATCHES,
            )
            title = f"Encoder-decoder training, dropout {dropout}: real tokens a second"
            work, flops = translate.tokens_per_step(), translate.flops_per_step()
            tables.append(show(title, results, work, flops, peak))
    if "loss" in names:
        from bench import loss

        tables += loss.run(args.rounds, peak)
    if "long" in names:
        from bench import long

        tables.append(long.run())
    if args.out:
        dump(args.out, tables, peak)


if __name__ == "__main__":
    main()
