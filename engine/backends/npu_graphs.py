"""Captured decode steps of an NPU: torch.npu.NPUGraph, with the lengths of each step put in anew.

Attention takes lengths from the host, so a graph would replay those of its capture. torch_npu
captures each such operator as a group of tasks that can be told new ones (auto_dispatch_capture),
and `NPUGraph.update` does it for all of them. Source: torch_npu 2.13.0, documentation of
NpuGraphOpHandler, and its own test of the update. No graph has been captured or replayed on a card.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.backends.accelerator import GraphPool
from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.base import CapturedGraph
from engine.backends.npu_attention import KV_LENGTHS


class NpuGraph(CapturedGraph):
    """One captured decode step of a fixed number of rows."""

    def __init__(self, graph: Any, output: torch.Tensor, current_stream: Callable[[], Any]) -> None:
        self._graph = graph
        self._output = output
        self._current_stream = current_stream
        self._last_replay: Any = None  # an event

    def replay(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Do the step again; metadata has a length for each captured row, padding included.

        The lengths are written into the graph itself. So the host waits for the replay before,
        which may be running with other ones; nothing says that an update would wait for it.
        """
        if self._last_replay is not None:
            self._last_replay.synchronize()
        # One dictionary serves all layers, and an operator takes the name that it knows.
        self._graph.update(cpu_update_input=[dict.fromkeys(KV_LENGTHS, list(metadata.seq_lens))])
        self._graph.replay()
        self._last_replay = self._current_stream().record_event()
        return self._output


class GraphCapture:
    """Captures graphs that share one pool of memory."""

    def __init__(self, npu: Any, stream: Any) -> None:
        """Take torch.npu, and the stream that computes and will replay."""
        self._npu = npu
        self._stream = stream
        self._pool = GraphPool(npu)

    def capture(self, run: Callable[[], torch.Tensor]) -> NpuGraph:
        """Capture what run launches."""
        graph = self._npu.NPUGraph()
        with self._npu.graph(
            graph, pool=self._pool.handle, stream=self._stream, auto_dispatch_capture=True
        ):
            output = run()
        captured = NpuGraph(graph, output, self._npu.current_stream)
        self._pool.keep(captured)
        return captured
