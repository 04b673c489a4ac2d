"""What `tokenmill ledger check` finds: nothing in a ledger that is well, the one thing that is not."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from ledger_builders import (
    ELSEWHERE,
    acquire,
    error_row,
    new_job,
    ok_row,
    skipped_row,
)
from msgspec.structs import replace
from sqlalchemy import create_engine, text

from engine import LedgerError
from flows.ledger import JobRow, Ledger, Owner, PartialRow
from flows.ledger_check import CheckResult, check_job, check_whole_ledger
from flows.schema import JobState, ShardState


def failed(results: list[CheckResult]) -> dict[str, tuple[str, ...]]:
    return {result.name: result.problems for result in results if not result.is_ok}


def note_of(results: list[CheckResult], name: str) -> str:
    return next(result.note for result in results if result.name == name)


def fill(ledger: Ledger) -> JobRow:
    """Make a job of ten rows in two shards: one is done, the other has rows of several samples."""
    job = ledger.create_job(new_job(num_rows=10, num_shards=2))
    ledger.commit_bad_rows(job.job_key, [error_row(0)])
    lease = acquire(ledger, job, 0)
    ledger.commit(lease, [ok_row(1), ok_row(2), skipped_row(3), error_row(4)])
    ledger.release_shard(lease, ShardState.DONE)
    lease = acquire(ledger, job, 1)
    samples = [replace(ok_row(5), sample_index=index, num_samples=3) for index in range(3)]
    ledger.commit(lease, [*samples, replace(ok_row(6), num_samples=2)])
    ledger.save_partials(lease, [PartialRow(row_index=6, sample_index=1, token_ids=(1, 2))])
    ledger.add_suspects(lease, [6, 7])
    ledger.release_shard(lease, ShardState.INTERRUPTED)
    ledger.set_job_state(job.job_key, JobState.INTERRUPTED)
    return ledger.get_job(job.job_id)


@pytest.fixture
def job(ledger: Ledger) -> JobRow:
    return fill(ledger)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "ledger.sqlite"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        fill(ledger)
    return path


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> str:
    """Give the URL of a copy of the filled ledger, to do harm to."""
    shutil.copy(filled, tmp_path / "copy.sqlite")
    return f"sqlite:///{tmp_path / 'copy.sqlite'}"


def corrupt(url: str, *statements: str) -> None:
    """Change the ledger behind its back, with foreign keys off."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def faults_of(url: str) -> dict[str, tuple[str, ...]]:
    with Ledger.open(url) as ledger:
        return failed([*check_whole_ledger(ledger), *check_job(ledger, "job")])


def test_a_job_under_way_is_well_and_its_rows_are_balanced(ledger: Ledger, job: JobRow) -> None:
    results = check_job(ledger, job.job_id)
    assert failed(results) == {}
    assert note_of(results, "job_counters") == "10 rows: 3 ok, 2 error, 1 skipped, 4 pending"
    assert note_of(results, "driver") == "nobody"
    assert failed(check_whole_ledger(ledger)) == {}


def test_a_job_that_is_not_there_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="has no job 'nothing'"):
        check_job(ledger, "nothing")


def test_a_running_job_whose_driver_is_gone_is_resumable_and_no_fault(
    ledger: Ledger, job: JobRow
) -> None:
    gone = dataclasses.replace(Owner.current(), start_time=1)
    ledger.acquire_job(job.job_key, owner=gone, lease_seconds=60)
    ledger.set_job_state(job.job_key, JobState.RUNNING)
    results = check_job(ledger, job.job_id)
    assert failed(results) == {}
    assert note_of(results, "driver").endswith("; it is gone, so the job can be resumed")
    ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=60)
    assert note_of(check_job(ledger, job.job_id), "driver") == "process 1 on host elsewhere"


def test_a_finished_job_has_every_shard_done_whoever_left_it(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=4, num_shards=8))
    ledger.commit_bad_rows(job.job_key, [error_row(0)])
    for shard in ledger.list_shards(job.job_key):
        if shard.num_pending:
            lease = acquire(ledger, job, shard.shard_index)
            ledger.commit(lease, [ok_row(lease.first_row)])
    ledger.set_job_state(job.job_key, JobState.FINISHED)
    assert failed(check_job(ledger, job.job_id)) == {}
    shards = ledger.list_shards(job.job_key)
    assert {(shard.state, shard.lease_owner) for shard in shards} == {(ShardState.DONE, None)}


def test_a_shard_of_a_finished_job_that_is_not_done_is_found(copy: str) -> None:
    with Ledger.open(copy) as ledger:
        job = ledger.get_job("job")
        lease = acquire(ledger, job, 1)
        ledger.commit(lease, [replace(ok_row(6), sample_index=1, num_samples=2)])
        ledger.commit(lease, [ok_row(index) for index in (7, 8, 9)])
        ledger.set_job_state(job.job_key, JobState.FINISHED)
        assert failed(check_job(ledger, "job")) == {}
    corrupt(copy, "UPDATE shards SET state = 'interrupted' WHERE shard_index = 1")
    assert faults_of(copy) == {"shard_states": ("shard 1 is interrupted, and the job is finished",)}


def test_only_the_first_problems_are_kept_and_all_are_counted(
    copy: str,
) -> None:
    corrupt(copy, "DELETE FROM payloads")
    with Ledger.open(copy) as ledger:
        (found,) = [result for result in check_job(ledger, "job") if not result.is_ok]
    assert (found.name, len(found.problems), found.num_problems) == ("payloads", 5, 6)
    assert found.problems[0] == "row 'row-1' (row 1, sample 0): its text is gone"


NEW_COMPLETION = (
    "INSERT INTO completions SELECT job_key, {row}, {sample}, row_id, 'error', 'timeout', "
    "error_message, finish_reason, 0, 0, 0, attempt, device, committed_at, "
    "num_samples, is_truncated, request_hash FROM completions WHERE row_index = 1"
)


@pytest.mark.parametrize(
    ("statements", "check", "problem"),
    [
        (["UPDATE jobs SET num_ok = num_ok + 1"], "job_counters", "num_ok is 4, counted 3"),
        (
            ["UPDATE jobs SET num_prompt_tokens = 0"],
            "job_counters",
            "num_prompt_tokens is 0, counted 46",
        ),
        (
            ["UPDATE shards SET num_skipped = 2 WHERE shard_index = 0"],
            "shard_counters",
            "shard 0: num_skipped is 2, counted 1",
        ),
        (
            ["UPDATE shards SET num_rows = 4 WHERE shard_index = 1"],
            "shard_ranges",
            "the shards end at row 9, the job at row 10",
        ),
        (
            ["UPDATE shards SET state = 'done' WHERE shard_index = 1"],
            "shard_states",
            "shard 1 is done with 4 rows pending",
        ),
        (
            ["UPDATE jobs SET state = 'finished'"],
            "finished",
            "the job is finished with 4 rows pending",
        ),
        (
            [NEW_COMPLETION.format(row=10, sample=0)],
            "row_range",
            "completions: row 10",
        ),
        (
            ["UPDATE partials SET row_index = -1"],
            "row_range",
            "partials: row -1",
        ),
        (
            ["UPDATE suspects SET row_index = 10 WHERE row_index = 7"],
            "row_range",
            "suspects: row 10",
        ),
        (
            [
                "UPDATE completions SET sample_index = 7 WHERE row_index = 5 AND sample_index = 1",
                "UPDATE payloads SET sample_index = 7 WHERE row_index = 5 AND sample_index = 1",
            ],
            "samples",
            "row 5: samples 0 to 7 of 3 to 3",
        ),
        (
            ["UPDATE completions SET num_samples = 2 WHERE row_index = 5 AND sample_index = 0"],
            "samples",
            "row 5: samples 0 to 2 of 2 to 3",
        ),
        (
            ["UPDATE completions SET error_code = 'timeout' WHERE row_index = 1"],
            "row_states",
            "row 'row-1' (row 1, sample 0) is ok with error code timeout",
        ),
        (
            ["UPDATE completions SET error_code = NULL WHERE row_index = 4"],
            "row_states",
            "row 'row-4' (row 4, sample 0) is error with error code None",
        ),
        (
            ["DELETE FROM payloads WHERE row_index = 2"],
            "payloads",
            "row 'row-2' (row 2, sample 0): its text is gone",
        ),
        (
            ["UPDATE payloads SET sample_index = 1 WHERE row_index = 1",
             "INSERT INTO payloads SELECT job_key, row_index, 0, text, token_ids, logprobs, turns, "
             "choices FROM payloads WHERE row_index = 1"],
            "lost_payloads",
            "row 1, sample 1",
        ),
        (
            ["UPDATE partials SET sample_index = 0"],
            "leftovers",
            "partial tokens of row 6, sample 0",
        ),
        (
            ["UPDATE suspects SET row_index = 5 WHERE row_index = 7"],
            "leftovers",
            "suspicion against row 5",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found_by_its_check_and_by_no_other(
    copy: str, statements: list[str], check: str, problem: str
) -> None:
    corrupt(copy, *statements)
    assert faults_of(copy) == {check: (problem,)}


def test_shards_that_are_missing_or_overlap_are_found(
    copy: str,
) -> None:
    corrupt(copy, "DELETE FROM shards WHERE shard_index = 1")
    assert faults_of(copy) == {
        "shard_ranges": (
            "the job has 2 shards, found 1",
            "the shards end at row 5, the job at row 10",
        )
    }


def test_a_row_that_another_shard_holds_is_found(copy: str) -> None:
    corrupt(
        copy,
        "UPDATE shards SET num_rows = 4, num_ok = 2, num_error = 1, num_prompt_tokens = 23 "
        "WHERE shard_index = 0",
        "UPDATE shards SET first_row = 4, num_rows = 6 WHERE shard_index = 1",
    )
    assert "shard 1 holds rows of shard(s) [0, 1]" in faults_of(copy)["shard_ranges"]


def test_rows_of_a_job_that_is_gone_are_found(copy: str) -> None:
    corrupt(copy, "UPDATE jobs SET job_key = 77")
    with Ledger.open(copy) as ledger:
        (problems,) = failed(check_whole_ledger(ledger)).values()
    assert [problem.partition(" ")[0] for problem in problems] == [
        "shards", "completions", "payloads", "partials", "suspects",
    ]  # fmt: skip


def test_a_damaged_file_is_found(copy: str) -> None:
    corrupt(
        copy,
        "PRAGMA writable_schema = ON",
        "DELETE FROM sqlite_master WHERE name = 'ix_experiments_job_key'",
    )
    assert list(faults_of(copy)) == ["database"]


def test_a_read_sees_one_state_of_the_database_while_others_commit(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    count = text("SELECT count(*) FROM completions")
    with ledger.database.read() as connection:
        assert connection.execute(count).scalar() == 0
        ledger.commit(lease, [ok_row(0)])
        assert connection.execute(count).scalar() == 0
    with ledger.database.read() as connection:
        assert connection.execute(count).scalar() == 1
