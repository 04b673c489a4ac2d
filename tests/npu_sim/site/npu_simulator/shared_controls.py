"""The controls of processes that were started with NPU_SIM_CONTROLS naming a file."""

import ctypes
import mmap
from pathlib import Path

from npu_simulator.acl import Controls


def make_shared_controls(path: Path) -> Controls:
    """Make the file, and return what its processes will share."""
    with path.open("w+b") as file:
        file.truncate(ctypes.sizeof(Controls))
        memory = mmap.mmap(file.fileno(), ctypes.sizeof(Controls))
    return Controls.from_buffer(memory)
