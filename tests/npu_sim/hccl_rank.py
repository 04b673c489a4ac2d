"""`python hccl_rank.py RANK FOLDER`: one of two ranks, on a simulated device of its own."""

import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401 - starts the simulator

from engine.parallel import ParallelGroup, Rendezvous


def main(rank: int, folder: Path) -> None:
    torch.npu.set_device(rank)
    group = ParallelGroup.join(
        Rendezvous(folder=folder, rank=rank, world_size=2, timeout_seconds=30), "hccl"
    )
    mine = torch.full((3,), rank + 1.0, device="npu")
    gathered = group.all_gather(mine)
    assert [part.tolist() for part in gathered] == [[1, 1, 1], [2, 2, 2]]
    assert group.broadcast(mine.clone()).tolist() == [1, 1, 1]
    summed = group.all_reduce(mine)
    assert summed.tolist() == [3, 3, 3]
    assert summed.device == torch.device("npu", rank)
    group.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
