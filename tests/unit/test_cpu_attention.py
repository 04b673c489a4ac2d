"""The CPU's attention kernels against the plain reference, over every kind of step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import (
    OPTIONS,
    STEPS,
    TOLERANCE,
    assert_equals_reference,
    assert_reads_only_its_own_blocks,
    make_case,
)

from engine.backends import load_backend
from engine.backends.base import DeviceBackend
from engine.backends.reference import causal_mask, reference_attention
from engine.errors import ConfigError, WorkerFailure


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    threads = torch.get_num_threads()
    backend = load_backend("cpu")
    backend.bind(0, 2)
    yield backend
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_kind_of_step_equals_the_reference(
    backend: DeviceBackend, step: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    assert_equals_reference(backend, make_case(STEPS[step], dtype, **options))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_every_block_size_equals_the_reference(backend: DeviceBackend, block_size: int) -> None:
    case = make_case(STEPS["mixed"], torch.float32, block_size=block_size, sliding_window=20)
    assert_equals_reference(backend, case)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (80, 80)], ids=str)
def test_every_layout_of_heads_equals_the_reference(
    backend: DeviceBackend, heads: tuple[int, int], widths: tuple[int, int]
) -> None:
    case = make_case(STEPS["mixed"], torch.bfloat16, heads=heads, widths=widths)
    assert_equals_reference(backend, case)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_large_scores_overflow_nothing(backend: DeviceBackend, dtype: torch.dtype) -> None:
    case = make_case(STEPS["mixed"], dtype)
    case.query.mul_(100)
    assert backend.attention(case.query, case.caches, case.metadata, case.options).isfinite().all()
    assert_equals_reference(backend, case)


def test_a_request_reads_no_block_but_its_own(backend: DeviceBackend) -> None:
    assert_reads_only_its_own_blocks(backend, make_case(STEPS["mixed"], torch.float32))


def test_the_reference_itself_equals_attention_written_out() -> None:
    case = make_case([(3, 5)], torch.float32, heads=(2, 1), sliding_window=2, has_sinks=True)
    table = case.metadata.block_tables[0].long()
    keys, values = (cache[table].flatten(0, 1)[:5, 0].double() for cache in case.caches)
    wanted = torch.zeros(3, 2, 32, dtype=torch.float64)
    assert case.options.sinks is not None
    for i, head in ((i, head) for i in range(3) for head in range(2)):
        position = 2 + i
        seen = [j for j in range(5) if position - 2 < j <= position]
        scores = keys[seen] @ case.query[i, head].double() * case.options.scale
        weights = scores.exp() / (scores.exp().sum() + case.options.sinks[head].double().exp())
        wanted[i, head] = weights @ values[seen]
    found = reference_attention(case.query, case.caches, case.metadata, case.options)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_the_mask_lets_a_row_see_itself_and_what_came_before() -> None:
    mask = causal_mask(2, 4, None, torch.device("cpu"))
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    windowed = causal_mask(2, 4, 2, torch.device("cpu"))
    assert windowed.tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_and_values_are_written_to_their_slots(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    caches = tuple(backend.allocate_kv((3, 4, 2, width), dtype) for width in (8, 5))
    states = tuple(torch.randn(3, 2, width).to(dtype) for width in (8, 5))
    backend.write_kv((states[0], states[1]), (caches[0], caches[1]), torch.tensor([11, 0, 5]))
    for cache, written in zip(caches, states, strict=True):
        assert torch.equal(cache[2, 3], written[0])
        assert torch.equal(cache[0, 0], written[1])
        assert torch.equal(cache[1, 1], written[2])
        assert cache.count_nonzero() == written.count_nonzero()


def test_an_allocation_that_fails_is_told_from_other_faults(backend: DeviceBackend) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert backend.classify_error(caught.value) is WorkerFailure.OUT_OF_MEMORY
    assert backend.classify_error(IndexError("index 5")) is WorkerFailure.OTHER


def test_a_device_without_a_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="engine.device is 'tpu'"):
        load_backend("tpu")
