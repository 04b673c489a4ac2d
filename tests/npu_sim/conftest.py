"""Tests of the NPU path on simulated devices; without the simulator none of them is collected."""

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("NPU_SIMULATOR") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _device_in_order() -> Iterator[None]:
    """Let every test begin and end with devices that work."""
    import torch_npu  # noqa: F401 - starts the simulator
    from npu_simulator.acl import controls

    memory_bytes = controls.memory_bytes
    yield
    controls.memory_bytes, controls.wait_error, controls.late_queries = memory_bytes, 0, 0
