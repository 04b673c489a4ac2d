"""run_shard: the pending rows of one shard are answered and committed, whatever comes between."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, read_rows, write_rows
from ledger_builders import ELSEWHERE, lose

from engine import ConfigError, LedgerError
from flows.config import JobConfig
from flows.job_driver import JobDriver
from flows.ledger import CompletionRow, Lease, Ledger, ShardRow
from flows.preparation import prepare, resolve
from flows.schema import JobState, RowState, ShardState
from flows.shard_runner import ShardJob, ShardSummary, run_shard
from flows.stacks import StackPool

# Slow enough that a shard of 24 rows is not done before its first commit is.
SLOW: dict[str, Any] = {"engine__runtime": {"inline": True, "mock_step_seconds": 0.005}}


class HookedLedger(Ledger):
    """A ledger that calls back after each commit."""

    after_commit: Callable[[Lease], object] = staticmethod(lambda _: None)

    def commit(
        self, lease: Lease, rows: Sequence[CompletionRow], *, device: str | None = None
    ) -> int:
        num_failed = super().commit(lease, rows, device=device)
        self.after_commit(lease)
        return num_failed


@dataclass
class Bench:
    """One planned job, and what is needed to run its shards."""

    ledger: HookedLedger
    driver: JobDriver
    shard_job: ShardJob
    stacks: StackPool
    stop: threading.Event

    def run(self, shard_index: int = 0) -> ShardSummary:
        return run_shard(
            self.shard_job, shard_index, ledger=self.ledger, stacks=self.stacks, stop=self.stop
        )

    def rows(self) -> list[CompletionRow]:
        return list(self.ledger.iter_completions(self.shard_job.job.job_key))

    def shard(self, shard_index: int = 0) -> ShardRow:
        return self.ledger.list_shards(self.shard_job.job.job_key)[shard_index]


Prepare = Callable[[JobConfig], Bench]


@pytest.fixture
def bench() -> Iterator[Prepare]:
    """Give a function that plans a job and makes it ready to run."""
    opened: list[Bench] = []

    def open_bench(config: JobConfig) -> Bench:
        with_paths = resolve(config)
        ledger = HookedLedger(Ledger.open(with_paths.resolved_ledger_url).database)
        stop = threading.Event()
        driver = JobDriver(ledger, lease_seconds=with_paths.lease_seconds, lost=stop)
        shard_job, _ = prepare(with_paths, ledger, driver)
        opened.append(Bench(ledger, driver, shard_job, StackPool(with_paths.engine), stop))
        return opened[-1]

    yield open_bench
    for each in opened:
        each.stacks.close()
        each.driver.finish(JobState.INTERRUPTED)
        each.ledger.close()


def test_the_seconds_of_a_load_belong_to_the_shard_that_loaded(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(make_job(tmp_path, questions(10), shards=2))
    first, second = job.run(0), job.run(1)
    assert first.stats.bucket_seconds["load"] > 0
    assert second.stats.bucket_seconds.get("load", 0.0) == 0
    # Not the whole life of the engine either, but this shard's part of it.
    assert second.stats.num_output_tokens == sum(row.num_output_tokens for row in job.rows()[5:])


def test_every_row_of_the_shard_is_answered_and_no_other(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, questions(10), shards=2))
    summary = job.run(1)
    assert [row.row_id for row in job.rows()] == ["q5", "q6", "q7", "q8", "q9"]
    assert all(row.state is RowState.OK and row.text for row in job.rows())
    assert (summary.state, summary.num_ok, summary.num_error) == (ShardState.DONE, 5, 0)
    assert summary.device == "mock"
    assert summary.stats.num_output_tokens == sum(row.num_output_tokens for row in job.rows())
    shard = job.shard(1)
    assert (shard.state, shard.num_ok, shard.attempt) == (ShardState.DONE, 5, 1)
    assert shard.lease_owner is None
    assert shard.busy_seconds == summary.stats.busy_seconds > 0


def test_rows_that_are_done_are_not_asked_again(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, questions(6), shards=1))
    job.run()
    before = job.rows()
    summary = job.run()
    assert (summary.num_resumed, summary.num_ok, summary.state) == (6, 0, ShardState.DONE)
    assert summary.stats.num_steps == 0
    assert job.rows() == before


def test_rows_that_the_plan_refused_are_not_asked(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, [*questions(2), "{not json", {"id": "empty"}], shards=1))
    summary = job.run()
    assert (summary.num_ok, summary.num_error, summary.state) == (2, 0, ShardState.DONE)
    assert [row.error_code for row in job.rows()] == [None, None, "bad_json", "bad_row"]


def test_a_row_that_only_the_engine_can_refuse_does_not_stop_the_shard(
    bench: Prepare, tmp_path: Path
) -> None:
    long = {"id": "long", "prompt": "x" * 900}
    config = make_job(
        tmp_path, [*questions(2), long], shards=1,
        engine__cache={"num_blocks": 16, "block_size": 16},
    )  # fmt: skip
    job = bench(config)
    summary = job.run()
    assert (summary.num_ok, summary.num_error, summary.state) == (2, 1, ShardState.DONE)
    refused = job.rows()[2]
    assert (refused.error_code, refused.text) == ("kv_capacity", None)
    assert refused.error_message


def test_a_row_has_its_own_sampling_over_that_of_the_job(bench: Prepare, tmp_path: Path) -> None:
    rows = [*questions(1), {"id": "own", "prompt": "x", "sampling": {"max_tokens": 1}}]
    job = bench(make_job(tmp_path, rows, shards=1, sampling={"max_tokens": 3}))
    job.run()
    assert [row.num_output_tokens for row in job.rows()] == [3, 1]


def test_answers_are_shown_as_they_are_committed(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, questions(3), shards=1, stream_output=True))
    job.run()
    shown = read_rows(job.shard_job.job_dir / "stream.jsonl")
    assert sorted(line["row_id"] for line in shown) == ["q0", "q1", "q2"]
    assert {line["row_id"]: line["text"] for line in shown} == {
        row.row_id: row.text for row in job.rows()
    }


def test_a_stop_leaves_the_shard_resumable_with_everything_finished_committed(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(make_job(tmp_path, questions(40), shards=1, commit_rows=1, **SLOW))
    job.ledger.after_commit = lambda _: job.stop.set()
    summary = job.run()
    answered = job.rows()
    assert summary.state is ShardState.INTERRUPTED
    assert 1 <= summary.num_ok == len(answered) < 40
    assert (job.shard().state, job.shard().lease_owner) == (ShardState.INTERRUPTED, None)

    job.ledger.after_commit = lambda _: None
    job.stop.clear()
    rest = job.run()
    assert (rest.state, rest.num_resumed) == (ShardState.DONE, len(answered))
    assert rest.num_ok == 40 - len(answered)
    assert [row for row in job.rows() if row.row_id in {row.row_id for row in answered}] == answered


def test_answers_do_not_depend_on_where_a_run_was_stopped(bench: Prepare, tmp_path: Path) -> None:
    undisturbed = bench(make_job(tmp_path, questions(24), shards=1))
    undisturbed.run()
    stopped = bench(make_job(tmp_path, shards=1, job_id="job-2", commit_rows=1, **SLOW))
    stopped.ledger.after_commit = lambda _: stopped.stop.set()
    num_runs = 0
    while stopped.shard().num_pending:
        stopped.stop.clear()
        stopped.run()
        num_runs += 1
    assert num_runs > 1
    assert [row.text for row in stopped.rows()] == [row.text for row in undisturbed.rows()]


def test_conversations_that_were_stopped_come_out_as_if_nothing_had_been(
    bench: Prepare, tmp_path: Path
) -> None:
    rows = [{"id": f"c{index}", "turns": [f"question {index}", "why?"]} for index in range(16)]
    undisturbed = bench(make_job(tmp_path, rows, shards=1))
    undisturbed.run()
    stopped = bench(make_job(tmp_path, shards=1, job_id="job-2", commit_rows=1, **SLOW))
    stopped.ledger.after_commit = lambda _: stopped.stop.set()
    summary = stopped.run()
    assert summary.state is ShardState.INTERRUPTED
    # Turns that were answered and have no row: their conversations were under way.
    answered = sum(row.num_output_tokens for row in stopped.rows())
    assert summary.stats.num_output_tokens > answered
    stopped.ledger.after_commit = lambda _: None
    stopped.stop.clear()
    assert stopped.run().state is ShardState.DONE
    replies = [(*row.turns, row.text) for row in stopped.rows()]
    assert replies == [(*row.turns, row.text) for row in undisturbed.rows()]
    assert {len(each) for each in replies} == {2}


def test_a_shard_that_is_stopped_before_it_begins_loads_no_engine(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(make_job(tmp_path, questions(4), shards=1))
    job.stop.set()
    summary = job.run()
    assert (summary.state, summary.device) == (ShardState.INTERRUPTED, None)
    assert job.stacks.num_loads == 0
    assert job.shard().attempt == 0


def test_a_shard_that_another_holds_is_refused_and_says_who(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, questions(4), shards=1))
    job.ledger.acquire_shard(
        job.shard_job.job.job_key, 0, owner=ELSEWHERE, lease_seconds=60, flow_run_id=None
    )
    with pytest.raises(LedgerError, match="held by process 1 on host elsewhere"):
        job.run()
    assert job.stacks.num_loads == 0
    with job.stacks.borrow():  # the slot came back
        assert job.rows() == []


def test_a_lost_lease_ends_the_shard_and_keeps_what_was_committed(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(make_job(tmp_path, questions(40), shards=1, commit_rows=1, **SLOW))
    committed: list[CompletionRow] = []

    def take_over(lease: Lease) -> None:
        committed.extend(job.rows())
        lose(job.ledger, lease)

    job.ledger.after_commit = take_over
    with pytest.raises(LedgerError, match="lease of shard 0 was lost"):
        job.run()
    assert 1 <= len(committed) < 40
    assert job.rows() == committed
    assert job.shard().lease_owner == str(ELSEWHERE)  # the other's lease was not touched


def test_a_row_that_changed_since_the_plan_is_not_answered(bench: Prepare, tmp_path: Path) -> None:
    job = bench(make_job(tmp_path, questions(3), shards=1))
    renamed = [{**row, "id": f"p{index}"} for index, row in enumerate(questions(3))]
    write_rows(tmp_path / "rows.jsonl", renamed)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: the row changed"):
        job.run()
    assert job.rows() == []
    assert job.shard().state is ShardState.FAILED
    assert "the row changed" in str(job.shard().error_message)


def test_an_error_that_nobody_foresaw_is_kept_with_the_shard(
    bench: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench(make_job(tmp_path, questions(3), shards=1))

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(job.ledger, "done_samples", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        job.run()
    assert (job.shard().state, job.shard().lease_owner) == (ShardState.FAILED, None)
    assert job.shard().error_message == "a fault of ours"


def test_rows_are_those_of_the_lease_whatever_the_index_was_cut_into(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(make_job(tmp_path, questions(10), shards=2))
    with Ledger.open(job.shard_job.config.resolved_ledger_url) as other:
        other.reshard(job.shard_job.job.job_key, 5)  # another process, between two shards
    job.run(1)
    assert [row.row_id for row in job.rows()] == ["q2", "q3"]


@pytest.mark.multiprocess
def test_a_worker_that_dies_once_is_replaced_and_no_row_is_blamed(
    bench: Prepare, tmp_path: Path
) -> None:
    job = bench(
        make_job(
            tmp_path, questions(40), shards=1, commit_rows=1,
            engine__runtime={"inline": False, "mock_step_seconds": 0.005},
        )
    )  # fmt: skip
    with job.stacks.borrow() as slot:
        (worker_pid,) = slot.engine().worker_pids

    def kill_once(_: Lease) -> None:
        job.ledger.after_commit = lambda _: None
        os.kill(worker_pid, signal.SIGKILL)

    job.ledger.after_commit = kill_once
    summary = job.run()
    assert (summary.state, summary.num_ok, summary.num_error) == (ShardState.DONE, 40, 0)
    assert (summary.num_worker_deaths, job.stacks.num_loads) == (1, 2)
    assert [row.row_id for row in job.rows()] == [row["id"] for row in questions(40)]
    assert job.ledger.suspects_of(job.shard_job.job.job_key, 0, 39) == {}
