"""GPUs through torch: its streams, allocator and graphs, and attention in plain torch.

No GPU was at hand when this was written: nothing in this file has run on one. What it is made of
(transfers, gathered attention, decode graphs) is tested on the CPU, and tests/device is the suite
to run where there is a GPU.

Shapes as in base.py.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from engine.backends import cuda_errors, gathered_attention
from engine.backends.accelerator import AcceleratorBackend, GraphPool
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches, Capabilities, CapturedGraph, DeviceHolder
from engine.backends.cuda_devices import describe_device, explain_no_devices, read_holders
from engine.errors import ConfigError, WorkerError, WorkerFailure

logger = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16", "float32")


class CudaGraph(CapturedGraph):
    """One captured decode step. Its kernels read every length from the captured tensors."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Launch it on the current stream."""
        self._graph.replay()
        return self._output


class CudaBackend(AcceleratorBackend):
    """One GPU."""

    name = "cuda"
    dist_backend = "nccl"
    reads_whole_tables = True  # see gathered_attention
    capabilities = Capabilities(dtypes=_DTYPES, default_memory_fraction=0.9)

    def __init__(self) -> None:
        super().__init__(torch.cuda)
        self._graph_pool = GraphPool(torch.cuda)

    # Runtime.

    def holders(self, device_id: int) -> tuple[DeviceHolder, ...]:
        """Ask nvidia-smi who else is on the GPU."""
        return read_holders(str(torch.cuda.get_device_properties(device_id).uuid))

    def check_device(self, device_id: int) -> None:
        """Refuse a device that cannot be had.

        Raises:
            ConfigError: there is no such GPU, or none at all, and why.
            WorkerError: another process holds it.
        """
        if self.count_devices() == 0:
            raise ConfigError(explain_no_devices(os.environ, torch.version.cuda))
        super().check_device(device_id)

    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Take the GPU for this process; say which one of the machine it is.

        Raises:
            WorkerError: the driver does not give it.
        """
        try:
            torch.cuda.set_device(device_id)
            properties = torch.cuda.get_device_properties(device_id)
            torch.cuda.mem_get_info(device_id)  # makes the context, which may be refused
        except RuntimeError as error:
            raise WorkerError(
                f"cuda:{device_id} cannot be bound: {cuda_errors.explain(str(error))}",
                failure=WorkerFailure.START_FAILED,
            ) from error
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = torch.device("cuda", device_id)
        words = describe_device(device_id, properties.name, properties.total_memory, os.environ)
        logger.info("bound %s", words)
        return words

    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Say what kind of trouble an exception is."""
        if isinstance(error, torch.OutOfMemoryError):
            return WorkerFailure.OUT_OF_MEMORY
        return cuda_errors.classify(str(error))

    def explain_error(self, error: BaseException) -> str:
        """Return an exception in words: what it means, and what to do."""
        return f"{type(error).__name__}: {cuda_errors.explain(str(error))}"

    def kernel_facts(self) -> dict[str, str]:
        """Say what compiled kernels and measured numbers depend on besides our own versions."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "cuda": str(torch.version.cuda),
        }

    # Between host and device.

    @property
    def has_graphs(self) -> bool:
        """Return True."""
        return True

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture what run launches, on the stream that computes and will replay it."""
        graph = torch.cuda.CUDAGraph()
        stream: Any = self._transfers.compute  # one that torch.cuda has made
        with torch.cuda.graph(
            graph,
            pool=self._graph_pool.handle,
            stream=stream,
            # Other threads, such as that of nccl, may go on asking the device meanwhile.
            capture_error_mode="thread_local",
        ):
            output = run()
        captured = CudaGraph(graph, output)
        self._graph_pool.keep(captured)
        return captured

    # Kernels.

    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend in plain torch to gathered blocks."""
        return gathered_attention.attend(query, caches, metadata, options)
