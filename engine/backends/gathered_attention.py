"""Attention to the paged cache in plain torch: blocks are gathered, then attended to.

Rows of one token (decode) that lie side by side go together: their blocks are gathered by their
table, and what lies behind a row's length is masked. Only tensors on the device are read for it, so
it can be captured in a graph; the host's lengths only say how many blocks the longest row has.
Gathered memory is bounded: keys are taken some blocks at a time, and the parts joined by the
running maximum and sum of the softmax. Source: Milakov and Gimelshein 2018; Dao et al. 2022.

Rows of several tokens (prompts and chunks) go one by one, through torch's fused attention where it
can do what the layer asks.

Shapes as in base.py; besides, P heads that share a key-value head, L gathered tokens of a row.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches
from engine.backends.reference import causal_mask, gather_blocks

# Tokens gathered at a time, over all rows: with 8 heads of 128 numbers, 256 MiB each for keys and
# for values in float32.
_MAX_GATHERED_TOKENS = 1 << 16
# Scores at a time where torch's fused attention does not serve: 256 MiB in float32.
_MAX_SCORES = 1 << 26


def attend(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend query [T, H, D] as DeviceBackend.attention says; return [T, H, E]."""
    parts = []
    start = 0
    for rows in _runs(metadata.query_lens):
        query_len = metadata.query_lens[rows.start]
        end = start + query_len * len(rows)
        if query_len == 1:
            parts.append(_attend_decodes(query[start:end], caches, metadata, options, rows))
        else:
            parts.append(_attend_prompt(query[start:end], caches, metadata, options, rows.start))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(query_lens: Sequence[int]) -> Iterator[range]:
    """Yield neighbours that have one token each together, and all others alone."""
    for is_decode, group in groupby(enumerate(query_lens), key=lambda item: item[1] == 1):
        rows = [row for row, _ in group]
        if is_decode:
            yield range(rows[0], rows[-1] + 1)
        else:
            yield from (range(row, row + 1) for row in rows)


def _attend_decodes(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    rows: range,
) -> torch.Tensor:
    """Attend query [R, H, D], one token of each row; return [R, H, E]."""
    num_rows, num_heads, width = query.shape
    _, block_size, num_kv_heads, value_width = caches[1].shape
    num_blocks = -(-max(metadata.seq_lens[rows.start : rows.stop]) // block_size)
    tables = metadata.block_tables[rows.start : rows.stop, :num_blocks]
    seq_lens = metadata.seq_lens_tensor[rows.start : rows.stop]
    num_sharing = num_heads // num_kv_heads
    grouped = (query.float() * options.scale).reshape(-1, num_sharing, width)  # [R G, P, D]
    softmax = _RunningSoftmax.begin(
        (num_rows, num_kv_heads, num_sharing), value_width, options, query
    )
    step = max(1, _MAX_GATHERED_TOKENS // (num_rows * block_size))
    for first in range(0, num_blocks, step):
        blocks = tables[:, first : first + step].long()
        positions = torch.arange(blocks.shape[1] * block_size, device=query.device)
        is_seen = _is_seen(positions + first * block_size, seq_lens, options)  # [R, L]
        keys, values = (_gather_heads(cache, blocks) for cache in caches)  # [R, G, L, D]
        # Memory behind a row's end may hold anything, and 0 times infinity is no number.
        values = values.masked_fill(~is_seen[:, None, :, None], 0)
        scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2))
        scores = _capped(scores, options).view(num_rows, num_kv_heads, num_sharing, -1)
        softmax.add(scores.masked_fill(~is_seen[:, None, None], float("-inf")), values)
    return softmax.result().reshape(num_rows, num_heads, value_width).to(query.dtype)


class _RunningSoftmax:
    """A weighted sum of values whose scores come in parts."""

    def __init__(self, largest: torch.Tensor, total: torch.Tensor, summed: torch.Tensor) -> None:
        self._largest = largest  # [R, G, P], of the scores so far
        self._total = total  # [R, G, P], of exp(score - largest)
        self._summed = summed  # [R, G, P, E]

    @classmethod
    def begin(
        cls, shape: tuple[int, int, int], width: int, options: AttentionOptions, like: torch.Tensor
    ) -> "_RunningSoftmax":
        """Begin with nothing, or with the one score that a sink is, whose value is 0."""
        summed = torch.zeros(*shape, width, device=like.device)
        if options.sinks is not None:
            sinks = options.sinks.float().view(shape[1:]).expand(shape)
            return cls(sinks, torch.ones_like(sinks), summed)
        # Not minus infinity, whose difference to itself is no number.
        lowest = torch.full(shape, torch.finfo(torch.float32).min, device=like.device)
        return cls(lowest, torch.zeros_like(lowest), summed)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Add scores [R, G, P, L], of which a row may be minus infinity, and values [R, G, L, E]."""
        largest = torch.maximum(self._largest, scores.amax(-1))
        weights = torch.exp(scores - largest[..., None])
        scaling = torch.exp(self._largest - largest)
        self._total = self._total * scaling + weights.sum(-1)
        self._summed = self._summed * scaling[..., None] + weights @ values
        self._largest = largest

    def result(self) -> torch.Tensor:
        """Return [R, G, P, E]."""
        return self._summed / self._total[..., None]


def _is_seen(
    positions: torch.Tensor, seq_lens: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Return [R, L], True where the last token of a row looks."""
    is_seen = positions[None] < seq_lens[:, None]
    if options.sliding_window is not None:
        is_seen &= positions[None] >= seq_lens[:, None] - options.sliding_window
    return is_seen


def _gather_heads(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the blocks [R, B] of each row by head, [R, G, L, D] float32."""
    gathered = cache[blocks].flatten(1, 2).transpose(1, 2)
    return gathered.to(torch.float32, memory_format=torch.contiguous_format)


def _capped(scores: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    if options.softcap is None:
        return scores
    return torch.tanh(scores / options.softcap) * options.softcap


def _attend_prompt(
    query: torch.Tensor,
    caches: Caches,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    row: int,
) -> torch.Tensor:
    """Attend the tokens [n, H, D] of one request; return [n, H, E]."""
    query_len, num_heads, _ = query.shape
    seq_len = metadata.seq_lens[row]
    # [H, L, D]: a head for each query head, since fused attention of some devices wants as many.
    keys, values = (
        gather_blocks(cache, metadata.block_tables[row], seq_len)
        .transpose(0, 1)
        .repeat_interleave(num_heads // cache.shape[2], dim=0)
        for cache in caches
    )
    queries = query.transpose(0, 1)  # [H, n, D]
    is_whole = query_len == seq_len and (options.sliding_window or seq_len) >= seq_len
    is_fused = options.softcap is None and options.sinks is None
    is_plain = is_whole and is_fused
    mask = None
    if not is_plain:
        mask = causal_mask(query_len, seq_len, options.sliding_window, query.device)
    if mask is not None and not is_fused:
        attended = _attend_by_parts(queries, keys, values, mask, options)
    else:
        attended = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=is_plain,
            scale=options.scale,
        )[0]
    return attended.transpose(0, 1)


def _attend_by_parts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend [H, n, D] to [H, L, D] as the reference does, some queries at a time: [H, n, E]."""
    num_heads, seq_len, _ = keys.shape
    step = max(1, _MAX_SCORES // (num_heads * seq_len))
    turned = keys.float().transpose(1, 2)
    parts = []
    for first in range(0, queries.shape[1], step):
        few = slice(first, first + step)
        scores = _capped(queries[:, few].float() @ turned * options.scale, options)
        scores = scores.masked_fill(~mask[few], float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        parts.append(weights @ values.float())
    return torch.cat(parts, dim=1).to(queries.dtype)
