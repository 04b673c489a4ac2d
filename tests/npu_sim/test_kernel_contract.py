"""Calls that the wheel's meta kernels take without a word, and a device would answer with rubbish.

Each is made twice: the meta kernel accepts it, which is why the reference kernels have to refuse it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from attention_call import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    WIDTH,
    make_options,
    make_tensors,
    numbers,
)
from npu_simulator.contract import ContractError

SMALL_MASK = torch.ones(128, 128, dtype=torch.int8).triu(1)
FLOAT_MASK = torch.ones(2048, 2048).triu(1)
WIDE_TABLE = torch.tensor([[3, 0], [1, 7], [6, 4]], dtype=torch.int64)
WRONG_ATTENTION: dict[str, dict[str, Any]] = {
    "block table of int64": {"block_table": WIDE_TABLE},
    "mask of 128 by 128": {"atten_mask": SMALL_MASK},
    "mask of float32": {"atten_mask": FLOAT_MASK},
    "block size 100": {"block_size": 100},
    "query lengths that are not cumulative": {"actual_seq_lengths": [5, 1, 30]},
    "no key lengths": {"actual_seq_lengths_kv": None},
    "sparse mode 9": {"sparse_mode": 9},
    "wrong number of heads": {"num_heads": 3},
}
MORE_WRONG_ATTENTION: dict[str, dict[str, Any]] = {
    "mask that is not causal": {"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)},
    "no mask": {"atten_mask": None},
    "block that does not exist": {"block_table": (WIDE_TABLE + 3).int()},
    "fewer keys than queries": {"actual_seq_lengths_kv": [4, 200, 130]},
    "keys beyond the block table": {"actual_seq_lengths_kv": [5, 200, 300]},
    "block size that the cache does not have": {"block_size": 256},
    "one query length missing": {"actual_seq_lengths": [5, 36]},
    "tokens that belong to nobody": {"actual_seq_lengths": [5, 6, 30]},
}


def attend(device: str, changes: dict[str, Any]) -> Any:
    return torch_npu.npu_fused_infer_attention_score(
        *make_tensors(device), **make_options(device, **changes)
    )


def write_kv(device: str, cache_mode: str) -> None:
    states = [numbers(5, NUM_KV_HEADS, WIDTH).to(device) for _ in "kv"]
    caches = [numbers(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, WIDTH).to(device) for _ in "kv"]
    slots = torch.arange(5, dtype=torch.int32).to(device)
    torch_npu.npu_scatter_pa_kv_cache(*states, *caches, slots, cache_mode=cache_mode)


def filter_logits(device: str, dtype: torch.dtype) -> torch.Tensor:
    k = torch.tensor([3, 4], dtype=dtype).to(device)
    logits = numbers(2, 10, dtype=torch.float32).to(device)
    return torch_npu.npu_top_k_top_p(logits, torch.tensor([0.5, 1.0]).to(device), k)


WRONG_CALLS: dict[str, Callable[[str], Any]] = {
    **{
        name: lambda device, changes=changes: attend(device, changes)
        for name, changes in WRONG_ATTENTION.items()
    },
    "misspelt cache mode": lambda device: write_kv(device, "norm"),
    "k of int64": lambda device: filter_logits(device, torch.int64),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_what_meta_accepts_and_the_documentation_forbids_is_refused(name: str) -> None:
    WRONG_CALLS[name]("meta")
    with pytest.raises(ContractError):
        WRONG_CALLS[name]("npu")


@pytest.mark.parametrize("name", MORE_WRONG_ATTENTION)
def test_attention_that_would_read_or_mask_wrongly_is_refused(name: str) -> None:
    with pytest.raises(ContractError):
        attend("npu", MORE_WRONG_ATTENTION[name])


def test_the_same_calls_without_the_fault_are_served() -> None:
    assert attend("npu", {})[0].shape == (36, 4, 128)
    write_kv("npu", "Norm")
    assert filter_logits("npu", torch.int32).shape == (2, 10)


def test_slots_that_repeat_are_refused() -> None:
    states = [numbers(2, NUM_KV_HEADS, WIDTH).npu() for _ in "kv"]
    caches = [numbers(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, WIDTH).npu() for _ in "kv"]
    slots = torch.tensor([3, 3], dtype=torch.int32).npu()
    with pytest.raises(ContractError, match="repeats"):
        torch_npu.npu_scatter_pa_kv_cache(*states, *caches, slots, cache_mode="Norm")


def test_states_that_are_not_contiguous_are_refused() -> None:
    query, key, value = make_tensors("npu")
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ContractError, match="contiguous"):
        torch_npu.npu_fused_infer_attention_score(turned, key, value, **make_options("npu"))


def test_an_option_that_the_reference_does_not_compute_is_refused() -> None:
    with pytest.raises(ContractError, match="softmax_lse_flag"):
        attend("npu", {"softmax_lse_flag": True})


def test_an_operation_without_a_reference_kernel_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="npu_fast_gelu is not simulated"):
        torch_npu.npu_fast_gelu(numbers(2, 4).npu())
