"""Engines of a run: exported once, kept with the run, chosen by the user or by speed.

RUN/engines/ctranslate2-float32/       what the engine reads
RUN/engines/ctranslate2-float32.json   digest of the weights that it was made of
RUN/engines/speed.json                 which engine translated faster here, measured once
"""

import hashlib
import platform
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from addnorm.errors import AddnormError, ConfigError, ExtraError, SavedError, nearest, require
from addnorm.files import read_json, to_json, write_whole
from addnorm.generate import Decoding
from addnorm.interop.ctranslate2 import require_expressible
from addnorm.interop.engines import CTranslate2Engine, Engine, OnnxEngine, OnnxTableEngine
from addnorm.models.fold_admin import fold
from addnorm.runs.imported import export_run
from addnorm.runs.run import RECORD, Run
from addnorm.tasks.base import Say, Trained, TrainedText

ENGINE_NAMES = ("torch", "ctranslate2", "onnx")
ENGINE_FOLDER = "engines"
SPEED_FILE = "speed.json"
AUTO_LINES = 200
"""Lines from which on it pays to measure which engine is the fastest."""
MEASURED_LINES = 48
"""Lines that are translated with each engine to compare them."""


def use_engine(run: Run, name: str, say: Say) -> None:
    """Make a run answer by an engine; it is exported, and verified, on first use.

    Parameters
    ----------
    run : a run, or an opened Hugging Face directory.
    name : torch, ctranslate2 or onnx.
    say : receives what was exported.
    """
    if name not in ENGINE_NAMES:
        raise ConfigError(f"there is no engine {name!r}. {nearest(name, ENGINE_NAMES)}")
    run.trained.engine = None if name == "torch" else _open_engine(run, run.trained, name, say)


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


def fastest_engine(run: Run, lines: Sequence[str], decoding: Decoding, say: Say) -> str:
    """Return the fastest engine that is installed, for translation on a CPU in one precision.

    It is measured once with the first lines of a long file, and stored with the run; a short file,
    another device or a run that cannot be written to is translated with torch.

    Parameters
    ----------
    run : a run for translation.
    lines : the texts to translate.
    decoding : settings of the search.
    say : receives which engine is used, and why.
    """
    trained = run.trained
    path = run.path / ENGINE_FOLDER / SPEED_FILE
    if not isinstance(trained, TrainedText) or not (run.path / RECORD).is_file():
        return "torch"
    key = _conditions(run, trained)
    stored = _read(path)
    if stored.get("conditions") == key and stored.get("engine") in ENGINE_NAMES:
        say(f"engine: {stored['engine']}, which was the fastest when it was measured ({path}).")
        return str(stored["engine"])
    if len(lines) < AUTO_LINES or decoding.penalty == "gnmt" or not _has_ctranslate2(trained):
        return "torch"
    texts = [text for text in lines if text.strip()][:MEASURED_LINES]
    seconds = {}
    for name in ("torch", "ctranslate2"):
        try:
            use_engine(run, name, say)
            list(trained.iter_translations(texts[:2], decoding))  # type: ignore[attr-defined]
            start = time.perf_counter()
            list(trained.iter_translations(texts, decoding))  # type: ignore[attr-defined]
            seconds[name] = time.perf_counter() - start
        except (AddnormError, RuntimeError, ValueError) as error:
            say(f"engine {name} was not measured: {error}")
    trained.engine = None
    best = min(seconds, key=seconds.__getitem__, default="torch")
    shown = ", ".join(f"{name} {len(texts) / s:,.0f} texts/s" for name, s in seconds.items())
    say(f"engine: {best} ({shown}). Choose another with --engine.")
    try:
        path.parent.mkdir(exist_ok=True)
        content = {"conditions": key, "engine": best, "seconds": seconds}
        write_whole(path, f"{to_json(content)}\n".encode())
    except (OSError, SavedError) as error:
        say(f"the choice of engine is not stored: {error}")
    return best


def _has_ctranslate2(trained: TrainedText) -> bool:
    """Return whether CTranslate2 is installed and can express the model, on a CPU."""
    try:
        require("ctranslate2", "export")
        model = trained.model if not trained.int8 else None
        if model is not None:
            require_expressible(fold(model) if model.config.addnorm == "admin" else model)
    except (ExtraError, ConfigError):
        return False
    return True


def _conditions(run: Run, trained: TrainedText) -> dict[str, Any]:
    """Return what a measurement of speed depends on."""
    return {
        "weights": _weights_digest(trained.model_path),
        "precision": "int8" if run.int8 else "float32",
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
