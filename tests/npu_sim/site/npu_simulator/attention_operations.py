"""The fused attention under the names and arguments that the wheel gives it."""

from typing import Any

import torch

from npu_simulator.contract import require, require_absent, require_tensor
from npu_simulator.fused_attention import AttentionCall, attend, check

_EVERYTHING = 2**31 - 1
Output = tuple[torch.Tensor, torch.Tensor]


def _first_version(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **unknown: Any,
) -> AttentionCall:
    require_absent(**unknown)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=atten_mask,
        query_ends=actual_seq_lengths,
        kv_lens=actual_seq_lengths_kv,
        block_table=block_table,
        num_heads=num_heads,
        num_kv_heads=num_key_value_heads or num_heads,
        scale=scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
    )


def _second_version(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **unknown: Any,
) -> AttentionCall:
    require_absent(**unknown)
    require(query.dtype is torch.bfloat16, f"version 2 with TND wants bfloat16, not {query.dtype}")
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=atten_mask,
        query_ends=actual_seq_qlen,
        kv_lens=actual_seq_kvlen,
        block_table=block_table,
        num_heads=num_query_heads,
        num_kv_heads=num_key_value_heads or num_query_heads,
        scale=softmax_scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
        sinks=learnable_sink,
    )


def _run(call: AttentionCall) -> Output:
    return attend(call), _no_lse(call.query)


def _no_lse(query: torch.Tensor) -> torch.Tensor:
    """Return the second output as the wheel's meta kernel has it when it is not asked for."""
    return query.new_zeros(0, dtype=torch.float32)


def _run_into(
    call: AttentionCall, workspace: torch.Tensor | None, out: list[torch.Tensor]
) -> Output:
    require(workspace is not None, "the form with `out` wants the workspace of get_max_workspace")
    output, lse = out
    result, _ = _run(call)
    require_tensor("out[0]", output, (result.dtype,), tuple(result.shape))
    output.copy_(result)
    return output, lse


def first(*args: Any, **kwargs: Any) -> Output:
    return _run(_first_version(*args, **kwargs))


def first_out(*args: Any, workspace: Any = None, out: Any, **kwargs: Any) -> Output:
    return _run_into(_first_version(*args, **kwargs), workspace, out)


def first_workspace(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _workspace(_first_version(*args, **kwargs))


def second(*args: Any, **kwargs: Any) -> Output:
    return _run(_second_version(*args, **kwargs))


def second_out(*args: Any, workspace: Any = None, out: Any, **kwargs: Any) -> Output:
    return _run_into(_second_version(*args, **kwargs), workspace, out)


def second_workspace(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _workspace(_second_version(*args, **kwargs))


def _workspace(call: AttentionCall) -> torch.Tensor:
    check(call)
    return torch.zeros(1024, dtype=torch.uint8)


def infer_output(query: torch.Tensor, value: torch.Tensor, **options: Any) -> Output:
    """Return empty outputs for the form with `out`; a paged value does not tell its heads."""
    groups = options.get("num_key_value_heads") or options.get("num_heads", 1)
    groups = options.get("num_key_value_heads") or options.get("num_query_heads", groups)
    require(options.get("input_layout") == "TND", "only TND is simulated")
    width = value.shape[2] // groups if options.get("block_table") is not None else value.shape[2]
    output = query.new_empty(*query.shape[:2], width)
    return output, _no_lse(query)


def for_training(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D]
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *options: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    """Attend as torch's own attention does, which the wheel sends here; no engine of ours calls it."""
    pse, padding_mask, mask, scale, keep_prob, *_ = options
    require_absent(pse=pse, padding_mask=padding_mask, **named)
    require(input_layout == "BNSD", f"input_layout {input_layout}: only BNSD is simulated")
    require(keep_prob == 1, "dropout is not simulated")
    repeats = head_num // key.shape[1]
    keys, values = (state.float().repeat_interleave(repeats, dim=1) for state in (key, value))
    scores = query.float() @ keys.transpose(2, 3) * scale
    if mask is not None:
        hidden = mask if mask.dim() == 4 else mask[: query.shape[2], : key.shape[2]]
        scores = scores.masked_fill(hidden.bool(), float("-inf"))
    output = (scores.softmax(-1) @ values).to(query.dtype)
    return output, *(_no_lse(query) for _ in range(5))
