"""A worker that cannot start: found before weights are read, told with numbers, leaving nothing."""

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import ConfigError, EngineConfig, OfflineInference, WorkerError, WorkerFailure
from engine.backends.host_memory import host_memory

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

PATIENCE_SECONDS = 60


def mock_engine(log_dir: Path, **settings: Any) -> OfflineInference:
    values = {"model_path": "mock", "device": "mock", "log_dir": log_dir, **settings}
    return OfflineInference(EngineConfig.model_validate(values))


def workers() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def is_a_worker(pid: int) -> bool:
    try:
        return "engine.worker" in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


@contextmanager
def sent_to_the_first_new_worker(number: signal.Signals) -> Iterator[list[int]]:
    """Send a signal as soon as there is a worker; the list then has its pid."""
    before = workers()
    pids: list[int] = []

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not pids and time.monotonic() < deadline:
            # Before it has become a worker, it would take the thread that starts it along.
            for pid in filter(is_a_worker, workers() - before):
                os.kill(pid, number)
                pids.append(pid)
                break

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield pids
    watcher.join()


def test_worker_that_is_killed_while_it_loads_is_a_start_that_failed(tmp_path: Path) -> None:
    before = workers()
    with (
        sent_to_the_first_new_worker(signal.SIGKILL) as pids,
        pytest.raises(WorkerError, match="could not start: worker rank 0") as caught,
    ):
        mock_engine(tmp_path).start()
    assert caught.value.failure is WorkerFailure.START_FAILED
    assert f"(pid {pids[0]}) was killed by signal 9" in str(caught.value)
    assert f"its log {tmp_path}" in str(caught.value)
    assert workers() == before


def test_rank_that_is_killed_while_it_loads_ends_the_start_of_all(tmp_path: Path) -> None:
    before = workers()
    engine = mock_engine(tmp_path, device_ids=[0, 1, 2], tensor_parallel_size=3)
    with (
        sent_to_the_first_new_worker(signal.SIGKILL) as pids,
        pytest.raises(WorkerError) as caught,
    ):
        engine.start()
    assert caught.value.failure is WorkerFailure.START_FAILED
    assert f"(pid {pids[0]}) was killed by signal 9" in str(caught.value)
    assert workers() == before
    with engine:
        assert len(engine.generate(["a", "b"])) == 2


def test_worker_that_hangs_while_it_loads_is_a_start_that_failed(tmp_path: Path) -> None:
    before = workers()
    with (
        sent_to_the_first_new_worker(signal.SIGSTOP),
        pytest.raises(WorkerError, match="could not start: .* was silent for 1 s") as caught,
    ):
        mock_engine(tmp_path, runtime={"start_timeout_seconds": 1}).start()
    assert caught.value.failure is WorkerFailure.START_FAILED
    assert workers() == before


def test_folder_of_logs_that_cannot_be_used_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    before = workers()
    with pytest.raises(ConfigError, match=r"no worker log .*set engine\.log_dir"):
        mock_engine(tmp_path / "logs").start()
    assert workers() == before


# With a real model: what is refused before its weights are read.


def with_weights(model: Path, folder: Path, num_bytes: int) -> Path:
    """Return a copy of a model whose weights are said to be so large: a file without content."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    shape = [num_bytes // 4]
    header = json.dumps(
        {"model.x": {"dtype": "F32", "shape": shape, "data_offsets": [0, shape[0] * 4]}}
    ).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + shape[0] * 4)
    return folder


def cpu_engine(model: Path, tmp_path: Path, **settings: Any) -> OfflineInference:
    values = {
        "model_path": str(model), "device": "cpu", "log_dir": tmp_path / "logs",
        "runtime": {"inline": True, "num_threads": 1}, **settings,
    }  # fmt: skip
    return OfflineInference(EngineConfig.model_validate(values))


def test_model_larger_than_the_machine_is_refused_before_it_is_read(
    tiny_llama: Path, tmp_path: Path
) -> None:
    size = 2 * host_memory().total_bytes
    model = with_weights(tiny_llama, tmp_path / "model", size)
    with pytest.raises(ConfigError, match="not enough memory on cpu: ") as caught:
        cpu_engine(model, tmp_path).start()
    assert f"weights {size / 2**30:.2f} in float32" in str(caught.value)


def test_model_that_others_leave_no_room_for_may_be_tried_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    memory = host_memory()
    size = (memory.total_bytes + memory.free_bytes) // 2
    model = with_weights(tiny_llama, tmp_path / "model", size)
    with pytest.raises(WorkerError, match="not enough memory .* end what else runs") as caught:
        cpu_engine(model, tmp_path, runtime={"num_threads": 1}).start()
    assert caught.value.failure is WorkerFailure.START_FAILED


def test_kv_cache_is_counted_too_before_anything_is_loaded(
    tiny_llama: Path, tmp_path: Path
) -> None:
    size_gib = host_memory().total_bytes / 2**30
    model = with_weights(tiny_llama, tmp_path / "model", 2**20)
    with pytest.raises(ConfigError, match=rf"KV cache {size_gib:.2f}\).*engine\.cache"):
        cpu_engine(model, tmp_path, cache={"kv_cache_gib": size_gib}).start()


def test_more_kv_blocks_than_there_is_memory_for_are_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cache\.num_blocks 1000000000, \d+ bytes each"):
        cpu_engine(tiny_llama, tmp_path, cache={"num_blocks": 10**9}).start()


def test_cpu_has_one_device(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_ids has 1, but this machine has 1 device"):
        cpu_engine(tiny_llama, tmp_path, device="auto", device_ids=[1]).start()
