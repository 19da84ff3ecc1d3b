"""Held-out loss of a character model with short windows, by the length of its segment memory.

    python -m bench.segments
    python -m bench.segments TEXT [--memories 0 16 64] [--steps 400] [--seeds 3] [--out FILE.json]

Without a text: sequences of 12 random tokens (of 16) and their copy; the model (1 block, width 32)
reads windows of 6, so that only a memory can show it the copy. Every batch is new; the loss is that
of 1,000 new sequences after 200 steps.

With a text: a character model (2 blocks, width 64, windows of 16 characters, relative positions) is
trained with each memory and evaluated on the last tenth of the text (Dai et al. 2019, 1901.02860,
table 8).
Finished trainings are read from the JSON file, so an interrupted run continues.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

import addnorm

SETTINGS = {
    "width": 64,
    "depth": 2,
    "heads": 4,
    "ffn_width": 176,
    "length": 16,
    "positions": "relative",
}


def train(text: str, memory: int, steps: int, seed: int) -> float:
    """Return the held-out loss in nats per character."""
    sets = [f"model.{name}={value}" for name, value in SETTINGS.items()]
    sets += [f"model.segment_memory={memory}", f"train.steps={steps}", f"run.seed={seed}"]
    sets += ["train.batch=512", f"train.evaluate_every={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        run = addnorm.train("language", text, out=f"{folder}/run", size="tiny", set=sets)
        return float(run.summary["best"]["loss"])


def train_on_copies(memory: int, seed: int, steps: int = 200) -> float:
    """Return the loss of new sequences, of which each token stands 12 positions earlier, too."""
    torch.manual_seed(seed)
    config = addnorm.ModelConfig(
        mode="decoder", vocab=16, width=32, depth=1, heads=2, dropout=0.0, positions="relative",
        addnorm="pre",
    )  # fmt: skip
    model = addnorm.build(config)

    def loss(rows: int) -> torch.Tensor:
        period = torch.randint(16, (rows, 12))
        text = torch.cat((period, period), dim=1)
        segments = model.segments(memory)
        with torch.no_grad():
            model(text[:, :12], segments=segments)
        logits = model(text[:, 12:18], segments=segments)
        return torch.nn.functional.cross_entropy(logits.mT, text[:, 13:19])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss(32).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(loss(1000))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.segments", description=__doc__)
    parser.add_argument("text", nargs="?")
    parser.add_argument("--memories", type=int, nargs="+", default=[0, 16, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.text is None:
        for memory in (0, 4, 8, 12):
            found = [train_on_copies(memory, seed) for seed in range(args.seeds)]
            print(f"memory {memory:>2}: " + ", ".join(f"{loss:.3f}" for loss in found), flush=True)
        return
    losses: dict[str, float] = {}
    if args.out is not None and args.out.exists():
        losses = json.loads(args.out.read_text())
    for memory in args.memories:
        for seed in range(args.seeds):
            key = f"memory {memory}, {args.steps} steps, seed {seed}"
            if key not in losses:
                losses[key] = train(args.text, memory, args.steps, seed)
                if args.out is not None:
                    args.out.write_text(json.dumps(losses, indent=1))
        found = [
            losses[f"memory {memory}, {args.steps} steps, seed {s}"] for s in range(args.seeds)
        ]
        shown = ", ".join(f"{loss:.3f}" for loss in found)
        print(f"memory {memory:>4}: {sum(found) / len(found):.3f}  ({shown})", flush=True)


if __name__ == "__main__":
    main()
