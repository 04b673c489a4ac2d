"""Captured graphs on the device that --device names."""

from collections.abc import Callable

import pytest
import torch
from decode_toy import (
    ToyShape,
    assert_graphs_equal_eager_steps,
    assert_padding_writes_nowhere,
)

from engine.backends.base import DeviceBackend
from engine.errors import ConfigError

MAX_NUM_SEQS = 11


@pytest.fixture
def graphed(backend: DeviceBackend) -> DeviceBackend:
    if not backend.has_graphs:
        pytest.skip(f"{backend.name} has no graphs")
    return backend


@pytest.fixture
def shape(backend: DeviceBackend, dtype: torch.dtype) -> ToyShape:
    """Return a toy in a layout that the device documents."""
    return ToyShape(
        block_size=backend.capabilities.default_block_size,
        num_blocks=40,
        max_model_len=1000,
        heads=(4, 2),
        width=128,
        dtype=dtype,
    )


def test_a_device_without_graphs_says_what_to_set(backend: DeviceBackend) -> None:
    if backend.has_graphs:
        pytest.skip(f"{backend.name} has graphs")
    with pytest.raises(ConfigError, match="set engine.enforce_eager to true"):
        backend.capture_graph(lambda: torch.zeros(1))


@torch.inference_mode()
def test_captured_decode_steps_of_every_size_equal_eager_ones(
    graphed: DeviceBackend, shape: ToyShape
) -> None:
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}[shape.dtype]
    with graphed.computing():
        assert_graphs_equal_eager_steps(graphed, shape, MAX_NUM_SEQS, tolerance=tolerance)


@torch.inference_mode()
def test_padding_rows_change_no_bit_of_the_pool_on_the_device(
    graphed: DeviceBackend, shape: ToyShape
) -> None:
    with graphed.computing():
        assert_padding_writes_nowhere(graphed, shape, MAX_NUM_SEQS)


def test_an_operation_that_waits_for_the_device_cannot_be_captured(
    graphed: DeviceBackend,
) -> None:
    """What a graph cannot do must fail at its capture, not be left out of the replay."""
    if graphed.name == "npu":
        pytest.skip("what CANN says to it is not known, and a capture that broke may not end")
    numbers = torch.ones(4, device=graphed.device)

    def run(ask: Callable[[torch.Tensor], object] = torch.Tensor.tolist) -> torch.Tensor:
        ask(numbers)
        return numbers + 1

    run()
    with pytest.raises(RuntimeError):
        graphed.capture_graph(run)
