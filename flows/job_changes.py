"""What becomes of a job from outside: failed rows asked again, answers taken over by a new job.

Either is refused while a process drives the job that would be changed.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from msgspec.structs import replace
from sqlalchemy import Connection, delete, func, select

from engine import ConfigError, LedgerError
from flows import completions, jobs, leases
from flows.config import JobConfig
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow
from flows.row_index import IndexRow, RowIndex
from flows.schema import CompletionTable, JobState, RowState

logger = logging.getLogger(__name__)
_BATCH_ROWS = 500
_BATCH_CHARACTERS = 4_000_000
# What a plan commits, and what a fork takes over, was made by no run of the job.
_NO_ATTEMPT = 0
# What a fingerprint says of the questions; all else in it is of the model that answers.
_OF_THE_JOB = frozenset({"sampling", "prompt", "seed", "too_long"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySummary:
    """How many samples are asked again by error code, and how many bad rows of the input are not."""

    num_samples_by_code: dict[str, int]
    num_bad_rows: int

    @property
    def num_samples(self) -> int:
        """Samples that have no result any more."""
        return sum(self.num_samples_by_code.values())

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {n}" for code, n in sorted(self.num_samples_by_code.items()))
        again = f"{self.num_samples} failed answers are asked again ({codes})"
        if not self.num_samples:
            again = "no failed answer can be asked again"
        if not self.num_bad_rows:
            return again
        return (
            f"{again}; {self.num_bad_rows} bad rows of the input stay as they are, for the plan "
            "would find them again: mend the input and run the job with --fork"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSummary:
    """How many rows a new job took over, and how many it did not, by reason."""

    num_rows: int
    num_left_by_reason: dict[str, int]

    def __str__(self) -> str:
        left = "".join(f"; {n} {reason}" for reason, n in self.num_left_by_reason.items())
        return f"{self.num_rows} rows taken over{left}"


def retry_failed(ledger: Ledger, job_id: str, codes: Sequence[str] = ()) -> RetrySummary:
    """Make rows that failed pending again, all or those with one of the error codes.

    Samples that are well stay, and so do rows that the plan refused: it would find them again.

    Raises:
        LedgerError: no such job, a living process drives it or holds one of its shards, or no row
            has such a code.
    """
    job_key = ledger.get_job(job_id).job_key

    def work(connection: Connection) -> RetrySummary:
        lease = leases.acquire_all(connection, job_key, now=ledger.database.now())
        summary = _forget_errors(connection, jobs.read(connection, job_key), codes)
        leases.release_job(connection, lease)
        return summary

    return ledger.database.write(work)


def fork_config(config: JobConfig, ledger: Ledger, parent_id: str) -> JobConfig:
    """Return the configuration of a new job that takes over what holds of another one.

    Raises:
        ConfigError: it names the folder of that job, or an existing job that is no fork of it.
        LedgerError: there is no such job.
    """
    parent = ledger.get_job(parent_id)
    job_id = None if config.job_id == parent.job_id else config.job_id
    existing = None if job_id is None else ledger.find_job(job_id)
    if existing is not None and existing.forked_from != parent.job_id:
        raise ConfigError(
            f"job_id: job {job_id!r} exists and is no fork of {parent.job_id!r}; give another "
            "job_id, or leave it out"
        )
    if config.job_dir is not None and str(config.job_dir.absolute()) == parent.config.get(
        "job_dir"
    ):
        raise ConfigError(
            f"job_dir: {config.job_dir} is the folder of job {parent.job_id!r}; name another, or "
            "leave it out"
        )
    return config.model_copy(update={"job_id": job_id, "forked_from": parent.job_id})


def refuse_fork(parent: JobRow, fingerprint: Mapping[str, str]) -> None:
    """Make sure that what answers is what has answered the job that is forked.

    Raises:
        LedgerError: names what differs: no answer of the job would hold.
    """
    changes = find_model_changes(parent, fingerprint)
    if changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise LedgerError(
            f"job {parent.job_id!r} cannot be forked: none of its answers would hold\n{listed}\n"
            "put the old values back, or start a new job without --fork"
        )


def find_model_changes(job: JobRow, fingerprint: Mapping[str, str]) -> list[str]:
    """List what differs of the model that answers, one `name: was A, is now B` each."""
    return [
        f"{name}: was {job.fingerprint.get(name, 'not set')}, is now {value}"
        for name, value in fingerprint.items()
        if _is_of_the_model(name) and job.fingerprint.get(name) != value
    ]


def take_over_answers(ledger: Ledger, job: JobRow, index: RowIndex) -> ForkSummary | None:
    """Fill a job that is a fork from the job that it names; None once it has begun itself."""
    if job.forked_from is None or any(s.attempt for s in ledger.list_shards(job.job_key)):
        return None
    parent = ledger.find_job(job.forked_from)
    if parent is None:
        logger.warning("job %s is gone, nothing is taken over from it", job.forked_from)
        return None
    summary = fork_rows(ledger, parent, job, index)
    logger.info("forked job=%s from=%s: %s", job.job_id, parent.job_id, summary)
    return summary


def fork_rows(ledger: Ledger, parent: JobRow, child: JobRow, index: RowIndex) -> ForkSummary:
    """Give a new job the answers of another one to rows that are asked the same.

    A row is the same when its id and its request_hash are, and, where numbers are drawn, the
    job's seed. Only rows that are ok in whole are taken over, as attempt 0. Rows of the new job
    that have a result are left alone, so that this may be repeated.
    """
    origin = completions.Origin(job_key=child.job_key, attempt=_NO_ATTEMPT, device=None)
    reasons = Counter[str]()
    num_taken = 0
    for batch in _batches(ledger.iter_completions(parent.job_key)):
        found = index.find(samples[0].row_id for samples in batch)
        taken: list[CompletionRow] = []
        for samples in batch:
            row = found.get(samples[0].row_id)
            if row is None:
                continue
            reason = _reason_against(samples, row, has_same_seed=parent.seed == child.seed)
            if reason is None:
                taken += [replace(sample, row_index=row.row_index) for sample in samples]
                num_taken += 1
            else:
                reasons[reason] += 1
        _store(ledger, child, origin, taken)
    num_left = child.num_rows - num_taken - reasons.total()
    if num_left:
        reasons["not in the other job, or pending there"] = num_left
    return ForkSummary(num_rows=num_taken, num_left_by_reason=dict(reasons.most_common()))


def _forget_errors(connection: Connection, job: JobRow, codes: Sequence[str]) -> RetrySummary:
    table = CompletionTable
    is_error = (table.job_key == job.job_key, table.state == RowState.ERROR)
    found = connection.execute(
        select(table.error_code, table.attempt, func.count())
        .where(*is_error)
        .group_by(table.error_code, table.attempt)
    ).all()
    _refuse_unknown_codes(job, codes, {str(code) for code, _, _ in found})
    by_code, num_bad_rows = Counter[str](), 0
    for code, attempt, number in found:
        if codes and code not in codes:
            continue
        if attempt == _NO_ATTEMPT:
            num_bad_rows += number
        else:
            by_code[str(code)] += number
    summary = RetrySummary(num_samples_by_code=dict(by_code), num_bad_rows=num_bad_rows)
    if summary.num_samples:
        is_wanted = (table.attempt != _NO_ATTEMPT, table.error_code.in_(list(by_code)))
        connection.execute(delete(table).where(*is_error, *is_wanted))
        jobs.recount(connection, job.job_key)
        jobs.set_state(connection, job.job_key, JobState.INTERRUPTED)
    return summary


def _refuse_unknown_codes(job: JobRow, codes: Sequence[str], known: set[str]) -> None:
    unknown = sorted(set(codes) - known)
    if unknown:
        there = f"its failed rows have: {', '.join(sorted(known))}" if known else "none has failed"
        raise LedgerError(
            f"job {job.job_id!r} has no failed row with the code {' or '.join(unknown)}; {there}"
        )


def _is_of_the_model(name: str) -> bool:
    """Tell whether a field of a fingerprint says what answers, and not what is asked."""
    return name not in _OF_THE_JOB and not name.startswith("sources.")


def _reason_against(
    samples: Sequence[CompletionRow], row: IndexRow, *, has_same_seed: bool
) -> str | None:
    """Return why the new job cannot take a row's answers over; None when it can."""
    is_whole = len(samples) >= max(sample.num_samples for sample in samples)
    if not is_whole or any(sample.state is not RowState.OK for sample in samples):
        return "failed, skipped or not complete there"
    if row.error_code is not None:
        return "cannot be asked here"
    if samples[0].request_hash is None:
        return "answered by an older tokenmill, which did not note what was asked"
    if any(sample.request_hash != row.request_hash for sample in samples):
        return "asked with another prompt or sampling"
    if not has_same_seed and not row.may_fold:
        return "drawn with another seed"
    return None


def _batches(rows: Iterable[CompletionRow]) -> Iterator[list[list[CompletionRow]]]:
    """Yield rows with all their samples, so many at a time as fit in little memory."""
    batch: list[list[CompletionRow]] = []
    num_characters = 0
    for _, samples in groupby(rows, lambda row: row.row_index):
        batch.append(list(samples))
        num_characters += sum(len(sample.text or "") for sample in batch[-1])
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _store(
    ledger: Ledger, job: JobRow, origin: completions.Origin, rows: Sequence[CompletionRow]
) -> None:
    def work(connection: Connection) -> None:
        leases.lock_shards(connection, job.job_key, now=ledger.database.now())
        known = _rows_with_result(connection, job.job_key, rows)
        by_shard = defaultdict[int, list[CompletionRow]](list)
        for row in rows:
            if row.row_index not in known:
                by_shard[job.shard_of(row.row_index)].append(row)
        for shard_index, of_shard in sorted(by_shard.items()):
            counts = completions.store(connection, origin, of_shard)
            jobs.add_counts(connection, job.job_key, shard_index, counts)

    if rows:
        ledger.database.write(work)


def _rows_with_result(
    connection: Connection, job_key: int, rows: Sequence[CompletionRow]
) -> set[int]:
    indices = {row.row_index for row in rows}
    query = select(CompletionTable.row_index).where(
        CompletionTable.job_key == job_key, CompletionTable.row_index.in_(indices)
    )
    return set(connection.scalars(query))
