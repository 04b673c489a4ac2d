"""Proves from the rows themselves what a ledger claims: `tokenmill ledger check`.

Each job is looked at in one transaction that sees one state of the database, so that a job may run
meanwhile.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, exists, select

from flows import leases
from flows.completions import COUNTERS
from flows.job_invariants import INVARIANTS, Facts
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
from flows.upkeep import find_damages

_SHOWN_PROBLEMS = 5
_FETCH_ROWS = 1000
_OF_JOBS = (ShardTable, CompletionTable, PayloadTable, PartialTable, SuspectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One invariant of one job, or of the whole ledger when job_id is None.

    claim says in words what must be true, note what was found besides. problems are the first of
    num_problems.
    """

    job_id: str | None
    name: str
    claim: str
    note: str = ""
    problems: tuple[str, ...] = ()
    num_problems: int = 0

    @property
    def is_ok(self) -> bool:
        """True when the claim is true."""
        return self.num_problems == 0


def check_job(ledger: Ledger, job_id: str) -> list[CheckResult]:
    """Check every invariant of one job.

    Raises:
        LedgerError: no such job.
    """
    job_key = ledger.get_job(job_id).job_key
    with ledger.database.read(fetch_rows=_FETCH_ROWS) as connection:
        facts = Facts.read(connection, job_key)
        results = [_result(job_id, name, claim, find(facts)) for name, claim, find in INVARIANTS]
    return [_balance(facts), *results, _driver(facts.job, ledger.database.read_clock())]


def check_whole_ledger(ledger: Ledger) -> list[CheckResult]:
    """Check what belongs to no single job: the file itself, and rows of jobs that are not there."""
    damages = find_damages(ledger.database, _SHOWN_PROBLEMS)
    with ledger.database.read(fetch_rows=_FETCH_ROWS) as connection:
        orphans = _result(None, "orphans", "everything belongs to a job", _find_orphans(connection))
    if damages is None:
        return [orphans]
    return [_result(None, "database", "the database is sound", damages), orphans]


def _result(
    job_id: str | None, name: str, claim: str, found: Iterable[str], *, note: str = ""
) -> CheckResult:
    problems, number = [], 0
    for number, problem in enumerate(found, start=1):
        if number <= _SHOWN_PROBLEMS:
            problems.append(problem)
    return CheckResult(
        job_id=job_id,
        name=name,
        claim=claim,
        note=note,
        problems=tuple(problems),
        num_problems=number,
    )


def _balance(facts: Facts) -> CheckResult:
    job = facts.job
    counts = ", ".join(f"{facts.total(name)} {name.removeprefix('num_')}" for name in COUNTERS[:3])
    note = f"{job.num_rows} rows: {counts}, {facts.num_pending_rows} pending"
    found = (
        f"{name} is {getattr(job, name)}, counted {facts.total(name)}"
        for name in COUNTERS
        if getattr(job, name) != facts.total(name)
    )
    return _result(job.job_id, "job_counters", "the job's counters are true", found, note=note)


def _driver(job: JobRow, now: float) -> CheckResult:
    """Say who drives the job. A driver that is gone is no fault, but somebody must resume."""
    note = "nobody" if job.lease_owner is None else leases.name_of(job.lease_owner)
    if job.state is JobState.RUNNING and not leases.is_held(job, now):
        note += "; it is gone, so the job can be resumed"
    return CheckResult(job_id=job.job_id, name="driver", claim="who drives the job", note=note)


def _find_orphans(connection: Connection) -> Iterator[str]:
    for table in _OF_JOBS:
        has_job = exists().where(JobTable.job_key == table.job_key)
        for job_key in connection.scalars(select(table.job_key).where(~has_job).distinct()):
            yield f"{table.__tablename__} of job key {job_key}, which is not there"
