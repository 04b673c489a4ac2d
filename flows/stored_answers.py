"""Answers read back with their texts, in the order of the input; damaged ones are found and named.

A disk may spoil what is stored. Such an answer costs itself alone: whoever reads over it is told
which row it is, and the others are read as ever.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVarTuple

from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, select, tuple_
from sqlalchemy.exc import DBAPIError

from engine import LedgerError
from flows.completions import to_completion_row
from flows.database import is_undecodable
from flows.ledger_rows import CompletionRow
from flows.schema import CompletionTable, JobTable, PayloadTable, RowState

_KEY = tuple_(CompletionTable.row_index, CompletionTable.sample_index)
# A key behind which every answer of a job lies.
BEFORE_ALL = (-1, -1)
_Columns = TypeVarTuple("_Columns")
# What SQLite's driver, a column type or a state that there is not raises over spoilt bytes.
_UNREADABLE = (LedgerError, DBAPIError, ValueError)
# More than a driver fetches at a time: so far behind the last good answer the bad one may be.
_LOOKED_THROUGH = 1000
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An answer that cannot be read, and what was counted of it when it was stored."""

    job_key: int
    row_index: int
    sample_index: int
    name: str
    state: str
    attempt: int
    num_output_tokens: int
    committed_at: float
    reason: str

    @property
    def key(self) -> tuple[int, int]:
        """Return what tells it from every other completion of the job."""
        return (self.row_index, self.sample_index)


class DamagedAnswerError(LedgerError):
    """An answer cannot be read; it can be asked again."""

    def __init__(self, damage: Damage, job_id: str) -> None:
        super().__init__(
            f"{damage.name}: its answer in the ledger is damaged, {damage.reason}; put a copy of "
            f"the ledger back that is whole, or have it answered again, and no other: `tokenmill "
            f"retry-failed {job_id} --damaged`"
        )
        self.damage = damage
        self._job_id = job_id

    def __reduce__(self) -> tuple[Any, ...]:
        """Come through a pickle: it is raised on other hosts too."""
        return type(self), (self.damage, self._job_id)


def read_after(
    connection: Connection, job_key: int, after: tuple[int, int], limit: int | None
) -> Iterator[CompletionRow]:
    """Yield completions with text behind the key `after`, in the order of the input.

    Raises:
        DamagedAnswerError: names the first that cannot be read; those before it were yielded, but
            for some that came from the database together with it.
    """
    is_wanted = CompletionTable.job_key == job_key
    yield from _read(connection, is_wanted, after=after, limit=limit)


def read_rows(
    connection: Connection, job_key: int, row_indices: Collection[int]
) -> list[CompletionRow]:
    """Return the completions of some rows with text, in the order of the input and of samples.

    Raises:
        DamagedAnswerError: one of them cannot be read.
    """
    table = CompletionTable
    is_wanted = and_(table.job_key == job_key, table.row_index.in_(row_indices))
    return list(_read(connection, is_wanted))


def find_damaged(connection: Connection, job_key: int) -> Iterator[Damage]:
    """Read every answer of a job, and yield those that cannot be read."""
    after: tuple[int, int] | None = BEFORE_ALL
    while after is not None:
        start, after = after, None
        try:
            for _ in read_after(connection, job_key, start, None):
                pass
        except DamagedAnswerError as error:
            yield error.damage
            after = error.damage.key


def _read(
    connection: Connection,
    is_wanted: ColumnElement[bool],
    *,
    after: tuple[int, int] | None = None,
    limit: int | None = None,
) -> Iterator[CompletionRow]:
    query = _behind(_select_with_payload(is_wanted), after).limit(limit)
    try:
        for row in connection.execute(query).mappings():
            answer = _read_with_payload(row)
            after = answer.key
            yield answer
    except _UNREADABLE as error:
        if isinstance(error, DBAPIError) and not is_undecodable(error):
            raise
        damage = _find_first(connection, is_wanted, after)
        if damage is None:
            raise
        raise _damaged(connection, damage) from error


def _behind(query: Select[*_Columns], after: tuple[int, int] | None) -> Select[*_Columns]:
    """Leave out what is not behind a key.

    Where there is none, SQLite must not see one: it would walk along the keys of the whole job
    instead of looking rows up.
    """
    return query if after is None else query.where(tuple_(*after) < _KEY)


def _select_with_payload(is_wanted: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    return (
        select(
            CompletionTable,
            PayloadTable.job_key.label("payload_of"),
            PayloadTable.text,
            PayloadTable.token_ids,
            PayloadTable.turns,
            PayloadTable.logprobs,
        )
        .outerjoin(
            PayloadTable,
            (PayloadTable.job_key == CompletionTable.job_key)
            & (PayloadTable.row_index == CompletionTable.row_index)
            & (PayloadTable.sample_index == CompletionTable.sample_index),
        )
        .where(is_wanted)
        .order_by(CompletionTable.row_index, CompletionTable.sample_index)
    )


def _read_with_payload(row: RowMapping) -> CompletionRow:
    if row["payload_of"] is None and row["state"] == RowState.OK:
        raise LedgerError("its text is gone")
    return replace(
        to_completion_row(row),
        text=row["text"],
        token_ids=row["token_ids"] or (),
        turns=tuple(row["turns"] or ()),
        logprobs=row["logprobs"],
    )


def _find_first(
    connection: Connection, is_wanted: ColumnElement[bool], after: tuple[int, int] | None
) -> Damage | None:
    """Return the first answer behind the key `after` that cannot be read, read one by one."""
    table = CompletionTable
    query = select(
        table.job_key, table.row_index, table.sample_index, table.state, table.attempt,
        table.num_output_tokens, table.committed_at,
    ).where(is_wanted)  # fmt: skip
    query = (
        _behind(query, after).order_by(table.row_index, table.sample_index).limit(_LOOKED_THROUGH)
    )
    for row in connection.execute(query).all():
        is_it = and_(
            table.job_key == row.job_key,
            table.row_index == row.row_index,
            table.sample_index == row.sample_index,
        )
        reason = _reason_against(connection, is_it)
        if reason is not None:
            name = _name_of(connection, is_it, f"row {row.row_index}, sample {row.sample_index}")
            return Damage(name=name, reason=reason, **row._mapping)
    return None


def _reason_against(connection: Connection, is_it: ColumnElement[bool]) -> str | None:
    """Return why an answer cannot be read, None when it can be."""
    try:
        _read_with_payload(connection.execute(_select_with_payload(is_it)).mappings().one())
    except _UNREADABLE as error:
        # The driver's own words, without the statement; they may quote the whole text.
        said = error.orig if isinstance(error, DBAPIError) else error
        return " ".join(str(said)[:_SHOWN_CHARACTERS].split())
    return None


def _name_of(connection: Connection, is_it: ColumnElement[bool], place: str) -> str:
    """Return what a message calls a row, also when its id cannot be read either."""
    query = select(CompletionTable.row_id).where(is_it)
    try:
        return f"row {connection.execute(query).scalar_one()!r} ({place})"
    except _UNREADABLE:
        return place


def _damaged(connection: Connection, damage: Damage) -> DamagedAnswerError:
    query = select(JobTable.job_id).where(JobTable.job_key == damage.job_key)
    return DamagedAnswerError(damage, connection.execute(query).scalar_one())
