"""Who may commit and who may take over; every test runs on SQLite and on PostgreSQL."""

import time
from dataclasses import replace

import pytest
from ledger_builders import (
    ELSEWHERE,
    acquire,
    assert_counters_equal_rows,
    error_row,
    lose,
    new_job,
    ok_row,
    silence,
    skipped_row,
    stored,
)
from sqlalchemy import text

from engine import LedgerError
from flows.ledger import Ledger, Owner
from flows.schema import ShardState


def test_a_stale_epoch_cannot_commit_and_nothing_of_it_stays(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    stale = acquire(ledger, job)
    ledger.commit(stale, [ok_row(0), error_row(1)])
    living = lose(ledger, stale)
    before = (ledger.get_job("job"), ledger.list_shards(job.job_key))
    with pytest.raises(LedgerError, match="held epoch 1, now process 1 on host elsewhere holds"):
        ledger.commit(stale, [ok_row(1), ok_row(2)])
    with pytest.raises(LedgerError, match="was lost"):
        ledger.renew_lease(stale)
    with pytest.raises(LedgerError, match="was lost"):
        ledger.release_shard(stale, ShardState.DONE)
    assert (ledger.get_job("job"), ledger.list_shards(job.job_key)) == before
    assert stored(ledger, job) == [ok_row(0), error_row(1)]
    ledger.commit(living, [ok_row(1)])
    assert stored(ledger, job) == [ok_row(0), ok_row(1)]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_was_set_keeps_nobody_out_for_longer_than_the_lease(
    ledger: Ledger, hours: int
) -> None:
    job = ledger.create_job(new_job())
    ledger.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
    ledger.database.write(
        lambda connection: connection.execute(
            text(f"UPDATE shards SET heartbeat_at = heartbeat_at + {3600 * hours}")
        )
    )
    assert acquire(ledger, job).epoch == 2


def test_a_released_lease_cannot_commit(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    lease = acquire(ledger, job)
    ledger.release_shard(lease, ShardState.INTERRUPTED)
    with pytest.raises(LedgerError, match="now nobody holds epoch 1"):
        ledger.commit(lease, [ok_row(0)])
    assert stored(ledger, job) == []


def test_each_start_of_a_shard_raises_its_epoch_and_attempt(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    for number in (1, 2, 3):
        lease = acquire(ledger, job)
        assert (lease.epoch, lease.attempt) == (number, number)
        ledger.release_shard(
            lease, ShardState.FAILED, busy_seconds=1.5, stats={"n": number}, error_message="\x00!"
        )
    shard = ledger.list_shards(job.job_key)[0]
    assert (shard.state, shard.attempt, shard.lease_owner) == (ShardState.FAILED, 3, None)
    assert (shard.busy_seconds, shard.stats, shard.error_message) == (4.5, {"n": 3}, "\x00!")
    assert shard.flow_run_id == "run-1"
    assert shard.started_at is not None
    assert shard.finished_at is not None
    assert 0 <= shard.finished_at - shard.started_at < 60


def test_a_living_owner_is_named_and_keeps_its_shard(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    me = Owner.current()
    lease = acquire(ledger, job)
    with pytest.raises(LedgerError) as refused:
        ledger.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=0.001)
    message = str(refused.value)
    assert f"job 'job': shard 0 is held by process {me.pid} on host {me.host} since 20" in message
    assert "last heartbeat 0 s ago" in message
    assert "silent for 60 s" in message
    ledger.commit(lease, [ok_row(0)])


def test_an_owner_elsewhere_keeps_its_shard_until_it_was_silent_as_long_as_it_promised(
    ledger: Ledger,
) -> None:
    job = ledger.create_job(new_job())
    theirs = ledger.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=0.5)
    time.sleep(0.3)
    ledger.renew_lease(theirs)
    time.sleep(0.3)
    with pytest.raises(LedgerError, match="on host elsewhere"):
        acquire(ledger, job)
    time.sleep(0.3)
    assert acquire(ledger, job).epoch == theirs.epoch + 1


def test_a_commit_is_a_heartbeat(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    lease = acquire(ledger, job)
    before = ledger.list_shards(job.job_key)[0].heartbeat_at
    time.sleep(0.01)
    ledger.commit(lease, [ok_row(0)])
    after = ledger.list_shards(job.job_key)[0].heartbeat_at
    assert before is not None
    assert after is not None
    assert after > before


def test_an_owner_that_is_gone_from_this_host_is_followed_at_once(ledger: Ledger) -> None:
    job = ledger.create_job(new_job())
    gone = replace(Owner.current(), start_time=1)  # its pid is in use again, by this process
    ledger.acquire_shard(job.job_key, 0, owner=gone, lease_seconds=3600)
    assert acquire(ledger, job).epoch == 2


def test_a_shard_that_does_not_exist_is_refused(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=2))
    with pytest.raises(LedgerError, match="no shard 2"):
        acquire(ledger, job, 2)


def test_resharding_keeps_what_is_done_and_counts_it_anew(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=12, num_shards=3))
    ledger.commit_bad_rows(job.job_key, [error_row(10)])
    lease = acquire(ledger, job, 0)
    ledger.commit(lease, [ok_row(0), ok_row(1), ok_row(2), skipped_row(3)])
    ledger.release_shard(lease, ShardState.DONE)
    ledger.reshard(job.job_key, 5)
    assert ledger.get_job("job").num_shards == 5
    assert_counters_equal_rows(ledger, "job")
    states = [shard.state for shard in ledger.list_shards(job.job_key)]
    assert states == [ShardState.DONE, *[ShardState.PENDING] * 4]


def test_resharding_waits_for_nobody_but_refuses_while_a_shard_is_held(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=2))
    lease = acquire(ledger, job, 1)
    with pytest.raises(LedgerError, match="shard 1 is held by"):
        ledger.reshard(job.job_key, 3)
    ledger.reshard(job.job_key, 2)  # the number that it has: nothing to do
    ledger.release_shard(lease, ShardState.INTERRUPTED)
    ledger.reshard(job.job_key, 3)
    assert len(ledger.list_shards(job.job_key)) == 3


def test_a_lease_from_before_resharding_never_fits_again(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=10, num_shards=2))
    for _ in range(3):
        stale = lose(ledger, acquire(ledger, job))
        silence(ledger)
    ledger.reshard(job.job_key, 1)
    for _ in range(stale.epoch + 2):
        lease = ledger.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
        assert lease.epoch > stale.epoch
        with pytest.raises(LedgerError, match="was lost"):
            ledger.commit(stale, [ok_row(0)])
        ledger.release_shard(lease, ShardState.INTERRUPTED)
