"""Completions and their payloads: stored once, counted, and read back in order.

These are statements on a connection; flows.ledger decides which of them make one transaction.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, RowMapping, case, delete, func, insert, select, tuple_

from engine import LedgerError
from flows.ledger_rows import CompletionRow
from flows.schema import CompletionTable, PayloadTable, RowState

COUNTERS = ("num_ok", "num_error", "num_skipped", "num_prompt_tokens", "num_output_tokens")
_COUNTER_OF_STATE = {
    RowState.OK: "num_ok",
    RowState.ERROR: "num_error",
    RowState.SKIPPED: "num_skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose rows these are, and what made them."""

    job_key: int
    attempt: int
    device: str | None


def store(
    connection: Connection, origin: Origin, rows: Sequence[CompletionRow]
) -> list[CompletionRow]:
    """Insert rows and payloads, and return the error rows that they replaced.

    Raises:
        LedgerError: a result that is not an error is there already, or a row is given twice.
    """
    if not rows:
        return []
    replaced = _find_existing(connection, origin.job_key, rows)
    for old in replaced:
        if old.state is not RowState.ERROR:
            raise LedgerError(
                f"row {old.row_id!r} (row {old.row_index}, sample {old.sample_index}) has a result "
                "already; a second one was refused. Two runs worked on one row: this is a bug, "
                "report it"
            )
        connection.execute(
            delete(CompletionTable).where(
                CompletionTable.job_key == origin.job_key,
                CompletionTable.row_index == old.row_index,
                CompletionTable.sample_index == old.sample_index,
            )
        )
    committed_at = time.time()
    connection.execute(
        insert(CompletionTable), [_completion_values(origin, row, committed_at) for row in rows]
    )
    payloads = [_payload_values(origin.job_key, row) for row in rows if _has_payload(row)]
    if payloads:
        connection.execute(insert(PayloadTable), payloads)
    return replaced


def leave_out_known_errors(
    connection: Connection, job_key: int, rows: Sequence[CompletionRow]
) -> list[CompletionRow]:
    """Return the rows whose very error the ledger does not hold yet."""
    known = {
        (old.key, old.state, old.error_code, old.error_message)
        for old in _find_existing(connection, job_key, rows)
    }
    return [
        row for row in rows if (row.key, row.state, row.error_code, row.error_message) not in known
    ]


def count(rows: Iterable[CompletionRow], *, replaced: Iterable[CompletionRow]) -> dict[str, int]:
    """Return what to add to the counters when some rows come and others go."""
    counts = dict.fromkeys(COUNTERS, 0)
    for sign, group in ((1, rows), (-1, replaced)):
        for row in group:
            counts[_COUNTER_OF_STATE[row.state]] += sign
            counts["num_prompt_tokens"] += sign * row.num_prompt_tokens
            counts["num_output_tokens"] += sign * row.num_output_tokens
    return counts


def read_after(
    connection: Connection, job_key: int, after: tuple[int, int], limit: int
) -> Iterator[CompletionRow]:
    """Yield completions with text behind the key `after`, in the order of the input."""
    key = tuple_(CompletionTable.row_index, CompletionTable.sample_index)
    query = (
        select(CompletionTable, PayloadTable.text, PayloadTable.token_ids, PayloadTable.turns)
        .outerjoin(
            PayloadTable,
            (PayloadTable.job_key == CompletionTable.job_key)
            & (PayloadTable.row_index == CompletionTable.row_index)
            & (PayloadTable.sample_index == CompletionTable.sample_index),
        )
        .where(CompletionTable.job_key == job_key, key > tuple_(*after))
        .order_by(CompletionTable.row_index, CompletionTable.sample_index)
        .limit(limit)
    )
    for row in connection.execute(query).mappings():
        yield replace(
            _read(row),
            text=row["text"],
            token_ids=row["token_ids"] or (),
            turns=tuple(row["turns"] or ()),
        )


def count_by_shard(
    connection: Connection, job_key: int, *, num_rows: int, num_shards: int
) -> dict[int, dict[str, int]]:
    """Return the counters of each shard, counted anew from the rows; empty shards are left out."""
    shard = CompletionTable.row_index * num_shards // num_rows
    sums = [
        func.sum(case((CompletionTable.state == state, 1), else_=0)).label(name)
        for state, name in _COUNTER_OF_STATE.items()
    ]
    counted = connection.execute(
        select(
            shard.label("shard"),
            *sums,
            func.sum(CompletionTable.num_prompt_tokens).label("num_prompt_tokens"),
            func.sum(CompletionTable.num_output_tokens).label("num_output_tokens"),
        )
        .where(CompletionTable.job_key == job_key)
        .group_by(shard)
    ).mappings()
    return {row["shard"]: {name: int(row[name]) for name in COUNTERS} for row in counted}


def _find_existing(
    connection: Connection, job_key: int, rows: Sequence[CompletionRow]
) -> list[CompletionRow]:
    keys = {row.key for row in rows}
    if len(keys) != len(rows):
        raise LedgerError("one commit has the same (row, sample) twice; this is a bug, report it")
    query = select(CompletionTable).where(
        CompletionTable.job_key == job_key,
        CompletionTable.row_index.in_({row.row_index for row in rows}),
    )
    existing = [_read(row) for row in connection.execute(query).mappings()]
    return [row for row in existing if row.key in keys]


def _read(row: RowMapping) -> CompletionRow:
    return CompletionRow(
        row_index=row["row_index"],
        sample_index=row["sample_index"],
        row_id=row["row_id"],
        state=RowState(row["state"]),
        error_code=row["error_code"],
        error_message=row["error_message"],
        finish_reason=row["finish_reason"],
        num_prompt_tokens=row["num_prompt_tokens"],
        num_cached_tokens=row["num_cached_tokens"],
        num_output_tokens=row["num_output_tokens"],
    )


def _completion_values(
    origin: Origin, row: CompletionRow, committed_at: float
) -> dict[str, object]:
    return {
        "job_key": origin.job_key,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "row_id": row.row_id,
        "state": row.state,
        "error_code": row.error_code,
        "error_message": row.error_message,
        "finish_reason": row.finish_reason,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_cached_tokens": row.num_cached_tokens,
        "num_output_tokens": row.num_output_tokens,
        "attempt": origin.attempt,
        "device": origin.device,
        "committed_at": committed_at,
    }


def _has_payload(row: CompletionRow) -> bool:
    return row.text is not None or len(row.token_ids) > 0 or len(row.turns) > 0


def _payload_values(job_key: int, row: CompletionRow) -> dict[str, object]:
    return {
        "job_key": job_key,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "text": row.text,
        "token_ids": row.token_ids,
        "turns": list(row.turns) or None,
    }
