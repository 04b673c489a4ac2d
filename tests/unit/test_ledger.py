"""Jobs, resume and commits; every test runs on SQLite and on PostgreSQL."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ledger_builders import (
    ELSEWHERE,
    acquire,
    assert_counters_equal_rows,
    error_row,
    lose,
    new_job,
    ok_row,
    skipped_row,
    stored,
)
from msgspec.structs import replace
from sqlalchemy import Connection

from engine import LedgerError, TokenLogprob
from flows.database import LedgerUnreachableError
from flows.ledger import Ledger, Owner, PartialRow
from flows.logprob_blob import StoredLogprobs
from flows.schema import JobState, ShardState


def test_a_new_job_is_read_back_with_its_shards(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=10, num_shards=4))
    assert (job.state, job.seed, job.num_pending) == (JobState.PLANNED, 2**62, 10)
    assert job.config == {"name": "job", "engine": {"dtype": "float32"}}
    assert ledger.get_job("job") == job
    shards = ledger.list_shards(job.job_key)
    assert [(shard.first_row, shard.num_rows) for shard in shards] == [
        (0, 3),
        (3, 2),
        (5, 3),
        (8, 2),
    ]
    assert all(shard.state is ShardState.PENDING for shard in shards)


@pytest.mark.parametrize(("num_rows", "num_shards"), [(1, 1), (7, 3), (3, 7), (100, 9), (1, 4)])
def test_shards_cover_every_row_once_and_agree_with_shard_of(
    ledger: Ledger, num_rows: int, num_shards: int
) -> None:
    job = ledger.create_job(new_job(num_rows=num_rows, num_shards=num_shards))
    owners = [
        shard.shard_index
        for shard in ledger.list_shards(job.job_key)
        for _ in range(shard.first_row, shard.first_row + shard.num_rows)
    ]
    assert owners == [job.shard_of(row_index) for row_index in range(num_rows)]


def test_a_second_job_of_the_same_id_is_refused(ledger: Ledger) -> None:
    ledger.create_job(new_job())
    with pytest.raises(LedgerError, match="job 'job' exists already"):
        ledger.create_job(new_job())
    assert len(ledger.list_jobs()) == 1


def test_a_misspelt_job_id_is_answered_with_the_right_one(ledger: Ledger) -> None:
    ledger.create_job(new_job("humaneval-1"))
    ledger.create_job(new_job("other"))
    assert ledger.find_job("humanevil-1") is None
    with pytest.raises(LedgerError, match=r"no job 'humanevil-1'; did you mean humaneval-1\?"):
        ledger.get_job("humanevil-1")


def test_jobs_are_listed_newest_first(ledger: Ledger) -> None:
    for name in ("first", "second", "third"):
        ledger.create_job(new_job(name))
    assert [job.job_id for job in ledger.list_jobs()] == ["third", "second", "first"]


def test_a_job_with_pending_rows_cannot_be_finished(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=2, num_shards=1))
    lease = acquire(ledger, job)
    ledger.commit(lease, [ok_row(0)])
    with pytest.raises(LedgerError, match="1 of 2 rows have no result"):
        ledger.set_job_state(job.job_key, JobState.FINISHED)
    ledger.commit(lease, [error_row(1)])
    ledger.set_job_state(job.job_key, JobState.FINISHED)
    assert ledger.get_job("job").state is JobState.FINISHED


def test_the_same_job_is_resumable(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    ledger.check_resumable(
        job, fingerprint=dict(job.fingerprint), manifest_hash="f00d", num_rows=10
    )


def test_a_refused_resume_names_each_field_with_both_values(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    with pytest.raises(LedgerError) as refused:
        ledger.check_resumable(
            job,
            fingerprint={"model": "aa11", "dtype": "bfloat16", "quantisation": "int8"},
            manifest_hash="beef",
            num_rows=11,
        )
    message = str(refused.value)
    assert "dtype: was float32, is now bfloat16" in message
    assert "quantisation: was not set, is now int8" in message
    assert "number of rows: was 10, is now 11" in message
    assert "input: was f00d, is now beef" in message
    assert "model" not in message.replace("another job_id", "")


def test_committed_rows_come_back_unchanged_and_in_order(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    samples = [replace(ok_row(4), sample_index=index, text=f"sample {index}") for index in (1, 0)]
    rows = [ok_row(9), error_row(2), *samples, skipped_row(0)]
    ledger.commit(lease, rows, device="cpu:0")
    expected = sorted(rows, key=lambda row: row.key)
    assert stored(ledger, job) == expected
    assert list(ledger.iter_completions(job.job_key, batch_rows=2)) == expected


def test_a_job_is_not_mixed_with_another(ledger: Ledger) -> None:
    one, two = ledger.create_job(new_job("one")), ledger.create_job(new_job("two"))
    ledger.commit(acquire(ledger, one), [ok_row(1, "of one")])
    ledger.commit(acquire(ledger, two), [ok_row(1, "of two")])
    assert [row.text for row in stored(ledger, one)] == ["of one"]
    assert [row.text for row in stored(ledger, two)] == ["of two"]


def test_counters_equal_the_rows_whatever_is_committed(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=12, num_shards=3))
    ledger.commit_bad_rows(job.job_key, [error_row(0), error_row(5), error_row(11)])
    first, second = acquire(ledger, job, 0), acquire(ledger, job, 1)
    ledger.commit(first, [ok_row(1), error_row(2), skipped_row(3)])
    ledger.commit(first, [])
    ledger.commit(second, [ok_row(4), error_row(6)])
    ledger.commit(first, [ok_row(2), error_row(0, "another reason")])
    assert_counters_equal_rows(ledger, "job")
    job = ledger.get_job("job")
    assert (job.num_ok, job.num_error, job.num_skipped, job.num_pending) == (3, 4, 1, 4)


def test_an_error_is_replaced_by_a_result_and_the_counters_follow(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    lease = acquire(ledger, job)
    ledger.commit(lease, [replace(error_row(1), text="half an ans", token_ids=(1, 2))])
    ledger.commit(lease, [ok_row(1)])
    assert stored(ledger, job) == [ok_row(1)]
    assert_counters_equal_rows(ledger, "job")


def test_a_result_is_never_overwritten_and_the_whole_commit_is_refused(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    lease = acquire(ledger, job)
    ledger.commit(lease, [ok_row(1, "first"), skipped_row(2), error_row(4)])
    for second in (ok_row(1, "second"), error_row(1), ok_row(2)):
        with pytest.raises(LedgerError, match="has a result already"):
            ledger.commit(lease, [ok_row(0), ok_row(4), second])
    assert stored(ledger, job) == [ok_row(1, "first"), skipped_row(2), error_row(4)]
    assert_counters_equal_rows(ledger, "job")


def test_a_row_that_is_twice_in_a_commit_or_of_another_shard_is_refused(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=10, num_shards=2))
    lease = acquire(ledger, job, 0)
    with pytest.raises(LedgerError, match="twice"):
        ledger.commit(lease, [ok_row(1, "a"), ok_row(1, "b")])
    with pytest.raises(LedgerError, match=r"rows \[5\] do not belong to shard 0"):
        ledger.commit(lease, [ok_row(4), ok_row(5)])
    assert stored(ledger, job) == []
    assert_counters_equal_rows(ledger, "job")


def test_bad_rows_may_be_committed_again_on_resume(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=3000, num_shards=4))
    bad = [error_row(index) for index in range(2500)]
    ledger.commit_bad_rows(job.job_key, iter(bad))
    ledger.commit_bad_rows(job.job_key, iter([*bad, error_row(2999)]))
    assert stored(ledger, job) == [*bad, error_row(2999)]
    assert_counters_equal_rows(ledger, "job")


def test_a_bad_row_cannot_take_the_place_of_a_result(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    ledger.commit(acquire(ledger, job), [ok_row(1)])
    with pytest.raises(LedgerError, match="has a result already"):
        ledger.commit_bad_rows(job.job_key, [error_row(0), error_row(1)])
    assert stored(ledger, job) == [ok_row(1)]


def test_done_samples_are_those_of_the_range_with_both_ends(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    samples = [replace(ok_row(3), sample_index=index, num_samples=3) for index in (0, 2)]
    ledger.commit(acquire(ledger, job), [ok_row(0), *samples, error_row(5), skipped_row(6)])
    done = ledger.done_samples(job.job_key, range(3, 6))
    assert done == {3: ({0, 2}, 3), 5: ({0}, 1)}
    assert [done[3].is_complete, done[5].is_complete] == [False, True]
    assert ledger.done_samples(job.job_key, range(7, 10)) == {}


def test_a_row_counts_when_its_last_sample_is_there_and_as_its_worst_sample(
    ledger: Ledger,
) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    first, second = (replace(ok_row(2), sample_index=index, num_samples=2) for index in (0, 1))
    failed = replace(error_row(2), sample_index=1, num_samples=2)
    ledger.commit(lease, [first])
    assert (ledger.get_job("job").num_ok, ledger.get_job("job").num_pending) == (0, 10)
    assert ledger.commit(lease, [failed]) == 1
    assert (ledger.get_job("job").num_error, ledger.get_job("job").num_pending) == (1, 9)
    assert ledger.commit(lease, [second]) == 0  # an error may be replaced, and only an error
    counted = ledger.get_job("job")
    assert (counted.num_ok, counted.num_error, counted.num_pending) == (1, 0, 9)
    assert counted.num_prompt_tokens == first.num_prompt_tokens  # one prompt, two samples
    assert counted.num_output_tokens == 2 * first.num_output_tokens
    ledger.release_shard(lease, ShardState.INTERRUPTED)
    ledger.reshard(job.job_key, 5)  # counts anew from the rows
    recounted = ledger.list_shards(job.job_key)[1]
    assert (recounted.num_ok, recounted.num_prompt_tokens) == (1, first.num_prompt_tokens)


def test_partials_and_suspicions_go_with_the_result(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    told = TokenLogprob(5, -0.5, 1, ((5, -0.5),))
    finished = PartialRow(row_index=3, token_ids=(1, 2), text="a turn")
    going_on = PartialRow(
        row_index=3, turn_index=1, token_ids=(5,), logprobs=StoredLogprobs(output=(told,))
    )
    other = PartialRow(row_index=4, sample_index=1, token_ids=(9,))
    ledger.save_partials(lease, [finished, other])
    ledger.save_partials(lease, [finished, going_on])
    assert ledger.partials_of(job.job_key, 0, 9) == [finished, going_on, other]
    ledger.add_suspects(lease, [3, 4])
    ledger.add_suspects(lease, [4, 5])
    assert ledger.suspects_of(job.job_key, 0, 9) == {3: 1, 4: 2, 5: 1}
    ledger.commit(lease, [ok_row(3), replace(ok_row(4), num_samples=2)])
    assert ledger.partials_of(job.job_key, 0, 9) == [other]  # of a sample that has no result
    assert ledger.suspects_of(job.job_key, 0, 9) == {5: 1}


def test_partials_and_suspicions_need_the_lease(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    lose(ledger, lease)
    with pytest.raises(LedgerError, match="was lost"):
        ledger.save_partials(lease, [PartialRow(row_index=3, token_ids=(1,))])
    with pytest.raises(LedgerError, match="was lost"):
        ledger.add_suspects(lease, [3])
    assert ledger.partials_of(job.job_key, 0, 9) == []
    assert ledger.suspects_of(job.job_key, 0, 9) == {}


def test_a_commit_that_comes_twice_because_the_server_went_away_counts_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    write_once = ledger.database._write_once
    outcomes: list[str] = []

    def lose_the_answer(work: Callable[[Connection], Any]) -> Any:
        result = write_once(work)
        if not outcomes:
            outcomes.append("lost")
            raise LedgerUnreachableError("server closed the connection unexpectedly")
        return result

    monkeypatch.setattr(ledger.database, "_write_once", lose_the_answer)
    monkeypatch.setattr("flows.outages._PAUSE_SECONDS", 0.01)
    ledger.commit(lease, [ok_row(0), ok_row(1)])
    assert outcomes == ["lost"]
    assert ledger.get_job("job").num_ok == 2
    assert_counters_equal_rows(ledger, "job")


def test_only_one_process_drives_a_job(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    me = Owner.current()
    lease = ledger.acquire_job(job.job_key, owner=me, lease_seconds=60)
    with pytest.raises(LedgerError, match=rf"job 'job' is driven by process {me.pid} on host"):
        ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=60)
    ledger.release_job(lease, JobState.INTERRUPTED)
    heir = ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=60)
    for write in (ledger.renew_job, lambda old: ledger.release_job(old, JobState.FAILED)):
        with pytest.raises(LedgerError, match="drives the job no longer: process 1 on host else"):
            write(lease)
    assert ledger.get_job("job").state is JobState.INTERRUPTED
    ledger.renew_job(heir)


def test_a_driver_that_is_gone_or_silent_is_replaced(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    dead = dataclasses.replace(Owner.current(), start_time=1)
    for owner, lease_seconds in ((dead, 3600), (ELSEWHERE, 0.001), (Owner.current(), 60)):
        time.sleep(0.01)
        ledger.acquire_job(job.job_key, owner=owner, lease_seconds=lease_seconds)
    assert ledger.get_job("job").lease_owner == str(Owner.current())


def test_threads_share_a_ledger_and_lose_nothing(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=400, num_shards=8))
    failures: list[BaseException] = []

    def run_shard(shard_index: int) -> None:
        try:
            lease = acquire(ledger, job, shard_index)
            for row_index in range(lease.first_row, lease.first_row + lease.num_rows, 5):
                ledger.commit(lease, [ok_row(index) for index in range(row_index, row_index + 5)])
                ledger.done_samples(job.job_key, range(400))
            ledger.release_shard(lease, ShardState.DONE)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run_shard, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [row.row_index for row in stored(ledger, job)] == list(range(400))
    assert_counters_equal_rows(ledger, "job")
