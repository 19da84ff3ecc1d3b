"""Kill training at random moments, resume it, and compare the bytes: `python -m bench.kills`.

For each kind of run, a reference is trained without interruption. Then the same command is started
again and again; its process is killed (SIGKILL) after a random time, and the run is resumed, or
started anew if it was killed before run.json was written. When it is finished, its files must have
the same SHA-256 as those of the reference: the best model, the tokenizer, the configuration, and
the weights of the last checkpoint. The state of that checkpoint must be equal but for its times.

Each process is forked from one that has imported torch, so that most of its time is training. With
two workers (fsdp), both are killed. Kinds can be named, to run them one by one.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import addnorm
from addnorm.models.saved import _bytes_of
from addnorm.training import checkpoint
from bench.mutations import SIZES, WORDS

STEPS = {"train.steps": 24, "train.evaluate_every": 6, "train.save_every": 3}
TEXT = {**SIZES, **STEPS, "train.batch": 256, "data.tokenizer": "characters"}


@dataclass(frozen=True)
class Kind:
    """A kind of run: the options of `addnorm.train`, and the number of workers."""

    name: str
    options: Callable[[Path], dict[str, Any]]
    workers: int = 1


KINDS = (
    Kind(
        "language",
        lambda data: {
            "task": "language",
            "source": data / "source.txt",
            "set": {**TEXT, "model.length": 16, "model.dropout": 0.1},
        },
    ),
    Kind(
        "translation",
        lambda data: {
            "task": "translate",
            "source": data / "source.txt",
            "target": data / "target.txt",
            "set": {**TEXT, "model.dropout": 0.1},
        },
    ),
    Kind(
        "classify",
        lambda data: {
            "task": "classify",
            "source": data / "labels.tsv",
            "set": {**TEXT, "model.dropout": 0.1},
        },
    ),
    Kind(
        "table",
        lambda data: {
            "task": "table",
            "source": data / "table.csv",
            "target": "label",
            "set": {**STEPS, "train.batch": 16, "model.width": 16, "model.depth": 1},
        },
    ),
    Kind(
        "fsdp",
        lambda data: {
            "task": "language",
            "source": data / "source.txt",
            "set": {**TEXT, "model.length": 16, "run.parallel": "fsdp"},
        },
        workers=2,
    ),
)


def write_data(folder: Path) -> None:
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(300)]
    (folder / "source.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target.txt").write_text("".join(f"{line.upper()}\n" for line in lines))
    labels = ["yes" if "ba" in line else "no" for line in lines]
    pairs = zip(lines, labels, strict=True)
    (folder / "labels.tsv").write_text("".join(f"{line}\t{label}\n" for line, label in pairs))
    rows = [f"{len(line)},{line[:2]},{line[-2:]},{'ba' in line}" for line in lines]
    (folder / "table.csv").write_text("\n".join(["size,first,last,label", *rows]) + "\n")


def work(kind: Kind, data: Path, out: Path) -> None:
    """Start the run, or resume it if run.json has been written."""
    if (out / "run.json").is_file():
        addnorm.train(resume=out, progress=False)
    else:
        addnorm.train(**kind.options(data), out=out, progress=False)


def start(kind: Kind, data: Path, out: Path) -> list[int]:
    """Fork the worker processes of a run; return their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(kind.workers):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            if kind.workers > 1:
                os.environ |= {
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    **{"WORLD_SIZE": str(kind.workers), "MASTER_ADDR": "127.0.0.1"},
                    "MASTER_PORT": str(port),
                }
            work(kind, data, out)
            code = 0
        except BaseException as error:
            print(f"{kind.name}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    return children


def wait(children: list[int], seconds: float) -> bool:
    """Wait for all processes; kill those that are left after some time. Return whether any was."""
    end, codes = time.monotonic() + seconds, {}
    while len(codes) < len(children) and time.monotonic() < end:
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    left = [child for child in children if child not in codes]
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not left and any(codes.values()):
        raise SystemExit(f"a process failed with {codes}")
    return bool(left)


def is_finished(out: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((out / "summary.json").read_text())["finished"])
    return False


def digests(out: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that decide answers, and of the last checkpoint's state."""
    last = checkpoint.steps(out)[-1]
    files = [p for p in (out / "best").iterdir() if p.name != "report.json"]
    files += [*out.glob("tokenizer*/*"), *out.glob("columns.json"), out / "config.toml"]
    files += [last / checkpoint.WEIGHTS_FILE]
    found = {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    saved = checkpoint.read(last)
    plain = saved.plain
    timed = ("_seconds", "pace")
    plain["state"] = {k: v for k, v in plain["state"].items() if not k.endswith(timed)}
    total = hashlib.sha256(json.dumps(plain).encode())
    for part in _bytes_of(saved.state):
        total.update(part)
    return found | {"state": total.hexdigest()}


def run_kind(kind: Kind, folder: Path, kills: int, per_run: int, seed: int) -> dict[str, Any]:
    """Return how many kills and runs there were, and which files differed."""
    draw = random.Random(f"{seed} {kind.name}")
    data = folder / "data"
    begin = time.monotonic()
    reference = folder / "reference"
    if wait(start(kind, data, reference), 300):
        raise SystemExit(f"the reference of {kind.name} took too long")
    seconds = time.monotonic() - begin
    expected, count, runs, early, differing = digests(reference), 0, 0, 0, set()
    while count < kills:
        out = folder / f"run-{runs}"
        for _ in range(min(per_run, kills - count)):
            started = time.monotonic()
            if not wait(start(kind, data, out), draw.uniform(0, 0.8 * seconds)):
                # It has ended before the kill. The machine may be faster now.
                seconds = min(seconds, time.monotonic() - started)
                break
            count += 1
            early += not (out / "run.json").is_file()
        unended = not is_finished(out) or (out / "run.lock").exists()
        if unended and wait(start(kind, data, out), 300):
            raise SystemExit(f"{kind.name} took too long")
        actual = digests(out)
        differing |= {name for name in expected | actual if expected.get(name) != actual.get(name)}
        leftovers = [p for p in out.rglob(".*")] + [*out.glob("run.lock")]
        differing |= {f"leftover {p.name}" for p in leftovers}
        shutil.rmtree(out)
        runs += 1
    shutil.rmtree(reference)
    return {
        "kind": kind.name,
        "kills": count,
        "before run.json": early,
        "runs": runs,
        "files compared": len(expected),
        "differing": ", ".join(sorted(differing)) or "none",
        "seconds": f"{time.monotonic() - begin:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__)
    names = [kind.name for kind in KINDS]
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(names)}; all")
    parser.add_argument("--kills", type=int, default=50, help="kills of each kind (default 50)")
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := {*args.kinds} - {*names}:
        parser.error(f"there is no kind {min(unknown)}: choose from {', '.join(names)}")
    rows = []
    for kind in KINDS:
        if args.kinds and kind.name not in args.kinds:
            continue
        folder = Path(tempfile.mkdtemp(prefix="addnorm-kills-"))
        try:
            (folder / "data").mkdir()
            write_data(folder / "data")
            rows.append(run_kind(kind, folder, args.kills, args.per_run, args.seed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if len(rows) == 1:
            print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
        print(f"| {' | '.join(str(value) for value in rows[-1].values())} |", flush=True)
    print(f"\n{sum(row['kills'] for row in rows)} kills")
    sys.exit(any(row["differing"] != "none" for row in rows))


if __name__ == "__main__":
    main()
