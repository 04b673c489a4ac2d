"""Failed rows that are asked again, and jobs that take answers over; on SQLite and PostgreSQL."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_builders import (
    ELSEWHERE,
    acquire,
    assert_counters_equal_rows,
    error_row,
    new_job,
    ok_row,
    skipped_row,
    stored,
)
from msgspec.structs import replace

from engine import LedgerError, TokenLogprob
from flows.job_changes import RetrySummary, fork_rows, refuse_fork, retry_failed
from flows.ledger import CompletionRow, JobRow, Lease, Ledger, Owner
from flows.ledger_check import check_job
from flows.logprob_blob import StoredLogprobs
from flows.row_index import IndexRow, RowIndex
from flows.schema import JobState, ShardState

HASH = b"0123456789abcdef"
GONE = dataclasses.replace(Owner.current(), start_time=1)


def crashed(row_index: int) -> CompletionRow:
    return replace(error_row(row_index, "a worker died"), error_code="engine_crash")


def assert_is_well(ledger: Ledger, job_id: str) -> None:
    assert [result for result in check_job(ledger, job_id) if not result.is_ok] == []


def answer(ledger: Ledger, job: JobRow, shard_index: int, rows: list[CompletionRow]) -> Lease:
    lease = acquire(ledger, job, shard_index)
    ledger.commit(lease, rows)
    ledger.release_shard(lease, ShardState.DONE)
    return lease


class TestRetryFailed:
    @pytest.fixture
    def job(self, ledger: Ledger) -> JobRow:
        """Give a finished job: one row was bad in the input, two failed, one was left out."""
        job = ledger.create_job(new_job(num_rows=8, num_shards=2))
        ledger.commit_bad_rows(job.job_key, [error_row(0, "rows.jsonl, line 1: not JSON")])
        answer(ledger, job, 0, [ok_row(1), error_row(2), skipped_row(3)])
        answer(ledger, job, 1, [ok_row(4), crashed(5), ok_row(6), ok_row(7)])
        ledger.set_job_state(job.job_key, JobState.FINISHED)
        return job

    def test_failed_rows_are_pending_again_and_nothing_else_is(
        self, ledger: Ledger, job: JobRow
    ) -> None:
        before = stored(ledger, job)
        summary = retry_failed(ledger, "job")
        assert summary == RetrySummary(
            num_samples_by_code={"engine_crash": 1, "prompt_too_long": 1}, num_bad_rows=1
        )
        assert stored(ledger, job) == [row for row in before if row.row_index not in (2, 5)]
        after = ledger.get_job("job")
        assert (after.state, after.num_pending) == (JobState.INTERRUPTED, 2)
        assert after.lease_owner is None
        states = [shard.state for shard in ledger.list_shards(job.job_key)]
        assert states == [ShardState.PENDING, ShardState.PENDING]
        assert_counters_equal_rows(ledger, "job")
        assert_is_well(ledger, "job")

    def test_rows_with_one_code_alone_are_taken_back(self, ledger: Ledger, job: JobRow) -> None:
        summary = retry_failed(ledger, "job", ["engine_crash"])
        assert summary == RetrySummary(num_samples_by_code={"engine_crash": 1}, num_bad_rows=0)
        states = [shard.state for shard in ledger.list_shards(job.job_key)]
        assert states == [ShardState.DONE, ShardState.PENDING]
        assert ledger.get_job("job").num_error == 2
        assert_is_well(ledger, "job")

    def test_a_code_that_no_row_has_is_answered_with_those_there_are(
        self, ledger: Ledger, job: JobRow
    ) -> None:
        with pytest.raises(LedgerError) as refused:
            retry_failed(ledger, "job", ["engine_crash", "timeot"])
        assert "no failed row with the code timeot; its failed rows have: " in str(refused.value)
        assert "engine_crash, prompt_too_long" in str(refused.value)
        assert ledger.get_job("job").state is JobState.FINISHED

    def test_nothing_changes_where_nothing_failed_but_the_input(
        self, ledger: Ledger, job: JobRow
    ) -> None:
        retry_failed(ledger, "job")
        lease = acquire(ledger, job, 0)
        ledger.commit(lease, [ok_row(2)])
        ledger.release_shard(lease, ShardState.DONE)
        answer(ledger, job, 1, [ok_row(5)])
        ledger.set_job_state(job.job_key, JobState.FINISHED)
        summary = retry_failed(ledger, "job")
        assert (summary.num_samples, summary.num_bad_rows) == (0, 1)
        assert ledger.get_job("job").state is JobState.FINISHED

    def test_the_samples_of_a_row_that_are_well_stay(self, ledger: Ledger) -> None:
        job = ledger.create_job(new_job(num_rows=2, num_shards=1))
        samples = [replace(ok_row(0), sample_index=index, num_samples=3) for index in (0, 2)]
        failed = replace(crashed(0), sample_index=1, num_samples=3)
        answer(ledger, job, 0, [*samples, failed, ok_row(1)])
        assert ledger.get_job("job").num_error == 1
        retry_failed(ledger, "job")
        assert stored(ledger, job) == [*samples, ok_row(1)]
        assert_is_well(ledger, "job")

    def test_a_job_that_is_driven_is_left_alone_and_its_driver_named(
        self, ledger: Ledger, job: JobRow
    ) -> None:
        ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=60)
        with pytest.raises(LedgerError, match="driven by process 1 on host elsewhere"):
            retry_failed(ledger, "job")
        assert ledger.get_job("job").num_error == 3

    def test_a_shard_that_is_held_is_left_alone(self, ledger: Ledger, job: JobRow) -> None:
        ledger.acquire_shard(job.job_key, 1, owner=ELSEWHERE, lease_seconds=60)
        with pytest.raises(LedgerError, match="shard 1 is held by process 1 on host elsewhere"):
            retry_failed(ledger, "job")
        assert ledger.get_job("job").num_error == 3
        assert ledger.get_job("job").lease_owner is None

    def test_a_driver_that_was_taken_for_dead_has_lost_the_job(
        self, ledger: Ledger, job: JobRow
    ) -> None:
        lease = ledger.acquire_job(job.job_key, owner=GONE, lease_seconds=60)
        retry_failed(ledger, "job")
        with pytest.raises(LedgerError, match="drives the job no longer: nobody does"):
            ledger.release_job(lease, JobState.INTERRUPTED)


@contextmanager
def index_of(folder: Path, *rows: IndexRow) -> Iterator[RowIndex]:
    with RowIndex.create(folder / "rows.sqlite") as builder:
        builder.insert(rows)
        builder.publish()
    with RowIndex.open(folder / "rows.sqlite") as index:
        yield index


def planned(row_index: int, row_id: str, **changes: object) -> IndexRow:
    row = IndexRow(row_index, 0, 0, 0, row_index + 1, row_id, request_hash=HASH)
    return row._replace(**changes)


def answered(row_index: int, **changes: object) -> CompletionRow:
    return replace(ok_row(row_index), **({"request_hash": HASH} | changes))  # type: ignore[arg-type]


class TestFork:
    @pytest.fixture
    def parent(self, ledger: Ledger) -> JobRow:
        job = ledger.create_job(new_job("parent", num_rows=10, num_shards=1))
        logprobs = StoredLogprobs(output=(TokenLogprob(5, -0.5, 1, ((5, -0.5),)),))
        samples = [answered(3, sample_index=index, num_samples=2) for index in range(2)]
        rows = [
            answered(0, text="a \u2028 b", logprobs=logprobs, is_truncated=True),
            answered(1),
            error_row(2),
            *samples,
            answered(4, sample_index=0, num_samples=2),
            answered(5, request_hash=None),
            answered(6, turns=("first", "second")),
            answered(7),
        ]
        lease = acquire(ledger, job)
        ledger.commit(lease, rows)
        ledger.release_shard(lease, ShardState.INTERRUPTED)
        return ledger.get_job("parent")

    def test_rows_that_are_asked_the_same_have_their_answers_at_once(
        self, ledger: Ledger, parent: JobRow, tmp_path: Path
    ) -> None:
        child = ledger.create_job(new_job("child", num_rows=10, num_shards=3))
        with index_of(
            tmp_path,
            planned(0, "new"),
            planned(1, "row-0"),
            planned(2, "row-1", request_hash=b"x" * 16),
            planned(3, "row-2"),
            planned(4, "row-3"),
            planned(5, "row-4"),
            planned(6, "row-5"),
            planned(7, "row-6"),
            planned(8, "row-7", request_hash=None, error_code="bad_row"),
            planned(9, "row-9"),
        ) as index:
            summary = fork_rows(ledger, parent, child, index)
            of_parent = stored(ledger, parent)
            assert stored(ledger, child) == [
                replace(row, row_index=new)
                for new, old in ((1, "row-0"), (4, "row-3"), (7, "row-6"))
                for row in of_parent
                if row.row_id == old
            ]
            assert summary.num_rows == 3
            assert summary.num_left_by_reason == {
                "failed, skipped or not complete there": 2,
                "not in the other job, or pending there": 2,
                "asked with another prompt or sampling": 1,
                "answered by an older tokenmill, which did not note what was asked": 1,
                "cannot be asked here": 1,
            }
            assert_is_well(ledger, "child")
            assert ledger.get_job("child").num_ok == 3
            fork_rows(ledger, parent, child, index)
        assert ledger.get_job("child").num_ok == 3
        assert ledger.get_job("parent") == parent
        assert_is_well(ledger, "child")

    def test_a_result_that_the_new_job_has_is_kept(
        self, ledger: Ledger, parent: JobRow, tmp_path: Path
    ) -> None:
        child = ledger.create_job(new_job("child", num_rows=2, num_shards=1))
        mine = answered(0, row_id="row-3", text="mine", num_samples=2)
        ledger.commit(acquire(ledger, child), [mine])
        with index_of(tmp_path, planned(0, "row-3"), planned(1, "row-0")) as index:
            fork_rows(ledger, parent, child, index)
        assert [row.text for row in stored(ledger, child)] == ["mine", "a \u2028 b"]

    def test_another_seed_holds_for_rows_that_draw_nothing(
        self, ledger: Ledger, parent: JobRow, tmp_path: Path
    ) -> None:
        child = ledger.create_job(
            dataclasses.replace(new_job("child", num_rows=2, num_shards=1), seed=5)
        )
        drawn, greedy = planned(0, "row-0"), planned(1, "row-1", may_fold=True)
        with index_of(tmp_path, drawn, greedy) as index:
            summary = fork_rows(ledger, parent, child, index)
        assert [row.row_id for row in stored(ledger, child)] == ["row-1"]
        assert summary.num_left_by_reason == {"drawn with another seed": 1}
        assert str(summary) == "1 rows taken over; 1 drawn with another seed"

    def test_rows_are_taken_over_in_pieces_and_none_is_cut_in_two(
        self, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flows.job_changes._BATCH_ROWS", 7)
        parent = ledger.create_job(new_job("parent", num_rows=40, num_shards=1))
        rows = [
            answered(row, sample_index=sample, num_samples=3)
            for row in range(40)
            for sample in range(3)
        ]
        ledger.commit(acquire(ledger, parent), rows)
        child = ledger.create_job(new_job("child", num_rows=40, num_shards=3))
        with index_of(tmp_path, *(planned(i, f"row-{39 - i}") for i in range(40))) as index:
            fork_rows(ledger, parent, child, index)
        assert len(stored(ledger, child)) == 120
        assert_is_well(ledger, "child")

    def test_another_model_is_refused_and_other_questions_are_not(
        self, ledger: Ledger, parent: JobRow
    ) -> None:
        refuse_fork(parent, {**parent.fingerprint, "prompt": "new", "sources.0.format": "csv"})
        with pytest.raises(LedgerError) as refused:
            refuse_fork(parent, {"model": "bb22", "dtype": "float32", "seed": "8"})
        assert "model: was aa11, is now bb22" in str(refused.value)
        assert "dtype" not in str(refused.value)
        assert "without --fork" in str(refused.value)
