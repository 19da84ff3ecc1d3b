"""Engines of a run: exported once, kept with the run, chosen by the user or by speed.

RUN/engines/ctranslate2-float32/       what the engine reads
RUN/engines/ctranslate2-float32.json   digest of the weights that it was made of
RUN/engines/speed.json                 which engine translates faster here, measured once
"""

import hashlib
import math
import platform
import shutil
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from addnorm.data.text.collate import delimit_source
from addnorm.errors import AddnormError, ConfigError, ExtraError, SavedError, nearest, require
from addnorm.files import read_json, to_json, write_whole
from addnorm.generate import Decoding
from addnorm.interop.ctranslate2 import require_expressible
from addnorm.interop.engines import CTranslate2Engine, Engine, OnnxEngine, OnnxTableEngine
from addnorm.models.fold_admin import fold
from addnorm.runs.imported import export_run
from addnorm.runs.run import RECORD, Run
from addnorm.tasks.base import Say, Trained, TrainedText, sides_of

ENGINE_NAMES = ("torch", "ctranslate2", "onnx")
ENGINE_FOLDER = "engines"
SPEED_FILE = "speed.json"
MEASURED_SOURCES, MEASURED_LENGTH = 16, 16
"""Sources that are translated with each engine to compare them, and their tokens."""
MEASURED_LINES = 4
"""Sources of the comparison when they are translated one by one."""


def use_engine(run: Run, name: str, say: Say) -> None:
    """Make a run answer by an engine; it is exported, and verified, on first use.

    Parameters
    ----------
    run : a run, or an opened Hugging Face directory.
    name : torch, ctranslate2 or onnx.
    say : receives what was exported.
    """
    run.trained.engine = _engine(run, name, say)


def _open_engine(run: Run, trained: Any, name: str, say: Say) -> Engine:
    precision = "int8" if run.int8 else "float32"
    if name == "onnx" and run.int8:
        raise ConfigError("the engine onnx computes in float32: leave out --int8.")
    if run.task == "table" and name == "onnx":
        return OnnxTableEngine(_exported(run, trained, name, precision, say))
    if not isinstance(trained, TrainedText):
        other = "torch or onnx" if run.task == "table" else "torch"
        raise ConfigError(
            f"the engine {name} is for text models: this run is for {run.task}. Try {other}."
        )
    directory = _exported(run, trained, name, precision, say)
    config = run.config.model
    if name == "onnx":
        return OnnxEngine(directory, config)
    return CTranslate2Engine(directory, config, trained.tokenizers, precision=precision)


def _exported(run: Run, trained: Trained, name: str, precision: str, say: Say) -> Path:
    """Return the directory of an engine; export it if there is none for these weights."""
    key = f"{name}-{precision}"
    if (run.path / RECORD).is_file():
        folder = run.path / ENGINE_FOLDER
        mark, digest = folder / f"{key}.json", _weights_digest(trained.model_path)
        if _read(mark).get("weights") == digest and (folder / key).is_dir():
            return folder / key
    else:  # a directory that is not ours is not written to
        folder = Path(tempfile.mkdtemp(prefix="addnorm-engine-"))
        weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
        mark, digest = folder / f"{key}.json", ""
    shutil.rmtree(folder / key, ignore_errors=True)
    mark.unlink(missing_ok=True)
    # The engine has float weights to start from, whatever the precision of the run.
    floats = Run.open(run.path) if run.int8 else run
    notes = export_run(floats, folder / key, to=name, precision=precision)
    for note in notes:
        say(f"engine {name}: {note}")
    write_whole(mark, f"{to_json({'weights': digest})}\n".encode())
    return folder / key


def _weights_digest(model_path: Path) -> str:
    """Return the digest of the weights; the file of a table also has its columns."""
    with (model_path / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file of ours; nothing if it is absent or damaged."""
    try:
        content = read_json(path) if path.is_file() else {}
    except SavedError:
        return {}
    return content if isinstance(content, dict) else {}


def engine_for_translation(
    run: Run, name: str | None, decoding: Decoding, say: Say
) -> Engine | None:
    """Return what translates, None for torch: an engine by name, that of the run, or the fastest.

    The fastest is the faster one of torch and CTranslate2 in the precision of the run. It is
    measured once for each kind of search, with random sources, and stored with the run.

    Parameters
    ----------
    run : a run for translation.
    name : torch, ctranslate2 or onnx; None for the engine of the run, or the fastest.
    decoding : settings of the search; with read_ahead=1, sources are translated one by one.
    say : receives which engine is used, and why.
    """
    trained: Any = run.trained
    if name is not None or trained.engine is not None:
        return trained.engine if name is None else _engine(run, name, say)
    if reason := _only_torch(run, decoding):
        say(f"engine: torch ({reason}).")
        return None
    path = run.path / ENGINE_FOLDER / SPEED_FILE
    key = _conditions(run, decoding)
    choices = [row for row in _stored(path) if row["conditions"].get("weights") == key["weights"]]
    if found := [row["engine"] for row in choices if row["conditions"] == key]:
        say(f"engine: {found[0]}, the fastest one here, measured once ({path}).")
        return _engine(run, found[0], say)
    seconds, engines = _time_engines(run, decoding, say)
    best = min(seconds, key=seconds.__getitem__)
    speeds = (f"{each} {seconds['torch'] / s:.1f}" for each, s in seconds.items())
    say(f"engine: {best}, the fastest one here (speeds: {', '.join(speeds)}). Choose another with "
        "--engine.")  # fmt: skip
    choices.append({"conditions": key, "engine": best, "seconds": seconds})
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, f"{to_json({'choices': choices})}\n".encode())
    except (OSError, SavedError) as error:
        say(f"the choice of engine is not stored: {error}")
    return engines[best]


def _engine(run: Run, name: str, say: Say) -> Engine | None:
    """Return an engine by its name, opened once for a run; None for torch."""
    if name not in ENGINE_NAMES:
        raise ConfigError(f"there is no engine {name!r}. {nearest(name, ENGINE_NAMES)}")
    trained = run.trained
    if name not in trained.opened:
        trained.opened[name] = None if name == "torch" else _open_engine(run, trained, name, say)
    opened: Engine | None = trained.opened[name]
    return opened


def _only_torch(run: Run, decoding: Decoding) -> str:
    """Return why only torch can be used, or ""."""
    if not (run.path / RECORD).is_file():
        return "another one is used by default only for a run: addnorm import DIRECTORY RUN"
    if decoding.penalty == "gnmt":
        return "CTranslate2 has no penalty gnmt"
    try:
        require("ctranslate2", "export")
        model = None if run.int8 else run.trained.model  # packed weights were expressible before
        if model is not None:
            require_expressible(fold(model) if model.config.addnorm == "admin" else model)
    except ExtraError:
        return "CTranslate2, which may be faster, is not installed: pip install 'addnorm[export]'"
    except ConfigError:
        return "CTranslate2 cannot express this model"
    return ""


def _time_engines(
    run: Run, decoding: Decoding, say: Say
) -> tuple[dict[str, float], dict[str, Engine | None]]:
    """Return the seconds that each engine takes for the same random sources, and the engines."""
    trained: Any = run.trained
    source, target = sides_of(trained.tokenizers)
    generator = torch.Generator().manual_seed(0)
    # Ids of ordinary tokens, in the order of the vocabulary mostly after the special ones.
    plain = sorted(set(range(source.size)) - set(source.special.ids()))
    places = torch.randint(len(plain), (MEASURED_SOURCES, MEASURED_LENGTH), generator=generator)
    rows = [delimit_source([plain[i] for i in row], source.special) for row in places.tolist()]
    each_line = decoding.read_ahead == 1
    parts = [[row] for row in rows[:MEASURED_LINES]] if each_line else [rows]
    short = replace(decoding, max_tokens=MEASURED_LENGTH + 1, scores=False)
    ends = {"begin": target.begin, "end": target.end}

    def seconds_of(engine: Engine | None) -> float:
        start = time.perf_counter()
        for part in parts:
            if engine is None:
                list(trained.decode_by_torch(part, short, **ends))
            else:
                list(engine.translate(part, short, **ends))
        return time.perf_counter() - start

    engines: dict[str, Engine | None] = {"torch": None}
    seconds = {"torch": math.inf}
    try:
        engines["ctranslate2"] = _engine(run, "ctranslate2", say)
        seconds["ctranslate2"] = math.inf
        for _ in range(2):  # each warms up once
            for name, engine in engines.items():
                seconds[name] = seconds_of(engine)
    except (AddnormError, OSError, RuntimeError, ValueError) as error:
        say(f"the engine ctranslate2 is not used: {error}")
        return {"torch": 1.0}, {"torch": None}
    return seconds, engines


def _stored(path: Path) -> list[dict[str, Any]]:
    """Return the choices that are stored; what is damaged counts as none."""
    rows = _read(path).get("choices")
    return [
        row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
        and isinstance(row.get("conditions"), dict)
        and row.get("engine") in ENGINE_NAMES
    ]


def _conditions(run: Run, decoding: Decoding) -> dict[str, Any]:
    """Return what a measurement of speed depends on."""
    library: Any = require("ctranslate2", "export")
    return {
        "weights": _weights_digest(run.trained.model_path),
        "precision": "int8" if run.int8 else "float32",
        "beam": decoding.beam,
        "one_by_one": decoding.read_ahead == 1,
        "workers": decoding.workers,
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ctranslate2": library.__version__,
    }
