"""The fused attention of Ascend over a paged cache, as far as an engine of ours may call it.

Source: what torch_npu's documentation says of npu_fused_infer_attention_score and its version 2.
Shapes: T query tokens, B requests, N blocks, S block size, H query heads, G key-value heads,
D width of a key, E width of a value.
"""

from dataclasses import dataclass
from functools import cache

import torch

from npu_simulator.contract import require, require_tensor

_MASK_SIZE = 2048
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
_MAX_BATCH = 4096
_MAX_TOKENS = 65536
_MAX_ROW_WIDTH = 65535
_CAUSAL, _BAND = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call, in words that both versions of the operation share."""

    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [N, S, G * D]
    value: torch.Tensor  # [N, S, G * E]
    mask: torch.Tensor | None
    query_ends: list[int] | None
    kv_lens: list[int] | None
    block_table: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout: str
    sparse_mode: int
    block_size: int
    sinks: torch.Tensor | None = None

    @property
    def query_lens(self) -> list[int]:
        assert self.query_ends is not None
        return [
            end - start for start, end in zip([0, *self.query_ends], self.query_ends, strict=False)
        ]


def check(call: AttentionCall) -> None:
    """Raise ContractError unless the call is as documented."""
    require(call.layout == "TND", f"input_layout {call.layout}: only TND is simulated")
    require(call.block_table is not None, "no block_table: only a paged cache is simulated")
    _check_tensors(call)
    _check_lengths(call)
    _check_blocks(call)
    _check_mask(call)
    if call.sinks is not None:
        require_tensor("learnable_sink", call.sinks, (torch.bfloat16,), (call.num_heads,))
        require(_value_width(call) <= 128, "learnable_sink wants values of width 128 at most")


def _check_tensors(call: AttentionCall) -> None:
    require_tensor("query", call.query, (torch.float16, torch.bfloat16), (None, None, None))
    num_tokens, num_heads, width = call.query.shape
    require(num_tokens <= _MAX_TOKENS, f"{num_tokens} tokens, at most {_MAX_TOKENS} are served")
    require(num_heads == call.num_heads, f"num_heads {call.num_heads}, query has {num_heads}")
    require(width % 16 == 0 and width <= 512, f"heads of width {width}: not a multiple of 16")
    groups = call.num_kv_heads
    require(
        groups > 0 and num_heads % groups == 0 and num_heads // groups <= 64,
        f"{num_heads} query heads over {groups} key-value heads",
    )
    size = call.block_size
    require_tensor("key", call.key, (call.query.dtype,), (None, size, groups * width))
    require_tensor("value", call.value, (call.query.dtype,), (len(call.key), size, None))
    require(call.value.shape[2] % groups == 0, f"value is {tuple(call.value.shape)}")
    for pool in (call.key, call.value):
        require(pool.shape[2] <= _MAX_ROW_WIDTH, f"{pool.shape[2]} numbers a token are too many")
        require(pool.numel() < 2**31, f"a cache of {pool.numel()} numbers is too large")


def _value_width(call: AttentionCall) -> int:
    return call.value.shape[2] // call.num_kv_heads


def _check_lengths(call: AttentionCall) -> None:
    ends, kv_lens = call.query_ends, call.kv_lens
    require(ends, "actual_seq_lengths is missing, which TND wants")
    require(kv_lens, "actual_seq_lengths_kv is missing, which a paged cache wants")
    assert ends is not None
    assert kv_lens is not None
    require(len(ends) <= _MAX_BATCH, f"{len(ends)} requests, at most {_MAX_BATCH} are served")
    require(len(ends) == len(kv_lens), f"{len(ends)} query and {len(kv_lens)} key lengths")
    lens = call.query_lens
    require(min(lens) >= 0, f"actual_seq_lengths is not cumulative: {ends}")
    num_tokens = len(call.query)
    require(ends[-1] == num_tokens, f"actual_seq_lengths ends at {ends[-1]} of {num_tokens} tokens")
    for row, (query_len, kv_len) in enumerate(zip(lens, kv_lens, strict=True)):
        require(query_len <= kv_len, f"request {row}: {query_len} queries, {kv_len} keys")


def _check_blocks(call: AttentionCall) -> None:
    size, table, kv_lens = call.block_size, call.block_table, call.kv_lens
    assert table is not None
    assert kv_lens is not None
    step = 128 if max(call.query_lens) > 1 else 16
    require(
        0 < size <= 512 and size % step == 0,
        f"block_size {size} is no multiple of {step} up to 512",
    )
    require_tensor("block_table", table, (torch.int32,), (len(kv_lens), None))
    for row, kv_len in enumerate(kv_lens):
        count = -(-kv_len // size)
        require(count <= table.shape[1], f"request {row} has {kv_len} keys, {table.shape} blocks")
        ids = table[row, :count]
        is_known = bool(((ids >= 0) & (ids < len(call.key))).all())
        require(is_known, f"request {row} names blocks that do not exist: {ids.tolist()}")


def _check_mask(call: AttentionCall) -> None:
    if call.sparse_mode == 0:
        require(call.mask is None, "sparse_mode 0 with a mask is not simulated")
        return
    require(call.sparse_mode in (_CAUSAL, _BAND), f"sparse_mode {call.sparse_mode}")
    require(call.mask is not None, f"sparse_mode {call.sparse_mode} wants a mask")
    assert call.mask is not None
    mask = call.mask.view(call.mask.shape[-2:])
    require_tensor("atten_mask", mask, _MASK_DTYPES, (_MASK_SIZE, _MASK_SIZE))
    require(torch.equal(mask.bool(), _future()), "atten_mask is not triu(ones, 1)")
    if call.sparse_mode == _BAND:
        require(call.pre_tokens + call.next_tokens >= 0, "pre_tokens and next_tokens exclude all")


@cache
def _future() -> torch.Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu(1)


def attend(call: AttentionCall) -> torch.Tensor:
    """Return [T, H, E], computed in float32 and rounded once, as the engine's reference does."""
    check(call)
    assert call.block_table is not None
    assert call.kv_lens is not None
    outputs, start = [], 0
    for row, (query_len, kv_len) in enumerate(zip(call.query_lens, call.kv_lens, strict=True)):
        ids = call.block_table[row, : -(-kv_len // call.block_size)].long()
        keys, values = (
            pool[ids].reshape(-1, call.num_kv_heads, pool.shape[2] // call.num_kv_heads)[:kv_len]
            for pool in (call.key, call.value)
        )
        outputs.append(_attend(call, call.query[start : start + query_len], keys, values))
        start += query_len
    return torch.cat(outputs)


def _attend(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    repeats = call.num_heads // call.num_kv_heads
    keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * call.scale
    scores = scores.masked_fill(~_visible(call, len(query), len(keys)), float("-inf"))
    if call.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, len(query), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khe->qhe", weights, values).to(query.dtype)


def _visible(call: AttentionCall, query_len: int, kv_len: int) -> torch.Tensor:
    """Return [query_len, kv_len], True where a row may look; the last row is the last key's."""
    rows = torch.arange(kv_len - query_len, kv_len)[:, None]
    columns = torch.arange(kv_len)[None, :]
    if call.sparse_mode == _CAUSAL:
        return columns <= rows
    if call.sparse_mode == _BAND:
        return (columns >= rows - call.pre_tokens) & (columns <= rows + call.next_tokens)
    return torch.ones(query_len, kv_len, dtype=torch.bool)
