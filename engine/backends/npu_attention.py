"""Paged attention by CANN's fused operator: one call a layer for prefill and decode rows alike.

Source: torch_npu 2.13.0, documentation of npu_fused_infer_attention_score, its v2, and
npu_scatter_pa_kv_cache. Only meta kernels and our reading of it have been run.

Shapes: T scheduled tokens, R requests, B blocks per row, N blocks in the pool, S block size,
H query heads, G key-value heads, D width of a head.
"""

from itertools import accumulate
from typing import Any

import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches
from engine.backends.npu_capabilities import MAX_REQUESTS
from engine.errors import ConfigError

# The names under which a captured graph takes the lengths of a step, see npu_graphs.
KV_LENGTHS = ("actual_seq_lengths_kv", "actual_seq_kvlen")

_MASK_SIZE = 2048  # whatever the lengths are
_CAUSAL = 3  # rows count from the end: the last query sees the last key
_BAND = 4  # the same, and no further back than pre_tokens
_EVERYTHING = 2**31 - 1


class FusedAttention:
    """Calls the operator of `ops`, which is torch_npu, on one device."""

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops = ops
        mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8).triu_(1)
        self._mask = mask.to(device)  # 1 where a query must not look
        self._metadata: AttentionMetadata | None = None
        self._query_ends: list[int] = []

    def write(self, states: Caches, caches: Caches, slot_mapping: torch.Tensor) -> None:
        """Write keys and values [T, G, D] to their slots; the slots [T] int32 are unique."""
        keys, values = (state.contiguous() for state in states)
        self._ops.npu_scatter_pa_kv_cache(keys, values, *caches, slot_mapping, cache_mode="Norm")

    def attend(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend query [T, H, D] to caches [N, S, G, D]; return [T, H, D]."""
        num_blocks, block_size, num_kv_heads, _ = caches[0].shape
        # Positional, for torch_npu's capture looks for them there.
        tensors = (
            query.contiguous(),
            *(cache.view(num_blocks, block_size, -1) for cache in caches),
        )
        window = _window(options)
        query_ends = self._ends(metadata)
        if options.sinks is None:
            output = self._ops.npu_fused_infer_attention_score(
                *tensors,
                atten_mask=self._mask,
                actual_seq_lengths=query_ends,
                actual_seq_lengths_kv=metadata.seq_lens,
                block_table=metadata.block_tables,
                num_heads=query.shape[1],
                num_key_value_heads=num_kv_heads,
                scale=options.scale,
                input_layout="TND",
                block_size=block_size,
                **window,
            )
        else:
            output = self._ops.npu_fused_infer_attention_score_v2(
                *tensors,
                atten_mask=self._mask,
                actual_seq_qlen=query_ends,
                actual_seq_kvlen=metadata.seq_lens,
                block_table=metadata.block_tables,
                learnable_sink=options.sinks,
                num_query_heads=query.shape[1],
                num_key_value_heads=num_kv_heads,
                softmax_scale=options.scale,
                input_layout="TND",
                block_size=block_size,
                **window,
            )
        return as_tensor(output[0])

    def _ends(self, metadata: AttentionMetadata) -> list[int]:
        """Return where each request's queries end; computed once a step, not once a layer."""
        if metadata is not self._metadata:
            if len(metadata.query_lens) > MAX_REQUESTS:
                raise ConfigError(
                    f"a step has {len(metadata.query_lens)} requests, but attention on an NPU "
                    f"takes {MAX_REQUESTS}; lower engine.scheduler.max_num_seqs"
                )
            self._query_ends = list(accumulate(metadata.query_lens))
            self._metadata = metadata
        return self._query_ends


def as_tensor(result: Any) -> torch.Tensor:
    """Say what an operator of torch_npu returns, which comes without types."""
    assert isinstance(result, torch.Tensor)
    return result


def _window(options: AttentionOptions) -> dict[str, int]:
    """Return how far a query looks.

    pre_tokens counts the keys before the query's own, so a window of W keys, itself among them,
    is W - 1. Source: the masks that the operator's own tests compare with, tril(-pre_tokens - 1).
    """
    if options.sliding_window is None:
        return {"sparse_mode": _CAUSAL, "pre_tokens": _EVERYTHING, "next_tokens": _EVERYTHING}
    return {
        "sparse_mode": _BAND,
        "pre_tokens": options.sliding_window - 1,
        "next_tokens": 0,
    }
