"""Attention of every layer of one model, over one KV pool.

A model's attention modules hold this object and call it with their layer's number; the step's
metadata is set by the runner for the length of one forward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import DeviceBackend
from engine.backends.reference import attend_without_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Heads and widths of one layer's keys and values, and how far back a token sees."""

    num_key_heads: int
    key_width: int
    num_value_heads: int
    value_width: int
    sliding_window: int | None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in this layer."""
        numbers = self.num_key_heads * self.key_width + self.num_value_heads * self.value_width
        return numbers * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What a layer asked for in a trial, and what it got."""

    layer_index: int
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as in PagedAttention.forward
    options: AttentionOptions
    attended: torch.Tensor


class PagedAttention:
    """Writes a layer's new keys and values, then attends to all of them."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._metadata: AttentionMetadata | None = None
        self._recorded: dict[int, LayerShape] | None = None
        self._tried: list[AttentionCall] | None = None
        self._answer: torch.Tensor | None = None

    def bind_caches(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Use these KV caches, one pair for each layer."""
        self._caches = caches

    @contextmanager
    def step(self, metadata: AttentionMetadata) -> Iterator[None]:
        """Serve one forward pass with this metadata."""
        self._metadata = metadata
        try:
            yield
        finally:
            self._metadata = None

    @contextmanager
    def recording(self) -> Iterator[dict[int, LayerShape]]:
        """Serve one forward pass without a cache; yield what each layer asked for.

        This is how the KV pool learns its layout from any model.
        """
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def trial(self, answer: torch.Tensor | None = None) -> Iterator[list[AttentionCall]]:
        """Serve passes over the tokens of one request, without a cache; yield what was asked for.

        This is how two layers are compared before there is a KV pool. The second is given the
        answer of the first: attention can make much of a last bit.
        """
        self._tried, self._answer = [], answer
        try:
            yield self._tried
        finally:
            self._tried = self._answer = None

    def forward(
        self,
        layer_index: int,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend query [T, H, D], key [T, G, D], value [T, G, E]; return [T, H, E]."""
        query, key, value = states
        if self._recorded is not None:
            self._backend.check_attention(states, options)
            self._recorded[layer_index] = LayerShape(
                num_key_heads=key.shape[1],
                key_width=key.shape[2],
                num_value_heads=value.shape[1],
                value_width=value.shape[2],
                sliding_window=options.sliding_window,
            )
            return query.new_zeros(*query.shape[:2], value.shape[2])
        if self._tried is not None:
            attended = self._answer
            if attended is None:
                attended = attend_without_cache(states, options)
            self._tried.append(
                AttentionCall(
                    layer_index=layer_index, states=states, options=options, attended=attended
                )
            )
            return attended
        assert self._metadata is not None, "a forward pass outside of step()"
        caches = self._caches[layer_index]
        self._backend.write_kv((key, value), caches, self._metadata.slot_mapping)
        return self._backend.attention(query, caches, self._metadata, options)
