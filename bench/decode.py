"""Decoding the same sentences with the same encoder-decoder: greedy and beam 5.

6 + 6 blocks, width 512, ffn 2,048, 8 heads, vocabulary 37,000; all three libraries use the same
random weights; 32 sources of 32 tokens, and exactly 32 output tokens for each, because the end
token is disabled. Output tokens per second. Before the race the outputs are compared: in float32
every token must be the same.

Run it alone with `python -m bench.decode --rounds 4`; `--size tiny` is a quick check. On a machine
that has other work, `--one-thread` compares addnorm and CTranslate2 by their processor time, with
one thread each, in turn in one process.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import Contender, dump, machine, peak_gflops, race, show


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int
    ffn: int
    vocab: int
    sentences: int
    length: int


SIZES = {
    "real": Size(512, 6, 8, 2048, 37_000, 32, 32),
    "tiny": Size(64, 2, 4, 128, 600, 6, 5),
}
BEAMS = (1, 5)
END = 0
Rows = list[list[int]]
Step = Callable[[], Rows]


def contenders(folder: str, beam: int, size: str) -> list[Contender]:
    def row(name: str, maker: str, keep: bool = False, **settings: Any) -> Contender:
        common = {"folder": folder, "beam": beam, "size": size}
        return Contender(name, f"bench.decode:{maker}", common | settings, keep)

    return [
        row("addnorm", "addnorm", True),
        row("addnorm, 2 workers", "addnorm", True, workers=2),
        row("addnorm int8", "addnorm", True, form="quantise"),
        row("addnorm int8, 2 workers", "addnorm", True, form="quantise", workers=2),
        row("Hugging Face Marian", "hugging_face"),
        row("Hugging Face Marian, kept memory", "hugging_face", True),
        row("addnorm, engine ctranslate2, 2 workers", "engine", workers=2),
        row("the same, int8", "engine", workers=2, kind="int8"),
        row("CTranslate2 float32, 1 × 2 threads", "ctranslate2", workers=1),
        row("CTranslate2 float32, 2 × 1 thread", "ctranslate2", workers=2),
        row("CTranslate2 int8, 1 × 2 threads", "ctranslate2", workers=1, kind="int8"),
        row("CTranslate2 int8, 2 × 1 thread", "ctranslate2", workers=2, kind="int8"),
    ]


OURS = (
    ("addnorm", "addnorm, 2 workers"),
    ("addnorm int8", "addnorm int8, 2 workers"),
    ("addnorm, engine ctranslate2, 2 workers",),
    ("the same, int8",),
)
"""Contenders that the others are compared with: of each group, the fastest."""


def run(
    rounds: int,
    peak: float,
    size: str = "real",
    beams: tuple[int, ...] = BEAMS,
    skip: str | None = None,
) -> list[dict[str, Any]]:
    """Return a race for each number of beams, compared with addnorm in each form.

    Contenders whose name has `skip` in it are left out.
    """
    tables = []
    sizes = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        # In other processes, because the three libraries should not share one that is timed.
        for task in ("--make", "--compare"):
            command = [sys.executable, "-m", "bench.decode", task, folder, "--size", size]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="")
        for beam in beams:
            every = contenders(folder, beam, size)
            chosen = [each for each in every if skip is None or skip not in each.name]
            results = race(chosen, rounds, steps=1, warm=1)
            flops, work = flops_per_step(sizes, beam), sizes.sentences * sizes.length
            kind = "Greedy decoding" if beam == 1 else f"Beam search, {beam} beams"
            for ours in OURS:
                named = [r for r in results if r.contender.name in ours and r.seconds]
                best = min(named, key=lambda r: r.median)
                rows = [replace(r, contender=replace(r.contender, ours=r is best)) for r in results]
                title = f"{kind}: output tokens per second, compared with {best.contender.name}"
                tables.append(show(title, rows, work, flops, peak))
    return tables


def flops_per_step(size: Size, beam: int) -> float:
    """Return the operations of the matrix products of decoding all sentences once."""
    w, tokens = size.width, size.sentences * size.length
    encoder = size.depth * (4 * w * w + 2 * w * size.ffn + 2 * size.length * w) * tokens
    memory = size.depth * 2 * w * w * tokens
    scores = 2 * w * (size.length / 2 + size.length)
    decoder = size.depth * (6 * w * w + 2 * w * size.ffn + scores) + w * size.vocab
    return 2 * (encoder + memory + decoder * tokens * beam)


def sources(size: Size) -> Rows:
    import torch

    draw = torch.Generator().manual_seed(0)
    shape = (size.sentences, size.length)
    rows: Rows = torch.randint(3, size.vocab - 1, shape, generator=draw).tolist()
    return rows


def require_lengths(outputs: Rows, size: Size) -> Rows:
    """Return the outputs; raise if one is shorter, which would be faster."""
    lengths = [len(row) for row in outputs]
    if lengths != [size.length] * size.sentences:
        raise RuntimeError(f"all outputs must have {size.length} tokens: got {set(lengths)}")
    return outputs


# ── Three libraries ───────────────────────────────────────────────────────────────────────────────


def addnorm(
    folder: str,
    beam: int,
    size: str,
    workers: int = 1,
    form: str = "pack",
    keep_greedy: bool = True,
) -> Step:
    from addnorm import generate, load

    sizes = SIZES[size]
    model = getattr(generate, form)(load(Path(folder) / "addnorm").eval())
    rows = sources(sizes)
    decoding = generate.Decoding(
        beam=beam,
        keep_greedy=keep_greedy,
        max_tokens=sizes.length,
        batch_tokens=10**6,
        workers=workers,
        scores=False,  # CTranslate2 does not compute them by default
    )

    def step() -> Rows:
        outputs = generate.translate(
            model,
            rows,
            decoding,
            begin=sizes.vocab - 1,
            end=None,
            pad=END,  # never chosen; the other libraries exclude it before the last token
        )
        return require_lengths([list(best.tokens) for best, *_ in outputs], sizes)

    return step


class NumberNames:
    """A tokenizer whose pieces are the names that CTranslate2 has for the ids in this race."""

    begin = pad = end = END

    def __init__(self, size: Size) -> None:
        self.size = size.vocab

    def piece(self, number: int) -> str:
        return str(number) if number < self.size - 1 else "<pad>"


def engine(folder: str, beam: int, size: str, workers: int, kind: str = "float32") -> Step:
    """The engine behind `addnorm translate --engine ctranslate2`, from ids to ids."""
    from addnorm import generate, load
    from addnorm.interop.engines import CTranslate2Engine

    sizes = SIZES[size]
    names: Any = {"text": NumberNames(sizes)}
    config = load(Path(folder) / "addnorm").config
    model = CTranslate2Engine(Path(folder) / "ctranslate2", config, names, precision=kind)
    rows = sources(sizes)
    # The engine has no least length: the end token is forbidden, as in the other contenders.
    model.banned = [END]
    decoding = generate.Decoding(
        beam=beam,
        max_tokens=sizes.length + 1,
        batch_tokens=sizes.sentences // workers * (sizes.length + 1) * beam,
        workers=workers,
        scores=False,
    )

    def step() -> Rows:
        outputs = model.translate(rows, decoding, begin=END, end=END)
        return require_lengths([list(best.tokens) for best, *_ in outputs], sizes)

    return step


def hugging_face(folder: str, beam: int, size: str) -> Step:
    import torch
    from transformers import MarianMTModel
    from transformers.utils import logging

    sizes = SIZES[size]
    logging.disable_progress_bar()
    model = MarianMTModel.from_pretrained(Path(folder) / "marian").eval()
    ids = torch.tensor(sources(sizes))
    lengths = {"min_new_tokens": sizes.length, "max_new_tokens": sizes.length}

    def step() -> Rows:
        with torch.inference_mode():
            outputs = model.generate(ids, num_beams=beam, do_sample=False, **lengths)
        return require_lengths(outputs[:, 1:].tolist(), sizes)

    return step


def ctranslate2(
    folder: str, beam: int, size: str, workers: int, kind: str = "float32", threads: int = 2
) -> Step:
    import ctranslate2 as library

    sizes = SIZES[size]
    translator = library.Translator(
        str(Path(folder) / "ctranslate2"),
        compute_type=kind,
        inter_threads=workers,
        intra_threads=threads // workers,
    )
    rows = [[str(token) for token in row] for row in sources(sizes)]

    def step() -> Rows:
        outputs = translator.translate_batch(
            rows,
            beam_size=beam,
            min_decoding_length=sizes.length,
            max_decoding_length=sizes.length,
            max_batch_size=sizes.sentences // workers,
        )
        return require_lengths([[int(t) for t in each.hypotheses[0]] for each in outputs], sizes)

    return step


# ── One model for all ─────────────────────────────────────────────────────────────────────────────


def make(folder: Path, size: Size) -> None:
    """Write one Marian model with random weights in the formats of the three libraries."""
    import torch
    import transformers
    from ctranslate2.converters.transformers import MarianMTLoader

    from addnorm.interop.huggingface import read_model

    config = transformers.MarianConfig(
        vocab_size=size.vocab,
        d_model=size.width,
        encoder_layers=size.depth,
        decoder_layers=size.depth,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.ffn,
        decoder_ffn_dim=size.ffn,
        max_position_embeddings=2 * size.length + 2,
        activation_function="relu",
        scale_embedding=True,
        eos_token_id=END,
        pad_token_id=size.vocab - 1,
        decoder_start_token_id=size.vocab - 1,
        forced_eos_token_id=None,
    )
    torch.manual_seed(1)
    theirs = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim == 2 and "embed_positions" not in name:
                # The usual initial size; with that of Marian all outputs are nearly the same.
                weight.normal_(std=weight.shape[1] ** -0.5)
        theirs.model.shared.weight[config.pad_token_id] = 0.0
    theirs.save_pretrained(folder / "marian")

    read_model(folder / "marian").model.save(folder / "addnorm")

    class Vocabulary:
        eos_token, unk_token = str(END), "1"

        def get_vocab(self) -> dict[str, int]:
            last = size.vocab - 1
            return {str(token): token for token in range(last)} | {"<pad>": last}

    with torch.no_grad():
        spec = MarianMTLoader()(theirs, Vocabulary())
    spec.validate()
    spec.optimize()
    (folder / "ctranslate2").mkdir()
    spec.save(str(folder / "ctranslate2"))


def compare(folder: str, size: str) -> None:
    """Raise RuntimeError unless all return the same tokens in float32; print how many int8 does."""
    for beam in BEAMS:
        common = (folder, beam, size)
        ours = addnorm(*common, keep_greedy=False)()  # as in the others' beam search
        outputs = {
            "Hugging Face": hugging_face(*common)(),
            "CTranslate2": ctranslate2(*common, workers=1)(),
            "addnorm int8": addnorm(*common, form="quantise", keep_greedy=False)(),
            "CTranslate2 int8": ctranslate2(*common, workers=1, kind="int8")(),
        }
        equal = {
            name: sum(a == b for a, b in zip(ours, rows, strict=True))
            for name, rows in outputs.items()
        }
        counts = ", ".join(f"{name} {count}" for name, count in equal.items())
        print(f"beam {beam}: outputs of {len(ours)} that equal addnorm's in every token: {counts}")
        for name in ("Hugging Face", "CTranslate2"):
            if equal[name] != len(ours):
                raise RuntimeError(
                    f"{name} must return the tokens of addnorm: beam {beam}, {counts}"
                )


def race_one_thread(rounds: int, size: str, beams: tuple[int, ...]) -> None:
    """Print the speed of addnorm over that of CTranslate2, by processor time with one thread."""
    import torch

    torch.set_num_threads(1)

    def seconds(step: Step) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.decode", "--make", folder, "--size", size]
        subprocess.run(command, check=True)
        for kind, form in (("float32", "pack"), ("int8", "quantise")):
            for beam in beams:
                theirs = ctranslate2(folder, beam, size, 1, kind, threads=1)
                forms = {
                    "torch": addnorm(folder, beam, size, form=form),
                    "engine ctranslate2": engine(folder, beam, size, 1, kind),
                }
                for name, ours in forms.items():
                    ours(), theirs()
                    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
                    ratios = sorted(other / own for own, other in pairs)
                    print(
                        f"{kind} beam {beam} {name}: {min(own for own, _ in pairs):.2f} s, "
                        f"CTranslate2 {min(other for _, other in pairs):.2f} s, speed "
                        f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}–{ratios[-1]:.2f}]",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds; every library is timed once in each"
    )
    parser.add_argument("--size", choices=SIZES, default="real")
    parser.add_argument("--beam", type=int, choices=BEAMS, action="append", help="only this race")
    parser.add_argument("--skip", metavar="TEXT", help="leave out contenders with this in the name")
    parser.add_argument("--out", help="write the tables to this JSON file too")
    parser.add_argument("--one-thread", action="store_true", help="compare processor times")
    parser.add_argument("--make", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--compare", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(Path(args.make), SIZES[args.size])
    elif args.compare:
        compare(args.compare, args.size)
    elif args.one_thread:
        race_one_thread(args.rounds, args.size, tuple(args.beam or BEAMS))
    else:
        print(", ".join(f"{key} {value}" for key, value in machine().items()))
        peak = peak_gflops()
        tables = run(args.rounds, peak, args.size, tuple(args.beam or BEAMS), args.skip)
        if args.out:
            dump(args.out, tables, peak)


if __name__ == "__main__":
    main()
