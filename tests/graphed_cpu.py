"""The CPU as a device with graphs: a replay runs the captured function again, on the same tensors.

What a real graph cannot see, these do not see either: a captured function is called without
arguments, and the lengths on the host are those of its capture (as on CUDA) or are put in anew by
the replay (as on an NPU). What asks the device for a number cannot be captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends import gathered_attention
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches, CapturedGraph
from engine.backends.cpu import CpuBackend
from engine.backends.reference import reference_attention

_ASKING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}


class Capturing(TorchDispatchMode):
    """Refuses what would make the host wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKING:
            raise RuntimeError(f"{func} is not permitted when the stream is capturing")
        return func(*args, **(kwargs or {}))


class RunAgain(CapturedGraph):
    def __init__(self, backend: "GraphedCpu", run: Callable[[], torch.Tensor]) -> None:
        self._backend = backend
        self._run = run
        with Capturing():
            self._output = run().clone()

    def replay(self, metadata: AttentionMetadata) -> torch.Tensor:
        self._backend.replayed = metadata
        self._backend.num_replays += 1
        try:
            return self._output.copy_(self._run())
        finally:
            self._backend.replayed = None


class GraphedCpu(CpuBackend):
    """Reads lengths of decode rows from tensors alone, as cuda does."""

    has_graphs = True
    reads_whole_tables = True

    def __init__(self) -> None:
        super().__init__()
        self.replayed: AttentionMetadata | None = None
        self.num_replays = 0

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        return RunAgain(self, run)

    def write_kv(self, states: Caches, caches: Caches, slot_mapping: torch.Tensor) -> None:
        assert slot_mapping.dtype == self.slot_dtype
        assert len(slot_mapping.unique()) == len(slot_mapping), "two tokens in one slot"
        super().write_kv(states, caches, slot_mapping.long())

    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        return gathered_attention.attend(query, caches, metadata, options)


class GraphedCpuWithHostLengths(GraphedCpu):
    """Takes lengths from the host, and those of a replayed step from its metadata, as npu does."""

    reads_whole_tables = False
    slot_dtype = torch.int32

    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        told = self.replayed or metadata
        assert sum(told.query_lens) == len(query)
        assert metadata.block_tables.is_contiguous()
        seen = AttentionMetadata(
            query_lens=told.query_lens,
            seq_lens=told.seq_lens,
            slot_mapping=metadata.slot_mapping,
            block_tables=metadata.block_tables,
            seq_lens_tensor=metadata.seq_lens_tensor,
        )
        return reference_attention(query, caches, seen, options)
