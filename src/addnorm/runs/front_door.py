"""The functions that most users call: train, open, explain."""

import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from addnorm.cpu import keep_memory
from addnorm.errors import ConfigError, InputError
from addnorm.interop.directory import is_huggingface
from addnorm.runs.imported import open_directory
from addnorm.runs.inputs import INPUTS, files_of
from addnorm.runs.loggers import make_loggers
from addnorm.runs.request import make_request
from addnorm.runs.run import RECORD, Run, require_unused
from addnorm.runs.train import resume_run, start_run
from addnorm.tasks import TASKS
from addnorm.tasks.base import Say, say_nothing

Settings = Mapping[str, Any] | Sequence[str]


def train(
    task: str | None = None,
    data: Any = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    source: Any = None,
    target: Any = None,
    valid_source: Any = None,
    valid_target: Any = None,
    text: Any = None,
    label: Any = None,
    start: str | Path | None = None,
    size: str | None = None,
    minutes: float | None = None,
    seed: int | None = None,
    set: Settings = (),
    model: str | None = None,
    schema: str | Path | None = None,
    groups: str | None = None,
    split: str | None = None,
    test: Any = None,
    compare: bool | None = None,
    unlabelled: Any = None,
    pretrain: str | None = None,
    board: bool = False,
) -> Run:
    """Train a model and return its run.

    Parameters
    ----------
    task : translate, language, masked, classify or table; or a TOML file that names one of them.
    data : a file, a list of texts or a data frame to learn from.
    out : directory for the run; a temporary one if None, deleted with the returned object.
    resume : a run to continue; nothing else is given then, but `progress` and `board`.
    progress : show progress on stderr, or in a notebook; False for silence.
    source, target : texts to translate, and their translations. For a table, `target` is the
        column to predict, or the values to predict.
    valid_source, valid_target : data to validate with; a part is held out if None.
    text, label : columns of a table of texts, or lists of texts and labels. For language and
        masked, `text` may be the file itself.
    start : a run, or a Hugging Face directory, whose weights training starts from (`--from` on
        the command line).
    size : tiny, small, base or big; chosen from the data if None.
    minutes : time to train; chosen from the data if None.
    seed : random seed.
    set : settings, as {"model.depth": 4} or ["model.depth=4"].
    model, schema, groups, split, test, compare, unlabelled, pretrain : options of tables; see
        `addnorm train table --help`.
    board : also write figures for TensorBoard.

    Examples
    --------
    >>> texts = ["a fine day", "a bad day", "fine weather", "bad weather"] * 3
    >>> labels = ["good", "poor"] * 6
    >>> run = train("classify", texts, label=labels, progress=False, set={"train.steps": 1})
    >>> run.task, run.labels
    ('classify', ['good', 'poor'])
    """
    say: Say = _print if progress else say_nothing
    keep_memory()

    def observers(path: Path) -> Any:
        return make_loggers(path, progress=progress, terminal=sys.stderr.isatty(), board=board)

    if data is not None and source is not None:
        raise ConfigError("give the data once: as the second argument, or as source.")
    named = {
        "source": data if data is not None else source,
        **{"target": target, "valid_source": valid_source, "valid_target": valid_target},
        **{"text": text, "label": label, "size": size, "start": start},
        **{"minutes": minutes, "seed": seed, "model": model, "schema": schema},
        **{"groups": groups, "split": split, "test": test, "compare": compare},
        **{"unlabelled": unlabelled, "pretrain": pretrain},
    }
    options = {name: value for name, value in named.items() if value is not None}
    if resume is not None:
        if task is not None or out is not None or options or set:
            raise ConfigError("resume takes no other options. To start a new run, use start=RUN.")
        return resume_run(resume, observers=observers, say=say).run
    name = task if task in TASKS else make_request(task, {}).task
    temporary = out is None
    folder = Path(tempfile.mkdtemp(prefix="addnorm-")) if out is None else require_unused(out)
    existed = out is not None and folder.exists()
    try:
        request = make_request(task, files_of(str(name), options, folder / INPUTS), set)
        run = start_run(request, folder, observers=observers, say=say).run
    except BaseException:
        if temporary or not (folder / RECORD).exists():
            shutil.rmtree(folder / INPUTS if existed else folder, ignore_errors=True)
        raise
    if temporary:
        weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run


def open(path: str | Path, *, int8: bool = False) -> Run:
    """Return the run in a directory, or a run over the model of a Hugging Face directory.

    Parameters
    ----------
    path : directory that `addnorm train` or `addnorm.train` wrote, or one with config.json,
        safetensors and a tokenizer.
    int8 : hold the weights of a text model as 8-bit numbers: faster on a CPU, a little less exact.
    """
    if not (Path(path) / RECORD).is_file() and is_huggingface(path):
        return open_directory(path, int8=int8)
    return Run.open(path, int8=int8)


def explain(run: Run | str | Path, data: Any, row: int | None = None) -> Any:
    """Return which columns a model for tables looks at, for all rows or for one.

    Parameters
    ----------
    run : a run, or its directory.
    data : a file or data frame; with the target column, unless `row` is given.
    row : a row to explain, counted from 1.
    """
    opened = run if isinstance(run, Run) else open(run)
    if opened.task != "table":
        raise InputError(f"explain is for tables: {str(opened.path)!r} is for {opened.task}.")
    return opened.explain(data, row)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
