"""Leases of jobs and shards: who may drive, who may commit, and when somebody else takes over.

A lease is a number, its epoch, that only grows. Every write of a holder names its epoch in the
same transaction, so that a holder that was taken for dead cannot write after all. One process
drives a job, which gives out its shards; whoever answers a shard has a lease of that shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, select, update

from engine import LedgerError
from flows.ledger_rows import JobLease, JobRow, Lease, ShardRow
from flows.owner import Owner
from flows.schema import JobTable, ShardState, ShardTable

# Who changes a job from outside gives it back in the same transaction: it never runs out.
_OUTSIDE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Who takes a lease, and how long he may be silent before he counts as dead."""

    owner: Owner
    lease_seconds: float
    flow_run_id: str | None = None


def acquire_job(
    connection: Connection,
    job_key: int,
    *,
    terms: LeaseTerms,
    now: ColumnElement[float],
    earlier: JobLease | None = None,
) -> JobLease:
    """Take the job, from nobody or from a driver that is gone.

    earlier is what this very call took before its connection broke: it may have come through.

    Raises:
        LedgerError: there is no such job, or a living process drives it.
    """
    query = select(JobTable, now.label("now")).where(JobTable.job_key == job_key).with_for_update()
    job = connection.execute(query).mappings().first()
    if job is None:
        raise LedgerError(f"the ledger has no job with key {job_key}")
    if earlier and (job["lease_owner"], job["lease_epoch"]) == (earlier.owner, earlier.epoch):
        return earlier
    if _is_held(dict(job)):
        raise _held(job, f"job {job['job_id']!r} is driven")
    lease = JobLease(job_key=job_key, epoch=job["lease_epoch"] + 1, owner=str(terms.owner))
    connection.execute(
        update(JobTable)
        .where(JobTable.job_key == job_key)
        .values(
            lease_owner=lease.owner,
            lease_epoch=lease.epoch,
            lease_seconds=terms.lease_seconds,
            heartbeat_at=now,
        )
    )
    return lease


def acquire_all(connection: Connection, job_key: int, *, now: ColumnElement[float]) -> JobLease:
    """Take the job with every shard, for what changes it from outside in this transaction.

    A driver that was taken for dead and lives after all has lost the job by this.

    Raises:
        LedgerError: a living process drives the job, or holds one of its shards.
    """
    shards = lock_shards(connection, job_key, now=now)
    terms = LeaseTerms(owner=Owner.current(), lease_seconds=_OUTSIDE_SECONDS)
    lease = acquire_job(connection, job_key, terms=terms, now=now)
    for shard in shards:
        refuse_if_held(shard)
    return lease


def fence_job(connection: Connection, lease: JobLease, **values: object) -> None:
    """Change the lease's job, and lock it until the transaction ends.

    Raises:
        LedgerError: another process drives the job now.
    """
    is_held = (JobTable.lease_epoch == lease.epoch, JobTable.lease_owner == lease.owner)
    changed = connection.execute(
        update(JobTable).where(JobTable.job_key == lease.job_key, *is_held).values(**values)
    )
    if changed.rowcount == 1:
        return
    owner = connection.execute(
        select(JobTable.lease_owner).where(JobTable.job_key == lease.job_key)
    ).scalar()
    raise LedgerError(
        f"this process drives the job no longer: {name_of(owner) if owner else 'nobody'} does; it "
        "was silent for longer than lease_seconds"
    )


def is_held(leased: JobRow | ShardRow, now: float) -> bool:
    """Tell whether a process that may still live drives the job, or holds the shard."""
    return _is_held(
        {
            "lease_owner": leased.lease_owner,
            "lease_seconds": leased.lease_seconds,
            "heartbeat_at": leased.heartbeat_at,
            "now": now,
        }
    )


def release_job(connection: Connection, lease: JobLease) -> None:
    """Let go of the job; that it was let go of already does no harm.

    Raises:
        LedgerError: another process drives the job now.
    """
    free_epoch = select(JobTable.lease_epoch).where(
        JobTable.job_key == lease.job_key, JobTable.lease_owner.is_(None)
    )
    if connection.execute(free_epoch).scalar() != lease.epoch:
        fence_job(connection, lease, lease_owner=None)


def acquire(
    connection: Connection,
    job_key: int,
    shard_index: int,
    *,
    terms: LeaseTerms,
    now: ColumnElement[float],
    earlier: Lease | None = None,
) -> Lease:
    """Take the shard, from nobody or from an owner that is gone.

    earlier is what this very call took before its connection broke: it may have come through.

    Raises:
        LedgerError: there is no such shard, or a living owner holds it.
    """
    shards = lock_shards(connection, job_key, now=now, shard_index=shard_index)
    if not shards:
        raise LedgerError(f"job {job_key} has no shard {shard_index}; plan the job first")
    shard = shards[0]
    if earlier and (shard["lease_owner"], shard["lease_epoch"]) == (earlier.owner, earlier.epoch):
        return earlier
    refuse_if_held(shard)
    lease = Lease(
        job_key=job_key,
        shard_index=shard_index,
        epoch=shard["lease_epoch"] + 1,
        owner=str(terms.owner),
        attempt=shard["attempt"] + 1,
        first_row=shard["first_row"],
        num_rows=shard["num_rows"],
        num_done=shard["num_ok"] + shard["num_error"] + shard["num_skipped"],
    )
    connection.execute(
        update(ShardTable)
        .where(ShardTable.job_key == job_key, ShardTable.shard_index == shard_index)
        .values(
            state=ShardState.RUNNING,
            attempt=lease.attempt,
            lease_owner=lease.owner,
            lease_epoch=lease.epoch,
            lease_seconds=terms.lease_seconds,
            heartbeat_at=now,
            flow_run_id=terms.flow_run_id,
            started_at=now,
            finished_at=None,
            error_message=None,
        )
    )
    return lease


def fence(connection: Connection, lease: Lease, **values: object) -> None:
    """Change the lease's shard, and lock it until the transaction ends.

    Raises:
        LedgerError: the lease was lost; nothing may be written under it.
    """
    is_shard = (
        ShardTable.job_key == lease.job_key,
        ShardTable.shard_index == lease.shard_index,
    )
    is_held = (ShardTable.lease_epoch == lease.epoch, ShardTable.lease_owner == lease.owner)
    changed = connection.execute(update(ShardTable).where(*is_shard, *is_held).values(**values))
    if changed.rowcount == 1:
        return
    found = connection.execute(
        select(ShardTable.lease_owner, ShardTable.lease_epoch).where(*is_shard)
    ).first()
    if found is None:
        raise LedgerError(f"lease of shard {lease.shard_index} was lost: the shard is gone")
    holder = "nobody" if found.lease_owner is None else name_of(found.lease_owner)
    raise LedgerError(
        f"lease of shard {lease.shard_index} was lost: this process held epoch {lease.epoch}, now "
        f"{holder} holds epoch {found.lease_epoch}; nothing of this write was kept. Either the "
        "lease was released, or its owner was silent for longer than lease_seconds"
    )


def release(connection: Connection, lease: Lease, **values: object) -> None:
    """Change the lease's shard and give it back; that it was given back already does no harm.

    Raises:
        LedgerError: the lease was lost.
    """
    free_epoch = select(ShardTable.lease_epoch).where(
        ShardTable.job_key == lease.job_key,
        ShardTable.shard_index == lease.shard_index,
        ShardTable.lease_owner.is_(None),
    )
    if connection.execute(free_epoch).scalar() != lease.epoch:
        fence(connection, lease, lease_owner=None, **values)


def lock_shards(
    connection: Connection,
    job_key: int,
    *,
    now: ColumnElement[float],
    shard_index: int | None = None,
) -> list[RowMapping]:
    """Lock and return one shard, or all, with `job_id` and `now` as further columns."""
    query = (
        select(ShardTable, JobTable.job_id, now.label("now"))
        .join(JobTable, JobTable.job_key == ShardTable.job_key)
        .where(ShardTable.job_key == job_key)
        .order_by(ShardTable.shard_index)
        .with_for_update(of=ShardTable)
    )
    if shard_index is not None:
        query = query.where(ShardTable.shard_index == shard_index)
    return list(connection.execute(query).mappings())


def refuse_if_held(shard: RowMapping) -> None:
    """Check a row of `lock_shards`.

    Raises:
        LedgerError: says who holds the shard, since when, and when it may be taken over.
    """
    if _is_held(dict(shard)):
        since = datetime.fromtimestamp(shard["started_at"], UTC)
        what = f"job {shard['job_id']!r}: shard {shard['shard_index']} is held"
        raise _held(shard, what, f" since {since:%Y-%m-%d %H:%M:%S} UTC")


def _is_held(row: Mapping[str, Any]) -> bool:
    if row["lease_owner"] is None or Owner.parse(row["lease_owner"]).is_gone():
        return False
    # A heartbeat of the future is as old as one of the past: somebody has set the clock, and who
    # lives has given a new one since.
    return bool(abs(row["now"] - row["heartbeat_at"]) <= row["lease_seconds"])


def _held(row: RowMapping, what: str, since: str = "") -> LedgerError:
    silent_seconds = max(0.0, row["now"] - row["heartbeat_at"])
    return LedgerError(
        f"{what} by {name_of(row['lease_owner'])}{since}, last heartbeat {silent_seconds:.0f} s "
        "ago; let it finish or stop it, then resume the job (an owner that is silent for "
        f"{row['lease_seconds']:g} s is taken for dead)"
    )


def name_of(owner_text: str) -> str:
    """Return what a message calls the process that a lease names."""
    owner = Owner.parse(owner_text)
    return f"process {owner.pid} on host {owner.host}"
