"""The memory of the KV cache: how many blocks fit, and the tensors themselves."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.backends.base import DeviceBackend
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.layers.paged_attention import LayerShape

logger = logging.getLogger(__name__)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What the size of the pool depends on beside the memory that is free.

    max_useful_tokens is what the largest batch can ever hold; more memory would lie idle.
    reserved_bytes are what a step takes beside the pool. num_sharing_ranks is how many ranks have
    a pool in the memory of this one device.
    """

    block_size: int
    max_useful_tokens: int
    reserved_bytes: int = 0
    num_sharing_ranks: int = 1


def count_blocks(
    config: CacheConfig,
    layouts: tuple[LayerShape, ...],
    dtype: torch.dtype,
    backend: DeviceBackend,
    limits: PoolLimits,
) -> int:
    """Decide the number of KV blocks, and log why.

    Raises:
        ConfigError: not even one block fits, or not what the configuration names, with numbers.
        WorkerError: what the configuration names would fit if others used less.
    """
    num_sharing_ranks = limits.num_sharing_ranks
    block_bytes = limits.block_size * sum(layout.bytes_per_token(dtype) for layout in layouts)
    if config.num_blocks is not None:
        backend.check_memory(
            config.num_blocks * block_bytes * num_sharing_ranks + limits.reserved_bytes,
            f"engine.cache.num_blocks {config.num_blocks}, {block_bytes} bytes each",
        )
        logger.info("kv cache: num_blocks=%d as configured", config.num_blocks)
        return config.num_blocks
    memory = backend.memory_info()
    free_bytes = max(memory.free_bytes - limits.reserved_bytes, 0) // num_sharing_ranks
    fraction = config.memory_fraction or backend.capabilities.default_memory_fraction
    if config.kv_cache_gib is not None:
        room_bytes = int(config.kv_cache_gib * _GIB) // num_sharing_ranks
        reason = f"kv_cache_gib={config.kv_cache_gib}"
    else:
        room_bytes = int(free_bytes * fraction)
        reason = f"{fraction:.2f} of {free_bytes / _GIB:.2f} GiB free"
    if limits.reserved_bytes:
        reason += f", {limits.reserved_bytes / _GIB:.2f} GiB left to the largest step"
    if num_sharing_ranks > 1:
        reason += f", for one of {num_sharing_ranks} ranks"
    if room_bytes > free_bytes or room_bytes < block_bytes:
        raise ConfigError(
            f"no room for the KV cache: {reason} gives {room_bytes} bytes, one block takes "
            f"{block_bytes}, and {memory.free_bytes} of {memory.total_bytes} bytes are free; "
            "change engine.cache.kv_cache_gib or engine.cache.memory_fraction"
        )
    useful = -(-limits.max_useful_tokens // limits.block_size)
    num_blocks = min(room_bytes // block_bytes, useful)
    logger.info(
        "kv cache: num_blocks=%d block_bytes=%d (%s; the largest batch needs %d)",
        num_blocks,
        block_bytes,
        reason,
        useful,
    )
    return num_blocks


def run_largest_step(
    logits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    device: torch.device,
    config: SchedulerConfig,
    max_model_len: int,
) -> None:
    """Run a step of the most tokens, and what sampling the most rows takes, to see its memory.

    logits runs the model without a cache: tokens [T] at positions [T] to logits of rows [R].
    """
    num_tokens = config.max_num_batched_tokens
    positions = torch.arange(num_tokens, device=device) % max_model_len
    rows = torch.arange(config.max_num_seqs, device=device)
    logits(torch.zeros_like(positions), positions, rows).float().softmax(dim=-1).cumsum(dim=-1)


def allocate_pool(
    num_blocks: int,
    block_size: int,
    layouts: tuple[LayerShape, ...],
    dtype: torch.dtype,
    backend: DeviceBackend,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return key and value memory of each layer, [num_blocks, block_size, heads, width]."""
    return [
        (
            backend.allocate_kv(
                (num_blocks, block_size, layout.num_key_heads, layout.key_width), dtype
            ),
            backend.allocate_kv(
                (num_blocks, block_size, layout.num_value_heads, layout.value_width), dtype
            ),
        )
        for layout in layouts
    ]
