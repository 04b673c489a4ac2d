"""What GPUs and NPUs share: torch_npu keeps the interface of torch.cuda.

Nothing of it has run on a card; see cuda.py and npu.py for what they rest on.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch

from engine.backends.base import (
    Array,
    CapturedGraph,
    DeviceBackend,
    Fetched,
    MemoryInfo,
)
from engine.backends.transfers import StreamTransfers


class AcceleratorBackend(DeviceBackend):
    """A device with memory, streams and an allocator of its own."""

    def __init__(self, api: Any) -> None:
        """Take torch.cuda or torch.npu; `bind` of the subclass sets the device."""
        self._api = api
        self._device: torch.device | None = None

    def count_devices(self) -> int:
        """Return how many devices the environment leaves to this process."""
        return int(self._api.device_count())

    @property
    def device(self) -> torch.device:
        """The bound device."""
        assert self._device is not None, "bind comes first"
        return self._device

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""
        self._api.synchronize(self.device)

    def memory_info(self) -> MemoryInfo:
        """Return the memory that is free, for others or in our own allocator, and the total.

        The driver counts as used what the allocator keeps, which this process can use again. With
        expandable segments, an NPU's empty_cache gives nothing of it back.
        """
        free_bytes, total_bytes = self._api.mem_get_info(self.device)
        kept_bytes = self._api.memory_reserved(self.device)
        kept_bytes -= self._api.memory_allocated(self.device)
        return MemoryInfo(free_bytes=free_bytes + kept_bytes, total_bytes=total_bytes)

    def release_memory(self) -> None:
        """Give back what the allocator keeps for later."""
        self._api.empty_cache()

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Run something; return the most bytes that it held beyond what was held before."""
        self.synchronize()
        self._api.reset_peak_memory_stats(self.device)
        before = int(self._api.memory_allocated(self.device))
        run()
        self.synchronize()
        peak = int(self._api.max_memory_allocated(self.device))
        self.release_memory()
        return peak - before

    @cached_property
    def _transfers(self) -> StreamTransfers:
        return StreamTransfers(self._api, self.device)

    def computing(self) -> AbstractContextManager[None]:
        """Put what is launched in this context on the stream that computes."""
        return self._transfers.computing()

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Bring a step's arrays to the device, on a stream of their own."""
        return self._transfers.upload(arrays)

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Begin to bring a small tensor to the host, on a stream of its own."""
        return self._transfers.fetch(tensor)


class GraphPool:
    """The memory that graphs share: no two run at a time, and an output is used before the next.

    It ends with the last graph that has memory in it.
    """

    def __init__(self, api: Any) -> None:
        """Take torch.cuda or torch.npu."""
        self._api = api
        self._handle: Any = None
        self._graphs: WeakSet[CapturedGraph] = WeakSet()

    @property
    def handle(self) -> Any:
        """What the next capture is to be given."""
        if not self._graphs:
            self._handle = self._api.graph_pool_handle()
        return self._handle

    def keep(self, graph: CapturedGraph) -> None:
        """Note that a graph has memory in the pool as long as it lives."""
        self._graphs.add(graph)
