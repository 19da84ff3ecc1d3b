"""Data-parallel training: process group, sums over workers, replicated or sharded models.

    gradient = Σ over workers of the gradient of (sum of the worker's losses / all tokens)

torch averages gradients over the workers, so each worker multiplies its loss by their number.
Checkpoints hold full tensors and are sharded again when they are read, so that a run can be resumed
with another number of workers.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from addnorm.errors import AddnormError
from addnorm.layers.stack import Block

Returned = TypeVar("Returned")

WORKER_TIMEOUT = timedelta(minutes=10)
"""How long a worker waits for the others before they count as lost."""
LOST_WORKER_ERRORS = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "gloo",
    "NCCL",
)
"""Parts of torch's messages when another worker does not respond."""


class WorkerLostError(AddnormError, RuntimeError):
    """Another process of the run does not respond."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def torchrun_ranks() -> tuple[int, int, int] | None:
    """Return (rank, local rank, world size) if torchrun started this process, otherwise None.

    torchrun passes them in environment variables only.
    """
    environment = os.environ
    if "WORLD_SIZE" not in environment:
        return None
    return (
        int(environment["RANK"]),
        int(environment["LOCAL_RANK"]),
        int(environment["WORLD_SIZE"]),
    )


def init_process_group(device: torch.device) -> None:
    """Initialise the process group if torchrun started this process."""
    if torchrun_ranks() is not None and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=WORKER_TIMEOUT)


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class CallWithModel(nn.Module):
    """A module whose forward pass calls a function with the model: what torch wraps for workers.

    Inside the call the weights are full, block by block as they are needed, also if sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Returned]) -> Returned:
        return function(self.model)


def distribute(model: nn.Module, kind: str) -> nn.Module:
    """Return a CallWithModel for all workers: "ddp" replicates the model, "fsdp" shards it."""
    module = CallWithModel(model)
    if world_size() == 1:
        return module
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in model.modules():
            if isinstance(part, Block):
                fully_shard(part)
        fully_shard(module)
        return module
    return DistributedDataParallel(module)


def without_ddp(module: nn.Module) -> nn.Module:
    """Return what `distribute` returned, for use without gradients."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def defer_gradient_sync(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context in which gradients are summed over workers only for the `last` part."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    set_sync: Any = getattr(module, "set_requires_gradient_sync", None)  # of FSDP
    if set_sync is not None:
        set_sync(last)
    return contextlib.nullcontext()


def sum_over_workers(*values: float) -> list[float]:
    """Return the sum of each value over all workers."""
    if world_size() == 1:
        return list(values)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.tensor(values, dtype=torch.float64, device=device)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raise WorkerLostError(_lost_message(error)) from None
    return [float(value) for value in total.tolist()]


def barrier() -> None:
    """Wait until all workers have called this."""
    if world_size() > 1:
        sum_over_workers(0.0)


def _lost_message(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return (
        f"another worker of this run does not respond ({reason}). The newest checkpoint is intact. "
        "Continue from it with --resume."
    )


@contextlib.contextmanager
def detect_lost_workers() -> Iterator[None]:
    """Context in which torch's errors about a lost worker become WorkerLostError."""
    try:
        yield
    except WorkerLostError:
        raise
    except RuntimeError as error:
        if world_size() > 1 and any(words in str(error) for words in LOST_WORKER_ERRORS):
            raise WorkerLostError(_lost_message(error)) from None
        raise


def rng_states() -> dict[str, Tensor]:
    """Return the RNG state of every worker, by its rank."""
    own = torch.get_rng_state()
    if world_size() == 1:
        return {"0": own}
    device = torch.device("cuda") if dist.get_backend() == "nccl" else own.device
    states = [torch.empty_like(own, device=device) for _ in range(world_size())]
    dist.all_gather(states, own.to(device))
    return {str(number): state.cpu() for number, state in enumerate(states)}


def unshard_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors, gathered where they are sharded; all workers must call this."""
    return {name: unshard(tensor) for name, tensor in tensors.items()}


def unshard(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered if it is sharded; all workers must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this worker's part of a full tensor, sharded as another tensor is."""
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def shard_all_like(
    tensors: Mapping[str, Tensor], like: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return full tensors sharded as the tensors of the same names are."""
    references = dict(like)
    return {
        name: shard_like(tensor, references[name]) if name in references else tensor
        for name, tensor in tensors.items()
    }
