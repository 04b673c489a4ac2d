"""A device that computes apart from its host, played on the CPU, with its worker in a thread.

What a step computes is there at once, but the host is told only after it has asked some times, so
the worker launches the next step before. Uploads live in two sets of buffers, and a set that is
read after its time is full of rubbish.
"""

import os
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graphed_cpu import GraphedCpu

from engine.backends.base import Array, Fetched
from engine.backends.cpu import CpuBackend
from engine.worker.channel import Channel
from engine.worker.model_worker import serve
from engine.worker.process import WorkerProcess


class LateNumbers(Fetched):
    """Numbers that are there when one has asked `num_asks` times, or waits."""

    def __init__(self, device: "LateDevice", tensor: torch.Tensor, num_asks: int) -> None:
        self._device = device
        self._numbers = tensor.clone()
        self._num_asks = num_asks

    def is_ready(self) -> bool:
        self._num_asks -= 1
        return self._num_asks < 0

    def numpy(self) -> Array:
        self._device.events.append("fetched")
        if self._device.errors:
            raise self._device.errors.popleft()
        return self._numbers.numpy()


class LateDevice(CpuBackend):
    """The CPU, but not the host."""

    is_host = False

    def __init__(self, num_asks: int = 20) -> None:
        super().__init__()
        self.events: list[str] = []
        self.errors: deque[Exception] = deque()
        self._num_asks = num_asks
        self._sets: deque[dict[str, torch.Tensor]] = deque()

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        self.events.append("upload")
        if len(self._sets) == 2:
            for tensor in self._sets.popleft().values():
                tensor.fill_(1 << 20)
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        self._sets.append(tensors)
        return dict(tensors)

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        return LateNumbers(self, tensor, self._num_asks)


class GraphedLateDevice(LateDevice, GraphedCpu):
    """A late device that replays decode steps."""


class ThreadOfWorker:
    """A worker in a thread, with what WorkerProcess asks of a process."""

    pid = os.getpid()

    def __init__(self, channel: Channel) -> None:
        inherited = Channel.inherited(os.dup(channel.file_descriptor))
        self._thread = threading.Thread(target=serve, args=(inherited,), daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout)
        return 0

    def kill(self) -> None:
        """Nothing ends a thread; the end of its pipe does."""


@contextmanager
def late_device(device: LateDevice) -> Iterator[LateDevice]:
    """Make every engine of device cpu that is opened here run on one late device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.worker.model_runner.load_backend", lambda name: device)
        patch.setattr(WorkerProcess, "_spawn", _spawn)
        yield device


def _spawn(self: Any, theirs: Channel) -> ThreadOfWorker:
    return ThreadOfWorker(theirs)
