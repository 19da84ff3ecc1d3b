"""The lens beside TransformerLens: equal numbers on one GPT-2, and the time of both.

    python -m bench.lens [--rounds 5]

Needs `pip install transformer_lens` (version 4 or later). Weights are random; nothing is fetched.
Compared on a tiny GPT-2 in which nothing is special: cached activations, attention maps, the logit
lens, direct logit attribution of every head and layer, and composition scores. Timed on a model of
GPT-2's size: a plain forward pass, one layer's maps, and the whole stream taken apart.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from tests.parity.common import randomise_
from torch import Tensor, nn

from addnorm.errors import require
from addnorm.interop.huggingface import read_model
from addnorm.lens import attribute_logits, decompose, logit_lens, look
from addnorm.lens.circuits import composition

VOCAB, LENGTH = 97, 64


def make_pair(width: int, depth: int, heads: int, vocab: int, length: int) -> tuple[Any, nn.Module]:
    """Return their model and ours with the same random weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bridge = require("transformer_lens.model_bridge", "bench").TransformerBridge
    sizes = {"n_embd": width, "n_layer": depth, "n_head": heads}
    config = GPT2Config(**sizes, vocab_size=vocab, n_positions=length)
    theirs = randomise_(GPT2LMHeadModel(config)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)  # before wrapping, which renames the tensors
        ours = read_model(folder).model
    words = Tokenizer(WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    with tempfile.TemporaryDirectory() as folder:  # they open the tokenizer again, by its name
        special = {"bos_token": "0", "eos_token": "1", "pad_token": "2"}
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        wrapped = bridge.boot_transformers("gpt2", hf_model=theirs, tokenizer=tokenizer)
    return wrapped, ours.eval()


@torch.no_grad()
def compare() -> dict[str, float]:
    """Return the largest difference of each kind of number."""
    theirs, ours = make_pair(48, 3, 4, VOCAB, LENGTH)
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    logits, cache = theirs.run_with_cache(ids)
    want = ("maps", "stream", "branches", "heads", "neurons")
    seen = look(ours, ids, want)
    gaps = {"logits": _gap(seen.output, logits)}

    def note(name: str, one: Tensor, other: Tensor) -> None:
        gaps[name] = max(gaps.get(name, 0.0), _gap(one.reshape(other.shape), other))

    table = logit_lens(ours, ids)
    for layer in range(3):
        prefix, place = f"blocks.{layer}", f"decoder.{layer}"
        note("maps", seen.maps[f"{place}.attention"], cache[f"{prefix}.attn.hook_pattern"])
        note("mixed values", seen.heads[f"{place}.attention"], cache[f"{prefix}.attn.hook_z"])
        note("branches", seen.branches[f"{place}.attention"], cache[f"{prefix}.hook_attn_out"])
        note("branches", seen.branches[f"{place}.ffn"], cache[f"{prefix}.hook_mlp_out"])
        note("neurons", seen.neurons[f"{place}.ffn"], cache[f"{prefix}.mlp.hook_post"])
        note("stream", seen.stream[f"{place}.ffn"], cache[f"{prefix}.hook_resid_post"])
        closed = theirs.unembed(theirs.ln_final(cache[f"{prefix}.hook_resid_post"]))
        note("logit lens", table.logits[table.names.index(f"{place}.ffn")], closed)
    _compare_attribution(ours, theirs, cache, ids, note)
    _compare_composition(ours, theirs, note)
    return gaps


def _compare_attribution(ours: Any, theirs: Any, cache: Any, ids: Tensor, note: Any) -> None:
    """Every piece, carried through the frozen final norm and read by one token."""
    parts = decompose(ours, ids)
    token = 5
    found = attribute_logits(parts, token)
    scale = cache["ln_final.hook_scale"]
    direction = ours.embedding()[token] * ours.decoder.stack.ends.norm.weight
    for layer in range(3):
        heads = cache[f"blocks.{layer}.attn.hook_z"]
        output = ours.decoder.stack.blocks[layer].sublayers["attention"].output.weight
        weight = output.T.view(4, -1, 48)
        mixed = heads.reshape(1, -1, 4, 12)
        pieces = {f"{layer}.attention.{h}": mixed[:, :, h] @ weight[h] for h in range(4)}
        pieces[f"{layer}.ffn"] = cache[f"blocks.{layer}.hook_mlp_out"]
        for name, piece in pieces.items():
            centred = piece - piece.mean(dim=-1, keepdim=True)
            expected = (centred / scale * direction).sum(dim=-1)
            place = found.names.index(f"decoder.{name}")
            note("direct logit attribution", found.values[place], expected)


def _compare_composition(ours: Any, theirs: Any, note: Any) -> None:
    for kind, ours_kind in (("Q", "query"), ("K", "key"), ("V", "value")):
        scores = theirs.all_composition_scores(kind)
        scores = getattr(scores, "scores", scores)
        for one in range(3):
            for other in range(one + 1, 3):
                for i in range(4):
                    for j in range(4):
                        names = (f"decoder.{one}.attention.{i}", f"decoder.{other}.attention.{j}")
                        own = composition(ours, *names, fold=False)[ours_kind]
                        note("composition", torch.tensor(own), scores[one, i, other, j])


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def times(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each in every round, taken in turns: time of the process."""
    theirs, ours = make_pair(768, 12, 12, 5000, 128)
    ids = torch.randint(5000, (1, 64), generator=torch.Generator().manual_seed(0))
    pattern = "blocks.5.attn.hook_pattern"

    def plain() -> object:
        return ours(ids)

    tasks: dict[str, Callable[[], object]] = {
        "ours, forward": plain,
        "ours, one layer's maps": lambda: look(ours, ids, "maps:decoder.5.attention"),
        "ours, all maps": lambda: look(ours, ids),
        "ours, whole stream by heads": lambda: decompose(ours, ids),
        "theirs, forward": lambda: theirs(ids),
        "theirs, one layer's maps": lambda: theirs.run_with_cache(
            ids, names_filter=lambda name: name == pattern
        ),
        "theirs, whole stream by heads": lambda: _their_pieces(theirs, ids),
    }
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    with torch.no_grad():
        for number in range(rounds + 1):
            for name, task in tasks.items():
                start = time.process_time()
                task()
                if number:  # the first round warms up
                    taken[name].append(1000 * (time.process_time() - start))
    return taken


def _their_pieces(theirs: Any, ids: Tensor) -> object:
    _, cache = theirs.run_with_cache(ids)
    return cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, gap in compare().items():
        print(f"{name:28} differs by {gap:.1e} at most")
    found = times(args.rounds)
    base = found["ours, forward"]
    print(f"CPU milliseconds, ratios to our forward pass of the same round; {args.rounds} rounds")
    for name, each in found.items():
        ratios = sorted(one / plain for one, plain in zip(each, base, strict=True))
        middle, spread = statistics.median(ratios), f"[{ratios[0]:.2f}–{ratios[-1]:.2f}]"
        print(f"{name:32} {statistics.median(each):9.1f}   {middle:5.2f} {spread}")


if __name__ == "__main__":
    main()
