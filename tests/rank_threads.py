"""Ranks of one group as threads of this process: the same gloo, without starting processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.parallel import ParallelGroup, Rendezvous

_Result = TypeVar("_Result")
_TIMEOUT_SECONDS = 30


def run_ranks(
    folder: Path, world_size: int, work: Callable[[ParallelGroup], _Result]
) -> list[_Result]:
    """Run `work` once for each rank, all at the same time; return the results by rank."""
    folder.mkdir(exist_ok=True)
    # A rank that fails at once must not leave while another still connects to it.
    is_joined = threading.Barrier(world_size, timeout=_TIMEOUT_SECONDS)

    def run_rank(rank: int) -> _Result:
        group = ParallelGroup.join(
            Rendezvous(
                folder=folder, rank=rank, world_size=world_size, timeout_seconds=_TIMEOUT_SECONDS
            ),
            "gloo",
        )
        try:
            is_joined.wait()
            return work(group)
        finally:
            group.leave()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run_rank, range(world_size)))
