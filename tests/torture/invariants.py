"""What must be true of a job at every moment, read from its ledger without the product's code."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

Row = Mapping[str, Any]
Key = tuple[int, int]  # row_index, sample_index
_STATES = ("ok", "error", "skipped")
_TABLES = ("shards", "completions", "payloads", "partials", "suspects")


@dataclass(frozen=True)
class LedgerState:
    """All that the ledger holds of one job, as one transaction sees it."""

    job: Row | None
    shards: list[Row]
    completions: dict[Key, Row]
    payloads: dict[Key, Row]
    partials: list[Row]
    suspects: list[Row]

    @property
    def answers(self) -> dict[Key, tuple[Row, Row | None]]:
        """Every result with all that is stored of it, its time and its attempt included."""
        return {key: (row, self.payloads.get(key)) for key, row in self.completions.items()}


def read_state(url: str, job_id: str = "job-1") -> LedgerState:
    """Read everything about a job in one transaction; a ledger that is not there is empty."""
    with closing(_connect(url)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("BEGIN" if url.startswith("sqlite") else "SELECT 1")
        try:
            jobs = _select(cursor, f"SELECT * FROM jobs WHERE job_id = '{job_id}'")
        except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
            jobs = []
        if not jobs:
            return LedgerState(None, [], {}, {}, [], [])
        where = f"WHERE job_key = {jobs[0]['job_key']}"
        tables = {name: _select(cursor, f"SELECT * FROM {name} {where}") for name in _TABLES}
    return LedgerState(
        job=jobs[0],
        shards=sorted(tables["shards"], key=lambda shard: shard["shard_index"]),
        completions=_by_key(tables["completions"]),
        payloads=_by_key(tables["payloads"]),
        partials=tables["partials"],
        suspects=tables["suspects"],
    )


def check_state(state: LedgerState, num_rows: int) -> None:
    """Check that rows, counters, parts and payloads of a ledger agree with each other."""
    if state.job is None:
        assert not state.completions
        return
    by_row = _by_row(state)
    assert state.job["num_rows"] == num_rows
    assert set(by_row) <= set(range(num_rows))
    assert max(Counter(rows[0]["row_id"] for rows in by_row.values()).values(), default=1) == 1
    _check_counters(state.job, by_row, range(num_rows))
    first = 0
    for shard in state.shards:
        assert shard["first_row"] == first
        first += shard["num_rows"]
        _check_counters(shard, by_row, range(shard["first_row"], first))
    assert first == num_rows
    assert set(state.payloads) <= set(state.completions)
    for key, row in state.completions.items():
        assert row["state"] != "ok" or state.payloads[key]["text"] is not None
    unfinished = {(row["row_index"], row["sample_index"]) for row in state.partials}
    assert not unfinished & set(state.completions), "a result and a part of it"
    suspects = {row["row_index"] for row in state.suspects}
    assert not suspects & {index for index, rows in by_row.items() if _is_whole(rows)}
    if state.job["state"] == "finished":
        assert len(by_row) == num_rows
        assert not state.partials


def _check_counters(counted: Row, by_row: dict[int, list[Row]], indices: Iterable[int]) -> None:
    """Check N_in = ok + error + skipped + pending, each counted anew from the rows."""
    expected: Counter[str] = Counter()
    num_rows = num_pending = 0
    for index in indices:
        rows = by_row.get(index, [])
        num_rows += 1
        num_pending += not _is_whole(rows)
        if _is_whole(rows):
            states = {row["state"] for row in rows}
            worst = next(state for state in ("error", "skipped", "ok") if state in states)
            expected[f"num_{worst}"] += 1
        expected["num_output_tokens"] += sum(row["num_output_tokens"] for row in rows)
    for name in (*(f"num_{state}" for state in _STATES), "num_output_tokens"):
        assert counted[name] == expected[name], name
    done = sum(counted[f"num_{state}"] for state in _STATES)
    assert counted["num_rows"] == num_rows == done + num_pending


def _is_whole(samples: list[Row]) -> bool:
    return bool(samples) and len(samples) == samples[0]["num_samples"]


def _by_row(state: LedgerState) -> dict[int, list[Row]]:
    by_row: dict[int, list[Row]] = {}
    for (row_index, _), row in sorted(state.completions.items()):
        by_row.setdefault(row_index, []).append(row)
    return by_row


def _by_key(rows: list[Row]) -> dict[Key, Row]:
    by_key = {(row["row_index"], row["sample_index"]): row for row in rows}
    assert len(by_key) == len(rows), "one result is there twice"
    return by_key


def _connect(url: str) -> Any:
    if url.startswith("sqlite:///"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
    connection = psycopg.connect(url, row_factory=dict_row)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    return connection


def _select(cursor: Any, query: str) -> list[Row]:
    cursor.execute(query)
    rows = cursor.fetchall()
    if rows and not isinstance(rows[0], dict):
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in rows]
    return rows
