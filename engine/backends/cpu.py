"""The CPU: torch for matrix products, our own kernel for attention to the paged cache."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numba
import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import (
    Array,
    Caches,
    Capabilities,
    DeviceBackend,
    Fetched,
    MemoryInfo,
)
from engine.backends.cpu_attention import attend
from engine.backends.cpu_kernels import keep_kernels
from engine.backends.host_memory import host_memory
from engine.backends.row_exact import RowExactMode
from engine.errors import WorkerFailure


class _InHostMemory(Fetched):
    """A tensor that never was anywhere else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def numpy(self) -> Array:
        """Return its memory."""
        return self._tensor.numpy()


class CpuBackend(DeviceBackend):
    """One process on the cores that the operating system allows it."""

    name = "cpu"
    is_host = True
    dist_backend = "gloo"
    capabilities = Capabilities(dtypes=("float32", "bfloat16"), default_memory_fraction=0.25)

    def __init__(self) -> None:
        self._row_exact_mode = RowExactMode()
        self._is_row_exact = False

    def count_devices(self) -> int:
        """Return 1: all cores are one device."""
        return 1

    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Set the number of threads; the CPU has one device, number 0."""
        cores = len(os.sched_getaffinity(0))
        threads = min(num_threads or cores, cores)
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.get_num_threads()))
        return f"cpu ({threads} threads)"

    @property
    def device(self) -> torch.device:
        """The one CPU device."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing: every operation is done when it returns."""

    def memory_info(self) -> MemoryInfo:
        """Return the memory that the host, or the container, could give away."""
        free_bytes, total_bytes = host_memory()
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Tell a failed allocation from everything else."""
        is_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return WorkerFailure.OUT_OF_MEMORY if is_memory else WorkerFailure.OTHER

    def kernel_facts(self) -> dict[str, str]:
        """Return the kind of processor; numba tells its own cache the model."""
        capability = torch.backends.cpu.get_cpu_capability()
        return {"device": f"cpu {platform.machine()} {capability}"}

    def keep_kernels(self, folder: Path) -> None:
        """Keep the machine code of attention."""
        keep_kernels(folder)

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return the arrays' own memory: a step ends before the next is written."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Return what is there already."""
        return _InHostMemory(tensor)

    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend by the kernels of this machine, which of them see cpu_attention."""
        return attend(query, caches, metadata, options, is_row_exact=self._is_row_exact)

    @contextmanager
    def row_exact(self) -> Iterator[None]:
        """Serve forward passes in which a row's bits depend on that row's own tokens only."""
        self._is_row_exact = True
        try:
            with self._row_exact_mode:
                yield
        finally:
            self._is_row_exact = False
