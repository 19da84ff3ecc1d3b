"""A run's state on disk: model, optimizer, position in the data, random state. Exact resume.

    checkpoints/step-00000400/   weights.safetensors   the model
                                 state.safetensors     optimizer moments, averages, random state
                                 state.json            plain values, and the digests of the two

A checkpoint is written under a temporary name, flushed to the disk, and renamed: one that has its
name is whole. It is read strictly; one that is damaged all the same is passed over for the one
before, and that is said. Nothing is pickled.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.disk import write_whole
from addnorm.errors import SavedError
from addnorm.models.saved import read_tensors, write_tensors
from addnorm.train import parallel

VERSION = 1
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """What `read` found: plain values, and tensors by name."""

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
    """Write the checkpoint of a step whole, then remove all but the newest `keep`.

    Of several workers, all gather and the first writes.
    """
    moments, groups = flatten(optimizer)
    state = {f"optimizer.{name}": tensor for name, tensor in moments.items()}
    state |= {f"more.{name}": tensor for name, tensor in more.items()}
    state = parallel.gathered(state)
    state |= {f"random.{name}": tensor for name, tensor in parallel.random_states().items()}
    weights = parallel.gathered(model.state_dict())
    path = run / FOLDER / f"step-{step:08d}"
    if parallel.rank() == 0:
        facts = {"version": VERSION, "step": step, "groups": groups, **plain}
        _write(path, weights, state, facts)
        for old in steps(run)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    parallel.wait()
    return path


def _write(
    path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], facts: dict[str, Any]
) -> None:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):  # by a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        write_tensors(temporary / "weights.safetensors", weights, {})
        write_tensors(temporary / "state.safetensors", state, {})
        write_whole(temporary / "state.json", json.dumps(facts, indent=1).encode())
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def steps(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in (run / FOLDER).glob("step-*") if path.is_dir())


def newest(run: Path, notes: list[str]) -> Checkpoint | None:
    """The newest checkpoint that is whole; what was passed over is said in `notes`."""
    for path in reversed(steps(run)):
        try:
            return read(path)
        except SavedError as error:
            notes.append(f"passed over {path.name}: {error}")
    return None


def read(path: Path) -> Checkpoint:
    """One checkpoint, strictly."""
    weights, _ = read_tensors(path / "weights.safetensors")
    state, _ = read_tensors(path / "state.safetensors")
    try:
        plain = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SavedError(f"{str(path / 'state.json')!r} cannot be read: {error}.") from None
    if plain.get("version") != VERSION:
        raise SavedError(
            f"{str(path)!r} has checkpoint version {plain.get('version')}; this addnorm reads "
            f"{VERSION}. Update addnorm to open it."
        )
    return Checkpoint(path, plain, weights, state)


def restore_(found: Checkpoint, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Put model, optimizer and random state back as they were; returns the other tensors."""
    try:
        own = model.state_dict()
        model.load_state_dict(parallel.cut_all_like(found.weights, own.items()))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise SavedError(f"{str(found.path)!r} is of another model: {reason}") from None
    unflatten_(
        optimizer,
        {
            name.removeprefix("optimizer."): tensor
            for name, tensor in found.state.items()
            if name.startswith("optimizer.")
        },
        found.plain["groups"],
    )
    _restore_random(found)
    return {
        name.removeprefix("more."): tensor
        for name, tensor in found.state.items()
        if name.startswith("more.")
    }


def _restore_random(found: Checkpoint) -> None:
    """This worker's random state; one that was not there before begins anew, by its number."""
    own = found.state.get(f"random.{parallel.rank()}")
    workers = sum(name.startswith("random.") for name in found.state)
    if own is None or workers != parallel.world():
        torch.manual_seed(found.plain["step"] * 1000 + parallel.rank())
    else:
        torch.set_rng_state(own)


def flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """An optimizer's moments as named tensors, and its groups' settings as plain values."""
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
    """Undo `flatten`."""
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
            own_moments[key] = parallel.cut_like(tensor, order[place])
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _flush(folder: Path) -> None:
    """Have the disk know the new name, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
