"""The ranks that share one model, and how they exchange tensors; torch.distributed is used only here.

On the CPU there is no global state: a group is an object, and two groups in one process do not
meet. The libraries of devices (nccl, hccl) know one group a process, torch's default one.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch's own annotations leave out what is used of it here.
_c10d: Any = dist
logger = logging.getLogger(__name__)
# All ranks of an engine are on one host; its own name may not resolve there.
_GLOO_HOST = "127.0.0.1"
_STORE_NAME = "ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one engine find each other: an empty folder that all of them reach.

    timeout_seconds bounds the meeting, and every exchange after it.
    """

    folder: Path
    rank: int
    world_size: int
    timeout_seconds: float


class ParallelGroup:
    """One rank's view of its group. A group of one rank exchanges nothing.

    Every rank calls the same methods in the same order. A call that fails, because another rank
    is gone or does not answer, raises RuntimeError, and the group is of no use any more.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self._process_group: Any = None

    @classmethod
    def join(cls, rendezvous: Rendezvous, dist_backend: str) -> "ParallelGroup":
        """Meet the other ranks; return when all of them are there. The device is bound before."""
        group = cls()
        if rendezvous.world_size == 1:
            return group
        group.rank, group.world_size = rendezvous.rank, rendezvous.world_size
        join = _join_gloo if dist_backend == "gloo" else partial(_join_devices, dist_backend)
        group._process_group = join(rendezvous)
        logger.info("joined the group rank=%d world_size=%d", group.rank, group.world_size)
        return group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, bit for bit the same on each; may reuse `tensor`."""
        if self.world_size == 1:
            return tensor
        summed = tensor.contiguous()
        self._process_group.allreduce([summed]).wait()
        return summed

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of ranks; all have one shape."""
        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._process_group.allgather([gathered], [tensor.contiguous()]).wait()
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor; the others pass one of its shape and dtype, may be written to."""
        if self.world_size == 1:
            return tensor
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([tensor], options).wait()
        return tensor

    def leave(self) -> None:
        """Close the connections; may be called twice. The other ranks are not waited for."""
        is_default = dist.is_initialized() and self._process_group is _c10d.group.WORLD
        self._process_group = None
        if is_default:
            dist.destroy_process_group()


def _join_devices(dist_backend: str, rendezvous: Rendezvous) -> Any:
    """Return torch's default process group, whose exchanges run on the devices.

    The libraries connect at the first exchange, so one is made here: a rank that cannot be
    reached is to come out now.
    """
    store, timeout = _open_store(rendezvous)
    dist.init_process_group(
        dist_backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
    dist.barrier()
    return _c10d.group.WORLD


def _open_store(rendezvous: Rendezvous) -> tuple[Any, timedelta]:
    store = _c10d.FileStore(str(rendezvous.folder / _STORE_NAME), rendezvous.world_size)
    timeout = timedelta(seconds=rendezvous.timeout_seconds)
    store.set_timeout(timeout)
    return store, timeout


def _join_gloo(rendezvous: Rendezvous) -> Any:
    """Return gloo's process group: each rank is connected to each other when this returns."""
    store, timeout = _open_store(rendezvous)
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_GLOO_HOST)]
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, rendezvous.rank, rendezvous.world_size, options)
