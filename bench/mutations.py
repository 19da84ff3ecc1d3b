"""Change files of every format that addnorm reads: `python -m bench.mutations`.

Small runs are trained, and each of their files is changed in many ways, one at a time. A changed
file must be refused with an AddnormError, or give the same answers as before. Two kinds of change
have a weaker rule, no traceback: *resealed* documents, whose digest was computed anew, so that only
the checks of their content are left; and files that decide no answer (tables to read, journals).
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import addnorm
from addnorm.data.table.frame import read_frame
from addnorm.data.text.files import read_lines
from addnorm.errors import AddnormError
from addnorm.files import METADATA_KEY, dump_document
from addnorm.models.saved import _bytes_of
from addnorm.runs.run import Run
from addnorm.tasks import find_task
from addnorm.training import checkpoint
from addnorm.training.loop import TrainingState

WORDS = ("ba", "be", "bi", "da", "de", "di", "ka", "ke", "ki", "la", "le", "li")
SIZES = {"model.width": 16, "model.depth": 1, "model.heads": 2, "model.ffn_width": 32}
NO_ANSWER = ("summary.json", "metrics.jsonl", "report.json", "input")
"""Files that decide no answer of a model."""
MEMORY_LIMIT = 2**30
"""Bytes that the process may use at most."""


@dataclass(frozen=True)
class Case:
    """One changed file: its format, the kind of change, and what came of it."""

    format: str
    mutation: str
    outcome: str
    """refused, equal, loaded, different or traceback."""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("different", "traceback")


# ── Files to change ───────────────────────────────────────────────────────────────────────────────


def make_files(folder: Path) -> dict[str, Path]:
    """Train small runs and write tables to read; return the folders by name."""
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(2, 6))) for _ in range(80)]
    (folder / "source.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target.txt").write_text("".join(f"{line.upper()}\n" for line in lines))
    rows = [f"{len(line)},{line[:2]},{line[-2:]},{'ba' in line}" for line in lines]
    (folder / "table.csv").write_text("\n".join(["size,first,last,label", *rows]) + "\n")
    text = {**SIZES, "train.steps": 2, "train.evaluate_every": 1, "train.batch": 256}
    table = {"model.width": 16, "model.depth": 1, "model.heads": 2}
    table |= {"train.steps": 2, "train.evaluate_every": 1, "train.batch": 32}
    addnorm.train(
        "language",
        folder / "source.txt",
        out=folder / "language",
        progress=False,
        set={**text, "model.length": 16, "data.tokenizer": "characters"},
    )
    addnorm.train(
        "translate",
        source=folder / "source.txt",
        target=folder / "target.txt",
        out=folder / "translate",
        progress=False,
        set={**text, "data.tokenizer": "bpe", "data.vocab": 300},
    )
    addnorm.train(
        "table",
        folder / "table.csv",
        target="label",
        out=folder / "table",
        progress=False,
        set=table,
    )
    labels = ["yes" if "ba" in line else "no" for line in lines]
    pairs = zip(lines, labels, strict=True)
    (folder / "labels.tsv").write_text("".join(f"{line}\t{label}\n" for line, label in pairs))
    addnorm.train(
        "classify",
        folder / "labels.tsv",
        out=folder / "classify",
        progress=False,
        set={**text, "data.tokenizer": "characters"},
    )
    return {name: folder / name for name in ("language", "translate", "classify", "table")}


def make_inputs(folder: Path, source: Path) -> list[Path]:
    """Write the table in every format that is read as input."""
    folder.mkdir()
    content = (source / "table.csv").read_bytes()
    (folder / "input.csv").write_bytes(content)
    (folder / "input.csv.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "input.txt").write_bytes((source / "source.txt").read_bytes())
    try:
        import pyarrow.csv as arrow_csv
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError:
        return sorted(folder.iterdir())
    table = arrow_csv.read_csv(folder / "input.csv")
    pyarrow.parquet.write_table(table, folder / "input.parquet")
    pyarrow.feather.write_feather(table, folder / "input.feather")
    return sorted(folder.iterdir())


def files_of_run(run: Path) -> list[Path]:
    """Return the files of a run that are read again, in order."""
    ends = (".json", ".toml", ".safetensors", ".model", ".jsonl")
    return sorted(p for p in run.rglob("*") if p.is_file() and p.name.endswith(ends))


# ── Answers ───────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def answer(run: Path, changed: Path) -> str:
    """Return a digest of everything that a run answers; of a checkpoint, of what it holds."""
    total = hashlib.sha256()
    if "checkpoints" in changed.parts:
        saved = checkpoint.read(changed.parent)
        TrainingState.parse(saved.plain.get("state"), saved)
        total.update(json.dumps(saved.plain).encode())
        for part in (*_bytes_of(saved.weights), *_bytes_of(saved.state)):
            total.update(part)
        return total.hexdigest()
    opened = Run.open(run)
    total.update(repr((opened.task, opened.labels, opened.config)).encode())
    _ = opened.history, opened.summary, find_task(opened.task).load_assets(run)
    if opened.task == "table":
        frame = read_frame(run.parent / "table.csv")
        total.update(repr(opened.predict(frame.without("label"))).encode())
    else:
        model, ids = opened.model, torch.arange(4, 12)[None]
        for part in opened.tokenizers.values():
            total.update(repr(part.encode("ba be di kila")).encode())
            total.update(part.decode([5, 6, 7, 8]).encode())
        logits = model(ids, ids) if opened.task == "translate" else model(ids)
        total.update(logits.numpy().tobytes())
        if opened.task == "classify":
            total.update(repr(opened.classify(["ba be", "di kila"])).encode())
    return total.hexdigest()


def read_input(path: Path) -> str:
    """Read a table or a text; return a digest of nothing, because any content is allowed."""
    if path.name.endswith((".txt", ".txt.gz")):
        read_lines(path)
    else:
        read_frame(path)
    return ""


# ── Changes ───────────────────────────────────────────────────────────────────────────────────────


def header_length(content: bytes, name: str) -> int:
    """Return the bytes before the tensors of a safetensors file; all bytes of another file."""
    if name.endswith(".safetensors"):
        return min(len(content), 8 + int.from_bytes(content[:8], "little"))
    return len(content)


def flip_header(content: bytes, name: str, draw: random.Random) -> bytes:
    place = draw.randrange(8 * header_length(content, name))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def flip_any(content: bytes, name: str, draw: random.Random) -> bytes:
    place = draw.randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def truncate(content: bytes, name: str, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def extend(content: bytes, name: str, draw: random.Random) -> bytes:
    return content + draw.randbytes(draw.randint(1, 64))


def zero_part(content: bytes, name: str, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.randint(1, 64))
    return content[:start] + bytes(stop - start) + content[stop:]


def delete_part(content: bytes, name: str, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start + draw.randint(1, 64) :]


def repeat_part(content: bytes, name: str, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    stop = start + draw.randint(1, 64)
    return content[:stop] + content[start:stop] + content[stop:]


def change_digit(content: bytes, name: str, draw: random.Random) -> bytes:
    """Replace a digit of the header by a large number."""
    length = header_length(content, name)
    start = 8 * name.endswith(".safetensors")
    digits = [i for i in range(start, length) if content[i : i + 1].isdigit()]
    if not digits:
        return flip_any(content, name, draw)
    place = draw.choice(digits)
    return content[:place] + b"1000000" + content[place + 1 :]


def nest(content: bytes, name: str, draw: random.Random) -> bytes:
    """Replace a part by deeply nested brackets."""
    place = draw.randrange(header_length(content, name))
    return content[:place] + b"[" * 50_000 + content[place:]


MUTATIONS: dict[str, Callable[[bytes, str, random.Random], bytes]] = {
    "bit of the header": flip_header,
    "bit anywhere": flip_any,
    "truncated": truncate,
    "extended": extend,
    "part set to zero": zero_part,
    "part deleted": delete_part,
    "part repeated": repeat_part,
    "larger number": change_digit,
    "deep nesting": nest,
}


def reseal(content: bytes, name: str, draw: random.Random) -> bytes | None:
    """Change one value of a document and compute its digest anew; None if it is no document."""
    try:
        if name.endswith(".safetensors"):
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            document = json.loads(header["__metadata__"][METADATA_KEY])
        else:
            header, document = None, json.loads(content)
        kind, version, values = document["kind"], document["version"], document["content"]
    except (ValueError, KeyError, TypeError):
        return None
    _change_value(values, draw)
    if header is None:
        return f"{dump_document(kind, version, values, indent=1)}\n".encode()
    tensors = _tensors_of(content)
    text = dump_document(kind, version, values, _bytes_of(tensors))
    header["__metadata__"][METADATA_KEY] = text
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + content[8 + length :]


def _tensors_of(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(content)


HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**6, 10**12, 2**70, 1e-300, 1e300, "", "x", "\x00", [], {}, [[]]),
    *("depth = 1000000", "[model]\nwidth = 1000000\ndepth = 1000000\n", "{" * 20_000),
)
"""Values that replace those of a document."""


def _change_value(values: Any, draw: random.Random) -> None:
    """Replace a value somewhere inside a document, or in the TOML text that it holds."""
    places = list(_places(values))
    holder, key = draw.choice(places)
    value = holder[key]
    lines = value.split("\n") if isinstance(value, str) else []
    fields = [i for i, line in enumerate(lines) if " = " in line]
    if len(lines) > 1 and fields and draw.random() < 0.8:
        place = draw.choice(fields)
        name = lines[place].split(" = ")[0]
        new = draw.choice(("1000000", "0", "-1", '"x"', "1e300", "true", "[[]]", "nan"))
        lines[place] = f"{name} = {new}"
        holder[key] = "\n".join(lines)
    else:
        holder[key] = draw.choice(HOSTILE)


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    keys = values.keys() if isinstance(values, dict) else range(len(values))
    for key in keys:
        yield values, key
        if isinstance(values[key], dict | list) and values[key]:
            yield from _places(values[key])


# ── Trials ────────────────────────────────────────────────────────────────────────────────────────


def try_case(path: Path, changed: bytes, ask: Callable[[], str], before: str) -> tuple[str, str]:
    """Return the outcome for a changed file, which is restored afterwards, and a detail."""
    content = path.read_bytes()
    path.write_bytes(changed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ("equal", "") if ask() == before else ("different", "")
    except AddnormError as error:
        return "refused", str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(content)


def run_cases(folder: Path, count: int, seed: int = 0, *, large: bool = False) -> Iterator[Case]:
    """Yield `count` cases, shared equally between the files of all formats.

    With `large` also bombs, and a bit of every byte of the header of a table and a text model.
    """
    draw = random.Random(seed)
    runs = make_files(folder)
    if large:
        for path in make_bombs(folder / "bombs"):
            ask = partial(read_input, path)
            outcome, detail = try_case(path, path.read_bytes(), ask, "nothing")
            yield Case(path.name, "bomb", outcome, detail)
        for name in ("table", "language"):
            yield from flip_every_header_byte(runs[name])
    targets = [(run, path) for run in runs.values() for path in files_of_run(run)]
    targets += [(folder, path) for path in make_inputs(folder / "inputs", folder)]
    kinds, answers = [*MUTATIONS, "resealed"], {}
    for number in range(count):
        run, path = targets[number % len(targets)]
        mutation = kinds[number // len(targets) % len(kinds)]
        content, name = path.read_bytes(), path.name
        resealed = reseal(content, name, draw) if mutation == "resealed" else None
        if mutation == "resealed" and resealed is None:
            mutation = draw.choice(list(MUTATIONS))
        changed = resealed or MUTATIONS.get(mutation, flip_any)(content, name, draw)
        is_input = run == folder

        def ask(run: Path = run, path: Path = path, is_input: bool = is_input) -> str:
            return read_input(path) if is_input else answer(run, path)

        if path not in answers:
            answers[path] = ask()
        outcome, detail = try_case(path, changed, ask, answers[path])
        is_free = mutation == "resealed" or name.startswith(NO_ANSWER)
        if outcome == "different" and is_free:
            outcome = "loaded"
        kind = name if is_input else f"{run.name}/{path.relative_to(run)}"
        yield Case(kind, mutation, outcome, detail)


def make_bombs(folder: Path) -> list[Path]:
    """Write small files that unpack to much more: texts, and tables of every packed format."""
    folder.mkdir()
    for name, line in (("rows.txt.gz", b"0" * 999 + b"\n"), ("rows.csv.gz", b"1," * 499 + b"1\n")):
        with gzip.open(folder / name, "wb", compresslevel=1) as file:
            for _ in range(800):
                file.write(line * (2**19 // len(line)))
    try:
        import pyarrow
        from pyarrow import feather, parquet
    except ImportError:
        return sorted(folder.iterdir())
    zeros = pyarrow.table({"x": pyarrow.nulls(1_000_000, pyarrow.int64())})
    with parquet.ParquetWriter(str(folder / "rows.parquet"), zeros.schema) as writer:
        for _ in range(60):
            writer.write_table(zeros)
    value = pyarrow.array(["x" * 400_000])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), value)
    path, texts = folder / "texts.parquet", pyarrow.table({"t": column})
    with parquet.ParquetWriter(str(path), texts.schema, store_schema=False) as writer:
        writer.write_table(texts)
    wide = pyarrow.table({f"x{i}": pyarrow.nulls(1_000_000, pyarrow.int8()) for i in range(40)})
    feather.write_feather(wide, str(folder / "rows.feather"), compression="zstd")
    return sorted(folder.iterdir())


def flip_every_header_byte(run: Path) -> Iterator[Case]:
    """Yield a case for each byte of the header of the best model, with one bit flipped."""
    path = run / "best" / "model.safetensors"
    content, before = path.read_bytes(), answer(run, path)
    for place in range(header_length(content, path.name)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        ask = partial(answer, run, path)
        outcome, detail = try_case(path, bytes(changed), ask, before)
        yield Case(
            f"{run.name}/best/model.safetensors", "every byte of the header", outcome, detail
        )


def peak_memory() -> int:
    """Return the largest memory that this process has used, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutations", description=__doc__)
    parser.add_argument("--count", type=int, default=2400, help="changed files (default 2400)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="addnorm-mutations-"))
    start = time.monotonic()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            cases = list(run_cases(folder, args.count, args.seed, large=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcomes = ("refused", "equal", "loaded", "different", "traceback")
    for title, key in (("format", "format"), ("change", "mutation")):
        print(f"| {title} | {' | '.join(outcomes)} |\n|---|{'---:|' * len(outcomes)}")
        for name in sorted({getattr(case, key) for case in cases}):
            counts = Counter(case.outcome for case in cases if getattr(case, key) == name)
            print(f"| {name} | {' | '.join(str(counts[each]) for each in outcomes)} |")
        print()
    failures = [case for case in cases if case.is_failure]
    for case in failures:
        print(case, file=sys.stderr)
    peak = peak_memory()
    print(
        f"{len(cases)} changed files in {time.monotonic() - start:.0f} s; "
        f"{len(failures)} failures; peak memory {peak / 2**20:.0f} MiB "
        f"(limit {MEMORY_LIMIT / 2**20:.0f} MiB)"
    )
    sys.exit(bool(failures) or peak > MEMORY_LIMIT)


if __name__ == "__main__":
    main()
