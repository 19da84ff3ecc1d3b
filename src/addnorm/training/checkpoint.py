"""Checkpoints of a run: model, optimizer, position in the data, RNG states. Resume is exact.

    checkpoints/step-00000400/   weights.safetensors   the model
                                 state.safetensors     optimizer moments, averages, RNG states;
                                                       in its metadata the plain values

A checkpoint is written to a temporary directory, flushed to the disk and renamed, so that one
under its final name is complete. One that is damaged nevertheless is skipped in favour of the one
before it, with a note. Nothing is pickled.
"""

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.errors import SavedError
from addnorm.files import CHECKPOINT_MODEL, CHECKPOINT_STATE, make_directory, sync_directory
from addnorm.models.saved import read_tensors, write_tensors
from addnorm.training import parallel

FOLDER = "checkpoints"
WEIGHTS_FILE, STATE_FILE = "weights.safetensors", "state.safetensors"
STEP = re.compile(r"step-\d{8,}")
UNFINISHED = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}")
"""Names of the directories of checkpoints, complete and unfinished."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Parameters
    ----------
    path : its directory
    plain : plain values: training state and settings of the parameter groups
    weights, state : tensors of the model, and of the optimizer, averages and RNGs, by name
    """

    path: Path
    plain: dict[str, Any]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def write(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    plain: Mapping[str, Any],
    more: Mapping[str, Tensor],
    keep: int,
) -> Path:
    """Write the checkpoint of a step, then delete all but the newest `keep`.

    With several processes, all of them gather and the first one writes.

    Parameters
    ----------
    run : the run directory
    step : number of steps taken
    model, optimizer : the state to write
    plain : other values to write, as JSON has them; NaN and infinities are kept
    more : other tensors to write, by name
    keep : number of checkpoints that stay
    """
    moments, groups = flatten(optimizer)
    state = {f"optimizer.{name}": tensor for name, tensor in moments.items()}
    state |= {f"more.{name}": tensor for name, tensor in more.items()}
    state = parallel.unshard_all(state)
    state |= {f"random.{name}": tensor for name, tensor in parallel.rng_states().items()}
    weights = parallel.unshard_all(model.state_dict())
    path = run / FOLDER / f"step-{step:08d}"
    if parallel.rank() == 0:
        _write_and_rename(path, weights, state, {"step": step, "groups": groups, **plain})
        for old in steps(run)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    parallel.barrier()
    return path


def _write_and_rename(
    path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], plain: dict[str, Any]
) -> None:
    folder = path.parent
    make_directory(folder)
    for unfinished in folder.glob(".step-*"):  # of a process that was killed while writing
        if UNFINISHED.fullmatch(unfinished.name):
            shutil.rmtree(unfinished, ignore_errors=True)
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}"
    make_directory(temporary)
    step = plain["step"]
    # As text, because resume is exact: documents sort their keys and refuse NaN.
    content = {"step": step, "values": json.dumps(plain)}
    try:
        write_tensors(temporary / WEIGHTS_FILE, weights, *CHECKPOINT_MODEL, {"step": step})
        write_tensors(temporary / STATE_FILE, state, *CHECKPOINT_STATE, content)
        if path.exists():
            shutil.rmtree(path)
        sync_directory(temporary)
        temporary.replace(path)
        sync_directory(folder)
    except OSError as error:
        if isinstance(error, SavedError):
            raise
        raise SavedError(f"{str(path)!r} cannot be written: {error.strerror}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def steps(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(
        path
        for path in (run / FOLDER).glob("step-*")
        if STEP.fullmatch(path.name) and path.is_dir()
    )


def newest(run: Path, notes: list[str]) -> Checkpoint | None:
    """Return the newest intact checkpoint; append a sentence to `notes` for each skipped one."""
    for path in reversed(steps(run)):
        try:
            return read(path)
        except SavedError as error:
            notes.append(f"skipped {path.name}: {error}")
    return None


def read(path: Path) -> Checkpoint:
    """Return one checkpoint, or raise SavedError if it is damaged or of another format."""
    weights, content = read_tensors(path / WEIGHTS_FILE, *CHECKPOINT_MODEL)
    state, state_content = read_tensors(path / STATE_FILE, *CHECKPOINT_STATE)
    step, state_step = content.get("step"), state_content.get("step")
    if type(step) is not int or step != state_step:
        raise SavedError(
            f"the files of {str(path)!r} must be of one step: {WEIGHTS_FILE} is of step "
            f"{step}, {STATE_FILE} of step {state_step}."
        )
    return Checkpoint(path, _parse_values(state_content.get("values"), step, path), weights, state)


def _parse_values(text: Any, step: int, path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint; SavedError unless they have step and groups."""
    where = f"{str(path / STATE_FILE)!r} is damaged"
    try:
        plain = json.loads(text)
    except RecursionError:
        raise SavedError(f"{where}: its values are nested too deeply. Use a backup.") from None
    except (TypeError, ValueError):
        raise SavedError(f"{where}: its values are not JSON. Use a backup.") from None
    groups = plain.get("groups") if isinstance(plain, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise SavedError(f"{where}: its values must be an object with groups. Use a backup.")
    if plain.get("step") != step:
        raise SavedError(
            f"{where}: its values are of step {plain.get('step')}, the file is of step {step}. "
            "Use a backup."
        )
    return plain


def restore_(saved: Checkpoint, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Restore model, optimizer and RNG state in place; return the other tensors."""
    try:
        own = model.state_dict()
        model.load_state_dict(parallel.shard_all_like(saved.weights, own.items()))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise SavedError(f"{str(saved.path)!r} is of another model: {reason}") from None
    try:
        unflatten_(optimizer, _strip_prefix(saved.state, "optimizer."), saved.plain["groups"])
        _restore_rng(saved)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(
            f"{str(saved.path)!r} is of another optimizer or number of workers: {reason}"
        ) from None
    return _strip_prefix(saved.state, "more.")


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, under their names without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _restore_rng(saved: Checkpoint) -> None:
    """Set this process's RNG state; seed it anew if the number of processes has changed."""
    states = _strip_prefix(saved.state, "random.")
    if len(states) == parallel.world_size():
        torch.set_rng_state(states[str(parallel.rank())])
    else:
        torch.manual_seed(saved.plain["step"] * 1000 + parallel.rank())


def flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return an optimizer's moments as named tensors, and its groups' settings as plain values."""
    saved = optimizer.state_dict()
    moments = {
        f"{number}.{name}": value
        for number, state in saved["state"].items()
        for name, value in state.items()
    }
    plain = [
        {name: value for name, value in group.items() if name != "params"}
        for group in saved["param_groups"]
    ]
    return moments, plain


def unflatten_(
    optimizer: Optimizer, moments: Mapping[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Load into an optimizer what `flatten` returned."""
    now = optimizer.state_dict()
    if len(now["param_groups"]) != len(groups):
        raise SavedError("the checkpoint is of another optimizer. Use the run's own configuration.")
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    merged = [
        {
            **{key: tuple(v) if isinstance(v, list) else v for key, v in group.items()},
            "params": own["params"],
        }
        for group, own in zip(groups, now["param_groups"], strict=True)
    ]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for place, own_moments in state.items():
        for key, tensor in own_moments.items():
            own_moments[key] = parallel.shard_like(tensor, order[place])
    optimizer.load_state_dict({"state": state, "param_groups": merged})
