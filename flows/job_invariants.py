"""What must be true of a job in the ledger, and the statements that find what is not.

The database does the counting and the joining, and only what is wrong comes out of it: memory does
not grow with the number of rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, exists, func, or_, select

from flows import jobs
from flows.completions import COUNTERS, count_by_shard
from flows.ledger_rows import JobRow, ShardRow
from flows.schema import (
    CompletionTable,
    JobState,
    PartialTable,
    PayloadTable,
    RowState,
    ShardState,
    ShardTable,
    SuspectTable,
)
from flows.stored_answers import find_damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A job as one transaction sees it, with its counters counted anew by shard."""

    connection: Connection
    job: JobRow
    shards: list[ShardRow]
    counted: dict[int, dict[str, int]]

    @classmethod
    def read(cls, connection: Connection, job_key: int) -> "Facts":
        """Read a job and count its rows."""
        job = jobs.read(connection, job_key)
        query = select(ShardTable).where(ShardTable.job_key == job_key)
        rows = connection.execute(query.order_by(ShardTable.shard_index)).mappings()
        return cls(
            connection=connection,
            job=job,
            shards=[jobs.to_shard_row(row) for row in rows],
            counted=count_by_shard(
                connection, job_key, num_rows=job.num_rows, num_shards=job.num_shards
            ),
        )

    def count(self, shard_index: int, counter: str) -> int:
        """Return what was counted in one shard."""
        return self.counted.get(shard_index, {}).get(counter, 0)

    def total(self, counter: str) -> int:
        """Return what was counted in all shards."""
        return sum(counts[counter] for counts in self.counted.values())

    def num_pending(self, shard: ShardRow) -> int:
        """Return how many rows of a shard have no result."""
        states = ("num_ok", "num_error", "num_skipped")
        return shard.num_rows - sum(self.count(shard.shard_index, state) for state in states)

    @property
    def num_pending_rows(self) -> int:
        """How many rows of the job have no result."""
        num_done = self.total("num_ok") + self.total("num_error") + self.total("num_skipped")
        return self.job.num_rows - num_done


# Each yields what is wrong.


def _wrong_shard_counters(facts: Facts) -> Iterator[str]:
    for shard in facts.shards:
        for name in COUNTERS:
            stored, counted = getattr(shard, name), facts.count(shard.shard_index, name)
            if stored != counted:
                yield f"shard {shard.shard_index}: {name} is {stored}, counted {counted}"


def _gaps_between_shards(facts: Facts) -> Iterator[str]:
    job, next_row = facts.job, 0
    if [shard.shard_index for shard in facts.shards] != list(range(job.num_shards)):
        yield f"the job has {job.num_shards} shards, found {len(facts.shards)}"
    for shard in facts.shards:
        if shard.first_row != next_row:
            yield f"shard {shard.shard_index} begins at row {shard.first_row}, not {next_row}"
        next_row = shard.first_row + shard.num_rows
        of_rows = {job.shard_of(row) for row in (shard.first_row, next_row - 1)}
        if shard.num_rows and of_rows != {shard.shard_index}:
            yield f"shard {shard.shard_index} holds rows of shard(s) {sorted(of_rows)}"
    if next_row != job.num_rows:
        yield f"the shards end at row {next_row}, the job at row {job.num_rows}"


def _wrong_shard_states(facts: Facts) -> Iterator[str]:
    for shard in facts.shards:
        num_pending, is_done = facts.num_pending(shard), shard.state is ShardState.DONE
        if is_done and num_pending:
            yield f"shard {shard.shard_index} is done with {num_pending} rows pending"
        if not is_done and not num_pending and facts.job.state is JobState.FINISHED:
            yield f"shard {shard.shard_index} is {shard.state.value}, and the job is finished"


def _finished_too_early(facts: Facts) -> Iterator[str]:
    if facts.job.state is JobState.FINISHED and facts.num_pending_rows:
        yield f"the job is finished with {facts.num_pending_rows} rows pending"


def _rows_outside(facts: Facts) -> Iterator[str]:
    for table in (CompletionTable, PartialTable, SuspectTable):
        is_outside = ~table.row_index.between(0, facts.job.num_rows - 1)
        query = select(table.row_index).where(table.job_key == facts.job.job_key, is_outside)
        for row_index in facts.connection.scalars(query):
            yield f"{table.__tablename__}: row {row_index}"


def _wrong_samples(facts: Facts) -> Iterator[str]:
    table = CompletionTable
    first, last = func.min(table.sample_index), func.max(table.sample_index)
    fewest, most = func.min(table.num_samples), func.max(table.num_samples)
    query = (
        select(table.row_index, first, last, fewest, most)
        .where(table.job_key == facts.job.job_key)
        .group_by(table.row_index)
        .having(or_(first < 0, last >= most, fewest != most))
    )
    for row_index, *found in facts.connection.execute(query):
        yield f"row {row_index}: samples {found[0]} to {found[1]} of {found[2]} to {found[3]}"


def _wrong_row_states(facts: Facts) -> Iterator[str]:
    table = CompletionTable
    is_wrong = or_(
        and_(table.state == RowState.OK, table.error_code.is_not(None)),
        and_(table.state == RowState.ERROR, table.error_code.is_(None)),
        table.state.not_in(list(RowState)),
    )
    query = _samples_of(facts, table, table.state, table.error_code).where(is_wrong)
    for row_index, sample_index, row_id, state, code in facts.connection.execute(query):
        yield f"{_name(row_index, sample_index, row_id)} is {state} with error code {code}"


def _damaged_answers(facts: Facts) -> Iterator[str]:
    for damage in find_damaged(facts.connection, facts.job.job_key):
        yield f"{damage.name}: {damage.reason}"


def _texts_without_answer(facts: Facts) -> Iterator[str]:
    table = PayloadTable
    is_alone = ~exists().where(_is_same_sample(CompletionTable, table))
    query = select(table.row_index, table.sample_index).where(
        table.job_key == facts.job.job_key, is_alone
    )
    for row_index, sample_index in facts.connection.execute(query):
        yield f"row {row_index}, sample {sample_index}"


def _leftovers(facts: Facts) -> Iterator[str]:
    partial, suspect, done = PartialTable, SuspectTable, CompletionTable
    with_result = select(partial.row_index, partial.sample_index).where(
        partial.job_key == facts.job.job_key, exists().where(_is_same_sample(done, partial))
    )
    for row_index, sample_index in facts.connection.execute(with_result.distinct()):
        yield f"partial tokens of row {row_index}, sample {sample_index}"
    is_done = (
        select(done.row_index)
        .where(done.job_key == suspect.job_key, done.row_index == suspect.row_index)
        .group_by(done.row_index)
        .having(func.count() >= func.max(done.num_samples))
        .exists()
    )
    of_done = select(suspect.row_index).where(suspect.job_key == facts.job.job_key, is_done)
    for row_index in facts.connection.scalars(of_done):
        yield f"suspicion against row {row_index}"


INVARIANTS: tuple[tuple[str, str, Callable[[Facts], Iterator[str]]], ...] = (
    ("shard_counters", "the shards' counters are true", _wrong_shard_counters),
    ("shard_ranges", "the shards hold each row once", _gaps_between_shards),
    ("shard_states", "a shard is done when its rows are", _wrong_shard_states),
    ("finished", "a finished job has no pending row", _finished_too_early),
    ("row_range", "no row is outside of the job", _rows_outside),
    ("samples", "the samples of a row have no gap", _wrong_samples),
    ("row_states", "errors, and only they, have a code", _wrong_row_states),
    ("payloads", "every answer can be read", _damaged_answers),
    ("lost_payloads", "every text belongs to a row", _texts_without_answer),
    ("leftovers", "what is done has nothing unfinished", _leftovers),
)


def _samples_of(
    facts: Facts, table: type[CompletionTable], *more: ColumnElement[Any] | Any
) -> Select[Any]:
    columns = (table.row_index, table.sample_index, table.row_id, *more)
    return select(*columns).where(table.job_key == facts.job.job_key)


def _is_same_sample(
    one: type[CompletionTable] | type[PayloadTable],
    other: type[CompletionTable] | type[PayloadTable] | type[PartialTable],
) -> ColumnElement[bool]:
    return and_(
        one.job_key == other.job_key,
        one.row_index == other.row_index,
        one.sample_index == other.sample_index,
    )


def _name(row_index: int, sample_index: int, row_id: str) -> str:
    return f"row {row_id!r} (row {row_index}, sample {sample_index})"
