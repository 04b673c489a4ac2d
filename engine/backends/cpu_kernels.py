"""Paged attention on the CPU, compiled by numba at first use and cached on disk.

Decode rows and prefill rows are one and the same to the kernel: each query token walks its own
keys in chunks that lie at fixed positions, with an online softmax in float32, and every row of
every tile is computed by one piece of machine code. So the bits of a row depend neither on the
other rows nor on how a prompt was cut into steps, nor on where its KV blocks lie.
Source of the online softmax: Milakov and Gimelshein 2018, algorithm 3.

Shapes as in base.py, and K keys of a chunk, P query rows of a tile: one for each of its tokens and
heads.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

_FAST = {"nsz", "arcp", "contract", "reassoc"}
_CHUNK = 32
_DOTS = 4  # keys whose products with a query row are summed side by side
# Below every score, and yet a number: the difference of two of them is not NaN.
_LOWEST = np.float32(-1e30)


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


# Reassociation would cancel the rounding trick.
@numba.njit(fastmath={"contract"}, cache=True)
def _exp(value: Any) -> Any:
    """Return e ** value for a value of at most 0, in operations that exist on vectors.

    2 ** n goes into the exponent bits; the polynomial is 2 ** f for f in [-0.5, 0.5], good to two
    units in the last place. Below 2 ** -126 the result stays there.
    """
    power = value * np.float32(1.4426950408889634)
    power = power if power > np.float32(-126.0) else np.float32(-126.0)
    # Adding 1.5 * 2 ** 23 leaves the rounded number in the lowest bits of the mantissa.
    rounded = np.float32(power + np.float32(12582912.0))
    rest = power - (rounded - np.float32(12582912.0))
    result = np.float32(1.535336188319500e-4)
    result = result * rest + np.float32(1.339887440266574e-3)
    result = result * rest + np.float32(9.618437357674640e-3)
    result = result * rest + np.float32(5.550332471162809e-2)
    result = result * rest + np.float32(2.402264791363012e-1)
    result = result * rest + np.float32(6.931472028550421e-1)
    result = result * rest + np.float32(1.0)
    exponent = (rounded.view(np.uint32) << np.uint32(23)) + np.uint32(127 << 23)
    return result * np.uint32(exponent).view(np.float32)


# Without "nnan" a maximum is not computed on vectors.
@numba.njit(fastmath={"nsz", "nnan"}, cache=True)
def _maximum(scores: Any, start: Any) -> Any:
    for j in range(_CHUNK):
        start = max(start, scores[j])
    return start


@numba.njit(fastmath=_FAST, cache=True)
def _visit(  # noqa: PLR0913 - a kernel
    p: int,  # the query row
    g: int,  # its key-value head
    queries: Any,  # [P, D] float32, scaled
    chunk: Any,  # keys [G, K, D], values [G, K, E], scores [K], float32
    state: Any,  # peaks [P], sums [P], totals [P, E]
    lo: int,
    hi: int,
    softcap: Any,
) -> None:
    """Take keys lo to hi of a chunk into the running softmax of one query row."""
    keys, values, scores = chunk
    peaks, sums, totals = state
    for j in range(lo // _DOTS * _DOTS, hi, _DOTS):
        score_0 = score_1 = score_2 = score_3 = np.float32(0.0)
        for d in range(queries.shape[1]):
            factor = queries[p, d]
            score_0 += factor * keys[g, j, d]
            score_1 += factor * keys[g, j + 1, d]
            score_2 += factor * keys[g, j + 2, d]
            score_3 += factor * keys[g, j + 3, d]
        scores[j], scores[j + 1] = score_0, score_1
        scores[j + 2], scores[j + 3] = score_2, score_3
    if softcap > 0:
        for j in range(lo, hi):
            scores[j] = np.float32(math.tanh(scores[j] / softcap)) * softcap
    for j in range(lo):
        scores[j] = _LOWEST
    for j in range(hi, _CHUNK):
        scores[j] = _LOWEST
    peak = _maximum(scores, peaks[p])
    shrink = _exp(peaks[p] - peak)
    for j in range(_CHUNK):
        scores[j] = _exp(scores[j] - peak)
    added = np.float32(0.0)
    for j in range(lo, hi):
        added += scores[j]
    peaks[p] = peak
    sums[p] = sums[p] * shrink + added
    for e in range(totals.shape[1]):
        totals[p, e] *= shrink
    _add_values(p, g, values, scores, totals, lo, hi)


@numba.njit(fastmath=_FAST, cache=True)
def _add_values(  # noqa: PLR0913 - a kernel
    p: int, g: int, values: Any, weights: Any, totals: Any, lo: int, hi: int
) -> None:
    """Add the values of keys lo to hi, weighted, to a query row's totals.

    Keys beyond `hi` are left out, not weighted with 0: they may be infinite.
    """
    j = lo
    while j + 8 <= hi:
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        w4, w5, w6, w7 = weights[j + 4], weights[j + 5], weights[j + 6], weights[j + 7]
        for e in range(totals.shape[1]):
            totals[p, e] += (
                (w0 * values[g, j, e] + w1 * values[g, j + 1, e])
                + (w2 * values[g, j + 2, e] + w3 * values[g, j + 3, e])
            ) + (
                (w4 * values[g, j + 4, e] + w5 * values[g, j + 5, e])
                + (w6 * values[g, j + 6, e] + w7 * values[g, j + 7, e])
            )
        j += 8
    while j < hi:
        weight = weights[j]
        for e in range(totals.shape[1]):
            totals[p, e] += weight * values[g, j, e]
        j += 1


# Numbers of a tile are read into variables before each loop: the compiler cannot know that a loop
# does not write them, and so would not compute it on vectors.
@numba.njit(fastmath=_FAST, cache=True)
def _start_rows(  # noqa: PLR0913 - a kernel
    tile: Any, query: Any, sinks: Any, factor: Any, group: int, queries: Any, state: Any
) -> None:
    """Bring the query rows of a tile together, and clear their softmax."""
    peaks, sums, totals = state
    first_token, num_heads, first_head = tile[1], tile[5] * group, tile[4] * group
    for p in range(tile[2] * num_heads):
        token, head = first_token + p // num_heads, first_head + p % num_heads
        for d in range(queries.shape[1]):
            queries[p, d] = query[token, head, d] * factor
        for e in range(totals.shape[1]):
            totals[p, e] = np.float32(0.0)
        # A sink is one more key, without a value.
        has_sink = sinks[head] > _LOWEST
        peaks[p] = sinks[head] if has_sink else _LOWEST
        sums[p] = np.float32(1.0) if has_sink else np.float32(0.0)


@numba.njit(fastmath=_FAST, cache=True)
def _read_chunk(  # noqa: PLR0913 - a kernel
    tile: Any, block_tables: Any, caches: Any, base: int, start: int, end: int, chunk: Any
) -> None:
    """Copy keys and values of positions start to end out of their blocks."""
    key_cache, value_cache = caches
    keys, values, _ = chunk
    row, first_kv, num_kv, block_size = tile[0], tile[4], tile[5], key_cache.shape[1]
    for position in range(start, end):
        block, slot = block_tables[row, position // block_size], position % block_size
        j = position - base
        for g in range(num_kv):
            for d in range(keys.shape[2]):
                keys[g, j, d] = _as_float32(key_cache[block, slot, first_kv + g, d])
            for e in range(values.shape[2]):
                values[g, j, e] = _as_float32(value_cache[block, slot, first_kv + g, e])


@numba.njit(fastmath=_FAST, cache=True)
def _visit_chunk(  # noqa: PLR0913 - a kernel
    tile: Any, queries: Any, chunk: Any, state: Any, group: int, base: int, window: int, cap: Any
) -> None:
    """Show each query row of a tile the keys of a chunk that it may see."""
    num_heads, first_position = tile[5] * group, tile[3]
    for p in range(tile[2] * num_heads):
        position = first_position + p // num_heads
        lo, hi = max(0, position + 1 - window - base), min(_CHUNK, position + 1 - base)
        if lo < hi:
            _visit(p, p % num_heads // group, queries, chunk, state, lo, hi, cap)


@numba.njit(fastmath=_FAST, cache=True)
def _finish_rows(tile: Any, group: int, state: Any, output: Any) -> None:
    """Write the query rows of a tile to where they belong."""
    _, sums, totals = state
    first_token, num_heads, first_head = tile[1], tile[5] * group, tile[4] * group
    for p in range(tile[2] * num_heads):
        token, head, total = first_token + p // num_heads, first_head + p % num_heads, sums[p]
        for e in range(totals.shape[1]):
            output[token, head, e] = totals[p, e] / total


@numba.njit(parallel=True, fastmath=_FAST, cache=True)
def attend(  # noqa: PLR0913 - a kernel
    query: Any,  # [T, H, D] float32
    key_cache: Any,  # [N, S, G, D] float32, or the bits of bfloat16
    value_cache: Any,  # [N, S, G, E]
    block_tables: Any,  # [R, B] int32
    tiles: Any,  # [tiles, 6] int64: request, first token, tokens, its position, first G, number of G
    sinks: Any,  # [H] float32, -inf where there is none
    scale: float,
    window: int,
    softcap: float,
    num_workers: int,
    output: Any,  # [T, H, E] float32, written here for the tokens of the tiles
) -> None:
    """Attend the tokens of each tile to the KV blocks of their request."""
    group = query.shape[1] // key_cache.shape[2]
    most_kv, most_rows = 1, 1
    for i in range(tiles.shape[0]):
        most_kv = max(most_kv, tiles[i, 5])
        most_rows = max(most_rows, tiles[i, 2] * tiles[i, 5] * group)
    for worker in numba.prange(num_workers):
        keys = np.zeros((most_kv, _CHUNK, key_cache.shape[3]), np.float32)
        values = np.zeros((most_kv, _CHUNK, value_cache.shape[3]), np.float32)
        chunk = (keys, values, np.empty(_CHUNK, np.float32))
        queries = np.empty((most_rows, keys.shape[2]), np.float32)
        peaks, sums = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32)
        totals = np.empty((most_rows, values.shape[2]), np.float32)
        state = (peaks, sums, totals)
        for i in range(worker, tiles.shape[0], num_workers):
            tile = tiles[i]
            _start_rows(tile, query, sinks, np.float32(scale), group, queries, state)
            start, end = max(0, tile[3] + 1 - window), tile[3] + tile[2]
            for base in range(start // _CHUNK * _CHUNK, end, _CHUNK):
                first, last = max(start, base), min(end, base + _CHUNK)
                _read_chunk(tile, block_tables, (key_cache, value_cache), base, first, last, chunk)
                cap = np.float32(softcap)
                _visit_chunk(tile, queries, chunk, state, group, base, window, cap)
            _finish_rows(tile, group, state, output)


_KERNELS = (
    _exp,
    _maximum,
    _visit,
    _add_values,
    _start_rows,
    _read_chunk,
    _visit_chunk,
    _finish_rows,
    attend,
)


def keep_kernels(folder: Path) -> None:
    """Keep machine code in a folder, and take it from there, from now on.

    Otherwise it is beside this file, or in the user's cache where that cannot be written. What
    this process has compiled already stays where it is.
    """
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    for kernel in _KERNELS:
        kernel.enable_caching()
