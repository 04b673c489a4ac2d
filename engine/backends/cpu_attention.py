"""Attention on the CPU: our paged kernel, and torch where it is faster and bits do not matter.

Shapes as in base.py.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
import torch.nn.functional as F

from engine.backends import cpu_kernels
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches
from engine.backends.reference import causal_mask, gather_blocks

# Query tokens that share a walk over the keys. More of them find the keys in the cache of the
# core more often, but leave fewer pieces to share out to the cores.
_TILE_TOKENS = 16
_NO_WINDOW = torch.iinfo(torch.int32).max


def attend(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    is_row_exact: bool,
) -> torch.Tensor:
    """Attend query [T, H, D] as DeviceBackend.attention says; return [T, H, E].

    torch is faster for many tokens of one request, but its bits depend on how many there are.
    """
    is_kernel_only = is_row_exact or options.softcap is not None or options.sinks is not None
    starts = np.cumsum([0, *metadata.query_lens]).tolist()
    by_torch = [row for row, n in enumerate(metadata.query_lens) if n > 1 and not is_kernel_only]
    by_kernel = sorted(set(range(len(metadata.query_lens))) - set(by_torch))
    output = query.new_empty(*query.shape[:2], caches[1].shape[3])
    if by_kernel:
        tiles = _tiles(by_kernel, starts, metadata, caches[0].shape[2])
        output = _run_kernel(query, caches, metadata, options, tiles)
    for row in by_torch:
        start, end = starts[row], starts[row + 1]
        output[start:end] = _attend_by_torch(query[start:end], caches, metadata, options, row)
    return output


def _tiles(
    rows: Sequence[int], starts: Sequence[int], metadata: AttentionMetadata, num_kv_heads: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Cut the tokens of these requests into pieces of work, dear ones first.

    A piece is (row, first token, tokens, position of the first, first KV head, KV heads). A
    single token takes all heads at once, for they lie side by side in memory, unless there are
    too few tokens to keep every core busy.
    """
    has_few = len(rows) < 2 * numba.get_num_threads()
    tiles = []
    for row in rows:
        query_len, seq_len = metadata.query_lens[row], metadata.seq_lens[row]
        step = 1 if query_len > 1 or has_few else num_kv_heads
        for first in range(0, query_len, _TILE_TOKENS):
            count = min(_TILE_TOKENS, query_len - first)
            position = seq_len - query_len + first
            tiles += [
                (row, starts[row] + first, count, position, head, step)
                for head in range(0, num_kv_heads, step)
            ]
    tiles.sort(key=lambda tile: -tile[2] * (tile[3] + tile[2]) * tile[5])
    return np.array(tiles, np.int64)


def _run_kernel(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    tiles: np.ndarray[tuple[int, int], np.dtype[np.int64]],
) -> torch.Tensor:
    """Return [T, H, E]; only the tokens of the tiles are written."""
    num_heads = query.shape[1]
    output = torch.empty(*query.shape[:2], caches[1].shape[3])
    sinks = (
        torch.full((num_heads,), float("-inf")) if options.sinks is None else options.sinks.float()
    )
    is_bfloat16 = caches[0].dtype == torch.bfloat16
    keys, values = (
        (cache.view(torch.uint16) if is_bfloat16 else cache).numpy() for cache in caches
    )
    cpu_kernels.attend(
        query.float().contiguous().numpy(),
        keys,
        values,
        metadata.block_tables.numpy(),
        tiles,
        sinks.numpy(),
        options.scale,
        options.sliding_window or _NO_WINDOW,
        options.softcap or 0.0,
        numba.get_num_threads(),
        output.numpy(),
    )
    return output.to(query.dtype)


def _attend_by_torch(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    row: int,
) -> torch.Tensor:
    """Attend one request's tokens [n, H, D] to its KV; return [n, H, E]."""
    query_len, seq_len = query.shape[0], metadata.seq_lens[row]
    table = metadata.block_tables[row]
    keys, values = (gather_blocks(cache, table, seq_len).transpose(0, 1) for cache in caches)
    is_plain = query_len == seq_len and (
        options.sliding_window is None or seq_len <= options.sliding_window
    )
    mask = (
        None if is_plain else causal_mask(query_len, seq_len, options.sliding_window, query.device)
    )
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=is_plain,
        scale=options.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
