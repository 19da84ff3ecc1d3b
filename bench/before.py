"""A race of the Transformer with the models before it, on the phrases of the demo.

    python -m bench.before --out FOLDER [--steps 400] [--seeds 2] [--quick]

attention    a Transformer of 2+2 blocks
convolution  gated convolutions of 3 positions in place of self-attention (Gehring et al. 2017,
             1705.03122); attention to the source stays
recurrent    GRUs in both directions, additive attention, a GRU decoder (Bahdanau et al. 2015,
             1409.0473)

English to German, with the settings of `addnorm demo` but for half the tokens in a batch. Every
entry has the same width, seeds, batches and number of steps. Exact: share of 500 held-out phrases
of which the greedy translation is the reference, word for word.
"""

import time
from pathlib import Path

import addnorm
from addnorm.cli.demo import SETTINGS
from addnorm.demo.phrases import Phrases, make_phrases
from addnorm.report import line_chart
from addnorm.runs.run import Run
from bench.measured import Results, Row, arguments, deviation, mean

KINDS = ("attention", "convolution", "recurrent")
VALID, TEST = 300, 500


def write_request(phrases: Phrases, folder: Path, steps: int) -> Path:
    """Write the phrases, and a configuration to train on them; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, rows in (("", phrases.train), ("valid_", phrases.held_out[:VALID])):
        for side, texts in (
            ("source", [row.english for row in rows]),
            ("target", [row.foreign for row in rows]),
        ):
            path = folder / f"{name}{side}.txt"
            path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
            lines.append(f'{name}{side} = "{path.resolve()}"')
    train = f"[train]\nsteps = {steps}\nevaluate_every = {max(1, steps // 8)}\n"
    request = folder / "run.toml"
    request.write_text(
        '[run]\ntask = "translate"\nsize = "tiny"\n[data]\n' + "\n".join(lines) + "\n" + train
    )
    return request


def evaluate(run: Run, phrases: Phrases) -> Row:
    """Return the share of exact translations, the seconds of a translation, and the size."""
    test = phrases.held_out[VALID : VALID + TEST]
    begin = time.process_time()
    answers = run.translate([row.english for row in test], beam=1, engine="torch")
    seconds = time.process_time() - begin
    right = sum(text == row.foreign for text, row in zip(answers, test, strict=True))
    return {
        "exact": right / len(test),
        "translate_ms": 1000 * seconds / len(test),
        "parameters": run.model.count(),
    }


def main() -> None:
    args = arguments(
        "before",
        __doc__,
        steps={"type": int, "default": 400},
        seeds={"type": int, "default": 2},
    )
    results, steps = Results(args.out, "before"), 4 if args.quick else args.steps
    phrases = make_phrases(to="de", seed=0)
    request = write_request(phrases, args.out / "phrases", steps)
    small = ["model.width=16", "model.heads=2"] if args.quick else []
    found = addnorm.race(
        request,
        vary={"model.mixing": list(KINDS)},
        set=[*SETTINGS, "train.batch=768", *small],
        out=args.out / "race",
        seeds=1 if args.quick else args.seeds,
        jobs=1,
    )
    curves = {}
    for kind, name in zip(KINDS, found.entry_names(), strict=True):
        for one in found.results_of(name):
            run = addnorm.open(args.out / "race" / f"mixing-{kind}" / f"seed-{one.seed}")
            row = {"kind": kind, "seed": one.seed, "steps": steps}
            shown = {"loss": one.loss, "curve": one.curve, "seconds": round(one.seconds, 1)}
            results.measure(row, lambda r=run, s=shown: {**s, **evaluate(r, phrases)})  # type: ignore[misc]
        rows = results.where(kind=kind, steps=steps)
        points = zip(*(row["curve"] for row in rows), strict=True)
        curves[kind] = [(float(p[0][0]), mean([loss for _, loss in p])) for p in points]
        losses, exact = [row["loss"] for row in rows], [row["exact"] for row in rows]
        print(
            f"{kind}: loss {mean(losses):.3f} ± {deviation(losses):.3f}, exact {mean(exact):.1%}, "
            f"{rows[0]['parameters']:,} parameters"
        )
    results.write("before-race", line_chart(curves, title="Race", y="held-out loss"))


if __name__ == "__main__":
    main()
