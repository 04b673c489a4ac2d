"""The name hccl in torch.distributed, on two simulated devices."""

import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("hccl_rank.py")


def test_two_processes_exchange_tensors_of_two_devices(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), str(rank), str(tmp_path)]) for rank in (0, 1)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
