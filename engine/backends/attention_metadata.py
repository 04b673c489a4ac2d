"""What attention is told about a step, and about a layer.

Shapes: T scheduled tokens, R requests, B blocks per row, H query heads.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step as attention sees it. Lists are on the host, tensors on the device."""

    query_lens: list[int]  # R, tokens of each request in this step
    seq_lens: list[int]  # R, computed and scheduled tokens of each request
    slot_mapping: torch.Tensor  # [T] in the backend's slot_dtype, flat KV slot of each token
    block_tables: torch.Tensor  # [R, B] int32, rows padded with 0
    seq_lens_tensor: torch.Tensor  # [R] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer asks of attention beside the tensors."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [H], one extra logit for each head
