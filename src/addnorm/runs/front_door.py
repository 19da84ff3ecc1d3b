"""The functions that most users call: train, open, explain."""

import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from addnorm.cpu import keep_memory
from addnorm.errors import ConfigError, SavedError
from addnorm.files import HUGGING_FACE, RUN, TABLE_MODEL, TEXT_MODEL, kind_of_directory
from addnorm.interop.huggingface import read_model
from addnorm.models.saved import load_model
from addnorm.runs.inputs import INPUTS, TableLike, Texts, Values, files_of
from addnorm.runs.loggers import make_observers
from addnorm.runs.request import make_request
from addnorm.runs.run import RECORD, Run, require_unused
from addnorm.runs.train import resume_run, start_run
from addnorm.tasks.base import Say, say_nothing
from addnorm.training.loop import Observer

if TYPE_CHECKING:
    from addnorm.lens.explanation import SequenceExplanation
    from addnorm.tabular.explain import Explanation, RowExplanation

Settings = Mapping[str, Any] | Sequence[str]
"""{"section.field": value}, or ["section.field=value"]."""


def train(
    task: str | Path | None = None,
    data: Texts | TableLike | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
    source: Texts | TableLike | None = None,
    target: Texts | Values | None = None,
    valid_source: Texts | TableLike | None = None,
    valid_target: Texts | None = None,
    text: Texts | None = None,
    label: Texts | Values | None = None,
    start: str | Path | None = None,
    size: str | None = None,
    minutes: float | str | None = None,
    steps: str | None = None,
    seed: int | None = None,
    set: Settings = (),
    model: str | None = None,
    schema: str | Path | None = None,
    groups: str | None = None,
    split: str | None = None,
    test: str | Path | TableLike | None = None,
    compare: bool | str | None = None,
    unlabelled: str | Path | TableLike | None = None,
    pretrain: str | None = None,
    target_kind: str | None = None,
    board: bool = False,
    clinic: bool = False,
) -> Run:
    """Train a model and return its run.

    Parameters
    ----------
    task : translate, language, masked, classify, label or table; or a TOML file that names one.
    data : a file, a list of texts or a data frame to learn from.
    out : directory for the run; a temporary one if None, deleted with the returned object.
    resume : a run to continue; nothing else is given then, but `progress`, `board`, `clinic`, and
        minutes="+10" or steps="+500" to extend it, finished or stopped, with a new warm-up.
    progress : show progress on stderr, or in a notebook; False for silence.
    source, target : texts to translate, and their translations. For a table, `target` is the
        column to predict, or the values to predict.
    valid_source, valid_target : data to validate with; a part is held out if None.
    text, label : columns of a table of texts, or lists of texts and labels. For language and
        masked, `text` may be the file itself.
    start : a run, or a Hugging Face directory, whose weights training starts from (`--from` on
        the command line).
    size : tiny, small, base or big; chosen from the data if None.
    minutes : time for all of the call, from reading the data to the summary; if None, the number
        of steps is chosen from the data.
    steps : further steps, such as "+500", with `resume`; else use set={"train.steps": 500}.
    seed : random seed.
    set : settings, as {"model.depth": 4} or ["model.depth=4"].
    model, schema, groups, split, test, compare, unlabelled, pretrain : options of tables; see
        `addnorm train table --help`.
    target_kind : what the target of a table is: classes, number or ordinal (`--task` on the
        command line); inferred if None.
    board : also write figures for TensorBoard.
    clinic : examine the model while it trains, and warn early.

    Examples
    --------
    >>> texts = ["a fine day", "a bad day", "fine weather", "bad weather"] * 3
    >>> labels = ["good", "poor"] * 6
    >>> run = train("classify", texts, label=labels, progress=False, set={"train.steps": 1})
    >>> run.task, run.labels
    ('classify', ['good', 'poor'])
    """
    began = time.perf_counter()
    say: Say = _print if progress else say_nothing
    keep_memory()

    def observers(path: Path) -> Sequence[Observer]:
        return make_observers(path, progress=progress, board=board, clinic=clinic)

    if data is not None and source is not None:
        raise ConfigError("give the data once: as the second argument, or as source.")
    named = {
        "source": data if data is not None else source,
        **{"target": target, "valid_source": valid_source, "valid_target": valid_target},
        **{"text": text, "label": label, "size": size, "start": start},
        **{"minutes": minutes, "seed": seed, "model": model, "schema": schema},
        **{"groups": groups, "split": split, "test": test, "compare": compare},
        **{"unlabelled": unlabelled, "pretrain": pretrain, "target_kind": target_kind},
    }
    if isinstance(compare, bool):
        named["compare"] = "default" if compare else "none"
    options = {name: value for name, value in named.items() if value is not None}
    if resume is not None:
        if task is not None or out is not None or {*options} - {"minutes"} or set:
            raise ConfigError(
                "resume takes no other options than minutes='+N' or steps='+N'. To start a new "
                "run, use start=RUN."
            )
        return resume_run(
            resume, observers=observers, minutes=minutes, steps=steps, began=began, say=say
        ).run
    if steps is not None:
        raise ConfigError(
            f"steps extends a run that is resumed: got {steps!r} for a new one. Try "
            'set={"train.steps": 500}.'
        )
    name = make_request(task, {}).task
    temporary = out is None
    folder = Path(tempfile.mkdtemp(prefix="addnorm-")) if out is None else require_unused(out)
    existed = out is not None and folder.exists()
    try:
        request = make_request(task, files_of(str(name), options, folder / INPUTS), set)
        run = start_run(request, folder, observers=observers, began=began, say=say).run
    except BaseException:
        if temporary or not (folder / RECORD).exists():
            shutil.rmtree(folder / INPUTS if existed else folder, ignore_errors=True)
        raise
    if temporary:
        weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run


def open(path: str | Path, *, int8: bool = False) -> Run:
    """Return the run in a directory, or the model in it as a run without a history.

    Parameters
    ----------
    path : directory that `addnorm train`, `addnorm.train` or a `save` function wrote, or one of
        a Hugging Face model. The file that marks it says what it holds.
    int8 : hold the weights of a text model as 8-bit numbers: faster on a CPU, a little less exact.

    Examples
    --------
    >>> texts = ["once upon a time", "there was a king"] * 20
    >>> run = train("language", text=texts, out="book", progress=False, set={"train.steps": 2})
    >>> open("book").task, open("book/best").task
    ('language', 'language')
    """
    return Run.open(path, int8=int8)


def load(path: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """Return the network in a directory, in evaluation mode.

    Parameters
    ----------
    path : a directory that `save` or an estimator's `save` wrote, one of a Hugging Face model, or
        a run: then its best model.
    device : where the weights are put.

    Examples
    --------
    >>> from addnorm import build, presets, save
    >>> save(build(presets.gpt2(vocab=16, width=8, depth=1, heads=2)), "small")
    >>> type(load("small")).__name__
    'Decoder'
    >>> load("nothing")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nothing/model.safetensors'. Check the path.
    """
    kind = kind_of_directory(path)
    if kind in (RUN.kind, TABLE_MODEL.kind):
        network: nn.Module = Run.open(path).model
        return network.to(device).eval()
    if kind == HUGGING_FACE:
        return read_model(path).model.to(device)
    if kind not in (None, TEXT_MODEL.kind):
        raise SavedError(
            f"{str(path)!r} must hold a model or a run: it is a {str(kind).replace('-', ' ')}. "
            "Check the path."
        )
    return load_model(path, device)


def explain(
    run: Run | str | Path, data: str | Path | Sequence[str] | TableLike, row: int | None = None
) -> "Explanation | RowExplanation | SequenceExplanation":
    """Return an explanation of a model's output: for a text, an image, rows of a table, one row.

    Parameters
    ----------
    run : a run, or its directory.
    data : a text or a list of texts; for images an image, an .npz file, a folder or an array; for
        tables a file or data frame, with the target column unless `row` is given.
    row : a row of a table, a text of a list or an image of several, counted from 1.

    Examples
    --------
    >>> rows = {"size": [*range(40)], "shape": ["round", "flat"] * 20, "sold": ["no", "yes"] * 20}
    >>> small = {"train.steps": 2, "model.width": 16, "model.depth": 1, "model.heads": 2}
    >>> run = train("table", rows, target="sold", progress=False, set=small)
    >>> explain(run, rows).columns
    ('size', 'shape')
    >>> texts = ["good", "bad", "very good", "very bad"] * 10
    >>> labels = ["yes", "no", "yes", "no"] * 10
    >>> run = train("classify", text=texts, label=labels, progress=False, set=small)
    >>> sorted(explain(run, "very good").contributions)
    ['encoder']
    """
    opened = run if isinstance(run, Run) else open(run)
    explanation: Explanation | RowExplanation | SequenceExplanation = opened.explain(data, row)
    return explanation


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
