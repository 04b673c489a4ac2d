"""The GPU's backend as far as it goes without one: refusals, texts, and what torch.cuda is called with.

torch.cuda is played by mocks that have the real functions' signatures, so nothing here says that a
GPU does what is asked of it; tests/device does, on one.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.base import DeviceHolder
from engine.backends.cuda import CudaBackend
from engine.backends.cuda_devices import (
    describe_device,
    explain_no_devices,
    parse_holders,
    read_holders,
)
from engine.errors import ConfigError, WorkerError, WorkerFailure

UUID = "5e9ad4c3-1111-2222-3333-444455556666"
SMI = f"""\
{os.getpid()}, GPU-{UUID}, 1024
999999998, GPU-{UUID}, 2048
77, GPU-00000000-0000-0000-0000-000000000000, 512
1, GPU-{UUID.upper()}, [N/A]
No running processes found
"""
GIB = 1 << 30


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mock]:
    """Put a mock with the real signature in the place of a function of torch.cuda."""

    def mock(name: str, **behaviour: object) -> Mock:
        real = getattr(torch, "cuda")  # noqa: B009 - the rule against torch.cuda is for engine/
        stand_in: Mock = create_autospec(getattr(real, name), **behaviour)
        monkeypatch.setattr(real, name, stand_in)
        return stand_in

    return mock


# No GPU.


def test_a_machine_without_a_gpu_is_refused_before_anything_is_bound(
    mocked: Callable[..., Mock],
) -> None:
    mocked("device_count", return_value=0)
    with pytest.raises(ConfigError, match="engine.device is cuda"):
        CudaBackend().check_device(0)


@pytest.mark.parametrize(
    ("environment", "cuda_version", "words"),
    [
        ({}, None, "this torch was built for the CPU; install the build for your CUDA"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "13.0", "CUDA_VISIBLE_DEVICES is empty, which hides every"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "13.0", "no GPU; CUDA_VISIBLE_DEVICES is '7'; compare"),
        ({}, "13.0", "built for CUDA 13.0.*no driver, or a container that was started without"),
    ],
)
def test_the_reason_why_there_is_no_gpu_is_named(
    environment: dict[str, str], cuda_version: str | None, words: str
) -> None:
    assert re.search(words, explain_no_devices(environment, cuda_version))


def test_a_number_beyond_the_gpus_is_refused_with_their_count(mocked: Callable[..., Mock]) -> None:
    mocked("device_count", return_value=2)
    with pytest.raises(ConfigError, match=r"device_ids has 2, but this machine has 2 device"):
        CudaBackend().check_device(2)


# Who else is there.


def test_only_processes_on_the_same_gpu_hold_it() -> None:
    assert parse_holders(SMI, UUID) == [
        DeviceHolder(pid=os.getpid(), used_bytes=GIB),
        DeviceHolder(pid=999999998, used_bytes=2 * GIB),
        DeviceHolder(pid=1, used_bytes=0),
    ]
    assert parse_holders(SMI, f"GPU-{UUID}") == parse_holders(SMI, UUID)
    assert parse_holders("", UUID) == []


def put_smi_on_path(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_processes_that_cannot_be_seen_from_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(SMI)
    put_smi_on_path(tmp_path, f"echo $@ > {tmp_path}/asked; cat {tmp_path}/answer", monkeypatch)
    assert [holder.pid for holder in read_holders(UUID)] == [os.getpid(), 1]
    asked = (tmp_path / "asked").read_text()
    assert "--query-compute-apps=pid,gpu_uuid,used_memory" in asked


@pytest.mark.parametrize("script", ["exit 9", None])
def test_without_nvidia_smi_nobody_is_known_and_the_log_says_so(
    script: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        put_smi_on_path(tmp_path, script, monkeypatch)
    assert read_holders(UUID) == ()
    assert "nvidia-smi does not say who else" in caplog.text


def test_a_gpu_that_another_process_holds_is_refused_by_pid_and_memory(
    mocked: Callable[..., Mock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mocked("device_count", return_value=1)
    mocked("get_device_properties", return_value=SimpleNamespace(uuid=UUID))
    (tmp_path / "answer").write_text(f"1, GPU-{UUID}, 3072\n{os.getpid()}, GPU-{UUID}, 5\n")
    put_smi_on_path(tmp_path, f"cat {tmp_path}/answer", monkeypatch)
    with pytest.raises(WorkerError, match=r"cuda 0 is held by pid 1 \(3.0 GiB\); end that"):
        CudaBackend().check_device(0)


# Binding.


def test_what_is_bound_is_said_in_the_numbers_of_the_machine_too() -> None:
    words = describe_device(1, "NVIDIA X", 80 * GIB, {"CUDA_VISIBLE_DEVICES": "4, 6"})
    assert words == "cuda:1 (NVIDIA X, 80.0 GiB, number 1 of CUDA_VISIBLE_DEVICES=4, 6: 6)"
    assert describe_device(0, "NVIDIA X", GIB, {}) == "cuda:0 (NVIDIA X, 1.0 GiB)"


def test_a_bound_gpu_is_the_device_and_says_its_name(
    mocked: Callable[..., Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_device = mocked("set_device")
    mocked(
        "get_device_properties",
        return_value=SimpleNamespace(name="NVIDIA X", total_memory=8 * GIB),
    )
    mocked("mem_get_info", return_value=(3 * GIB, 8 * GIB))
    mocked("memory_reserved", return_value=5 * GIB // 4)
    mocked("memory_allocated", return_value=GIB)
    backend = CudaBackend()
    assert backend.bind(1, None) == "cuda:1 (NVIDIA X, 8.0 GiB)"
    set_device.assert_called_once_with(1)
    assert backend.device == torch.device("cuda", 1)
    # What our own allocator has kept is free for us, though not for the driver.
    assert backend.memory_info().free_bytes == 3 * GIB + GIB // 4


def test_a_gpu_that_the_driver_does_not_give_is_a_failed_start(
    mocked: Callable[..., Mock],
) -> None:
    busy = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    mocked("set_device", side_effect=RuntimeError(busy))
    with pytest.raises(WorkerError, match="cuda:0 cannot be bound: another process has") as caught:
        CudaBackend().bind(0, None)
    assert caught.value.failure is WorkerFailure.START_FAILED


# Measuring and capturing.


def bound(mocked: Callable[..., Mock]) -> CudaBackend:
    mocked("set_device")
    mocked("get_device_properties", return_value=SimpleNamespace(name="X", total_memory=GIB))
    mocked("mem_get_info", return_value=(GIB, GIB))
    backend = CudaBackend()
    backend.bind(0, None)
    return backend


def test_the_peak_is_counted_beyond_what_was_held_before(mocked: Callable[..., Mock]) -> None:
    backend = bound(mocked)
    ran: list[str] = []
    mocked("synchronize", side_effect=lambda device: ran.append("synchronize"))
    mocked("reset_peak_memory_stats", side_effect=lambda device: ran.append("reset"))
    mocked("memory_allocated", return_value=100)
    mocked("max_memory_allocated", return_value=350)
    mocked("empty_cache", side_effect=lambda: ran.append("release"))
    assert backend.measure_peak_bytes(lambda: ran.append("run")) == 250
    assert ran == ["synchronize", "reset", "run", "synchronize", "release"]


def test_graphs_are_captured_into_one_pool_on_the_compute_stream(
    mocked: Callable[..., Mock],
) -> None:
    backend = bound(mocked)
    compute = Mock()
    mocked("Stream", side_effect=[compute, Mock(), Mock()])
    mocked("CUDAGraph")
    pool_handle = mocked("graph_pool_handle", side_effect=[(0, 1), (0, 2)])
    capture = mocked("graph")
    outputs = [torch.zeros(1), torch.ones(1)]
    graphs = [backend.capture_graph(lambda output=output: output) for output in outputs]
    pool_handle.assert_called_once_with()
    for call in capture.call_args_list:
        assert call.kwargs["pool"] == (0, 1)
        assert call.kwargs["stream"] is compute
    metadata = Mock(spec=AttentionMetadata)
    assert [graph.replay(metadata) for graph in graphs] == outputs
    graphs.clear()
    backend.capture_graph(lambda: outputs[0])
    assert capture.call_args.kwargs["pool"] == (0, 2), "a pool ends with its last graph"


# Errors.

ASYNC = (
    "\nSearch for `cudaErrorX' in the CUDA runtime documentation for more information.\nCUDA "
    "kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


@pytest.mark.parametrize(
    ("error", "failure", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a"),
            WorkerFailure.OUT_OF_MEMORY,
            "max_num_batched_tokens",
        ),
        (
            torch.AcceleratorError(f"CUDA error: out of memory{ASYNC}"),
            WorkerFailure.OUT_OF_MEMORY,
            "no memory left on the GPU",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            WorkerFailure.OUT_OF_MEMORY,
            "cuBLAS",
        ),
        (
            torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{ASYNC}"),
            WorkerFailure.DEVICE_LOST,
            "CUDA_LAUNCH_BLOCKING=1 and engine.enforce_eager",
        ),
        (
            torch.AcceleratorError(f"CUDA error: device-side assert triggered{ASYNC}"),
            WorkerFailure.DEVICE_LOST,
            "out of its range",
        ),
        (
            torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered{ASYNC}"),
            WorkerFailure.DEVICE_LOST,
            "Xid",
        ),
        (
            torch.AcceleratorError(f"CUDA error: unspecified launch failure{ASYNC}"),
            WorkerFailure.DEVICE_LOST,
            "a kernel failed",
        ),
        (
            torch.AcceleratorError(
                f"CUDA error: operation not permitted when stream is capturing{ASYNC}"
            ),
            WorkerFailure.OTHER,
            "engine.enforce_eager to true",
        ),
        (
            RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
            WorkerFailure.TIMEOUT,
            "rank",
        ),
        (RuntimeError("NCCL Error 2: unhandled system error"), WorkerFailure.OTHER, "rank"),
        (ValueError("shapes [3] and [4]"), WorkerFailure.OTHER, "^ValueError: shapes"),
        (torch.AcceleratorError("CUDA error: invalid argument"), WorkerFailure.OTHER, "invalid"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_told_apart_and_explained(
    error: Exception, failure: WorkerFailure, words: str
) -> None:
    backend = CudaBackend()
    assert backend.classify_error(error) is failure
    assert re.search(words, backend.explain_error(error))


def test_a_long_text_is_cut() -> None:
    words = CudaBackend().explain_error(RuntimeError("x" * 10_000))
    assert len(words) < 700
    assert words.endswith("...")


def test_rows_are_not_exact_on_a_gpu_and_that_is_said() -> None:
    with pytest.raises(ConfigError, match="on device cuda the last bits of a row"):
        CudaBackend().row_exact()
