"""Copies, streams, memory and errors of the device that --device names."""

import numpy as np
import pytest
import torch

from engine.backends.base import DeviceBackend
from engine.errors import ConfigError, WorkerFailure

MIB = 1 << 20


# Between host and device.


def test_uploaded_arrays_arrive_whatever_their_kind(backend: DeviceBackend) -> None:
    arrays = {
        "ids": np.arange(7, dtype=np.int64),
        "tables": np.arange(6, dtype=np.int32).reshape(2, 3),
        "none": np.zeros((0, 4), np.int32),
        "uniforms": np.linspace(0, 1, 5, dtype=np.float32),
    }
    found = backend.upload(arrays)
    with backend.computing():
        copies = {name: tensor.clone() for name, tensor in found.items()}
    for name, array in arrays.items():
        assert copies[name].device == backend.device
        np.testing.assert_array_equal(copies[name].cpu().numpy(), array, err_msg=name)


def test_arrays_may_be_changed_after_their_upload(backend: DeviceBackend) -> None:
    if backend.is_host:
        pytest.skip("where the device is the host, an upload is the array itself")
    array = np.arange(100_000)
    with backend.computing():
        found = backend.upload({"numbers": array})["numbers"]
        array[:] = -1
        doubled = found * 2
    assert np.array_equal(backend.fetch(doubled).numpy(), np.arange(100_000) * 2)


def test_an_upload_is_good_until_the_one_after_the_next(backend: DeviceBackend) -> None:
    with backend.computing():
        uploads = []
        sums = []
        for step in range(9):
            numbers = backend.upload({"numbers": np.full(50_000, step)})["numbers"]
            uploads.append(numbers)
            if step:
                sums.append(uploads[step - 1] + uploads[step])
        fetched = [backend.fetch(total) for total in sums]
    for step, total in enumerate(fetched):
        assert (total.numpy() == 2 * step + 1).all()


def test_what_was_fetched_is_ready_in_the_end_and_read_as_often_as_one_likes(
    backend: DeviceBackend,
) -> None:
    with backend.computing():
        large = torch.ones(1000, 1000, device=backend.device)
        fetched = backend.fetch((large @ large)[0])
    backend.synchronize()
    assert fetched.is_ready()
    assert (fetched.numpy() == 1000).all()
    assert np.array_equal(fetched.numpy(), fetched.numpy())


def test_computing_follows_what_was_launched_before_and_precedes_what_comes_after(
    backend: DeviceBackend,
) -> None:
    total = torch.zeros(1 << 20, device=backend.device)
    for _ in range(20):
        total += 1
        with backend.computing():
            total *= 2
    assert (total.cpu() == 2**21 - 2).all()


# Memory and errors.


def test_free_memory_is_some_of_the_total_and_falls_with_what_is_taken(
    backend: DeviceBackend,
) -> None:
    before = backend.memory_info()
    assert 0 < before.free_bytes <= before.total_bytes
    if backend.is_host:
        pytest.skip("free memory of a host is an estimate")
    backend.release_memory()
    before = backend.memory_info()
    held = torch.zeros(256 * MIB, dtype=torch.uint8, device=backend.device)
    backend.synchronize()
    after = backend.memory_info()
    assert before.free_bytes - after.free_bytes >= 256 * MIB
    del held
    backend.release_memory()
    assert backend.memory_info().free_bytes > after.free_bytes


def test_the_peak_of_a_run_is_measured_beyond_what_was_held(backend: DeviceBackend) -> None:
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device=backend.device)

    def run() -> None:
        torch.zeros(32 * MIB, dtype=torch.uint8, device=backend.device)
        torch.zeros(48 * MIB, dtype=torch.uint8, device=backend.device)

    peak = backend.measure_peak_bytes(run)
    if backend.is_host:
        assert peak == 0
    else:
        assert 48 * MIB <= peak < 60 * MIB
    del held


def test_an_allocation_that_fails_is_told_apart_and_the_device_goes_on(
    backend: DeviceBackend,
) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=backend.device)
    assert backend.classify_error(caught.value) is WorkerFailure.OUT_OF_MEMORY
    assert backend.explain_error(caught.value)
    assert torch.ones(3, device=backend.device).sum().item() == 3


def test_a_fault_of_the_program_is_neither_memory_nor_device(backend: DeviceBackend) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(3, device=backend.device) + torch.ones(4, device=backend.device)
    assert backend.classify_error(caught.value) is WorkerFailure.OTHER


def test_a_device_beyond_the_last_is_refused_with_their_count(backend: DeviceBackend) -> None:
    count = backend.count_devices()
    assert count >= 1
    with pytest.raises(ConfigError, match=str(count)):
        backend.check_device(count)


def test_the_default_block_size_is_one_that_the_device_takes(backend: DeviceBackend) -> None:
    backend.check_block_size(backend.capabilities.default_block_size)
