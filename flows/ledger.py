"""The ledger: the only truth about what is done. One (row, sample) has one result, for good.

A result and its finished mark are written in one transaction, under a lease that is checked in
that transaction. This module says what is one transaction; the statements are in flows.jobs,
flows.leases and flows.completions, the tables in flows.schema.
"""

import difflib
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, select

from engine import LedgerError
from flows import completions, jobs, leases, stored_answers, unfinished
from flows.database import Database, LedgerUnreachableError
from flows.ledger_rows import CompletionRow as CompletionRow
from flows.ledger_rows import DoneSamples as DoneSamples
from flows.ledger_rows import JobLease as JobLease
from flows.ledger_rows import JobRow as JobRow
from flows.ledger_rows import Lease as Lease
from flows.ledger_rows import NewJob as NewJob
from flows.ledger_rows import PartialRow as PartialRow
from flows.ledger_rows import ShardRow as ShardRow
from flows.owner import Owner as Owner
from flows.schema import JobState, JobTable, ShardState, ShardTable

_BAD_ROWS_PER_COMMIT = 1000
# Answers may be megabytes long: a page of them is not held in memory at once.
_FETCH_ROWS = 64


class Ledger:
    """Jobs, shards and completions in one database; may be used from several threads."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(
        cls, url: str, *, must_exist: bool = False, stop: threading.Event | None = None
    ) -> "Ledger":
        """Connect to the ledger, and create or upgrade its tables.

        With must_exist, an SQLite file that is not there is an error and not created. Once `stop`
        is set, nobody waits for long for a server that went away.

        Raises:
            LedgerError: not a usable URL, cannot be reached, on a network file system, or written
                by a newer tokenmill.
        """
        return cls(Database.open(url, must_exist=must_exist, stop=stop))

    def close(self) -> None:
        """Close every connection."""
        self.database.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def create_job(self, job: NewJob) -> JobRow:
        """Add a job and its shards.

        Raises:
            LedgerError: a job with that id exists.
        """
        now = time.time()
        self.database.write(lambda connection: jobs.create(connection, job, created_at=now))
        return self.get_job(job.job_id)

    def find_job(self, job_id: str) -> JobRow | None:
        """Return the job, or None when there is none of that id."""
        query = select(JobTable).where(JobTable.job_id == job_id)
        found = self.database.query(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else jobs.to_job_row(found)

    def get_job(self, job_id: str) -> JobRow:
        """Return the job.

        Raises:
            LedgerError: no such job; names those whose ids look alike.
        """
        job = self.find_job(job_id)
        if job is not None:
            return job
        with self.database.read() as connection:
            known = list(connection.scalars(select(JobTable.job_id)))
        close = difflib.get_close_matches(job_id, known, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it holds {len(known)} job(s)"
        raise LedgerError(f"the ledger has no job {job_id!r}; {hint}")

    def list_jobs(self) -> list[JobRow]:
        """Return all jobs, newest first."""
        query = select(JobTable).order_by(JobTable.created_at.desc(), JobTable.job_key.desc())
        with self.database.read() as connection:
            return [jobs.to_job_row(row) for row in connection.execute(query).mappings()]

    def list_shards(self, job_key: int) -> list[ShardRow]:
        """Return the shards of a job in order."""
        query = select(ShardTable).where(ShardTable.job_key == job_key)
        query = query.order_by(ShardTable.shard_index)
        rows = self.database.query(lambda connection: connection.execute(query).mappings().all())
        return [jobs.to_shard_row(row) for row in rows]

    def get_shard(self, job_key: int, shard_index: int) -> ShardRow:
        """Return one shard of a job: of many, reading all for each would take for ever."""
        query = select(ShardTable).where(
            ShardTable.job_key == job_key, ShardTable.shard_index == shard_index
        )
        row = self.database.query(lambda connection: connection.execute(query).mappings().one())
        return jobs.to_shard_row(row)

    def set_job_state(self, job_key: int, state: JobState) -> None:
        """Move a job to another state.

        Raises:
            LedgerError: the job would be finished with rows pending.
        """
        self.database.write(lambda connection: jobs.set_state(connection, job_key, state))

    def set_job_config(self, job_key: int, config: Mapping[str, Any]) -> None:
        """Keep the configuration of the run that goes on with a job."""
        self.database.write(lambda connection: jobs.set_config(connection, job_key, config))

    def acquire_job(self, job_key: int, *, owner: Owner, lease_seconds: float) -> JobLease:
        """Become the one process that drives the job.

        Raises:
            LedgerError: a living process drives it; says which, and what to do.
        """
        terms = leases.LeaseTerms(owner=owner, lease_seconds=lease_seconds)
        taken: JobLease | None = None

        def work(connection: Connection) -> JobLease:
            nonlocal taken
            now = self.database.now()
            taken = leases.acquire_job(connection, job_key, terms=terms, now=now, earlier=taken)
            return taken

        return self.database.write(work)

    def renew_job(self, lease: JobLease) -> None:
        """Show that the driver lives.

        Raises:
            LedgerError: another process drives the job now.
        """
        self.database.write(
            lambda connection: leases.fence_job(connection, lease, heartbeat_at=self.database.now())
        )

    def release_job(self, lease: JobLease, state: JobState) -> None:
        """Let go of the job in the state that it is left in.

        Raises:
            LedgerError: another process drives the job now, or it would be finished with rows
                pending.
        """

        def work(connection: Connection) -> None:
            jobs.set_state(connection, lease.job_key, state)
            leases.release_job(connection, lease)

        self.database.write(work)

    def check_resumable(
        self, job: JobRow, *, fingerprint: Mapping[str, str], manifest_hash: str, num_rows: int
    ) -> None:
        """Compare what the job was started with and what it would be resumed with.

        Raises:
            LedgerError: names each thing that differs, its old and its new value.
        """
        changes = jobs.find_changes(
            job, fingerprint=fingerprint, manifest_hash=manifest_hash, num_rows=num_rows
        )
        if changes:
            listed = "\n".join(f"  {change}" for change in changes)
            raise LedgerError(
                f"job {job.job_id!r} cannot be resumed: its answers would not be of one kind\n"
                f"{listed}\nput the old values back, or start a new job: `tokenmill run CONFIG --fork "
                f"{job.job_id}` takes over the answers to rows that still hold"
            )

    def reshard(self, job_key: int, num_shards: int) -> None:
        """Cut the job into another number of shards; what is done stays done.

        Raises:
            LedgerError: a living owner holds one of its shards.
        """
        self.database.write(
            lambda connection: jobs.reshard(
                connection, job_key, num_shards, now=self.database.now()
            )
        )

    def acquire_shard(
        self,
        job_key: int,
        shard_index: int,
        *,
        owner: Owner,
        lease_seconds: float,
        flow_run_id: str | None = None,
    ) -> Lease:
        """Take a shard that nobody holds, or whose owner is gone; raises its epoch and attempt.

        An owner on this host is gone when its process is; any owner is when it gave no heartbeat
        for the lease_seconds that it promised.

        Raises:
            LedgerError: a living owner holds it; says who, since when, and what to do.
        """
        terms = leases.LeaseTerms(owner=owner, lease_seconds=lease_seconds, flow_run_id=flow_run_id)
        taken: Lease | None = None

        def work(connection: Connection) -> Lease:
            nonlocal taken
            now = self.database.now()
            taken = leases.acquire(
                connection, job_key, shard_index, terms=terms, now=now, earlier=taken
            )
            return taken

        return self.database.write(work)

    def renew_lease(self, lease: Lease) -> None:
        """Show that the owner lives.

        Raises:
            LedgerError: the lease was lost.
        """
        self.database.write(
            lambda connection: leases.fence(connection, lease, heartbeat_at=self.database.now())
        )

    def release_shard(
        self,
        lease: Lease,
        state: ShardState,
        *,
        busy_seconds: float = 0.0,
        stats: Mapping[str, Any] | None = None,
        error_message: str | None = None,
    ) -> None:
        """Give the shard back in the state that it is left in.

        busy_seconds is added to that of earlier attempts; stats replace theirs.

        Raises:
            LedgerError: the lease was lost.
        """
        self.database.write(
            lambda connection: leases.release(
                connection,
                lease,
                state=state,
                finished_at=self.database.now(),
                busy_seconds=ShardTable.busy_seconds + busy_seconds,
                stats=None if stats is None else dict(stats),
                error_message=error_message,
            )
        )

    def commit(
        self, lease: Lease, rows: Sequence[CompletionRow], *, device: str | None = None
    ) -> int:
        """Store results, their finished marks and the counters in one transaction.

        A row that is there as an error is replaced; the commit is a heartbeat too. Returns how
        many rows of the job have failed by now.

        Raises:
            LedgerError: the lease was lost, or a row has a result already; nothing was stored.
        """
        strangers = [row.row_index for row in rows if not lease.covers(row.row_index)]
        if strangers:
            raise LedgerError(
                f"rows {strangers[:5]} do not belong to shard {lease.shard_index}; "
                "this is a bug, report it"
            )

        origin = completions.Origin(job_key=lease.job_key, attempt=lease.attempt, device=device)

        def work(connection: Connection) -> int:
            leases.fence(connection, lease, heartbeat_at=self.database.now())
            counts = completions.store(connection, origin, rows)
            jobs.add_counts(connection, lease.job_key, lease.shard_index, counts)
            return jobs.count_failed(connection, lease.job_key)

        return self.database.write(work)

    def save_partials(self, lease: Lease, rows: Sequence[PartialRow]) -> None:
        """Store what there is of samples that have no result yet, in the place of older parts.

        Raises:
            LedgerError: the lease was lost.
        """

        def work(connection: Connection) -> None:
            leases.fence(connection, lease, heartbeat_at=self.database.now())
            unfinished.save_partials(connection, lease.job_key, rows)

        self.database.write(work)

    def partials_of(self, job_key: int, first: int, last: int) -> list[PartialRow]:
        """Return what there is of unfinished rows; rows first to last, included."""
        return self.database.query(
            lambda connection: unfinished.read_partials(connection, job_key, first, last)
        )

    def add_suspects(self, lease: Lease, row_indices: Iterable[int]) -> None:
        """Count a crash against each row that was in flight when a worker died.

        Raises:
            LedgerError: the lease was lost.
        """
        indices = list(row_indices)

        def work(connection: Connection) -> None:
            leases.fence(connection, lease, heartbeat_at=self.database.now())
            unfinished.add_suspects(connection, lease.job_key, indices)

        self.database.write(work)

    def suspects_of(self, job_key: int, first: int, last: int) -> dict[int, int]:
        """Return the crashes counted against unfinished rows; rows first to last, included."""
        return self.database.query(
            lambda connection: unfinished.read_suspects(connection, job_key, first, last)
        )

    def commit_bad_rows(self, job_key: int, rows: Iterable[CompletionRow]) -> None:
        """Store error rows that were found at plan time, outside of any lease.

        A row whose very error is there already is passed over, so a resumed job may repeat this.

        Raises:
            LedgerError: a row has a result already; that batch of rows was not stored.
        """
        iterator = iter(rows)
        while batch := list(islice(iterator, _BAD_ROWS_PER_COMMIT)):
            self._commit_bad_rows_batch(job_key, batch)

    def done_samples(self, job_key: int, rows: range | Collection[int]) -> dict[int, DoneSamples]:
        """Return what has a result by row_index, of a range of rows or of some of them."""
        return self.database.query(
            lambda connection: completions.read_done(connection, job_key, rows)
        )

    def read_rows(self, job_key: int, row_indices: Collection[int]) -> list[CompletionRow]:
        """Return the completions of a few rows with their texts, in the order of the input."""
        return self.database.query(
            lambda connection: stored_answers.read_rows(connection, job_key, row_indices)
        )

    def iter_completions(self, job_key: int, *, batch_rows: int = 1000) -> Iterator[CompletionRow]:
        """Yield all completions in the order of (row_index, sample_index).

        Each batch is read in a transaction of its own, so a slow reader holds nobody up.
        """
        after: tuple[int, int] | None = stored_answers.BEFORE_ALL
        while after is not None:
            start, after = after, None
            try:
                with self.database.read(fetch_rows=_FETCH_ROWS) as connection:
                    for row in stored_answers.read_after(connection, job_key, start, batch_rows):
                        after = row.key
                        yield row
            except LedgerUnreachableError as error:
                self.database.wait_until_back(error)
                after = after or start

    def _commit_bad_rows_batch(self, job_key: int, batch: Sequence[CompletionRow]) -> None:
        origin = completions.Origin(job_key=job_key, attempt=0, device=None)

        def work(connection: Connection) -> None:
            # Locked, so that nobody reshards the job between the rows and their counters.
            leases.lock_shards(connection, job_key, now=self.database.now())
            job = jobs.read(connection, job_key)
            by_shard = defaultdict[int, list[CompletionRow]](list)
            for row in completions.leave_out_known_errors(connection, job_key, batch):
                by_shard[job.shard_of(row.row_index)].append(row)
            for shard_index, rows in sorted(by_shard.items()):
                counts = completions.store(connection, origin, rows)
                jobs.add_counts(connection, job_key, shard_index, counts)

        self.database.write(work)
