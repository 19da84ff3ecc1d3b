"""Decoding the same sentences with the same size of encoder-decoder: greedy and beam 5.

6 + 6 blocks, width 512, ffn 2,048, 8 heads, vocabulary 16,000, random weights; 32 sources of 32
tokens, and exactly 32 tokens out of each, because nothing may end. Output tokens a second.

Run alone: `python -m bench.decode --rounds 4`, or `--size tiny` to see that it works.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.harness import Contender, machine, peak_gflops, race, show


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
    "real": Size(512, 6, 8, 2048, 16_000, 32, 32),
    "tiny": Size(64, 2, 4, 128, 600, 6, 5),
}
Step = Callable[[], object]


def contenders(beam: int, size: str) -> list[Contender]:
    def row(name: str, maker: str, keep: bool = False, **settings: Any) -> Contender:
        return Contender(
            name, f"bench.decode:{maker}", {"beam": beam, "size": size, **settings}, keep
        )

    return [
        row("addnorm", "addnorm", True),
        row("addnorm, 2 workers", "addnorm", True, workers=2),
        row("addnorm int8", "addnorm", True, int8=True),
        row("addnorm int8, 2 workers", "addnorm", True, int8=True, workers=2),
        row("Hugging Face Marian", "hugging_face"),
        row("Hugging Face Marian, kept memory", "hugging_face", True),
        row("CTranslate2 float32, 1 × 2 threads", "ctranslate2", workers=1),
        row("CTranslate2 float32, 2 × 1 thread", "ctranslate2", workers=2),
        row("CTranslate2 int8, 1 × 2 threads", "ctranslate2", workers=1, kind="int8"),
        row("CTranslate2 int8, 2 × 1 thread", "ctranslate2", workers=2, kind="int8"),
    ]


def run(rounds: int, peak: float, size: str = "real") -> list[dict[str, Any]]:
    """One race for greedy and one for beam 5; each is shown beside our best in either precision."""
    tables = []
    sizes = SIZES[size]
    for beam in (1, 5):
        results = race(contenders(beam, size), rounds, steps=1, warm=1)
        flops, work = flops_per_step(sizes, beam), sizes.sentences * sizes.length
        kind = "Greedy decoding" if beam == 1 else f"Beam search, {beam} beams"
        for ours, precision in ((slice(0, 2), "float32"), (slice(2, 4), "int8")):
            best = min((r for r in results[ours] if r.seconds), key=lambda r: r.median)
            shown = [replace(r, contender=replace(r.contender, ours=r is best)) for r in results]
            title = f"{kind}: output tokens a second, beside {best.contender.name} ({precision})"
            tables.append(show(title, shown, work, flops, peak))
    return tables


def flops_per_step(size: Size, beam: int) -> float:
    """Matrix products of decoding all sentences once."""
    w, tokens = size.width, size.sentences * size.length
    encoder = size.depth * (4 * w * w + 2 * w * size.ffn + 2 * size.length * w) * tokens
    memory = size.depth * 2 * w * w * tokens
    scores = 2 * w * (size.length / 2 + size.length)
    decoder = size.depth * (6 * w * w + 2 * w * size.ffn + scores) + w * size.vocab
    return 2 * (encoder + memory + decoder * tokens * beam)


def sources(size: Size) -> list[list[int]]:
    import torch

    draw = torch.Generator().manual_seed(0)
    shape = (size.sentences, size.length)
    rows: list[list[int]] = torch.randint(3, size.vocab - 1, shape, generator=draw).tolist()
    return rows


def addnorm(beam: int, size: str, workers: int = 1, int8: bool = False) -> Step:
    from addnorm import build, presets
    from addnorm.generate import quantise, translate

    sizes = SIZES[size]
    shape = dict(
        vocab=sizes.vocab,
        width=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        ffn_width=sizes.ffn,
        attention_bias="all",
        dropout=0.0,
    )
    model = build(presets.base(**shape)).eval()
    model = quantise(model) if int8 else model
    rows = sources(sizes)

    def step() -> None:
        found = list(
            translate(
                model,
                rows,
                begin=1,
                end=None,
                beam=beam,
                longest=(0.0, sizes.length),
                batch_tokens=10**6,
                workers=workers,
            )
        )
        need_lengths([len(best.tokens) for best, *_ in found], sizes)

    return step


def need_lengths(found: list[int], size: Size) -> None:
    """Nobody may win by writing less."""
    if found != [size.length] * size.sentences:
        raise RuntimeError(f"all outputs must have {size.length} tokens: got {sorted(set(found))}")


def marian(size: Size) -> Any:
    import transformers

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
        eos_token_id=0,
        pad_token_id=size.vocab - 1,
        decoder_start_token_id=size.vocab - 1,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config).eval()


def hugging_face(beam: int, size: str) -> Step:
    import torch

    sizes = SIZES[size]
    model, ids = marian(sizes), torch.tensor(sources(sizes))
    lengths = {"min_new_tokens": sizes.length, "max_new_tokens": sizes.length}

    def step() -> None:
        with torch.inference_mode():
            found = model.generate(ids, num_beams=beam, do_sample=False, **lengths)
        need_lengths([len(row) - 1 for row in found], sizes)

    return step


def ctranslate2(beam: int, size: str, workers: int, kind: str = "float32") -> Step:
    """CTranslate2 with Marian's weights; converted elsewhere, as it should not share a process."""
    import ctranslate2 as library

    sizes = SIZES[size]
    folder = tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", "bench.decode", "--convert", folder.name, "--size", size]
    subprocess.run(command, check=True, capture_output=True)
    translator = library.Translator(
        folder.name, compute_type=kind, inter_threads=workers, intra_threads=2 // workers
    )
    folder.cleanup()
    rows = [[str(token) for token in row] for row in sources(sizes)]

    def step() -> None:
        found = translator.translate_batch(
            rows,
            beam_size=beam,
            min_decoding_length=sizes.length,
            max_decoding_length=sizes.length,
            max_batch_size=sizes.sentences // workers,
        )
        need_lengths([len(each.hypotheses[0]) for each in found], sizes)

    return step


def convert(folder: str, size: Size) -> None:
    """Marian with random weights, in CTranslate2's format."""
    import torch
    from ctranslate2.converters.transformers import MarianMTLoader

    class Vocabulary:
        eos_token, unk_token = "0", "1"

        def get_vocab(self) -> dict[str, int]:
            last = size.vocab - 1
            return {str(token): token for token in range(last)} | {"<pad>": last}

    torch.manual_seed(1)
    with torch.no_grad():
        spec = MarianMTLoader()(marian(size), Vocabulary())
    spec.validate()
    spec.optimize()
    spec.save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which all take a turn")
    parser.add_argument("--size", choices=SIZES, default="real")
    parser.add_argument("--convert", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        convert(args.convert, SIZES[args.size])
        return
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    run(args.rounds, peak_gflops(), args.size)


if __name__ == "__main__":
    main()
