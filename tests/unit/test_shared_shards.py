"""Slots that no shard waits for take rows of a shard that another slot has begun."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, note_asked, questions, run_job, stored_rows

from engine import (
    ConfigError,
    ExitCode,
    LedgerError,
    OfflineInference,
    WorkerError,
    WorkerFailure,
)
from flows.config import JobConfig
from flows.device_locks import DeviceLocks
from flows.engine_part import EnginePart
from flows.job_run import JobOutcome, JobRun
from flows.ledger import CompletionRow, Lease, Ledger
from flows.ledger_check import check_job
from flows.preparation import output_path_of
from flows.schema import ShardState
from flows.shard_recovery import BadDeviceError
from flows.shard_runner import ShardSummary

NUM_ROWS = 60
THREE_SLOTS: dict[str, Any] = {
    "shards": 1,
    "engine__device_ids": [0, 1, 2],
    "engine__runtime": {"inline": True, "mock_step_seconds": 0.01},
    "commit_rows": 2,
}


def run_at_once(config: JobConfig) -> tuple[JobOutcome, list[ShardSummary], JobRun]:
    """Run as many shards at a time as there are slots, as the flow does."""
    summaries: list[ShardSummary] = []
    failures: dict[int, BaseException] = {}
    with JobRun.open(config) as run:
        with ThreadPoolExecutor(run.num_slots) as threads:
            running = {i: threads.submit(run.run_shard, i) for i in run.pending_shards()}
            for index, future in running.items():
                error = future.exception()
                if error is None:
                    summaries.append(future.result())
                else:
                    failures[index] = error
        return run.finish(summaries, failures), summaries, run


def check_ledger(config: JobConfig) -> None:
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        assert [result for result in check_job(ledger, config.job_id) if not result.is_ok] == []


def in_spare_slots(act: Callable[[EnginePart], None]) -> Callable[..., None]:
    """Return EnginePart.answer that does something before, in all slots but the first."""
    answer = EnginePart.answer

    def answer_or_act(part: EnginePart, row_indices: Sequence[int] | None) -> None:
        if threading.current_thread().name.startswith("spare-"):
            act(part)
        answer(part, row_indices)

    return answer_or_act


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Give a list of what is to be done after the next commits, in order."""
    to_do: list[Callable[[], None]] = []
    commit = Ledger.commit

    def commit_and_act(
        self: Ledger, lease: Lease, rows: Sequence[CompletionRow], *, device: str | None = None
    ) -> int:
        num_failed = commit(self, lease, rows, device=device)
        if to_do:
            to_do.pop(0)()
        return num_failed

    monkeypatch.setattr(Ledger, "commit", commit_and_act)
    return to_do


def test_every_slot_takes_rows_of_the_one_shard_and_each_row_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = note_asked(monkeypatch)
    config = make_job(tmp_path, questions(NUM_ROWS), **THREE_SLOTS)
    outcome, (summary,), _ = run_at_once(config)
    assert (outcome.exit_code, summary.state) == (ExitCode.OK, ShardState.DONE)
    assert Counter(asked) == Counter(row["id"] for row in questions(NUM_ROWS))
    assert set(summary.busy_seconds_by_slot) == {0, 1, 2}
    assert sum(summary.busy_seconds_by_slot.values()) == pytest.approx(summary.stats.busy_seconds)
    assert summary.busy_seconds == max(summary.busy_seconds_by_slot.values())
    assert summary.num_ok == NUM_ROWS
    rows = stored_rows(config)
    assert summary.stats.num_output_tokens == sum(row.num_output_tokens for row in rows)
    check_ledger(config)


def test_the_output_does_not_depend_on_how_many_slots_took_part(tmp_path: Path) -> None:
    outputs = []
    for device_ids in ([0], [0, 1, 2]):
        folder = tmp_path / str(len(device_ids))
        folder.mkdir()
        rows = [
            *questions(30),
            *({"id": f"n{i}", "prompt": f"{i}", "sampling": {"n": 3}} for i in range(6)),
            *({"id": f"t{i}", "turns": ["one", f"two {i}"]} for i in range(6)),
            *({"id": f"g{i}", "prompt": "g", "sampling": {"temperature": 0}} for i in range(9)),
        ]
        config = make_job(folder, rows, **THREE_SLOTS | {"engine__device_ids": device_ids})
        run_at_once(config)
        outputs.append(output_path_of(config).read_bytes())
        check_ledger(config)
    assert outputs[0] == outputs[1]


def test_a_slot_whose_shard_is_done_helps_the_one_that_is_not(tmp_path: Path) -> None:
    short = {"max_tokens": 1}
    rows = [
        {**row, "sampling": short if index < 20 else {"min_tokens": 8, "max_tokens": 8}}
        for index, row in enumerate(questions(40))
    ]
    changes = THREE_SLOTS | {"shards": 2, "engine__device_ids": [0, 1]}
    _, summaries, _ = run_at_once(make_job(tmp_path, rows, **changes))
    first, second = sorted(summaries, key=lambda summary: summary.shard_index)
    assert len(first.busy_seconds_by_slot) == 1
    assert set(second.busy_seconds_by_slot) == {0, 1}
    assert (first.num_ok, second.num_ok) == (20, 20)


def test_no_slot_is_spare_while_a_shard_has_still_to_begin(tmp_path: Path) -> None:
    with JobRun.open(make_job(tmp_path, questions(40), **THREE_SLOTS | {"shards": 2})) as run:
        first, second = run.run_shard(0), run.run_shard(1)
    assert set(first.busy_seconds_by_slot) == {0}
    assert set(second.busy_seconds_by_slot) == {0, 1, 2}


def test_for_less_than_a_batch_no_other_engine_is_loaded(tmp_path: Path) -> None:
    changes = THREE_SLOTS | {"engine__scheduler": {"max_num_seqs": 32}}
    _, (summary,), run = run_at_once(make_job(tmp_path, questions(20), **changes))
    assert set(summary.busy_seconds_by_slot) == {0}
    assert run._stacks.num_loads == 1


def test_a_device_that_another_process_has_is_taken_as_soon_as_it_is_free(
    tmp_path: Path, commits: list[Callable[[], None]]
) -> None:
    hold = DeviceLocks(tmp_path / "locks", "another").try_take(("mock:1",))
    assert hold is not None
    commits += [lambda: None] * 4 + [hold.release]
    changes = THREE_SLOTS | {"engine__device_ids": [0, 1], "device_lock_dir": tmp_path / "locks"}
    outcome, (summary,), _ = run_at_once(make_job(tmp_path, questions(200), **changes))
    assert outcome.exit_code == ExitCode.OK
    assert set(summary.busy_seconds_by_slot) == {0, 1}


def test_a_job_does_not_wait_at_its_end_for_a_device_that_another_process_has(
    tmp_path: Path,
) -> None:
    locks = DeviceLocks(tmp_path / "locks", "another")
    hold = locks.try_take(("mock:1",))
    assert hold is not None
    changes = THREE_SLOTS | {"engine__device_ids": [0, 1], "device_lock_dir": tmp_path / "locks"}
    outcome, (summary,), _ = run_at_once(make_job(tmp_path, questions(NUM_ROWS), **changes))
    assert outcome.exit_code == ExitCode.OK
    assert set(summary.busy_seconds_by_slot) == {0}
    assert locks.waiting() == []
    hold.release()


def test_one_slot_has_no_thread_for_others(tmp_path: Path) -> None:
    with JobRun.open(make_job(tmp_path, questions(2), shards=1)) as run:
        assert [t.name for t in threading.enumerate() if t.name.startswith("spare-")] == []
        run.run_shard(0)


def test_a_stop_reaches_every_slot_and_the_rest_is_resumed_by_any_number_of_them(
    tmp_path: Path, commits: list[Callable[[], None]]
) -> None:
    config = make_job(tmp_path, questions(NUM_ROWS), **THREE_SLOTS)
    with JobRun.open(config) as run:
        commits += [lambda: None] * 3 + [run.stop.set]
        summary = run.run_shard(0)
        run.finish([summary], {})
    assert summary.state is ShardState.INTERRUPTED
    before = stored_rows(config)
    assert 8 <= summary.num_ok == len(before) < NUM_ROWS
    check_ledger(config)
    outcome, (rest,) = run_job(make_job(tmp_path, **THREE_SLOTS | {"engine__device_ids": [0]}))
    assert (outcome.exit_code, rest.num_resumed) == (ExitCode.OK, len(before))
    after = {row.row_id: row for row in stored_rows(config)}
    assert [after[row.row_id] for row in before] == before
    assert len(after) == NUM_ROWS
    check_ledger(config)


def test_a_bad_device_of_a_spare_slot_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(_: EnginePart) -> None:
        raise BadDeviceError("the device is gone", failure=WorkerFailure.DEVICE_LOST)

    monkeypatch.setattr(EnginePart, "answer", in_spare_slots(lose))
    config = make_job(tmp_path, questions(NUM_ROWS), **THREE_SLOTS)
    outcome, (summary,), _ = run_at_once(config)
    assert (outcome.exit_code, summary.num_ok) == (ExitCode.OK, NUM_ROWS)
    assert caplog.text.count("is bad: the device is gone") == 2
    check_ledger(config)


def test_an_engine_that_cannot_start_beside_the_first_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = OfflineInference.start

    def start_or_fail(self: OfflineInference) -> None:
        if threading.current_thread().name.startswith("spare-"):
            raise WorkerError("no memory left", failure=WorkerFailure.START_FAILED)
        start(self)

    monkeypatch.setattr(OfflineInference, "start", start_or_fail)
    outcome, (summary,), _ = run_at_once(make_job(tmp_path, questions(NUM_ROWS), **THREE_SLOTS))
    assert (outcome.exit_code, summary.num_ok) == (ExitCode.OK, NUM_ROWS)
    assert caplog.text.count("the job goes on with one engine less: no memory left") == 2


@pytest.mark.parametrize(
    "error", [ConfigError("a row changed"), LedgerError("lost"), KeyError("x")]
)
def test_an_error_that_is_not_an_engines_ends_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failed: list[EnginePart] = []

    def fail(part: EnginePart) -> None:
        failed.append(part)
        raise error

    monkeypatch.setattr(EnginePart, "answer", in_spare_slots(fail))
    config = make_job(tmp_path, questions(400), **THREE_SLOTS)
    with JobRun.open(config) as run:
        with pytest.raises(type(error), match=str(error)):
            run.run_shard(0)
        (shard,) = run.ledger.list_shards(run.job.job_key)
    assert (shard.state, shard.lease_owner) == (ShardState.FAILED, None)
    assert shard.num_pending > 0
    assert 1 <= len(failed) <= 2  # nobody comes back to a shard that is about to end
    check_ledger(config)


def test_rows_that_a_spare_engine_gives_back_last_are_answered_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine has ended when the other one, which still has rows, fails."""
    first_has_ended = threading.Event()
    end = EnginePart.__exit__
    answer = EnginePart.answer

    def note_end(part: EnginePart, *exc_info: object) -> None:
        end(part, *exc_info)
        if not threading.current_thread().name.startswith("spare-"):
            first_has_ended.set()

    def take_wait_and_fail(part: EnginePart, row_indices: Sequence[int] | None) -> None:
        if not threading.current_thread().name.startswith("spare-"):
            answer(part, row_indices)
            return
        next(part._rows.requests())
        assert first_has_ended.wait(10)
        deadline = time.monotonic() + 10
        while not run._stacks.has_idle(is_warm=True):  # it lets others have its engine
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise WorkerError("out of order", failure=WorkerFailure.OUT_OF_MEMORY)

    monkeypatch.setattr(EnginePart, "__exit__", note_end)
    monkeypatch.setattr(EnginePart, "answer", take_wait_and_fail)
    config = make_job(tmp_path, questions(NUM_ROWS), **THREE_SLOTS)
    with JobRun.open(config) as run:
        summary = run.run_shard(0)
        (shard,) = run.ledger.list_shards(run.job.job_key)
    assert (summary.state, summary.num_ok) == (ShardState.DONE, NUM_ROWS)
    assert shard.attempt == 2
    check_ledger(config)


@pytest.mark.multiprocess
def test_workers_of_spare_slots_that_are_killed_lose_and_repeat_nothing(
    tmp_path: Path, commits: list[Callable[[], None]]
) -> None:
    runtime = {"inline": False, "mock_step_seconds": 0.02}
    config = make_job(tmp_path, questions(120), **THREE_SLOTS | {"engine__runtime": runtime})

    def kill_the_others() -> None:
        stacks = run._stacks._stacks
        for stack in [stack for stack in stacks if stack.engine is not None][1:]:
            assert stack.engine is not None
            os.kill(stack.engine.worker_pids[0], signal.SIGKILL)

    def wait_for_three() -> None:
        deadline = time.monotonic() + 30
        while run._stacks.num_loads < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with JobRun.open(config) as run:
        commits += [wait_for_three, *[lambda: None] * 4, kill_the_others]
        summary = run.run_shard(0)
    assert (summary.state, summary.num_ok, summary.num_error) == (ShardState.DONE, 120, 0)
    assert summary.num_worker_deaths >= 1
    check_ledger(config)
