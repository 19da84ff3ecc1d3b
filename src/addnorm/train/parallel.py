"""Several processes, one run: who am I, sums over all, and a model held by each or in parts.

    gradient = Σ over workers of the gradient of (sum of the worker's losses / all tokens)

torch takes the mean over the workers, so each multiplies its loss by their number. What is saved is
whole, whatever the number of workers was, and is cut anew for the number there is: a run may go on
with more workers or fewer.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from addnorm.errors import AddnormError
from addnorm.layers.stack import Block

Result = TypeVar("Result")

PATIENCE = timedelta(minutes=10)
"""How long a worker waits for the others before it takes them for lost."""


class WorkerLostError(AddnormError, RuntimeError):
    """Another process of the run does not answer."""


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def launched() -> tuple[int, int, int] | None:
    """This process's number, its number on this machine, and how many there are, if torchrun began
    it: torchrun tells its workers so in the environment, and nowhere else."""
    told = os.environ
    if "WORLD_SIZE" not in told:
        return None
    return int(told["RANK"]), int(told["LOCAL_RANK"]), int(told["WORLD_SIZE"])


def join(device: torch.device) -> None:
    """Meet the other processes that torchrun started, if it did."""
    if launched() is not None and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)


def leave() -> None:
    """Part from the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Inside(nn.Module):
    """Whatever is done with a model, as a module's forward pass: what torch wraps for workers.

    Inside it the weights are whole, block by block as they are needed, whoever holds their parts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[nn.Module], Result]) -> Result:
        return run(self.model)


def spread(model: nn.Module, kind: str) -> nn.Module:
    """A model for all workers: ddp (each holds it, gradients are added up) or fsdp (in parts)."""
    inside = Inside(model)
    if world() == 1:
        return inside
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module)
        fully_shard(inside)
        return inside
    return DistributedDataParallel(inside)


def quietly(module: nn.Module) -> nn.Module:
    """What `spread` gave, for use without gradients."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def hold_back(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """While parts are accumulated, gradients are added up over the workers only after the last."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    synchronise: Any = getattr(module, "set_requires_gradient_sync", None)
    if synchronise is not None:  # of FSDP
        synchronise(last)
    return contextlib.nullcontext()


def add_up(*values: float) -> list[float]:
    """Each value's sum over all workers."""
    if world() == 1:
        return list(values)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.tensor(values, dtype=torch.float64, device=device)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raise WorkerLostError(_lost(error)) from None
    return [float(value) for value in total.tolist()]


def wait() -> None:
    """Until all are here."""
    if world() > 1:
        add_up(0.0)


def _lost(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return (
        f"another worker of this run is gone ({reason}). Nothing is lost: the newest checkpoint is "
        "whole. Go on from it with --resume."
    )


@contextlib.contextmanager
def watch() -> Any:
    """Inside, a worker that does not answer is an error that says so."""
    try:
        yield
    except RuntimeError as error:
        gone = ("closed by peer", "Connection reset", "Broken pipe", "Timed out", "gloo", "NCCL")
        if world() > 1 and any(word in str(error) for word in gone):
            raise WorkerLostError(_lost(error)) from None
        raise


def random_states() -> dict[str, Tensor]:
    """The state of every worker's random numbers, by its number."""
    own = torch.get_rng_state()
    if world() == 1:
        return {"0": own}
    device = torch.device("cuda") if dist.get_backend() == "nccl" else own.device
    found = [torch.empty_like(own, device=device) for _ in range(world())]
    dist.all_gather(found, own.to(device))
    return {str(number): state.cpu() for number, state in enumerate(found)}


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whole, where workers hold parts of them; all workers must ask."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    """A tensor whole, where workers hold parts of it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cut_like(tensor: Tensor, like: Any) -> Tensor:
    """This worker's part of a whole tensor, cut as another one is."""
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def cut_all_like(tensors: Mapping[str, Tensor], like: Iterable[tuple[str, Tensor]]) -> Any:
    """Whole tensors cut as those of the same name are."""
    wanted = dict(like)
    return {
        name: cut_like(tensor, wanted[name]) if name in wanted else tensor
        for name, tensor in tensors.items()
    }
