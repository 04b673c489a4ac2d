"""A worker that hangs, and an answer that is lost, end in a WorkerError that tells all."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import (
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    WorkerError,
    WorkerFailure,
)

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model_path": "mock",
            "device": "mock",
            "log_dir": tmp_path,
            "runtime": {"watchdog_seconds": 1, "mock_step_seconds": 0.005},
        }
    )


def rows() -> Iterator[GenerateRequest]:
    for number in range(1000):
        yield GenerateRequest(
            request_id=f"row {number}", prompt="x", sampling_params=SamplingParams(temperature=0)
        )


def test_worker_that_is_stopped_is_found_by_the_watchdog(tmp_path: Path) -> None:
    with OfflineInference(config(tmp_path)) as llm:
        run = llm.run(rows())
        next(run)
        (pid,) = llm.worker_pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError) as caught:
            list(run)
    error = caught.value
    assert error.failure is WorkerFailure.TIMEOUT
    assert error.request_ids
    assert all(name.startswith("row ") for name in error.request_ids)
    for part in ("silent", "waiting=", "running=", "steps_in_flight=", error.request_ids[0]):
        assert part in str(error)
    assert str(tmp_path) in str(error), "the path of the worker's log is missing"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_answer_that_is_lost_is_found_by_the_watchdog(tmp_path: Path) -> None:
    with OfflineInference(config(tmp_path)) as llm:
        run = llm.run(rows())
        next(run)
        # Taken out of the pipe behind the engine's back.
        worker = llm._loop.execution._workers[0]  # type: ignore[union-attr]  # noqa: SLF001
        worker.receive(30)
        with pytest.raises(WorkerError, match="was lost"):
            list(run)


def test_engine_that_failed_can_be_entered_again(tmp_path: Path) -> None:
    llm = OfflineInference(config(tmp_path))
    with llm:
        run = llm.run(rows())
        next(run)
        os.kill(llm.worker_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed by signal 9"):
            list(run)
        with pytest.raises(WorkerError, match="failed while another run"):
            next(llm.run(rows()))
    with llm:
        assert next(llm.run(rows())).error is None
