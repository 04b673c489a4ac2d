"""Fixtures that more than one test file uses: ledgers on SQLite and on an embedded PostgreSQL."""

import os
import secrets

# Ray reads them once, when it is imported: a test's cluster is for its own tests alone.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# As in a worker, and before anything imports torch: threads that wait do not spin for long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from postgres_server import running_postgres

from flows.ledger import Ledger


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Give the URL of a PostgreSQL server that all tests of this session share."""
    with running_postgres() as server:
        yield server.url


@pytest.fixture
def postgres_database_url(postgres_url: str) -> Iterator[str]:
    """Give the test an empty place of its own: a schema, which is there faster than a database."""
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{postgres_url}&options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of a ledger that does not exist yet, once on each database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'runs' / 'ledger.sqlite'}"
    url: str = request.getfixturevalue("postgres_database_url")
    return url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """Open a new ledger, once on each database."""
    with Ledger.open(ledger_url) as opened:
        yield opened


@pytest.fixture
def log_settings_as_before() -> Iterator[None]:
    """Take back what a command does to the logging of its process."""
    packages = [logging.getLogger(name) for name in ("engine", "flows")]
    before = [(list(each.handlers), each.level, each.propagate) for each in packages]
    yield
    for package, (handlers, level, propagate) in zip(packages, before, strict=True):
        package.handlers[:] = handlers
        package.setLevel(level)
        package.propagate = propagate
