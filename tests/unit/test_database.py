"""URLs, migrations and busy databases, below the ledger."""

import re
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, inspect, text
from sqlalchemy.schema import CreateTable

from engine import LedgerError
from flows.database import Database
from flows.ledger import Ledger, Owner
from flows.migrations import HEAD, REVISIONS, VERSION_TABLE
from flows.schema import Base, JobState


def plain_engine(ledger_url: str) -> Engine:
    """Connect without what Database does: no migration, no refusal."""
    return create_engine(ledger_url.replace("postgresql:", "postgresql+psycopg:"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "is not a database URL"),
        ("mysql://host/db", "mysql is not supported"),
        ("oracle+oracledb://host/db", "oracle\\+oracledb is not supported"),
    ],
)
def test_a_url_that_cannot_be_used_is_answered_with_one_that_can(url: str, message: str) -> None:
    with pytest.raises(LedgerError, match=f"{message}.*sqlite:///FILE or postgresql://"):
        Ledger.open(url)


def test_a_database_that_does_not_answer_is_reported_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as refused:
        Ledger.open(f"postgresql://user:secret@/runs?host={tmp_path}")
    assert "secret" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_the_list_of_revisions_is_that_of_the_migration_files() -> None:
    config = Config()
    config.set_main_option("script_location", "flows:migrations")
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_current_head() == HEAD
    walked = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(walked)) == REVISIONS


def test_migrations_create_exactly_the_tables_of_the_schema(ledger_url: str) -> None:
    Ledger.open(ledger_url).close()
    database = Database.open(ledger_url)
    options = {"compare_type": True, "version_table": VERSION_TABLE}
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_sqlite_tables_are_created_as_the_schema_says(tmp_path: Path) -> None:
    # What Alembic's comparison does not look at: WITHOUT ROWID, ON DELETE, the keys' columns.
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    database = Database.open(url)
    with database.read() as connection:
        for table in Base.metadata.sorted_tables:
            found = connection.execute(
                text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": table.name}
            ).scalar_one()
            wanted = str(CreateTable(table).compile(dialect=connection.dialect))
            assert _clauses(found) == _clauses(wanted)
    database.close()


def _clauses(create_table: str) -> list[str]:
    """Return the columns, constraints and options; the defaults of later columns do not count."""
    head, _, rest = " ".join(create_table.split()).partition("(")
    body, _, options = rest.rpartition(")")
    clauses = re.split(r",(?![^(]*\))", body)
    plain = (re.sub(r" DEFAULT \S+", "", clause).replace(" ", "") for clause in clauses)
    return [head.strip(), options.strip(), *sorted(plain)]


def test_a_ledger_of_the_first_schema_is_upgraded_with_its_rows(ledger_url: str) -> None:
    engine = plain_engine(ledger_url)
    if engine.url.database is not None and engine.dialect.name == "sqlite":
        Path(engine.url.database).parent.mkdir()
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", "flows:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in _OLD_ROWS:
            connection.execute(text(statement))
    engine.dispose()
    with Ledger.open(ledger_url) as ledger:
        job = ledger.get_job("old")
        (row,) = ledger.iter_completions(job.job_key)
        assert (row.text, row.num_samples, row.is_truncated) == ("kept", 1, False)
        assert (job.num_ok, job.lease_owner, job.forked_from) == (1, None, None)
        lease = ledger.acquire_job(job.job_key, owner=Owner.current(), lease_seconds=60)
        ledger.release_job(lease, JobState.FINISHED)


_OLD_ROWS = (
    "INSERT INTO jobs (job_key, job_id, engine_name, config, seed, fingerprint, manifest_hash, "
    "state, num_shards, num_rows, num_ok, num_error, num_skipped, num_prompt_tokens, "
    "num_output_tokens, created_at, updated_at) VALUES (1, 'old', 'default', '{}', 1, '{}', 'm', "
    "'running', 1, 1, 1, 0, 0, 1, 1, 0, 0)",
    "INSERT INTO completions (job_key, row_index, sample_index, row_id, state, num_prompt_tokens, "
    "num_cached_tokens, num_output_tokens, attempt, committed_at) "
    "VALUES (1, 0, 0, 'r', 'ok', 1, 0, 1, 1, 0)",
    "INSERT INTO payloads (job_key, row_index, sample_index, text) VALUES (1, 0, 0, 'kept')",
)


def test_a_ledger_of_a_newer_tokenmill_is_refused_and_left_alone(ledger_url: str) -> None:
    Ledger.open(ledger_url).close()
    _set_revision(ledger_url, "0999")
    with pytest.raises(LedgerError, match=f"revision 0999, this tokenmill knows up to {HEAD}"):
        Ledger.open(ledger_url)
    _set_revision(ledger_url, HEAD)
    Ledger.open(ledger_url).close()


def _set_revision(ledger_url: str, revision: str) -> None:
    engine = plain_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
    engine.dispose()


def test_tables_of_somebody_else_are_reported_and_left_alone(ledger_url: str) -> None:
    engine = plain_engine(ledger_url)
    if engine.url.database is not None and engine.dialect.name == "sqlite":
        Path(engine.url.database).parent.mkdir()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE payloads (mine TEXT)"))
        connection.execute(text("INSERT INTO payloads VALUES ('kept')"))
    with pytest.raises(LedgerError, match="payloads.* already exists"):
        Ledger.open(ledger_url)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT mine FROM payloads")).scalar() == "kept"
        # Nothing of the migration stays, so the next try begins anew.
        assert inspect(connection).get_table_names() == ["payloads"]
    engine.dispose()


def test_what_fails_leaves_nothing_behind(ledger_url: str) -> None:
    database = Database.open(ledger_url)

    def work(connection: Connection) -> None:
        connection.execute(text("INSERT INTO tokenmill_version VALUES ('half')"))
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        database.write(work)
    with database.read() as connection:
        versions = list(connection.scalars(text("SELECT version_num FROM tokenmill_version")))
    assert versions == [HEAD]
    database.close()


def test_a_writer_waits_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = Database.open(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.5, other.execute, ["ROLLBACK"])
    release.start()
    began = time.monotonic()
    database.write(lambda connection: connection.execute(text("DELETE FROM suspects")))
    assert time.monotonic() - began > 0.4
    release.join()
    other.close()
    database.close()


def test_nobody_writes_between_what_a_writer_reads_and_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = Database.open(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None, timeout=0)

    def work(connection: Connection) -> None:
        connection.execute(text("SELECT * FROM jobs"))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("DELETE FROM suspects")
        connection.execute(text("DELETE FROM suspects"))

    database.write(work)
    other.close()
    database.close()


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert ledger.list_jobs() == []
    other.close()
    ledger.close()


def test_sqlite_keeps_what_it_acknowledged_through_a_power_cut(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    with database.read() as connection:
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {
        "journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000,
    }  # fmt: skip
    database.close()
