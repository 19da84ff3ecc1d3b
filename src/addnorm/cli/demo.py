"""The main job: the classical Transformer, its cost, its masks, and a small one trained to copy."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from addnorm import presets
from addnorm.cli.inspect import cost

if TYPE_CHECKING:
    from torch import Tensor

    from addnorm.models.transformer import EncoderDecoder

START, VOCAB, LENGTH = 1, 24, 10


def demo(args: argparse.Namespace) -> None:
    """Show the parts of the network and overfit a tiny task."""
    import torch

    from addnorm import keep_memory

    keep_memory()
    torch.manual_seed(args.seed)
    _title("The classical Transformer (Vaswani et al. 2017)")
    cost(argparse.Namespace(config="base", settings=[], length=64, batch=32, json=False))
    _title("Who may see whom: rows are queries, columns keys")
    _show_masks()
    _title("A small one, trained to copy a sequence")
    _copy()


def _title(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 82 - len(text)) + "\n", flush=True)


def _show_masks() -> None:
    import torch

    from addnorm import Mask

    real = torch.arange(8)[None] < 6
    patterns = {
        "fully visible": Mask.visible(),
        "causal": Mask.causal(),
        "with prefix": Mask.causal(prefix=3),
        "window of 3": Mask.causal() & Mask.window(3),
        "padding": Mask.padding(real),
        "all of these": Mask.causal(prefix=3) & Mask.window(5) & Mask.padding(real),
    }
    print("  ".join(f"{name:<16}" for name in patterns))
    pictures = [mask.dense(8, 8)[0, 0] for mask in patterns.values()]
    for row in range(8):
        cells = ("".join("██" if seen else "· " for seen in picture[row]) for picture in pictures)
        print("  ".join(cells))


def _copy() -> None:
    import torch

    from addnorm import build, shift_right, token_loss
    from addnorm.models.transformer import EncoderDecoder

    config = presets.base(vocab=VOCAB, width=64, depth=2, heads=4, addnorm="pre", dropout=0.0)
    model = build(config)
    assert isinstance(model, EncoderDecoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    print(f"2 + 2 blocks, width 64, {model.count():,} parameters, pre-norm; {LENGTH} random tokens")
    began = time.perf_counter()
    for step in range(1, 301):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 301)
        ids = torch.randint(2, VOCAB, (32, LENGTH))
        loss = token_loss(model, model.hidden(ids, shift_right(ids, START)), ids)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            seconds = time.perf_counter() - began
            print(f"  step {step:>4}   loss {loss.item():.4f}   {seconds:.1f} s", flush=True)
    ids = torch.randint(2, VOCAB, (200, LENGTH))
    copied = _decode(model, ids)
    exact = int((copied == ids).all(dim=1).sum())
    print(f"\n{exact} of {len(ids)} new sequences copied exactly, token by token with the cache")
    _show_map(model, ids[:1])
    if exact < 190:
        print("fewer than 190: this is not right; please report it.", file=sys.stderr)


def _decode(model: "EncoderDecoder", source: "Tensor") -> "Tensor":
    """Greedy decoding, one token a step over the cache, of as many tokens as the source has."""
    import torch

    model.eval()
    with torch.inference_mode():
        memory = model.encode(source)
        cache = model.cache(len(source), source.shape[1])
        last = torch.full((len(source), 1), START)
        tokens = []
        for _ in range(source.shape[1]):
            last = model.answer(model.decode(last, memory, cache=cache)).argmax(dim=-1)
            tokens.append(last)
        return torch.cat(tokens, dim=1)


def _show_map(model: "EncoderDecoder", ids: "Tensor") -> None:
    """Where the decoder looks in the source, as shades: the mean of all heads of the last block."""
    import torch

    from addnorm import shift_right

    maps: dict[str, Tensor] = {}
    with torch.inference_mode():
        model(ids, shift_right(ids, START), maps=maps)
    print("\nwhere it looks in the source (columns) to write each token (rows):\n")
    for row in maps["decoder.1.memory"][0].mean(dim=0):
        print("   " + "".join(2 * " ░▒▓█"[min(4, int(5 * weight))] for weight in row.tolist()))
