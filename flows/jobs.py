"""Jobs and the cutting of a job into shards, as statements on a connection.

flows.ledger decides which of them make one transaction. Whoever locks shards and the job locks
the shards first, so that no two transactions wait for each other.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from engine import LedgerError
from flows.completions import COUNTERS, count_by_shard
from flows.leases import lock_shards, refuse_if_held
from flows.ledger_rows import JobRow, NewJob, ShardRow
from flows.schema import JobState, JobTable, ShardState, ShardTable

_NO_COUNTS = dict.fromkeys(COUNTERS, 0)
# Built once: every commit has them, and building such a statement takes longer than running it.
_ADD_TO_SHARD = (
    update(ShardTable)
    .where(ShardTable.job_key == bindparam("key"), ShardTable.shard_index == bindparam("index"))
    .values({name: getattr(ShardTable, name) + bindparam(f"new_{name}") for name in COUNTERS})
)
_ADD_TO_JOB = (
    update(JobTable)
    .where(JobTable.job_key == bindparam("key"))
    .values({name: getattr(JobTable, name) + bindparam(f"new_{name}") for name in COUNTERS})
    .values(updated_at=bindparam("now"))
)
_NUM_FAILED = select(JobTable.num_error).where(JobTable.job_key == bindparam("key"))


def create(connection: Connection, job: NewJob, *, created_at: float) -> None:
    """Insert a job and its shards, unless this very creation is there already.

    Raises:
        LedgerError: a job with that id exists.
    """
    query = select(JobTable.created_at).where(JobTable.job_id == job.job_id)
    if connection.execute(query).scalar() == created_at:
        return
    values = asdict(job) | _NO_COUNTS
    try:
        connection.execute(
            insert(JobTable).values(
                **values,
                state=JobState.PLANNED,
                lease_epoch=0,
                created_at=created_at,
                updated_at=created_at,
            )
        )
    except IntegrityError as error:
        raise LedgerError(
            f"job {job.job_id!r} exists already; resume it, or give another job_id"
        ) from error
    job_key = connection.execute(
        select(JobTable.job_key).where(JobTable.job_id == job.job_id)
    ).scalar_one()
    _insert_shards(connection, job_key, num_rows=job.num_rows, num_shards=job.num_shards)


def read(connection: Connection, job_key: int, *, is_locked: bool = False) -> JobRow:
    """Return a job by its key, and with is_locked keep others from changing it.

    Raises:
        LedgerError: no such job.
    """
    query = select(JobTable).where(JobTable.job_key == job_key)
    row = connection.execute(query.with_for_update() if is_locked else query).mappings().first()
    if row is None:
        raise LedgerError(f"the ledger has no job with key {job_key}")
    return to_job_row(row)


def set_state(connection: Connection, job_key: int, state: JobState) -> None:
    """Move a job to another state.

    Raises:
        LedgerError: the job would be finished with rows pending.
    """
    if state is JobState.FINISHED:
        _close_shards(connection, job_key)
    job = read(connection, job_key, is_locked=True)
    if state is JobState.FINISHED and job.num_pending:
        raise LedgerError(
            f"job {job.job_id!r} cannot be finished: {job.num_pending} of {job.num_rows} rows "
            "have no result; resume it"
        )
    _update(connection, job_key, {"state": state})


def set_config(connection: Connection, job_key: int, config: Mapping[str, Any]) -> None:
    """Keep another configuration."""
    _update(connection, job_key, {"config": dict(config)})


def add_counts(
    connection: Connection, job_key: int, shard_index: int, counts: Mapping[str, int]
) -> None:
    """Add to the counters of a shard and of its job; counts has all of them."""
    values = {f"new_{name}": number for name, number in counts.items()} | {"key": job_key}
    connection.execute(_ADD_TO_SHARD, {**values, "index": shard_index})
    connection.execute(_ADD_TO_JOB, {**values, "now": time.time()})


def count_failed(connection: Connection, job_key: int) -> int:
    """Return how many rows of the job have failed."""
    return connection.execute(_NUM_FAILED, {"key": job_key}).scalar_one()


def reshard(
    connection: Connection, job_key: int, num_shards: int, *, now: ColumnElement[float]
) -> None:
    """Cut the job into another number of shards and count what is done in each.

    Raises:
        LedgerError: a living owner holds one of its shards.
    """
    shards = lock_shards(connection, job_key, now=now)
    job = read(connection, job_key, is_locked=True)
    if job.num_shards == num_shards:
        return
    for shard in shards:
        refuse_if_held(shard)
    connection.execute(delete(ShardTable).where(ShardTable.job_key == job_key))
    # Epochs go on above the old ones: an old lease must not fit a new shard of the same index.
    _insert_shards(
        connection,
        job_key,
        num_rows=job.num_rows,
        num_shards=num_shards,
        lease_epoch=1 + max((shard["lease_epoch"] for shard in shards), default=0),
        attempt=max((shard["attempt"] for shard in shards), default=0),
    )
    _update(connection, job_key, {"num_shards": num_shards})


def recount(connection: Connection, job_key: int) -> None:
    """Count all results anew, and open shards again that have pending rows.

    Whoever calls this has locked the shards.
    """
    job = read(connection, job_key, is_locked=True)
    counted = count_by_shard(connection, job_key, num_rows=job.num_rows, num_shards=job.num_shards)
    totals = dict(_NO_COUNTS)
    for shard_index in range(job.num_shards):
        counts = counted.get(shard_index, _NO_COUNTS)
        connection.execute(
            update(ShardTable)
            .where(ShardTable.job_key == job_key, ShardTable.shard_index == shard_index)
            .values(counts)
        )
        totals = {name: totals[name] + counts[name] for name in COUNTERS}
    num_done = ShardTable.num_ok + ShardTable.num_error + ShardTable.num_skipped
    connection.execute(
        update(ShardTable)
        .where(ShardTable.job_key == job_key, ShardTable.state == ShardState.DONE)
        .where(num_done < ShardTable.num_rows)
        .values(state=ShardState.PENDING)
    )
    _update(connection, job_key, totals)


def find_changes(
    job: JobRow, *, fingerprint: Mapping[str, str], manifest_hash: str, num_rows: int
) -> list[str]:
    """List what differs from what the job was started with, one `name: was A, is now B` each."""
    old = {**job.fingerprint, "number of rows": job.num_rows, "input": job.manifest_hash}
    new = {**fingerprint, "number of rows": num_rows, "input": manifest_hash}
    return [
        f"{name}: was {old.get(name, 'not set')}, is now {new.get(name, 'not set')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def to_job_row(row: RowMapping) -> JobRow:
    """Read a row of JobTable."""
    values = {field.name: row[field.name] for field in fields(JobRow)}
    return JobRow(**values | {"state": JobState(row["state"])})


def to_shard_row(row: RowMapping) -> ShardRow:
    """Read a row of ShardTable."""
    values = {field.name: row[field.name] for field in fields(ShardRow)}
    return ShardRow(**values | {"state": ShardState(row["state"])})


def _close_shards(connection: Connection, job_key: int) -> None:
    """Mark every shard as done, also one whose last owner had no time to say so."""
    connection.execute(
        update(ShardTable)
        .where(ShardTable.job_key == job_key, ShardTable.state != ShardState.DONE)
        .values(state=ShardState.DONE, lease_owner=None)
    )


def _update(connection: Connection, job_key: int, values: Mapping[str, object]) -> None:
    connection.execute(
        update(JobTable)
        .where(JobTable.job_key == job_key)
        .values({**values, "updated_at": time.time()})
    )


def _insert_shards(
    connection: Connection,
    job_key: int,
    *,
    num_rows: int,
    num_shards: int,
    lease_epoch: int = 0,
    attempt: int = 0,
) -> None:
    counted = count_by_shard(connection, job_key, num_rows=num_rows, num_shards=num_shards)
    values = []
    for shard_index in range(num_shards):
        # The shard of a row is row_index * num_shards // num_rows; this is its inverse.
        first_row = -(-shard_index * num_rows // num_shards)
        end_row = -(-(shard_index + 1) * num_rows // num_shards)
        counts = counted.get(shard_index, _NO_COUNTS)
        num_done = counts["num_ok"] + counts["num_error"] + counts["num_skipped"]
        is_done = end_row - first_row <= num_done  # a shard without rows is done
        values.append(
            {
                "job_key": job_key,
                "shard_index": shard_index,
                "state": ShardState.DONE if is_done else ShardState.PENDING,
                "first_row": first_row,
                "num_rows": end_row - first_row,
                "attempt": attempt,
                "lease_epoch": lease_epoch,
                "busy_seconds": 0.0,
                **counts,
            }
        )
    connection.execute(insert(ShardTable), values)
