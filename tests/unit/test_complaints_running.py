"""Runs that hung, stalled, grew or told the wrong progress; each case with its neighbours."""

import gc
import logging
import os
import signal
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from interrupted_jobs import ONE_BY_ONE, after_each_commit, run_at_once, stop_after
from job_builders import Row, make_job, questions, read_rows, run_job, stored_rows

from engine import ExitCode, OfflineInference, WorkerError, WorkerFailure, execution
from engine.execution import ExecutionEngine, StepFuture
from engine.messages import ScheduleBatch
from engine.worker import process
from flows.console import show_progress
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of
from flows.schema import JobState, ShardState

LONG_ANSWER = {"min_tokens": 40, "max_tokens": 40}


@pytest.fixture
def worker_pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the ids of the worker processes, in the order in which they start."""
    pids: list[int] = []
    start = OfflineInference.start

    def noted_start(self: OfflineInference) -> None:
        start(self)
        pids.extend(pid for pid in self.worker_pids if pid != os.getpid())

    monkeypatch.setattr(OfflineInference, "start", noted_start)
    return pids


class TestUnevenShards:
    """A rank without work, or with less than the others, hung the job at its end."""

    @pytest.mark.parametrize(
        ("num_rows", "shards"), [(5, 4), (1, 4), (3, 10), (4, 4), (9, 4), (2, 1)]
    )
    def test_every_row_is_answered_and_nobody_waits_for_the_idle(
        self, tmp_path: Path, num_rows: int, shards: int
    ) -> None:
        config = make_job(
            tmp_path, questions(num_rows), shards=shards, engine__device_ids=[0, 1, 2, 3]
        )
        outcome, summaries = run_at_once(config)
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.OK)
        assert len(summaries) == min(num_rows, shards)
        assert len(read_rows(output_path_of(config))) == num_rows
        with Ledger.open(config.resolved_ledger_url) as ledger:
            states = {shard.state for shard in ledger.list_shards(1)}
        assert states == {ShardState.DONE}
        assert run_at_once(config)[1] == []

    def test_a_device_that_is_done_early_takes_what_another_has_not_begun(
        self, tmp_path: Path
    ) -> None:
        rows: list[Row] = [{"id": "long", "prompt": "x", "sampling": LONG_ANSWER}, *questions(3)]
        config = make_job(
            tmp_path,
            rows,
            shards=4,
            sampling__max_tokens=1,
            engine__device_ids=[0, 1],
            engine__runtime={"inline": True, "mock_step_seconds": 0.02},
        )
        _, summaries = run_at_once(config)
        slots = [summary.slot for summary in summaries]
        assert Counter(slots)[slots[0]] == 1


class TestLongTail:
    """One long row held up the batch that it was in, and all that came after."""

    def test_short_rows_are_committed_while_a_long_one_goes_on(self, tmp_path: Path) -> None:
        rows: list[Row] = [{"id": "long", "prompt": "x", "sampling": LONG_ANSWER}, *questions(15)]
        config = make_job(
            tmp_path,
            rows,
            shards=1,
            sampling__max_tokens=1,
            stream_output=True,
            engine__scheduler={"max_num_seqs": 2},
        )
        _, (summary,) = run_job(config)
        stream = read_rows(tmp_path / "runs" / "job-1" / "stream.jsonl")
        assert stream[-1]["row_id"] == "long"
        # 40 steps of the long row; the others need no steps of their own.
        assert 40 <= summary.stats.num_steps <= 44


@pytest.mark.multiprocess
class TestHangs:
    """A request that never returns must end the run with an exit code, not hang it for ever."""

    RUNTIME: dict[str, Any] = {"inline": False, "watchdog_seconds": 1}

    def test_a_device_that_hangs_each_time_fails_the_job_and_says_where_it_stood(
        self, tmp_path: Path
    ) -> None:
        config = make_job(
            tmp_path,
            questions(3),
            shards=1,
            engine__runtime={"mock_step_seconds": 5, "watchdog_seconds": 0.05},
        )
        started = time.monotonic()
        with JobRun.open(config) as run:
            with pytest.raises(WorkerError, match="no good device is left") as caught:
                run.run_shard(0)
            outcome = run.finish([], {0: caught.value})
        assert time.monotonic() - started < 30
        assert (outcome.state, outcome.exit_code) == (JobState.FAILED, ExitCode.INFRASTRUCTURE)
        for part in ("silent", "running=", "3 pending; to go on: tokenmill resume job-1"):
            assert part in outcome.message

    def test_a_worker_that_hangs_at_the_last_row_is_replaced_and_the_row_answered(
        self, tmp_path: Path, worker_pids: list[int]
    ) -> None:
        rows: list[Row] = [*questions(5), {"id": "last", "prompt": "x", "sampling": LONG_ANSWER}]
        config = make_job(
            tmp_path,
            rows,
            sampling__max_tokens=2,
            engine__runtime=self.RUNTIME | {"mock_step_seconds": 0.01},
            **ONE_BY_ONE,
        )

        def hang(number: int) -> None:
            if number == 5:
                os.kill(worker_pids[0], signal.SIGSTOP)

        with after_each_commit(hang):
            outcome, (summary,) = run_job(config)
        assert outcome.message.startswith("6 ok, 0 failed")
        assert summary.num_worker_deaths == 1
        assert not psutil.pid_exists(worker_pids[0])

    def test_who_stops_a_job_whose_worker_hangs_waits_for_no_watchdog_and_no_other_worker(
        self, tmp_path: Path, worker_pids: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = make_job(tmp_path, questions(6), job_id="whole", job_dir=str(tmp_path / "whole"))
        run_job(whole)
        monkeypatch.setattr(execution, "_GRACE_SECONDS", 0.2)
        runtime = self.RUNTIME | {"watchdog_seconds": 3600}
        config = make_job(tmp_path, engine__runtime=runtime, **ONE_BY_ONE)
        submit = ExecutionEngine.submit

        def hang_and_stop(self: ExecutionEngine, batch: ScheduleBatch) -> StepFuture:
            if batch.step_id == 20 and self.worker_pids[0] != os.getpid():
                os.kill(self.worker_pids[0], signal.SIGSTOP)
                run.stop.set()
            return submit(self, batch)

        monkeypatch.setattr(ExecutionEngine, "submit", hang_and_stop)
        with JobRun.open(config) as run:
            with pytest.raises(WorkerError, match="silent") as caught:
                run.run_shard(0)
            outcome = run.finish([], {0: caught.value})
        assert (outcome.state, outcome.exit_code) == (JobState.INTERRUPTED, ExitCode.INTERRUPTED)
        assert [psutil.pid_exists(pid) for pid in worker_pids] == [False]
        assert len(stored_rows(config)) >= 1
        run_job(make_job(tmp_path, engine__scheduler={"max_num_seqs": 1}))
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()

    def test_a_worker_that_hangs_after_the_last_row_does_not_keep_the_run(
        self, tmp_path: Path, worker_pids: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "_STOP_SECONDS", 0.2)
        config = make_job(tmp_path, questions(2), shards=1, engine__runtime=self.RUNTIME)
        started = time.monotonic()
        with JobRun.open(config) as run:
            summary = run.run_shard(0)
            os.kill(worker_pids[0], signal.SIGSTOP)
            outcome = run.finish([summary], {})
        assert time.monotonic() - started < 30
        assert outcome.exit_code == ExitCode.OK
        assert len(read_rows(output_path_of(config))) == 2
        assert not psutil.pid_exists(worker_pids[0])


class TestDeadEngines:
    """The death of one engine shut down a job of many."""

    @pytest.mark.multiprocess
    def test_one_that_is_killed_is_replaced_and_the_other_never_notices(
        self, tmp_path: Path, worker_pids: list[int]
    ) -> None:
        rows = questions(40)
        whole = make_job(tmp_path, rows, job_id="whole", job_dir=str(tmp_path / "whole"))
        run_job(whole)
        config = make_job(
            tmp_path,
            engine__device_ids=[0, 1],
            engine__runtime={"inline": False, "mock_step_seconds": 0.005},
        )

        def kill_the_first(number: int) -> None:
            if number == 1:
                os.kill(worker_pids[0], signal.SIGKILL)

        with after_each_commit(kill_the_first):
            outcome, summaries = run_at_once(config)
        assert outcome.message.startswith("40 ok, 0 failed")
        assert sorted(summary.num_worker_deaths for summary in summaries) == [0, 1]
        assert {summary.state for summary in summaries} == {ShardState.DONE}
        assert len(worker_pids) == 3
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()

    def test_a_device_that_is_lost_for_good_leaves_its_rows_to_the_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_job(tmp_path, questions(24), shards=6, engine__device_ids=[0, 1])
        run = OfflineInference.run
        asked: list[int] = []

        def lost(self: OfflineInference, *arguments: Any, **options: Any) -> Any:
            (device_id,) = self.config.device_ids
            asked.append(device_id)
            if device_id == 0:
                raise WorkerError("fell off the bus", failure=WorkerFailure.DEVICE_LOST)
            return run(self, *arguments, **options)

        monkeypatch.setattr(OfflineInference, "run", lost)
        with JobRun.open(config) as job, ThreadPoolExecutor(2) as threads:
            summaries = list(threads.map(job.run_shard, job.pending_shards()))
            assert job.num_slots == 1
            outcome = job.finish(summaries, {})
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.OK)
        assert len(stored_rows(config)) == 24
        assert asked.count(0) == 2  # the shard's rows, and the canary


class TestManyShards:
    """What goes from part to part is a number, never rows: a thousand parts cost no more memory."""

    def test_a_shard_reads_nothing_of_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with JobRun.open(make_job(tmp_path, questions(6), shards=3)) as run:
            monkeypatch.setattr(Ledger, "list_shards", None)
            assert run.run_shard(1).num_ok == 2

    def test_memory_does_not_grow_with_the_number_of_shards(self, tmp_path: Path) -> None:
        rows = [{**row, "note": "x" * 150_000} for row in questions(120)]
        config = make_job(tmp_path, rows, shards=120, sampling__max_tokens=1)
        with JobRun.open(config) as run:
            used = []
            tracemalloc.start()
            for index in run.pending_shards():
                run.run_shard(index)
                used.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        assert len(used) == 120
        assert used[-1] - used[30] < 4e6  # the notes of these rows are 13 MB

    def test_memory_does_not_grow_with_the_rows_of_a_shard(self, tmp_path: Path) -> None:
        threshold = gc.get_threshold()

        def peak_bytes(num_rows: int) -> int:
            name = f"job-{num_rows}"
            config = make_job(
                tmp_path,
                [{"prompt": f"{index} {'x' * 4000}"} for index in range(num_rows)],
                job_id=name,
                job_dir=str(tmp_path / name),
                shards=1,
                commit_rows=16,
                sampling__max_tokens=1,
                engine__cache={"num_blocks": 2000, "enable_prefix_caching": False},
                engine__scheduler={"max_num_seqs": 4, "max_waiting_requests": 8},
            )
            with JobRun.open(config) as run:
                gc.set_threshold(100)  # what waits for the collector is not what is kept
                tracemalloc.start()
                run.run_shard(0)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            gc.set_threshold(*threshold)
            return peak

        few, many = peak_bytes(200), peak_bytes(600)
        assert many - few < 0.8e6  # the prompts are 1.6 MB, their tokens more than ten times that


class TestProgress:
    """Several samples a row made the bar end at 4 of 40, and a resume made it look fast."""

    def test_rows_are_rows_whatever_the_samples_and_of_the_whole_job(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "flows.console")
        slow = {"inline": True, "mock_step_seconds": 0.005}
        config = make_job(
            tmp_path, questions(4), sampling__n=10, engine__runtime=slow, **ONE_BY_ONE
        )
        with show_progress(config.resolved_ledger_url, "job-1"):
            stop_after(config, 15)
        with show_progress(config.resolved_ledger_url, "job-1"):
            run_job(config)
        lines = [line.getMessage() for line in caplog.records if line.name == "flows.console"]
        assert lines[0].startswith("progress job=job-1 rows=1/4 resumed=0 failed=0 ")
        assert lines[-1].startswith("progress job=job-1 rows=4/4 resumed=1 failed=0 ")
