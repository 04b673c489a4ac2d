"""Steps in flight: whose answer is whose, who is busy, who is named, and an orderly end."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import (
    ConfigError,
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    WorkerError,
    WorkerFailure,
)
from engine.execution import ExecutionEngine
from engine.messages import ScheduleBatch, StepDone
from engine.worker.answers import Patience, receive_from_all

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

PATIENCE_SECONDS = 60


def mock_config(log_dir: Path, **settings: Any) -> EngineConfig:
    values = {"model_path": "mock", "device": "mock", "log_dir": log_dir, **settings}
    return EngineConfig.model_validate(values)


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[ExecutionEngine]:
    engine = ExecutionEngine(config)
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


def empty_step(step_id: int) -> ScheduleBatch:
    return ScheduleBatch(step_id=step_id, new=[], running=[], preempted=[], finished=[])


def test_step_is_in_flight_until_it_is_answered(tmp_path: Path) -> None:
    with engine_of(mock_config(tmp_path, device_ids=[0, 1], tensor_parallel_size=2)) as engine:
        assert engine.num_in_flight == 0
        first, second = engine.submit(empty_step(1)), engine.submit(empty_step(2))
        assert engine.num_in_flight == 2
        assert first.result().step_id == 1
        assert engine.num_in_flight == 1
        assert second.result().step_id == 2
        assert engine.num_in_flight == 0


def test_asking_for_a_later_step_first_loses_no_answer(tmp_path: Path) -> None:
    with engine_of(mock_config(tmp_path)) as engine:
        steps = [engine.submit(empty_step(number)) for number in range(3)]
        assert [step.result().step_id for step in reversed(steps)] == [2, 1, 0]


def test_answer_of_any_rank_to_another_step_is_an_error(tmp_path: Path) -> None:
    with engine_of(mock_config(tmp_path, device_ids=[0, 1], tensor_parallel_size=2)) as engine:
        step = engine.submit(empty_step(1))
        engine.submit(empty_step(2))
        # Taken out of the pipe behind the engine's back.
        receive_from_all(engine._workers[1:], Patience(PATIENCE_SECONDS))  # noqa: SLF001
        with pytest.raises(WorkerError, match="the answer to step 1 was lost: that to 2 came"):
            step.result()


# The end.


def test_closing_waits_for_the_steps_in_flight_and_ends_workers_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(mock_config(tmp_path, runtime={"mock_step_seconds": 0.3})) as engine:
        steps = [engine.submit(empty_step(number)) for number in range(2)]
        [pid] = engine.worker_pids
        with caplog.at_level(logging.WARNING):
            engine.stop()
    assert all(isinstance(step.answer, StepDone) for step in steps)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == []  # such as that a worker was killed
    assert not psutil.pid_exists(pid)


def test_closing_kills_a_worker_that_does_not_finish_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(mock_config(tmp_path, runtime={"watchdog_seconds": 0.5})) as engine:
        [pid] = engine.worker_pids
        os.kill(pid, signal.SIGSTOP)
        step = engine.submit(empty_step(7))
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            engine.stop()
        assert time.monotonic() - started < 8  # a worker that could still end is given 10 s
        assert "of 1 steps in flight at the end, not all ended: worker rank 0" in caplog.text
        assert not psutil.pid_exists(pid)
        with pytest.raises(WorkerError, match="a step has no answer: its engine was closed"):
            step.result()


def endless() -> Iterator[GenerateRequest]:
    number = 0
    while True:
        yield row(f"row {number}")
        number += 1


def row(request_id: str, prompt: str = "a prompt") -> GenerateRequest:
    params = SamplingParams(temperature=0, max_tokens=20)
    return GenerateRequest(request_id=request_id, prompt=prompt, sampling_params=params)


def test_closing_from_another_thread_waits_for_the_step_of_the_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = []
    is_running = threading.Event()

    def drive() -> None:
        try:
            for _ in llm.run(endless()):
                is_running.set()
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    llm = OfflineInference(mock_config(tmp_path, runtime={"mock_step_seconds": 0.02}))
    llm.start()
    driver = threading.Thread(target=drive)
    driver.start()
    assert is_running.wait(PATIENCE_SECONDS)
    llm.close()
    driver.join(PATIENCE_SECONDS)
    assert not driver.is_alive()
    assert [type(error) for error in errors] == [ConfigError]
    assert "is not open" in str(errors[0])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# What is in flight when a worker fails.


@pytest.mark.parametrize(
    ("failure", "trouble"),
    [
        (WorkerFailure.DIED, {"mock_crash_text": "poison"}),
        (WorkerFailure.TIMEOUT, {"mock_step_seconds": 3600, "watchdog_seconds": 0.2}),
        (WorkerFailure.DEVICE_LOST, {"mock_device_lost_after_steps": 0}),
    ],
)
def test_failure_names_the_rows_of_both_steps_in_flight_and_no_others(
    failure: WorkerFailure, trouble: dict[str, Any], tmp_path: Path
) -> None:
    # The first step has room for the old row alone, the second for a part of the new one.
    scheduler = {
        "max_num_batched_tokens": 8, "max_num_seqs": 8, "max_prefill_fraction": 1,
        # All are there before the first step.
        "batching": "static", "max_batch_size": 3, "max_wait_ms": 1e6,
    }  # fmt: skip
    rows = [row("old", "poison.."), row("new", "12345678"), row("waiting", "12345678")]
    llm = OfflineInference(mock_config(tmp_path, scheduler=scheduler, runtime=trouble))
    with llm, pytest.raises(WorkerError) as caught:
        llm.generate(rows)
    assert caught.value.failure is failure
    assert caught.value.request_ids == ("old", "new")
    assert "steps_in_flight=2" in str(caught.value)


def test_step_that_ranks_share_names_its_rows_when_it_fails(tmp_path: Path) -> None:
    config = mock_config(
        tmp_path,
        device_ids=[0, 1],
        tensor_parallel_size=2,
        runtime={"mock_device_lost_after_steps": 3},
    )
    with OfflineInference(config) as llm, pytest.raises(WorkerError) as caught:
        llm.generate([row("a"), row("b")])
    assert caught.value.failure is WorkerFailure.DEVICE_LOST
    assert set(caught.value.request_ids) == {"a", "b"}
    assert "a step failed in worker (pid" in str(caught.value)


def test_samples_of_one_row_are_named_once(tmp_path: Path) -> None:
    params = SamplingParams(n=3, max_tokens=20, seed=1)
    several = GenerateRequest(request_id="row", prompt="a", sampling_params=params)
    config = mock_config(
        tmp_path, runtime={"mock_device_lost_after_steps": 1}, scheduler={"num_steps_in_flight": 1}
    )
    with OfflineInference(config) as llm, pytest.raises(WorkerError) as caught:
        llm.generate([several])
    assert caught.value.request_ids == ("row",)


def test_worker_that_takes_no_message_is_found_by_the_watchdog(tmp_path: Path) -> None:
    config = mock_config(tmp_path, runtime={"watchdog_seconds": 0.5}, max_model_len=10**7)
    with OfflineInference(config) as llm:
        [pid] = llm.worker_pids
        os.kill(pid, signal.SIGSTOP)
        # More than the pipe holds.
        with pytest.raises(WorkerError, match=rf"pid {pid}\) has taken no message") as caught:
            llm.generate([row("long", "x" * 200_000)])
    assert caught.value.failure is WorkerFailure.TIMEOUT
    assert caught.value.request_ids == ("long",)
