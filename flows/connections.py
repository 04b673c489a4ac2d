"""How the ledger's databases are spoken to: time-outs, transactions, JSON.

Whoever hangs, freezes or loses the network must not hold up the others for ever.
"""

import json
import math
import sqlite3
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event

from flows.sqlite_file import connect_to_file, sqlite_path

_BUSY_TIMEOUT_SECONDS = 30
_LOCK_MILLISECONDS = 30_000
_IDLE_MILLISECONDS = 300_000
# A server whose host, or the way to it, is gone is noticed in seconds and not in two hours.
_POSTGRES_TERMS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def connect(url: URL) -> Engine:
    """Return an engine, which connects when it is first used.

    Raises:
        LedgerError: an SQLite URL without a file.
    """
    json_serializer: Any = _to_json
    if url.get_backend_name() == "sqlite":
        path = sqlite_path(url)
        engine = create_engine(
            url,
            json_serializer=json_serializer,
            max_overflow=-1,
            creator=lambda: connect_to_file(path, timeout_seconds=_BUSY_TIMEOUT_SECONDS),
        )
        event.listen(engine, "connect", _set_up_sqlite_connection)
        event.listen(engine, "begin", _begin_sqlite_transaction)
        return engine
    arguments = {name: value for name, value in _POSTGRES_TERMS.items() if name not in url.query}
    engine = create_engine(
        url,
        json_serializer=json_serializer,
        max_overflow=-1,
        pool_pre_ping=True,
        connect_args={"application_name": "tokenmill", **arguments},
    )
    event.listen(engine, "connect", _set_up_postgres_session)
    return engine


def _set_up_sqlite_connection(connection: sqlite3.Connection, record: object) -> None:
    # The driver's own idea of when a transaction begins leaves DDL and reads outside of it.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # NORMAL would keep commits through a kill of the process, FULL keeps them through a power cut
    # too. It costs one fsync a commit, and a commit holds many rows.
    connection.execute("PRAGMA synchronous = FULL")


def _set_up_postgres_session(connection: psycopg.Connection[Any], record: object) -> None:
    # Whoever freezes in a transaction, or loses the network, keeps his locks: without these, who
    # wants to take his shard over would wait as long as he does.
    connection.execute(f"SET lock_timeout = {_LOCK_MILLISECONDS}")
    connection.execute(f"SET idle_in_transaction_session_timeout = {_IDLE_MILLISECONDS}")
    connection.commit()


def _begin_sqlite_transaction(connection: Connection) -> None:
    # A transaction that reads first and writes later fails, without waiting, when another process
    # wrote in between; one that says at once that it will write waits for its turn.
    options = connection.get_execution_options()
    if not options.get("tokenmill_begin", True):
        return
    is_write = options.get("tokenmill_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not know, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
