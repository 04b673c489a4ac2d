"""From a ScheduleBatch to what the model sees, by way of one slot per request.

Shapes: T scheduled tokens, R requests, B blocks per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.base import Array, DeviceBackend
from engine.layers.slot import Slot
from engine.messages import NewRequest, Running, ScheduleBatch

# What a step wants on the device beside the model's own input, by name; see device_sampler.
ExtraArrays = Callable[[list[Slot]], dict[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSpan:
    """Tokens of a prompt, from position `start` on, whose log probabilities a step is to find."""

    slot: Slot
    start: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One step as the model sees it."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor  # int64, index into T: a row for each slot that samples, then a
    # row for each token of each scored span
    sampling: tuple[Slot, ...]
    scored: tuple[ScoredSpan, ...]
    attention: AttentionMetadata
    extra: dict[str, torch.Tensor]  # what ExtraArrays asked for


class SlotTable:
    """The requests that this worker knows, and the buffers of its steps."""

    def __init__(
        self,
        backend: DeviceBackend,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._backend = backend
        self._block_size = block_size
        self._slots: dict[int, Slot] = {}
        self._max_num_seqs = max_num_seqs
        self._free_places = list(range(max_num_seqs))
        self._input_ids = np.zeros(max_num_batched_tokens, np.int64)
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._slot_mapping = np.zeros(
            max_num_batched_tokens, np.int32 if backend.slot_dtype is torch.int32 else np.int64
        )

    def prepare(self, batch: ScheduleBatch, extra_arrays: ExtraArrays) -> ModelInput:
        """Take in the differences, write the step into the buffers, and upload it.

        The input id of a token that the host does not know yet is left to LastTokens.
        """
        for uid in (*batch.preempted, *batch.finished):
            self._forget(uid)
        scheduled = self._take_in(batch)
        query_lens: list[int] = []
        seq_lens: list[int] = []
        sample_rows: list[int] = []
        scored_rows: list[int] = []
        sampling: list[Slot] = []
        scored: list[ScoredSpan] = []
        fed: list[tuple[int, int]] = []
        end = 0
        for slot, count in scheduled:
            start, end = end, end + count
            self._write_tokens(slot, count, start)
            span = _scored_span(slot, count)
            if span is not None:
                scored_rows += range(start, start + len(span.token_ids))
                scored.append(span)
            slot.num_computed_tokens += count
            if slot.num_computed_tokens > len(slot.token_ids):
                fed.append((end - 1, slot.place))
            query_lens.append(count)
            seq_lens.append(slot.num_computed_tokens)
            if slot.is_sampling:
                sample_rows.append(end - 1)
                sampling.append(slot)
        tensors = self._backend.upload(
            {
                "input_ids": self._input_ids[:end],
                "positions": self._positions[:end],
                "logit_rows": np.array(sample_rows + scored_rows, np.int64),
                "slot_mapping": self._slot_mapping[:end],
                "block_tables": _pad([slot.block_ids for slot, _ in scheduled]),
                "seq_lens": np.array(seq_lens, np.int32),
                **_feeding(fed),
                **extra_arrays(sampling),
            }
        )
        return ModelInput(
            input_ids=tensors.pop("input_ids"),
            positions=tensors.pop("positions"),
            logit_rows=tensors.pop("logit_rows"),
            sampling=tuple(sampling),
            scored=tuple(scored),
            attention=AttentionMetadata(
                query_lens=query_lens,
                seq_lens=seq_lens,
                slot_mapping=tensors.pop("slot_mapping"),
                block_tables=tensors.pop("block_tables"),
                seq_lens_tensor=tensors.pop("seq_lens"),
            ),
            extra=tensors,
        )

    def clear(self) -> None:
        """Forget every request."""
        self._slots.clear()
        self._free_places = list(range(self._max_num_seqs))

    def _forget(self, uid: int) -> None:
        slot = self._slots.pop(uid, None)
        if slot is not None:
            self._free_places.append(slot.place)

    def _take_in(self, batch: ScheduleBatch) -> list[tuple[Slot, int]]:
        scheduled = [self._known(item) for item in batch.running]
        scheduled += [self._add(item) for item in batch.new]
        return scheduled

    def _known(self, item: Running) -> tuple[Slot, int]:
        slot = self._slots[item.uid]
        slot.block_ids.extend(item.new_block_ids)
        return slot, item.num_scheduled_tokens

    def _add(self, item: NewRequest) -> tuple[Slot, int]:
        slot = Slot(
            uid=item.uid,
            token_ids=list(item.token_ids),
            num_prompt_tokens=item.num_prompt_tokens,
            num_computed_tokens=item.num_computed_tokens,
            block_ids=list(item.block_ids),
            sampler=item.sampler,
            place=self._free_places.pop(),
        )
        self._slots[item.uid] = slot
        return slot, item.num_scheduled_tokens

    def _write_tokens(self, slot: Slot, count: int, start: int) -> None:
        first = slot.num_computed_tokens
        positions = np.arange(first, first + count)
        known = slot.token_ids[first : first + count]
        self._input_ids[start : start + len(known)] = known
        self._input_ids[start + len(known) : start + count] = 0
        self._positions[start : start + count] = positions
        blocks = np.asarray(slot.block_ids)[positions // self._block_size]
        self._slot_mapping[start : start + count] = (
            blocks * self._block_size + positions % self._block_size
        )


def _scored_span(slot: Slot, count: int) -> ScoredSpan | None:
    """Return what the next `count` tokens say about the prompt: each scores the one after it."""
    if slot.sampler.prompt_logprobs is None:
        return None
    start = slot.num_computed_tokens + 1
    token_ids = slot.token_ids[start : min(start + count, slot.num_prompt_tokens)]
    return ScoredSpan(slot=slot, start=start, token_ids=token_ids) if token_ids else None


def _feeding(fed: list[tuple[int, int]]) -> dict[str, Array]:
    """Return which input ids come from which place of LastTokens; nothing where all are known."""
    if not fed:
        return {}
    rows, places = zip(*fed, strict=True)
    return {"fed_rows": np.array(rows, np.int64), "fed_places": np.array(places, np.int64)}


def _pad(tables: list[list[int]]) -> Array:
    width = max(len(table) for table in tables)
    padded = np.zeros((len(tables), width), np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
