"""Takes old jobs out of the ledger: `tokenmill ledger prune`, so that no disk fills up in a year.

A job goes with its rows and its answers, and of its folder with what only a run needs: the row
index, logs, stream.jsonl. Outputs and manifests stay, and so do the rows of the experiment log.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, delete

from engine import ConfigError, LedgerError
from flows import jobs, leases
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.schema import (
    CompletionTable,
    JobState,
    JobTable,
    PartialTable,
    PayloadTable,
    ShardTable,
    SuspectTable,
)
from flows.upkeep import shrink, size_bytes

_SECONDS_OF_UNIT = {"h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d+) *([hdw])")
# Payloads before completions, and jobs last: what points to a row goes before it.
_TABLES = (PayloadTable, CompletionTable, PartialTable, SuspectTable, ShardTable, JobTable)
_FILES_OF_A_RUN = ("rows.sqlite", "rows-*.sqlite", ".rows*.tmp", "stream.jsonl", "logs/*.log*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedJob:
    """A job that went, or would go; num_rows have a result, num_bytes are those of its files."""

    job_id: str
    state: JobState
    num_rows: int
    updated_at: float
    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSummary:
    """What was freed. kept says why a job that is old enough was not touched.

    num_ledger_bytes is what the database takes less than before. not_shrunk says why it keeps its
    size although rows went; later rows then fill the space.
    """

    jobs: tuple[PrunedJob, ...]
    kept: tuple[str, ...] = ()
    num_ledger_bytes: int = 0
    not_shrunk: str | None = None

    @property
    def num_rows(self) -> int:
        """Rows with a result of all jobs."""
        return sum(job.num_rows for job in self.jobs)

    @property
    def num_file_bytes(self) -> int:
        """Bytes of all jobs' files."""
        return sum(job.num_bytes for job in self.jobs)


def parse_age(text: str) -> float:
    """Return the seconds of an age such as 12h, 30d or 8w.

    Raises:
        ConfigError: it is something else.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--older-than {text!r}: wanted a whole number and a unit, h (hours), d (days) or w "
            "(weeks): 12h, 30d, 8w"
        )
    return float(int(match[1]) * _SECONDS_OF_UNIT[match[2]])


def prune(
    ledger: Ledger, *, older_than_seconds: float, include_unfinished: bool, is_dry_run: bool
) -> PruneSummary:
    """Take out jobs that ended so long ago; with include_unfinished also those that can go on.

    A job that a process drives is never touched. A dry run changes nothing.
    """
    now = ledger.database.read_clock()
    known = ledger.list_jobs()
    driven = {job.job_id for job in known if leases.is_held(job, now)}
    wanted = [
        job
        for job in known
        if now - max(job.updated_at, job.heartbeat_at or 0.0) >= older_than_seconds
        and (include_unfinished or job.state is JobState.FINISHED)
    ]
    size_before = size_bytes(ledger.database)
    pruned, kept = [], []
    for job in wanted:
        if job.job_id in driven:
            kept.append(f"job {job.job_id} is driven by {leases.name_of(job.lease_owner or '')}")
            continue
        try:
            if not is_dry_run:
                _delete_job(ledger, job)
        except LedgerError as error:
            kept.append(str(error))
            continue
        files = _files_of(job, known)
        pruned.append(_describe(job, files))
        if not is_dry_run:
            kept += _delete_files(files)
    if is_dry_run or not pruned:
        return PruneSummary(jobs=tuple(pruned), kept=tuple(kept))
    not_shrunk = _shrink(ledger, driven)
    return PruneSummary(
        jobs=tuple(pruned),
        kept=tuple(kept),
        num_ledger_bytes=max(0, size_before - size_bytes(ledger.database)),
        not_shrunk=not_shrunk,
    )


def _delete_job(ledger: Ledger, job: JobRow) -> None:
    def work(connection: Connection) -> None:
        leases.acquire_all(connection, job.job_key, now=ledger.database.now())
        if jobs.read(connection, job.job_key).updated_at != job.updated_at:
            raise LedgerError(f"job {job.job_id} was changed a moment ago")
        for table in _TABLES:
            connection.execute(delete(table).where(table.job_key == job.job_key))

    ledger.database.write(work)


def _shrink(ledger: Ledger, driven: Iterable[str]) -> str | None:
    """Give the space back; return why it cannot be given back now."""
    if names := ", ".join(sorted(driven)):
        return f"{names} would have to wait for it; prune again when no job runs"
    try:
        shrink(ledger.database)
    except LedgerError as error:
        return str(error)
    return None


def _files_of(job: JobRow, known: Iterable[JobRow]) -> list[Path]:
    """Return the files in the job's folder that only its runs need; none of a shared folder."""
    folder = job.config.get("job_dir")
    num_users = sum(other.config.get("job_dir") == folder for other in known)
    if folder is None or num_users > 1:
        return []
    found = (path for pattern in _FILES_OF_A_RUN for path in Path(folder).glob(pattern))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _describe(job: JobRow, files: Iterable[Path]) -> PrunedJob:
    sizes = [path.stat().st_size for path in files]
    return PrunedJob(
        job_id=job.job_id,
        state=job.state,
        num_rows=job.num_rows - job.num_pending,
        updated_at=job.updated_at,
        num_files=len(sizes),
        num_bytes=sum(sizes),
    )


def _delete_files(files: Sequence[Path]) -> Iterator[str]:
    """Delete files and the folders that are empty then; yield what could not be deleted."""
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            yield f"{path}: cannot be deleted: {error.strerror}"
    for folder in sorted({path.parent for path in files}, reverse=True):
        with suppress(OSError):  # it holds something else
            folder.rmdir()
