"""What every backend must do, against the references, on the device that --device names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    OPTIONS,
    STEPS,
    Case,
    assert_equals_reference,
    assert_reads_only_its_own_blocks,
    assert_takes_strided_queries,
    make_case,
)

from engine.backends import reference
from engine.backends.base import DeviceBackend
from engine.errors import ConfigError

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def make_device_case(backend: DeviceBackend, dtype: torch.dtype) -> Callable[..., Case]:
    """Make cases in a layout that the device documents: its block size, and heads of 128."""

    def make(step: str, **options: Any) -> Case:
        layout = {"block_size": backend.capabilities.default_block_size, "heads": (8, 2)}
        case = make_case(STEPS[step], dtype, **(layout | {"widths": (128, 128)} | options))
        if case.options.sinks is not None:  # which a model has in its own dtype
            sinks = case.options.sinks.to(dtype)
            case = replace(case, options=replace(case.options, sinks=sinks))
        heads = case.caches[0].shape[2]
        states = (case.query, case.query[:, :heads], case.query[:, :heads])
        try:
            backend.check_block_size(case.caches[0].shape[1])
            backend.check_attention(states, case.options)
        except ConfigError as error:
            pytest.skip(str(error))
        return case

    return make


# Attention and KV memory.


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_equals_the_reference_in_every_kind_of_step(
    backend: DeviceBackend,
    make_device_case: Callable[..., Case],
    step: str,
    options: dict[str, Any],
) -> None:
    assert_equals_reference(backend, make_device_case(step, **options))


@pytest.mark.parametrize("block_size", [16, 128, 256])
def test_attention_equals_the_reference_in_every_block_size(
    backend: DeviceBackend, make_device_case: Callable[..., Case], block_size: int
) -> None:
    case = make_device_case("mixed", block_size=block_size, sliding_window=20)
    assert_equals_reference(backend, case)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_attention_equals_the_reference_in_every_layout_of_heads(
    backend: DeviceBackend,
    make_device_case: Callable[..., Case],
    heads: tuple[int, int],
    width: int,
) -> None:
    case = make_device_case("mixed", heads=heads, widths=(width, width))
    assert_equals_reference(backend, case)


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_a_request_reads_no_block_but_its_own_on_the_device(
    backend: DeviceBackend, make_device_case: Callable[..., Case], step: str
) -> None:
    assert_reads_only_its_own_blocks(backend, make_device_case(step))


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_heads_need_not_lie_side_by_side_on_the_device(
    backend: DeviceBackend, make_device_case: Callable[..., Case], step: str
) -> None:
    assert_takes_strided_queries(backend, make_device_case(step))


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    block_size = backend.capabilities.default_block_size
    shape = (3, block_size, 2, 128)
    slots = [2 * block_size + 3, 0, block_size + 1]
    keys, values = backend.allocate_kv(shape, dtype), backend.allocate_kv(shape, dtype)
    written = [torch.randn(3, 2, 128).to(dtype) for _ in range(2)]
    mapping = torch.tensor(slots, dtype=backend.slot_dtype, device=backend.device)
    # Not contiguous, as a layer's are.
    there = [state.transpose(0, 1).contiguous().to(backend.device) for state in written]
    states = (there[0].transpose(0, 1), there[1].transpose(0, 1))
    backend.write_kv(states, (keys, values), mapping)
    for cache, state in zip((keys, values), written, strict=True):
        flat = cache.cpu().flatten(0, 1)
        assert torch.equal(flat[slots], state)
        assert flat.count_nonzero() == state.count_nonzero()


def test_warm_up_runs_on_empty_memory(backend: DeviceBackend, dtype: torch.dtype) -> None:
    shape = (4, backend.capabilities.default_block_size, 2, 128)
    backend.warm_up((backend.allocate_kv(shape, dtype), backend.allocate_kv(shape, dtype)))
    backend.synchronize()


# Fused operations.


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 37])
def test_norms_equal_the_references(
    backend: DeviceBackend, dtype: torch.dtype, num_tokens: int
) -> None:
    hidden, residual = (torch.randn(num_tokens, 256).to(dtype) for _ in range(2))
    weight = torch.rand(256).to(dtype)
    there = [tensor.to(backend.device) for tensor in (hidden, residual, weight)]
    assert_close(
        backend.rms_norm(there[0], there[2], 1e-5), reference.rms_norm(hidden, weight, 1e-5)
    )
    normed, summed = backend.add_rms_norm(*there, 1e-5)
    assert_close(summed, hidden + residual)
    assert_close(normed, reference.rms_norm(hidden + residual, weight, 1e-5))


@pytest.mark.parametrize("width", [64, 128])
def test_rotary_equals_the_reference(
    backend: DeviceBackend, dtype: torch.dtype, width: int
) -> None:
    states = torch.randn(19, 6, width).to(dtype)
    angles = torch.rand(19, width // 2).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = backend.rotary(*(tensor.to(backend.device) for tensor in (states, cos, sin)))
    assert_close(found, reference.rotary(states, cos, sin))


def test_silu_mul_equals_the_reference(backend: DeviceBackend, dtype: torch.dtype) -> None:
    gate_up = torch.randn(19, 2 * 96).to(dtype)
    assert_close(backend.silu_mul(gate_up.to(backend.device)), reference.silu_mul(gate_up))


# Filters. Each token is half as likely as the one before it, so no mass is near a limit.

VOCAB_SIZE = 3000


def falling_logits(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    falling = -torch.arange(VOCAB_SIZE) * float(np.log(2.0))
    return torch.stack(
        [falling[torch.randperm(VOCAB_SIZE, generator=generator)] for _ in range(num_rows)]
    )


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([1, 5, VOCAB_SIZE, 40], None),
        (None, [0.4, 0.6, 0.8, 1.0]),
        ([3, 3, 2, VOCAB_SIZE], [0.6, 1.0, 0.99, 0.8]),
        ([2000, 1, 1500, 1024], [1.0, 0.5, 1.0, 0.3]),
        (None, None),
    ],
    ids=str,
)
def test_filters_leave_what_the_reference_leaves(
    backend: DeviceBackend, top_k: list[int] | None, top_p: list[float] | None
) -> None:
    logits = falling_logits(4)
    k = None if top_k is None else torch.tensor(top_k, dtype=torch.int32)
    p = None if top_p is None else torch.tensor(top_p)
    found = backend.top_k_top_p(
        logits.to(backend.device),
        None if k is None else k.to(backend.device),
        None if p is None else p.to(backend.device),
        max_top_k=max(top_k or [0]),
    ).cpu()
    wanted = reference.top_k_top_p(logits, k, p)
    assert found.dtype == torch.float32
    # Beyond 21 halvings there is less mass than float32 tells from none beside 1, and it depends on
    # the end that a kernel sums from whether such a token is left; nobody will draw it.
    matters = logits > -15
    assert torch.equal(found.isfinite() & matters, wanted.isfinite() & matters)
    torch.testing.assert_close(found[matters], wanted[matters])
