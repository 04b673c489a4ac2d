"""A worker that hangs, and an answer that is lost, end in a WorkerError that tells all.

The watchdog finds it; one who wants to end does not wait for the watchdog.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import (
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    PartialOutput,
    SamplingParams,
    StreamedToken,
    WorkerError,
    WorkerFailure,
)
from engine.execution import ExecutionEngine, StepFuture
from engine.messages import ScheduleBatch
from engine.worker.answers import Patience, receive_from_all
from engine.worker.channel import Channel

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def config(tmp_path: Path, **runtime: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model_path": "mock",
            "device": "mock",
            "log_dir": tmp_path,
            "runtime": {"watchdog_seconds": 1, "mock_step_seconds": 0.005} | runtime,
        }
    )


def rows() -> Iterator[GenerateRequest]:
    for number in range(1000):
        yield GenerateRequest(
            request_id=f"row {number}",
            prompt=f"prompt {number}",
            sampling_params=SamplingParams(temperature=0),
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
        receive_from_all([worker], Patience(30))
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


# Who wants to end does not wait for the watchdog, which here would not come before the test's end.


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OfflineInference]:
    monkeypatch.setattr("engine.execution._GRACE_SECONDS", 0.5)
    with OfflineInference(config(tmp_path, watchdog_seconds=3600)) as llm:
        yield llm


def hang_at_step(
    monkeypatch: pytest.MonkeyPatch, step_id: int, then: Callable[[], object] = bool
) -> None:
    """Stop the worker when it has answered every step before this one, which it will not answer."""
    submit = ExecutionEngine.submit

    def hang(self: ExecutionEngine, batch: ScheduleBatch) -> StepFuture:
        if batch.step_id == step_id:
            [worker] = self._workers
            assert not self._in_flight or Channel.wait_for_any([worker.channel], 60)  # type: ignore[union-attr]
            os.kill(worker.pid, signal.SIGSTOP)
            then()
        return submit(self, batch)

    monkeypatch.setattr(ExecutionEngine, "submit", hang)


def is_reaped(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_stopping_a_run_whose_worker_hangs_loses_nothing_that_came_back_before(
    patient: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = patient.worker_pids
    stop = threading.Event()
    hang_at_step(monkeypatch, 10, then=stop.set)
    partials: list[PartialOutput] = []
    run = patient.run(rows(), stop=stop, on_partials=partials.extend, partial_seconds=3600)
    answered = set()
    with pytest.raises(WorkerError, match="silent") as caught:
        answered |= {completion.request_id for completion in run}
    assert is_reaped(pid)
    told = {partial.request_id for partial in partials if partial.token_ids}
    assert told.isdisjoint(answered)
    assert told
    assert told <= set(caught.value.request_ids)


def test_an_answer_that_was_on_its_way_when_the_worker_failed_comes_before_the_error(
    patient: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = patient.worker_pids
    stop = threading.Event()
    hang_at_step(monkeypatch, 30, then=stop.set)

    def hold_up_what_comes_after(_: StreamedToken) -> None:
        while not is_reaped(pid):
            time.sleep(0.01)

    first = GenerateRequest(
        request_id="first",
        prompt="x",
        sampling_params=SamplingParams(min_tokens=40, max_tokens=40),
        on_token=hold_up_what_comes_after,
    )
    once = SamplingParams(max_tokens=1)
    second = GenerateRequest(request_id="second", prompt="y", sampling_params=once)
    answered = []
    with pytest.raises(WorkerError, match="silent"):  # noqa: PT012
        for completion in patient.run([first, second], stop=stop):
            answered.append(completion.request_id)
    assert answered == ["second"]


def test_an_error_of_the_caller_comes_out_though_the_worker_hangs(
    patient: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = patient.worker_pids
    hung = threading.Event()
    hang_at_step(monkeypatch, 3, then=hung.set)

    def fail_when_it_hangs(_: list[PartialOutput]) -> None:
        if hung.is_set():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(patient.run(rows(), on_partials=fail_when_it_hangs, partial_seconds=0.0))
    assert is_reaped(pid)
    with pytest.raises(WorkerError, match="failed while another run"):
        next(patient.run(rows()))


def test_closing_an_engine_whose_worker_hangs_in_the_run_of_another_thread(
    patient: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = patient.worker_pids
    errors: list[WorkerError] = []
    hung = threading.Event()
    hang_at_step(monkeypatch, 0, then=hung.set)  # no step before it lets the engine go

    def wait_in_vain() -> None:
        try:
            list(patient.run(rows()))
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    assert hung.wait(60)
    patient.close()
    thread.join()
    assert is_reaped(pid)
    assert [error.failure for error in errors] == [WorkerFailure.TIMEOUT]


def test_a_worker_that_is_merely_slow_may_end_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.execution._GRACE_SECONDS", 0.1)
    partials: list[PartialOutput] = []
    stop = threading.Event()
    slow = {"watchdog_seconds": 3600, "mock_step_seconds": 1.0}
    request = GenerateRequest(
        request_id="row", prompt="x", sampling_params=SamplingParams(temperature=0)
    )

    def stop_after_the_first_step(found: list[PartialOutput]) -> None:
        partials.extend(found)
        stop.set()

    with OfflineInference(config(tmp_path, **slow)) as llm:
        done = llm.run(
            [request], stop=stop, on_partials=stop_after_the_first_step, partial_seconds=0.0
        )
        assert list(done) == []
    first, last = partials
    assert len(first.token_ids) < len(last.token_ids)
