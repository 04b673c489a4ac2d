"""The reference kernels compute what plain torch computes, and have the shapes of the wheel's."""

import math
from typing import Any

import pytest
import torch
import torch_npu
from attention_call import (
    BLOCK_SIZE,
    KV_LENS,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    QUERY_ENDS,
    WIDTH,
    for_v2,
    make_options,
    make_tensors,
    numbers,
)
from torch.nn import functional
from torch.utils._pytree import tree_leaves


def plain_attention(window: int | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attend row by row with torch's own attention, or its formula where there are sinks."""
    query, key, value = make_tensors("cpu")
    table = make_options("cpu")["block_table"]
    outputs, start = [], 0
    for row, (end, kv_len) in enumerate(zip(QUERY_ENDS, KV_LENS, strict=True)):
        blocks = table[row, : -(-kv_len // BLOCK_SIZE)].long()
        states = [
            cache[blocks].reshape(-1, NUM_KV_HEADS, WIDTH)[:kv_len].transpose(0, 1).float()
            for cache in (key, value)
        ]
        mask = torch.ones(end - start, kv_len, dtype=torch.bool).tril(kv_len - end + start)
        if window is not None:
            mask &= ~torch.ones_like(mask).tril(kv_len - end + start - window)
        outputs.append(_attend(query[start:end].transpose(0, 1).float(), states, mask, sinks))
        start = end
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    states: list[torch.Tensor],
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if sinks is None:
        output = functional.scaled_dot_product_attention(
            query[None], *(state[None] for state in states), attn_mask=mask, enable_gqa=True
        )
        return output[0].transpose(0, 1)
    keys, values = (state.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0) for state in states)
    scores = (query @ keys.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(~mask, float("-inf"))
    exponents = scores.exp()
    total = exponents.sum(-1, keepdim=True) + sinks.float().exp()[:, None, None]
    return (exponents / total @ values).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 7, 150])
def test_attention_equals_plain_torch_row_by_row(window: int | None) -> None:
    changes: dict[str, Any] = {}
    if window is not None:
        changes = {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    options = make_options("npu", **changes)
    output, _ = torch_npu.npu_fused_infer_attention_score(*make_tensors("npu"), **options)
    torch.testing.assert_close(output.cpu().float(), plain_attention(window), rtol=1e-2, atol=1e-2)


def test_attention_with_sinks_equals_the_formula() -> None:
    sinks = numbers(NUM_HEADS, seed=3)
    options = for_v2(make_options("npu", learnable_sink=sinks))
    output, _ = torch_npu.npu_fused_infer_attention_score_v2(*make_tensors("npu"), **options)
    torch.testing.assert_close(
        output.cpu().float(), plain_attention(sinks=sinks), rtol=1e-2, atol=1e-2
    )
    without, _ = torch_npu.npu_fused_infer_attention_score(
        *make_tensors("npu"), **make_options("npu")
    )
    assert not torch.equal(output.cpu(), without.cpu())


def test_attention_without_a_mask_sees_everything() -> None:
    options = make_options("npu", sparse_mode=0, atten_mask=None)
    output, _ = torch_npu.npu_fused_infer_attention_score(*make_tensors("npu"), **options)
    causal, _ = torch_npu.npu_fused_infer_attention_score(
        *make_tensors("npu"), **make_options("npu")
    )
    is_same = (output.cpu() == causal.cpu()).flatten(1).all(1)
    last_rows = [end - 1 for end in QUERY_ENDS]
    assert is_same[last_rows].all()
    assert not is_same[0]


def test_the_form_with_out_writes_the_same_numbers() -> None:
    tensors, options = make_tensors("npu"), make_options("npu")
    wanted, _ = torch_npu.npu_fused_infer_attention_score(*tensors, **options)
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(*tensors, **options)
    out = [torch.empty_like(wanted), torch.empty(0, dtype=torch.float32, device="npu")]
    torch_npu.npu_fused_infer_attention_score.out(*tensors, workspace=workspace, out=out, **options)
    assert torch.equal(out[0].cpu(), wanted.cpu())


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    key, value = numbers(3, NUM_KV_HEADS, WIDTH), numbers(3, NUM_KV_HEADS, WIDTH, seed=1)
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, WIDTH).bfloat16() for _ in "kv"]
    on_device = [cache.npu() for cache in caches]
    slots = torch.tensor([200, 0, 1023], dtype=torch.int32)
    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), value.npu(), *on_device, slots.npu(), cache_mode="Norm"
    )
    for cache, state in zip(caches, (key, value), strict=True):
        cache.view(-1, NUM_KV_HEADS, WIDTH)[slots.long()] = state
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, caches, strict=True))


def test_norms_and_activations_equal_plain_torch() -> None:
    hidden, residual, weight = numbers(7, 64), numbers(7, 64, seed=1), numbers(64, seed=2)
    wanted = functional.rms_norm(hidden.float(), (64,), weight.float(), 1e-5)
    found, _ = torch_npu.npu_rms_norm(hidden.npu(), weight.npu(), 1e-5)
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=1e-2, atol=1e-2)
    summed = hidden + residual
    wanted = functional.rms_norm(summed.float(), (64,), weight.float(), 1e-5)
    found, _, kept = torch_npu.npu_add_rms_norm(hidden.npu(), residual.npu(), weight.npu(), 1e-5)
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(kept.cpu(), summed)
    gate, up = hidden.float().chunk(2, -1)
    found = torch_npu.npu_swiglu(hidden.npu())
    torch.testing.assert_close(
        found.cpu().float(), gate * gate.sigmoid() * up, rtol=1e-2, atol=1e-2
    )


def test_rotation_turns_pairs_of_coordinates_by_their_angle() -> None:
    states, angles = numbers(1, 5, 3, 8, dtype=torch.float32), torch.arange(20.0).view(1, 5, 1, 4)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    found = torch_npu.npu_rotary_mul(states.npu(), cos.npu(), sin.npu()).cpu()
    turned = torch.complex(*states.chunk(2, -1)) * torch.complex(angles.cos(), angles.sin())
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1))


def test_filters_leave_the_likeliest_tokens() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    top_k, top_p = torch.tensor([4, 2, 4], dtype=torch.int32), torch.tensor([0.75, 1.0, 0.0])
    found = torch_npu.npu_top_k_top_p(probabilities.log().npu(), top_p.npu(), top_k.npu()).cpu()
    kept = [row.isfinite().nonzero().flatten().tolist() for row in found]
    assert kept == [[1, 2, 3], [1, 3], [1]]
    assert torch.equal(found[1][[1, 3]], probabilities.log()[1][[1, 3]])


def meta_of(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tree_leaves(result)]


def test_shapes_and_dtypes_are_those_of_the_wheels_meta_kernels() -> None:
    def call_all(device: str) -> list[Any]:
        hidden, weight = numbers(6, 64).to(device), numbers(64).to(device)
        states = numbers(1, 6, 4, 64).to(device)
        logits = numbers(3, 10, dtype=torch.float32).to(device)
        k, p = torch.full((3,), 2, dtype=torch.int32), torch.full((3,), 0.5)
        tensors, options = make_tensors(device), make_options(device)
        return [
            torch_npu.npu_fused_infer_attention_score(*tensors, **options),
            torch_npu.npu_fused_infer_attention_score_v2(*tensors, **for_v2(options)),
            torch_npu.npu_rms_norm(hidden, weight),
            torch_npu.npu_add_rms_norm(hidden, hidden, weight),
            torch_npu.npu_swiglu(hidden),
            torch_npu.npu_rotary_mul(states, states[:, :, :1], states[:, :, :1]),
            torch_npu.npu_top_k_top_p(logits, p.to(device), k.to(device)),
        ]

    assert [meta_of(r) for r in call_all("npu")] == [meta_of(r) for r in call_all("meta")]
