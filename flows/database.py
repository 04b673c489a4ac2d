"""The door to the ledger's database: URL, connections, migrations, transactions.

SQLite and PostgreSQL differ here and nowhere above. One process writes through one lock, so that
its threads wait in Python and not in the database.
"""

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psycopg
from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Engine,
    cast,
    extract,
    func,
    inspect,
    literal,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError

from engine import LedgerError
from flows.connections import connect
from flows.ledger_url import parse_ledger_url, shown_url
from flows.migrations import HEAD, REVISIONS, VERSION_TABLE
from flows.outages import LedgerUnreachableError as LedgerUnreachableError
from flows.outages import Patience
from flows.sqlite_file import SqliteFile, prepare_sqlite_file

Result = TypeVar("Result")

_WRITE_LOCK = threading.Lock()
_RETRY_PAUSES_SECONDS = (0.05, 0.2, 0.8, 3.0)
# Any number will do, as long as every tokenmill takes the same one.
_MIGRATION_LOCK = 0x746F6B656E
_SQLITE_TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_POSTGRES_GONE = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
    psycopg.errors.CannotConnectNow,
    psycopg.errors.ConnectionException,
)
_POSTGRES_TRANSIENT = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)


class Database:
    """Connections to one database whose schema is the newest that this tokenmill knows."""

    def __init__(
        self,
        engine: Engine,
        *,
        stop: threading.Event | None = None,
        file: SqliteFile | None = None,
    ) -> None:
        self._engine = engine
        self._file = file
        self._patience = Patience(stop)
        self._writer = engine.execution_options(tokenmill_write=True)
        self._is_sqlite = engine.dialect.name == "sqlite"
        # SQLite's transactions see one state of the database anyway.
        one_state = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.execution_options(**one_state)

    @classmethod
    def open(
        cls, url: str, *, must_exist: bool = False, stop: threading.Event | None = None
    ) -> "Database":
        """Connect, and create or upgrade the tables; with must_exist, never create a file.

        Once `stop` is set, nobody waits for long for a server that went away.

        Raises:
            LedgerError: not a usable URL, cannot be reached, on a network file system, or written
                by a newer tokenmill.
        """
        parsed = parse_ledger_url(url)
        file: SqliteFile | None = None
        if parsed.get_backend_name() == "sqlite":
            file = prepare_sqlite_file(parsed, must_exist=must_exist)
        database = cls(connect(parsed), stop=stop, file=file)
        try:
            database._migrate()
        except BaseException:
            database.close()
            raise
        return database

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def read(self, *, fetch_rows: int | None = None) -> Iterator[Connection]:
        """Yield a connection inside a transaction that sees one state of the database.

        fetch_rows bounds the rows of a result that are held in memory at a time.
        """
        try:
            with self._reader.begin() as connection:
                if fetch_rows is not None:
                    connection.execution_options(yield_per=fetch_rows)
                yield connection
        except DBAPIError as error:
            raise self._translated(error) from error

    @contextmanager
    def outside_transaction(self) -> Iterator[Connection]:
        """Yield a connection for statements that no transaction may hold, such as VACUUM."""
        options = (
            {"tokenmill_begin": False} if self._is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        )
        try:
            with self._engine.connect() as connection:
                yield connection.execution_options(**options)
        except DBAPIError as error:
            raise self._translated(error) from error

    def query(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work`, which only reads, in one transaction; waits for a server that went away."""

        def read_once() -> Result:
            with self.read() as connection:
                return work(connection)

        return self._through_outages(read_once)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in one transaction; it is run again when the database was busy or away.

        Whatever `work` raises undoes everything that it did. When the server goes away in the
        middle of a commit, nobody knows whether it was kept, so `work` must see it if it was.
        """
        with _WRITE_LOCK:
            return self._through_outages(lambda: self._write_patiently(work))

    def wait_until_back(self, error: LedgerUnreachableError) -> None:
        """Wait for the server, saying so.

        Raises:
            LedgerUnreachableError: `error`, when it stays away for too long.
        """
        self._patience.wait(error, self._is_reachable)

    def _is_reachable(self) -> bool:
        try:
            with self.read() as connection:
                connection.execute(text("SELECT 1"))
        except LedgerUnreachableError:
            return False
        return True

    def _through_outages(self, attempt: Callable[[], Result]) -> Result:
        while True:
            self._patience.refuse_if_given_up()
            try:
                return attempt()
            except LedgerUnreachableError as error:
                self.wait_until_back(error)

    def _write_patiently(self, work: Callable[[Connection], Result]) -> Result:
        try:
            for pause in _RETRY_PAUSES_SECONDS:
                try:
                    return self._write_once(work)
                except DBAPIError as error:
                    if not _is_transient(error):
                        raise
                time.sleep(pause * random.uniform(0.5, 1.5))
            return self._write_once(work)
        except DBAPIError as error:
            raise self._translated(error) from error

    def now(self) -> ColumnElement[float]:
        """Return the expression for the time that every host agrees on.

        PostgreSQL is asked, because clocks of hosts differ; SQLite lives on one host.
        """
        if self._is_sqlite:
            return literal(time.time(), Double())
        return cast(extract("epoch", func.clock_timestamp()), Double())

    def read_clock(self) -> float:
        """Return the time that every host agrees on, in epoch seconds."""
        query = select(self.now())
        return float(self.query(lambda connection: connection.execute(query).scalar_one()))

    def _write_once(self, work: Callable[[Connection], Result]) -> Result:
        with self._writer.begin() as connection:
            if self._file is not None:
                self._file.refuse_if_moved()
            return work(connection)

    def _migrate(self) -> None:
        with self.read() as connection:
            revision = schema_revision(connection)
        if revision == HEAD:
            return
        if revision is not None and revision not in REVISIONS:
            raise LedgerError(
                f"ledger {self._name}: its schema is revision {revision}, this tokenmill knows up "
                f"to {HEAD}; a newer tokenmill wrote it: upgrade, or use another ledger_url"
            )
        self.write(self._upgrade)

    def _upgrade(self, connection: Connection) -> None:
        # Alembic takes a moment to import, and a ledger that is up to date does not need it.
        from alembic import command
        from alembic.config import Config

        # Alembic does nothing when another process was faster, as long as it looks only now.
        if not self._is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        config = Config()
        config.set_main_option("script_location", "flows:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    @property
    def _name(self) -> str:
        return shown_url(self._engine.url)

    def _translated(self, error: DBAPIError) -> LedgerError:
        reason = " ".join(str(error.orig).split())
        if _is_server_gone(error):
            return LedgerUnreachableError(
                f"ledger {self._name} cannot be reached: {reason}; see that the server runs, then "
                "resume the job"
            )
        return LedgerError(f"ledger {self._name}: {reason}; {_advice_on(error)}")


@contextmanager
def looking_at(url: str) -> Iterator[Connection]:
    """Yield a connection to a ledger as it is: nothing is made, upgraded or long waited for.

    Raises:
        LedgerError: not a usable URL, or cannot be reached.
    """
    parsed = parse_ledger_url(url)
    if parsed.get_backend_name() != "sqlite":
        parsed = parsed.update_query_dict({"connect_timeout": "5"})
    database = Database(connect(parsed))
    try:
        with database.read() as connection:
            yield connection
    finally:
        database.close()


def schema_revision(connection: Connection) -> str | None:
    """Return the revision of the ledger's tables, None where there are none."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def _is_transient(error: DBAPIError) -> bool:
    original = error.orig
    if isinstance(original, sqlite3.OperationalError):
        return (original.sqlite_errorcode & 0xFF) in _SQLITE_TRANSIENT
    return isinstance(original, _POSTGRES_TRANSIENT)


def _advice_on(error: DBAPIError) -> str:
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            "the file itself is damaged; put a copy of it back that is whole, or save what can be "
            "read with `sqlite3 FILE .recover`, then resume the job"
        )
    if _is_transient(error):
        return "another process has held it for long; see that none hangs, then resume the job"
    return "nothing of this transaction was kept; mend the cause, then resume the job"


def is_undecodable(error: DBAPIError) -> bool:
    """Tell whether SQLite's driver could not make a text of stored bytes; the query goes on.

    An error of SQLite itself has a code.
    """
    is_sqlite = isinstance(error.orig, sqlite3.Error)
    return is_sqlite and not hasattr(error.orig, "sqlite_errorcode")


def _is_server_gone(error: DBAPIError) -> bool:
    original = error.orig
    if isinstance(original, _POSTGRES_GONE) or error.connection_invalidated:
        return True
    # What libpq finds out by itself, such as a refused connection, has no SQLSTATE.
    return isinstance(original, psycopg.OperationalError) and original.sqlstate is None
