"""What int8 costs a trained translator: BLEU and equal outputs, of torch and of CTranslate2.

    addnorm demo --out runs/demo-de
    python -m bench.int8 runs/demo-de/run runs/demo-de/phrases/test.en runs/demo-de/phrases/test.de

Every engine translates the same sources in float32 and in int8. A row has BLEU (sacrebleu), exact
translations, and how many outputs equal those of torch in float32.
"""

import argparse
import time
from pathlib import Path

import addnorm
from addnorm.metrics import bleu

HEADER = ["engine", "precision", "beam", "BLEU", "exact", "as torch in float32", "CPU seconds"]


def rows(run: Path, sources: list[str], references: list[str], beams: list[int]) -> list[list[str]]:
    """Return the cells of each engine, precision and number of beams."""
    table = []
    for beam in beams:
        first: list[str] = []
        for engine in ("torch", "ctranslate2"):
            for precision in ("float32", "int8"):
                opened = addnorm.open(run, int8=precision == "int8")
                opened.translate(sources[:2], beam=beam, engine=engine)  # exports, and warms up
                start = time.process_time()
                found = opened.translate(sources, beam=beam, engine=engine)
                seconds = time.process_time() - start
                first = first or found
                table.append(
                    [
                        engine,
                        precision,
                        str(beam),
                        f"{bleu(found, references)['score']:.2f}",
                        f"{sum(map(str.__eq__, found, references))} of {len(references)}",
                        f"{sum(map(str.__eq__, found, first))}",
                        f"{seconds:.1f}",
                    ]
                )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.int8", description=__doc__)
    parser.add_argument("run", type=Path, help="a run for translation")
    parser.add_argument("source", type=Path, help="lines to translate")
    parser.add_argument("target", type=Path, help="their translations")
    parser.add_argument("--beam", type=int, nargs="+", default=[1, 5])
    args = parser.parse_args()
    sources, references = (
        path.read_text(encoding="utf-8").splitlines() for path in (args.source, args.target)
    )
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for row in rows(args.run, sources, references, args.beam):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
