"""Decode steps captured once, for each batch size, and replayed without launching their kernels.

How a runner uses it, with `forward` the part of a step between its input and its logits:

    graphs = DecodeGraphs(backend, forward, limits)   # where backend.has_graphs, and not eager
    graphs.capture()                                  # when the pool is allocated and bound
    logits = graphs.replay(step)                      # None: call forward(step) instead

Only steps in which each request has one token are replayed. A step of R requests takes the next
captured size; its padding rows are one token long and have a place of their own in spare blocks,
which lie behind the pool's blocks and belong to no request (count_spare_blocks).

A graph reads tensors that never move. They are filled from the step's tensors on the device, so
nothing more crosses from the host than without graphs.

How wide the captured block tables are depends on what the device's attention reads. Where it takes
the lengths from the host (NPU), a table may be as wide as the longest request, and there is one
graph for each size. Where it gathers every block of a table (DeviceBackend.reads_whole_tables), a
long table costs as much as a long text: there is one graph for each size and width, the widths four
times apart. Every graph is captured at the start, none when it is first wanted: what cannot be
captured comes out before the first batch, and no graph asks for memory that the pool has taken.

Shapes: R rows, B blocks per row, V vocabulary.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.base import CapturedGraph, DeviceBackend
from engine.errors import ConfigError, WorkerFailure
from engine.layers.model_input import ModelInput

logger = logging.getLogger(__name__)

Forward = Callable[[ModelInput], torch.Tensor]  # from a step to the logits of its logit_rows

_FIRST_SIZES = (1, 2, 4)
_SMALL_STEP, _LARGE_STEP = 8, 16
_SMALL_UP_TO = 256  # beyond it a step of 16 wastes as little
_NARROWEST_TOKENS = 512
_WIDTH_FACTOR = 4


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the captured batch sizes, ascending; the last one is max_num_seqs itself."""
    sizes = [
        *_FIRST_SIZES,
        *range(_SMALL_STEP, _SMALL_UP_TO + 1, _SMALL_STEP),
        *range(_SMALL_UP_TO + _LARGE_STEP, max_num_seqs, _LARGE_STEP),
    ]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def table_widths(max_num_blocks: int, block_size: int, *, is_narrow_cheaper: bool) -> list[int]:
    """Return the captured widths of block tables, ascending; the last one is max_num_blocks."""
    widths = []
    width = -(-_NARROWEST_TOKENS // block_size)
    while is_narrow_cheaper and width < max_num_blocks:
        widths.append(width)
        width *= _WIDTH_FACTOR
    return [*widths, max_num_blocks]


def count_spare_blocks(max_num_seqs: int, block_size: int) -> int:
    """Return the KV blocks beyond the pool that give each padding row a slot of its own."""
    return -(-max_num_seqs // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """What the captured shapes depend on."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int  # of the pool; the spare ones come behind

    @property
    def max_request_blocks(self) -> int:
        """Most blocks of one request."""
        return min(-(-self.max_model_len // self.block_size), self.num_blocks)


class _StaticInput:
    """The tensors that graphs read, each of them a beginning of these rows."""

    def __init__(self, limits: GraphLimits, widths: list[int], backend: DeviceBackend) -> None:
        num_rows, block_size, device = limits.max_num_seqs, limits.block_size, backend.device
        rows = torch.arange(num_rows, device=device)
        self.input_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.ones(num_rows, dtype=torch.int32, device=device)
        self.logit_rows = rows
        self._spare_slots = (limits.num_blocks * block_size + rows).to(backend.slot_dtype)
        self._spare_blocks = (limits.num_blocks + rows // block_size).int()[:, None]
        self.slot_mapping = self._spare_slots.clone()
        # One for each width, so that the rows of each lie side by side.
        self.tables = {width: self._spare_blocks.repeat(1, width) for width in widths}

    def step(self, size: int, width: int, seq_lens: list[int]) -> ModelInput:
        """Return the first `size` rows as a step."""
        return ModelInput(
            input_ids=self.input_ids[:size],
            positions=self.positions[:size],
            logit_rows=self.logit_rows[:size],
            sampling=(),
            scored=(),
            attention=AttentionMetadata(
                query_lens=[1] * size,
                seq_lens=seq_lens,
                slot_mapping=self.slot_mapping[:size],
                block_tables=self.tables[width][:size],
                seq_lens_tensor=self.seq_lens[:size],
            ),
            extra={},
        )

    def fill(self, step: ModelInput, size: int, width: int) -> None:
        """Write a step into the first rows, and padding into the rest of `size`.

        What is left of earlier steps in a row's table lies behind its length.
        """
        attention = step.attention
        count = len(attention.seq_lens)
        tables = self.tables[width]
        used = min(attention.block_tables.shape[1], width)
        self.input_ids[:count].copy_(step.input_ids)
        self.positions[:count].copy_(step.positions)
        self.slot_mapping[:count].copy_(attention.slot_mapping)
        self.seq_lens[:count].copy_(attention.seq_lens_tensor)
        tables[:count, :used].copy_(attention.block_tables[:, :used])
        if count < size:
            self.input_ids[count:size].zero_()
            self.positions[count:size].zero_()
            self.slot_mapping[count:size].copy_(self._spare_slots[count:size])
            self.seq_lens[count:size].fill_(1)
            tables[count:size, :1].copy_(self._spare_blocks[count:size])


class DecodeGraphs:
    """The captured graphs of one model, its pool and its device."""

    def __init__(self, backend: DeviceBackend, forward: Forward, limits: GraphLimits) -> None:
        self._backend = backend
        self._forward = forward
        self._limits = limits
        self._sizes = capture_sizes(limits.max_num_seqs)
        self._widths = table_widths(
            limits.max_request_blocks,
            limits.block_size,
            is_narrow_cheaper=backend.reads_whole_tables,
        )
        self._input = _StaticInput(limits, self._widths, backend)
        self._graphs: dict[tuple[int, int], CapturedGraph] = {}
        self.num_replayed = 0
        self.num_eager_decodes = 0  # steps of one token a request that no graph was found for

    @torch.inference_mode()
    def capture(self) -> None:
        """Run and capture a step of each size and width, the largest first: it takes most memory.

        Raises:
            ConfigError: the model cannot be captured, or there is no memory for it.
        """
        shapes = [(size, width) for width in self._widths[::-1] for size in self._sizes[::-1]]
        logger.info(
            "capturing %d graphs of decode steps; this takes a while, and engine.enforce_eager "
            "does without (batch sizes %s; block tables %s wide)",
            len(shapes),
            self._sizes,
            self._widths,
        )
        started = time.perf_counter()
        free_bytes = self._backend.memory_info().free_bytes
        with self._backend.computing():
            for size, width in shapes:
                self._graphs[size, width] = self._capture_one(size, width)
        self._backend.synchronize()
        taken = free_bytes - self._backend.memory_info().free_bytes
        logger.info(
            "captured %d graphs of decode steps seconds=%.1f memory_mib=%.0f",
            len(shapes),
            time.perf_counter() - started,
            taken / (1 << 20),
        )

    def _capture_one(self, size: int, width: int) -> CapturedGraph:
        # The longest lengths, so that a workspace that depends on them suits every step.
        longest = width * self._limits.block_size
        self._input.seq_lens[:size].fill_(longest)
        run = partial(self._forward, self._input.step(size, width, [longest] * size))
        try:
            run()
            return self._backend.capture_graph(run)
        except ConfigError:
            raise
        except Exception as error:
            kind = self._backend.classify_error(error)
            if kind in (WorkerFailure.DEVICE_LOST, WorkerFailure.TIMEOUT):
                raise
            remedy = "set engine.enforce_eager to true"
            if kind is WorkerFailure.OUT_OF_MEMORY:
                remedy = "lower engine.cache.memory_fraction or engine.scheduler.max_num_seqs, or "
                remedy += "set engine.enforce_eager to true"
            raise ConfigError(
                f"a decode step of {size} requests cannot be captured as a graph: "
                f"{self._backend.explain_error(error)}; {remedy}"
            ) from error

    @torch.inference_mode()
    def replay(self, step: ModelInput) -> torch.Tensor | None:
        """Return the step's logits, or None where it must be run kernel by kernel.

        They lie in memory of the graph: good until the next replay, and free to be changed.
        """
        shape = self._shape_for(step.attention)
        if shape is None:
            return None
        size, width = shape
        self._input.fill(step, size, width)
        seq_lens = step.attention.seq_lens
        padded = self._input.step(size, width, seq_lens + [1] * (size - len(seq_lens)))
        logits = self._graphs[shape].replay(padded.attention)  # [size, V]
        self.num_replayed += 1
        if len(step.sampling) == len(seq_lens):  # then none is scored: it would have more tokens
            return logits[: len(seq_lens)]
        # A copy: prompt tokens are scored from it when the next step may have been replayed.
        return logits.index_select(0, step.logit_rows)

    def _shape_for(self, attention: AttentionMetadata) -> tuple[int, int] | None:
        """Return the smallest captured size and width that hold a step."""
        if any(query_len != 1 for query_len in attention.query_lens):
            return None
        num_blocks = -(-max(attention.seq_lens) // self._limits.block_size)
        size = next((size for size in self._sizes if size >= len(attention.seq_lens)), None)
        width = next((width for width in self._widths if width >= num_blocks), None)
        if size is None or width is None or (size, width) not in self._graphs:
            self.num_eager_decodes += 1
            return None
        return size, width

    def release(self) -> None:
        """Let go of the graphs and their memory, before the pool and the model go."""
        logger.info(
            "decode steps: replayed=%d without_a_graph=%d",
            self.num_replayed,
            self.num_eager_decodes,
        )
        self._graphs.clear()
