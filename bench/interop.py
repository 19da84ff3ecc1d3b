"""Every architecture of Hugging Face against transformers, in both directions, as a table.

    python -m bench.interop                      print the table
    python -m bench.interop --write docs/interop.md   replace it between the two markers there

Models are small and random. A row has the largest difference of an output after reading what
transformers saved, whether greedy and beam-4 decoding give the same ids, the largest difference
after transformers read what addnorm wrote, and whether every tensor came back bit for bit.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.interop.common import DECODERS, PAIRS, answers, make, save, their_class
from tests.parity.common import gap
from tests.theirs import MODELS, VOCAB

from addnorm.generate import Decoding, generate, translate
from addnorm.interop.huggingface import read_model, write_model

START, STOP = "<!-- table: python -m bench.interop -->", "<!-- end of table -->"
HEADER = ["model", "class", "in", "greedy", "beam 4", "out", "tensors"]
NEW = 7


@torch.no_grad()
def ids_agree(name: str, theirs: Any, ours: Any, beam: int) -> str:
    """Return whether both decode the same ids from three random prompts or sources."""
    if name not in (*DECODERS, *PAIRS) or name == "marian-apart":
        return ""
    length = 6
    ids = torch.randint(4, VOCAB, (3, length), generator=torch.Generator().manual_seed(3))
    options = {"num_beams": beam, "num_return_sequences": beam, "do_sample": False}
    options |= {"min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0, "use_cache": False}
    decoding = Decoding(beam=beam, nbest=beam, max_tokens=NEW, keep_greedy=False)
    if name in PAIRS:
        starts = {"decoder_start_token_id": 0, "suppress_tokens": [0], "eos_token_id": 2}
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options, **starts)
        found = translate(ours, ids.tolist(), decoding, begin=0, end=None, pad=2)
        length = 1
    else:
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found = generate(ours, ids.tolist(), decoding, pad=2)
    tokens = [h.tokens for each in found for h in each]
    return "same" if tokens == [tuple(row) for row in expected[:, length:].tolist()] else "differ"


def row(name: str, folder: Path) -> list[str]:
    """Return the cells of one model."""
    theirs = make(name)
    expected = answers(name, theirs)
    imported = read_model(save(theirs, folder / "in"))
    ours, kind = imported.model, imported.architecture.model_type
    write_model(ours, folder / "out", architecture=kind)
    one, other = (load_file(folder / side / "model.safetensors") for side in ("in", "out"))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return [
        name,
        type(theirs).__name__,
        f"{gap(expected, answers(name, ours)):.1e}",
        ids_agree(name, theirs, ours, 1),
        ids_agree(name, theirs, ours, 4),
        f"{gap(expected, answers(name, their_class(folder / 'out'))):.1e}",
        f"{len(one)} equal" if same else "differ",
    ]


def table() -> str:
    """Return the table of all models."""
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(f"| {' | '.join(row(name, Path(folder)))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.interop", description=__doc__)
    parser.add_argument("--write", metavar="FILE", help="replace the table in this file")
    args = parser.parse_args()
    text = table()
    if args.write is None:
        print(text)
        return
    path = Path(args.write)
    before, _, rest = path.read_text(encoding="utf-8").partition(START)
    after = rest.partition(STOP)[2]
    path.write_text(f"{before}{START}\n\n{text}\n\n{STOP}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
