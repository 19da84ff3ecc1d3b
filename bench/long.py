"""Memory of one forward and backward pass as the length grows: 4 blocks, width 256, batch 1.

Each point is measured in its own process: the peak resident memory of the pass minus that of the
model alone. If memory is linear, doubling the length doubles it.
"""

import multiprocessing
import resource
import time
from typing import Any

LENGTHS = (2048, 4096, 8192, 16384)
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal + padding": {"padded": True},
    "window of 256": {"window": 256},
    "linear bias": {"positions": "linear-bias"},
    "T5 buckets": {"positions": "buckets"},
    "attention dropout 0.1": {"attention_dropout": 0.1},
}


def run(cases: tuple[str, ...] = ("causal", "causal + padding", "window of 256")) -> dict[str, Any]:
    print("\nForward and backward of one long sequence: peak MiB (seconds)")
    print("  " + " " * 26 + "".join(f"{length:>18,}" for length in LENGTHS))
    rows = []
    for case in cases:
        cells = [_measure(case, length) for length in LENGTHS]
        shown = "".join(f"{f'{mib:,.0f} ({seconds:.1f} s)':>18}" for mib, seconds in cells)
        print(f"  {case:26}{shown}")
        rows.append({"name": case, "mib": [c[0] for c in cells], "seconds": [c[1] for c in cells]})
    return {"title": "long sequences", "lengths": LENGTHS, "rows": rows}


def _measure(case: str, length: int) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_pass, (case, length))


def _pass(case: str, length: int) -> tuple[float, float]:
    import torch

    from addnorm import Mask, build, presets, token_loss

    torch.set_num_threads(2)
    settings = dict(CASES[case])
    padded = settings.pop("padded", False)
    sizes = dict(vocab=256, width=256, depth=4, heads=8, length=length, dropout=0.0)
    model = build(presets.gpt2(**{"positions": "rotary", **sizes, **settings}))
    ids = torch.randint(256, (1, length + 1))
    mask = Mask.padding(torch.arange(length)[None] < length - 7) if padded else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    token_loss(model, model.hidden(ids[:, :-1], mask=mask), ids[:, 1:]).backward()
    seconds = time.perf_counter() - start
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds
