"""Paged decode attention on the CPU, compiled by numba at first use and cached on disk.

One query token a row reads the row's KV blocks where they lie, with an online softmax in float32.
Source of the online softmax: Milakov and Gimelshein 2018, algorithm 3.

Shapes as in base.py: R rows, H query heads, G key-value heads, D and E widths of key and value.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

_FAST = {"nsz", "arcp", "contract", "reassoc"}


def _as_float32(value: Any) -> Any:
    """Return a cache entry as float32; a uint16 holds the bits of a bfloat16."""
    raise AssertionError("compiled code only")


def _from_bits(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _unchanged(value: Any) -> Any:
    return value


@overload(_as_float32, inline="always")
def _choose_reading(value: Any) -> Callable[[Any], Any]:
    return _from_bits if value == types.uint16 else _unchanged


@numba.njit(fastmath=_FAST, cache=True)
def _visit(
    query: Any,  # [H, D] float32, this row's
    key: Any,  # [D] float32
    value: Any,  # [E] float32
    state: Any,  # peaks [K], sums [K], totals [K, E] of the K heads that share the key
    first_head: int,
    scoring: Any,  # scale, softcap
) -> None:
    """Take one position into the running softmax of every head of a group."""
    peaks, sums, totals = state
    scale, softcap = scoring
    for head in range(peaks.shape[0]):
        score = np.float32(0.0)
        for d in range(key.shape[0]):
            score += query[first_head + head, d] * key[d]
        score *= scale
        if softcap > 0:
            score = np.float32(math.tanh(score / softcap) * softcap)
        if score > peaks[head]:
            shrink = np.float32(math.exp(peaks[head] - score))
            peaks[head] = score
            sums[head] *= shrink
            for d in range(value.shape[0]):
                totals[head, d] *= shrink
        weight = np.float32(math.exp(score - peaks[head]))
        sums[head] += weight
        for d in range(value.shape[0]):
            totals[head, d] += weight * value[d]


@numba.njit(parallel=True, fastmath=_FAST, cache=True)
def decode(  # noqa: PLR0913 - a kernel
    query: Any,  # [R, H, D] float32
    key_cache: Any,  # [N, S, G, D] float32, or the bits of bfloat16
    value_cache: Any,  # [N, S, G, E]
    block_tables: Any,  # [R, B] int32
    seq_lens: Any,  # [R] int32
    sinks: Any,  # [H] float32, -inf where there is none
    scale: float,
    window: int,
    softcap: float,
    output: Any,  # [R, H, E] float32, written here
) -> None:
    """Attend each row's one query token to its own KV blocks."""
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    key_width, value_width = key_cache.shape[3], value_cache.shape[3]
    group = query.shape[1] // num_kv_heads
    scoring = (np.float32(scale), np.float32(softcap))
    for task in numba.prange(query.shape[0] * num_kv_heads):
        row, kv_head = task // num_kv_heads, task % num_kv_heads
        first_head = kv_head * group
        key, value = np.empty(key_width, np.float32), np.empty(value_width, np.float32)
        peaks = sinks[first_head : first_head + group].copy()
        sums = np.where(np.isinf(peaks), np.float32(0.0), np.float32(1.0))
        totals = np.zeros((group, value_width), np.float32)
        for position in range(max(0, seq_lens[row] - window), seq_lens[row]):
            block = block_tables[row, position // block_size]
            slot = position % block_size
            for d in range(key_width):
                key[d] = _as_float32(key_cache[block, slot, kv_head, d])
            for d in range(value_width):
                value[d] = _as_float32(value_cache[block, slot, kv_head, d])
            _visit(query[row], key, value, (peaks, sums, totals), first_head, scoring)
        for head in range(group):
            for d in range(value_width):
                output[row, first_head + head, d] = totals[head, d] / sums[head]
