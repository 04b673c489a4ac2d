"""What is known about rows that have no result yet: tokens so far, and who is under suspicion.

A sample's partial tokens go in the transaction of its completion, and so does the suspicion
against a row. These are statements on a connection; flows.ledger decides what is one transaction.
"""

import logging
import time
from collections.abc import Iterable, Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    RowMapping,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    select,
    update,
)

from engine import LedgerError
from flows.ledger_rows import CompletionRow, PartialRow
from flows.schema import PartialTable, SuspectTable

logger = logging.getLogger(__name__)


def _has_any(table: type[PartialTable | SuspectTable]) -> Exists:
    return exists().where(
        table.job_key == bindparam("job_key"),
        table.row_index.between(bindparam("first"), bindparam("last")),
    )


# Whether there may be something to forget. Most rows never had any, and every commit asks: to name
# its rows in two statements takes long.
_HAVE_ANY = select(_has_any(PartialTable), _has_any(SuspectTable))


def save_partials(connection: Connection, job_key: int, rows: Sequence[PartialRow]) -> None:
    """Store the turns of some samples, in the place of what was there of those samples."""
    if not rows:
        return
    _delete_partials(connection, job_key, {(row.row_index, row.sample_index) for row in rows})
    now = time.time()
    connection.execute(
        insert(PartialTable),
        [
            {
                "job_key": job_key,
                "row_index": row.row_index,
                "sample_index": row.sample_index,
                "turn_index": row.turn_index,
                "token_ids": row.token_ids,
                "logprobs": row.logprobs,
                "text": row.text,
                "updated_at": now,
            }
            for row in rows
        ],
    )


def read_partials(connection: Connection, job_key: int, first: int, last: int) -> list[PartialRow]:
    """Return what there is of the rows first to last, included, turns in order.

    It only saves work: when some of it is damaged, the rows start over.
    """
    query = (
        select(PartialTable)
        .where(PartialTable.job_key == job_key, PartialTable.row_index.between(first, last))
        .order_by(PartialTable.row_index, PartialTable.sample_index, PartialTable.turn_index)
    )
    try:
        return [_to_partial(row) for row in connection.execute(query).mappings()]
    except LedgerError as error:
        logger.warning("unfinished answers of rows %d to %d start over: %s", first, last, error)
        return []


def add_suspects(connection: Connection, job_key: int, row_indices: Iterable[int]) -> None:
    """Count one more crash against each of the rows."""
    indices = sorted(set(row_indices))
    known_query = select(SuspectTable.row_index).where(
        SuspectTable.job_key == job_key, SuspectTable.row_index.in_(indices)
    )
    known = set(connection.scalars(known_query))
    now = time.time()
    connection.execute(
        update(SuspectTable)
        .where(SuspectTable.job_key == job_key, SuspectTable.row_index.in_(known))
        .values(num_crashes=SuspectTable.num_crashes + 1, updated_at=now)
    )
    new = [
        {"job_key": job_key, "row_index": index, "num_crashes": 1, "updated_at": now}
        for index in indices
        if index not in known
    ]
    if new:
        connection.execute(insert(SuspectTable), new)


def read_suspects(connection: Connection, job_key: int, first: int, last: int) -> dict[int, int]:
    """Return the crashes counted against each of the rows first to last, included."""
    query = (
        select(SuspectTable.row_index, SuspectTable.num_crashes)
        .where(SuspectTable.job_key == job_key, SuspectTable.row_index.between(first, last))
        .order_by(SuspectTable.row_index)
    )
    return {row.row_index: row.num_crashes for row in connection.execute(query)}


def clear_suspects(connection: Connection, job_key: int, row_indices: Iterable[int]) -> None:
    """Drop the suspicion against rows that were proven innocent."""
    connection.execute(
        delete(SuspectTable).where(
            SuspectTable.job_key == job_key, SuspectTable.row_index.in_(set(row_indices))
        )
    )


def forget(connection: Connection, job_key: int, rows: Sequence[CompletionRow]) -> None:
    """Drop what was known about samples that have a result now."""
    if not rows:
        return
    row_indices = {row.row_index for row in rows}
    values = {"job_key": job_key, "first": min(row_indices), "last": max(row_indices)}
    has_partials, has_suspects = connection.execute(_HAVE_ANY, values).one()
    if has_partials:
        _delete_partials(connection, job_key, {row.key for row in rows})
    if has_suspects:
        clear_suspects(connection, job_key, row_indices)


def _delete_partials(connection: Connection, job_key: int, keys: Iterable[tuple[int, int]]) -> None:
    by_sample: dict[int, list[int]] = {}
    for row_index, sample_index in sorted(keys):
        by_sample.setdefault(sample_index, []).append(row_index)
    for sample_index, row_indices in by_sample.items():
        is_one: ColumnElement[bool] = and_(
            PartialTable.job_key == job_key,
            PartialTable.row_index.in_(row_indices),
            PartialTable.sample_index == sample_index,
        )
        connection.execute(delete(PartialTable).where(is_one))


def _to_partial(row: RowMapping) -> PartialRow:
    return PartialRow(
        row_index=row["row_index"],
        sample_index=row["sample_index"],
        turn_index=row["turn_index"],
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        text=row["text"],
    )
