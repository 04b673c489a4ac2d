"""Attention in plain torch against the reference: what CUDA runs, here on CPU tensors."""

from typing import Any

import pytest
import torch
from attention_cases import (
    DECODE,
    OPTIONS,
    STEPS,
    TOLERANCE,
    assert_equals_reference,
    assert_reads_only_its_own_blocks,
    assert_takes_strided_queries,
    attend,
    make_case,
)
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends import gathered_attention
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches
from engine.backends.cpu import CpuBackend


class Gathering(CpuBackend):
    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        return gathered_attention.attend(query, caches, metadata, options)


BACKEND = Gathering()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_kind_of_step_equals_the_reference(
    step: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert_equals_reference(BACKEND, make_case(STEPS[step], dtype, **options))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_every_block_size_equals_the_reference(block_size: int) -> None:
    case = make_case(STEPS["mixed"], torch.float32, block_size=block_size, sliding_window=20)
    assert_equals_reference(BACKEND, case)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (80, 80)], ids=str)
def test_every_layout_of_heads_equals_the_reference(
    heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    case = make_case(STEPS["mixed"], torch.bfloat16, heads=heads, widths=widths)
    assert_equals_reference(BACKEND, case)


@pytest.mark.parametrize("limit", [1, 40, 200])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_keys_that_are_gathered_in_parts_give_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(gathered_attention, "_MAX_GATHERED_TOKENS", limit)
    monkeypatch.setattr(gathered_attention, "_MAX_SCORES", 10 * limit)
    assert_equals_reference(BACKEND, make_case(STEPS["mixed"], torch.float32, **options))
    case = make_case(DECODE, torch.float32, **options)
    assert_equals_reference(BACKEND, case)


def test_gathered_memory_is_bounded_whatever_the_longest_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case([(1, 5000), (1, 3), (1, 700)], torch.float32, heads=(2, 1), widths=(8, 8))
    monkeypatch.setattr(gathered_attention, "_MAX_GATHERED_TOKENS", 1000)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index.Tensor:
                largest = max(largest, result.numel())
            return result

    with Largest():
        attend(BACKEND, case)
    assert 0 < largest <= 1000 * 8
    assert_equals_reference(BACKEND, case)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"has_sinks": True}], ids=str)
def test_large_scores_overflow_nothing(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(STEPS["mixed"], dtype, **options)
    case.query.mul_(100)
    assert attend(BACKEND, case).isfinite().all()
    assert_equals_reference(BACKEND, case)


@pytest.mark.parametrize("step", STEPS)
def test_a_request_reads_no_block_but_its_own(step: str) -> None:
    assert_reads_only_its_own_blocks(BACKEND, make_case(STEPS[step], torch.float32))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_heads_need_not_lie_side_by_side(step: str, options: dict[str, Any]) -> None:
    assert_takes_strided_queries(BACKEND, make_case(STEPS[step], torch.float32, **options))


def test_a_decode_step_reads_no_lengths_from_the_host_but_the_longest() -> None:
    case = make_case(DECODE, torch.float32)
    wanted = attend(BACKEND, case)
    longest = max(case.metadata.seq_lens)
    case.metadata.seq_lens[:] = [longest] * len(DECODE)
    assert torch.equal(attend(BACKEND, case), wanted)


def test_a_decode_step_asks_nothing_of_the_device() -> None:
    """On a device each of these would wait for it, and a graph could not be captured."""
    asking = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
    called: set[str] = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            called.add(func.name().split(".")[0])
            return func(*args, **(kwargs or {}))

    for options in OPTIONS:
        case = make_case(DECODE, torch.float32, **options)
        with Record():
            attend(BACKEND, case)
    assert "aten::bmm" in called
    assert not called & asking
