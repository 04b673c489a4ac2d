"""The database as a thing that takes space and may be damaged; nothing here knows a job."""

from pathlib import Path

from sqlalchemy import Connection, text

from flows.database import Database
from flows.schema import Base


def find_damages(database: Database, limit: int) -> list[str] | None:
    """Return what SQLite finds wrong with its file; None for PostgreSQL, which has no such look."""
    with database.read() as connection:
        if not _is_sqlite(connection):
            return None
        found = connection.exec_driver_sql(f"PRAGMA integrity_check({limit})").scalars()
        return [damage for damage in found if damage != "ok"]


def size_bytes(database: Database) -> int:
    """Return how much disk the ledger takes."""
    with database.read() as connection:
        if _is_sqlite(connection):
            path = Path(str(connection.engine.url.database))
            files = (path, path.with_name(f"{path.name}-wal"))
            return sum(file.stat().st_size for file in files if file.exists())
        sizes = (
            connection.execute(text("SELECT pg_total_relation_size(:name)"), {"name": name})
            for name in Base.metadata.tables
        )
        return sum(int(size.scalar_one()) for size in sizes)


def shrink(database: Database) -> None:
    """Give the space of deleted rows back: to the disk, or to rows that PostgreSQL writes later.

    Raises:
        LedgerError: somebody keeps the database busy, or the disk has no room for it.
    """
    with database.outside_transaction() as connection:
        if _is_sqlite(connection):
            connection.exec_driver_sql("VACUUM")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            connection.exec_driver_sql(f"VACUUM {', '.join(Base.metadata.tables)}")


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"
