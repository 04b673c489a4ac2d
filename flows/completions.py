"""Completions and their payloads: stored once, and counted.

These are statements on a connection; flows.ledger decides which of them make one transaction.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import (
    Connection,
    RowMapping,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
)

from engine import LedgerError
from flows import unfinished
from flows.ledger_rows import CompletionRow, DoneSamples
from flows.schema import CompletionTable, PayloadTable, RowState

COUNTERS = ("num_ok", "num_error", "num_skipped", "num_prompt_tokens", "num_output_tokens")
# A row of several samples is as bad as the worst of them.
_WORST_LAST = (RowState.OK, RowState.SKIPPED, RowState.ERROR)
_COUNTER_OF_STATE = {
    RowState.OK: "num_ok",
    RowState.ERROR: "num_error",
    RowState.SKIPPED: "num_skipped",
}
# Built once: every commit asks it, and to name a thousand rows in a new statement takes long.
_OF_ROWS = select(CompletionTable).where(
    CompletionTable.job_key == bindparam("job_key"),
    CompletionTable.row_index.in_(bindparam("row_indices", expanding=True)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose rows these are, what made them, and when: the mark of one commit."""

    job_key: int
    attempt: int
    device: str | None
    committed_at: float = field(default_factory=time.time)


def store(connection: Connection, origin: Origin, rows: Sequence[CompletionRow]) -> dict[str, int]:
    """Insert rows and payloads; return what to add to the counters of job and shard.

    An error is replaced. What was known about the rows while they had no result is forgotten. The
    very same commit may come twice: when the connection is lost, nobody knows whether the first
    has arrived.

    Raises:
        LedgerError: a result that is not an error is there already, or a row is given twice.
    """
    existing = _find_existing(connection, origin.job_key, rows)
    keys = {row.key for row in rows}
    replaced = [row for row in existing if row.key in keys]
    if replaced and _is_stored(connection, origin, rows):
        return dict.fromkeys(COUNTERS, 0)
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
    _insert(connection, origin, rows)
    remaining = [row for row in existing if row.key not in keys]
    unfinished.forget(connection, origin.job_key, rows)
    return _difference(count([*remaining, *rows]), count(existing))


def leave_out_known_errors(
    connection: Connection, job_key: int, rows: Sequence[CompletionRow]
) -> list[CompletionRow]:
    """Return the rows that the ledger does not hold with this state and error yet."""
    known = {
        (old.key, old.state, old.error_code) for old in _find_existing(connection, job_key, rows)
    }
    return [row for row in rows if (row.key, row.state, row.error_code) not in known]


def count(samples: Iterable[CompletionRow]) -> dict[str, int]:
    """Return the counters of some rows, given all samples of them that there are.

    States are counted by row, once all its samples are there. Tokens are counted at once, those
    of the prompt with the first sample.
    """
    counts = dict.fromkeys(COUNTERS, 0)
    by_row = defaultdict[int, list[CompletionRow]](list)
    for sample in samples:
        by_row[sample.row_index].append(sample)
        counts["num_output_tokens"] += sample.num_output_tokens
        if sample.sample_index == 0:
            counts["num_prompt_tokens"] += sample.num_prompt_tokens
    for of_row in by_row.values():
        if len(of_row) >= max(sample.num_samples for sample in of_row):
            state = max((sample.state for sample in of_row), key=_WORST_LAST.index)
            counts[_COUNTER_OF_STATE[state]] += 1
    return counts


def to_completion_row(row: RowMapping) -> CompletionRow:
    """Read a row of CompletionTable."""
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
        num_samples=row["num_samples"],
        is_truncated=row["is_truncated"],
        request_hash=row["request_hash"],
    )


def read_done(
    connection: Connection, job_key: int, rows: range | Collection[int]
) -> dict[int, DoneSamples]:
    """Return which samples of a range of rows, or of some rows, have a result."""
    table = CompletionTable
    is_one = (
        table.row_index.between(rows.start, rows.stop - 1)
        if isinstance(rows, range)
        else table.row_index.in_(rows)
    )
    query = select(table.row_index, table.sample_index, table.num_samples).where(
        table.job_key == job_key, is_one
    )
    done: dict[int, DoneSamples] = {}
    for row_index, sample_index, num_samples in connection.execute(query):
        done.setdefault(row_index, DoneSamples(set(), num_samples)).indices.add(sample_index)
    return done


def count_by_shard(
    connection: Connection, job_key: int, *, num_rows: int, num_shards: int
) -> dict[int, dict[str, int]]:
    """Return the counters of each shard, counted anew from the rows; empty shards are left out."""
    table = CompletionTable
    is_first = table.sample_index == 0
    rank_of_state = case({state: rank for rank, state in enumerate(_WORST_LAST)}, value=table.state)
    rows = (
        select(
            table.row_index,
            func.max(rank_of_state).label("rank"),
            (func.count() >= func.max(table.num_samples)).label("is_done"),
            func.sum(case((is_first, table.num_prompt_tokens), else_=0)).label("num_prompt_tokens"),
            func.sum(table.num_output_tokens).label("num_output_tokens"),
        )
        .where(table.job_key == job_key, table.row_index.between(0, num_rows - 1))
        .group_by(table.row_index)
        .subquery()
    )
    shard = rows.c.row_index * num_shards // num_rows
    sums = [
        func.sum(case((rows.c.is_done & (rows.c.rank == rank), 1), else_=0)).label(
            _COUNTER_OF_STATE[state]
        )
        for rank, state in enumerate(_WORST_LAST)
    ]
    counted = connection.execute(
        select(
            shard.label("shard"),
            *sums,
            func.sum(rows.c.num_prompt_tokens).label("num_prompt_tokens"),
            func.sum(rows.c.num_output_tokens).label("num_output_tokens"),
        ).group_by(shard)
    ).mappings()
    return {row["shard"]: {name: int(row[name]) for name in COUNTERS} for row in counted}


def _difference(new: dict[str, int], old: dict[str, int]) -> dict[str, int]:
    return {name: new[name] - old[name] for name in COUNTERS}


def _find_existing(
    connection: Connection, job_key: int, rows: Sequence[CompletionRow]
) -> list[CompletionRow]:
    """Return every sample that the ledger has of these rows."""
    if len({row.key for row in rows}) != len(rows):
        raise LedgerError("one commit has the same (row, sample) twice; this is a bug, report it")
    values = {"job_key": job_key, "row_indices": list({row.row_index for row in rows})}
    return [to_completion_row(row) for row in connection.execute(_OF_ROWS, values).mappings()]


def _is_stored(connection: Connection, origin: Origin, rows: Sequence[CompletionRow]) -> bool:
    """Tell whether this very commit is there: it is all there, or not at all."""
    first = select(CompletionTable.row_index).where(
        CompletionTable.job_key == origin.job_key,
        CompletionTable.row_index == rows[0].row_index,
        CompletionTable.sample_index == rows[0].sample_index,
        CompletionTable.attempt == origin.attempt,
        CompletionTable.committed_at == origin.committed_at,
    )
    return connection.execute(first).first() is not None


def _insert(connection: Connection, origin: Origin, rows: Sequence[CompletionRow]) -> None:
    if not rows:
        return
    connection.execute(insert(CompletionTable), [_completion_values(origin, row) for row in rows])
    payloads = [_payload_values(origin.job_key, row) for row in rows if _has_payload(row)]
    if payloads:
        connection.execute(insert(PayloadTable), payloads)


def _completion_values(origin: Origin, row: CompletionRow) -> dict[str, object]:
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
        "committed_at": origin.committed_at,
        "num_samples": row.num_samples,
        "is_truncated": row.is_truncated,
        "request_hash": row.request_hash,
    }


def _has_payload(row: CompletionRow) -> bool:
    has_tokens = len(row.token_ids) > 0 or len(row.turns) > 0
    return row.text is not None or has_tokens or bool(row.logprobs)


def _payload_values(job_key: int, row: CompletionRow) -> dict[str, object]:
    return {
        "job_key": job_key,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "text": row.text,
        "token_ids": row.token_ids,
        "logprobs": row.logprobs,
        "turns": list(row.turns) or None,
    }
