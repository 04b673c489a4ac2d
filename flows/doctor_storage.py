"""Checks of the ledger, of the folders that a job writes to, and of the clock."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from sqlalchemy import Connection, text

from engine import Finding
from flows.config import JobConfig
from flows.database import looking_at, schema_revision
from flows.device_locks import DEFAULT_LOCK_DIR
from flows.ledger_url import parse_ledger_url, without_password
from flows.migrations import HEAD, REVISIONS
from flows.sqlite_file import refuse_network_file_system, sqlite_path

_GIB = 1 << 30
_LITTLE_SPACE_BYTES = 5 * _GIB
_NO_SPACE_BYTES = _GIB // 4
_CLOCK_TOLERANCE_SECONDS = 60.0
_MOUNTS = Path("/proc/mounts")


def check_ledger(url: str, mounts: Path = _MOUNTS) -> Finding:
    """Look at the ledger as it is; one that a run would make is not made here.

    Raises:
        LedgerError: it cannot be used; the message says why, and what to change.
    """
    shown = without_password(url)
    path = _sqlite_path(url)
    if path is not None:
        refuse_network_file_system(path, mounts)
        if not path.exists():
            return _absent_ledger(path)
        if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
            return Finding.error(
                "ledger", f"{path} or its folder may not be written", "change the rights of both"
            )
        shown = str(path.absolute())
    with looking_at(url) as connection:
        revision = schema_revision(connection)
        is_read_only = path is None and _is_read_only(connection)
    if is_read_only:
        return Finding.error(
            "ledger",
            f"{shown} takes no writes",
            "name the primary server, and a user that may write",
        )
    return _judge_revision(shown, revision)


def _judge_revision(shown: str, revision: str | None) -> Finding:
    if revision == HEAD:
        return Finding.ok("ledger", f"{shown}, schema {revision}")
    if revision is None:
        return Finding.ok("ledger", f"{shown}, without tables: the first run makes them")
    if revision in REVISIONS:
        return Finding.warning(
            "ledger",
            f"{shown} has schema {revision}, this tokenmill uses {HEAD}",
            "the next command that opens it upgrades it; end the runs of older versions before",
        )
    return Finding.error(
        "ledger",
        f"{shown} has schema {revision}, this tokenmill knows up to {HEAD}",
        "upgrade tokenmill, or use another ledger_url",
    )


def _absent_ledger(path: Path) -> Finding:
    folder = _nearest_existing(path.parent)
    if not os.access(folder, os.W_OK):
        return Finding.error(
            "ledger",
            f"there is none in {path.absolute()}, and {folder.absolute()} may not be written",
            "go to a folder of your own, or name a ledger with --ledger or TOKENMILL_LEDGER_URL",
        )
    return Finding.ok("ledger", f"none yet; the first run makes {path.absolute()}")


def _is_read_only(connection: Connection) -> bool:
    return connection.execute(text("SHOW transaction_read_only")).scalar() == "on"


def check_folders(config: JobConfig | None) -> list[Finding]:
    """Check space and write access of what a run writes to; of runs/ when no job is named."""
    folders: dict[str, Path | None] = {"folder runs": Path("runs")}
    if config is not None:
        folders = {
            "folder job_dir": config.job_dir or Path("runs"),
            "folder log_dir": config.engine.log_dir,
            "folder cache_dir": config.engine.cache_dir,
            "folder output": None if config.output.path is None else config.output.path.parent,
        }
    lock_dir = None if config is None else config.device_lock_dir
    folders["folder device locks"] = lock_dir or DEFAULT_LOCK_DIR
    return [_check_folder(name, path) for name, path in folders.items() if path is not None]


def _check_folder(name: str, path: Path) -> Finding:
    """Write a file into the folder, or into the nearest one above that is there."""
    folder = _nearest_existing(path)
    note = "" if folder == path else f", to be made in {folder.absolute()}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tokenmill")
            file.flush()
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding.error(
            name,
            f"{path.absolute()}{note}: cannot be written: {error.strerror}",
            "change its rights or free space there, or name another folder in the job file",
        )
    found = f"{path.absolute()}{note}: {free_bytes / _GIB:.1f} GiB free"
    remedy = "free space there, or name another folder in the job file"
    if free_bytes < _NO_SPACE_BYTES:
        return Finding.error(name, found, remedy)
    if free_bytes < _LITTLE_SPACE_BYTES:
        return Finding.warning(name, found, remedy)
    return Finding.ok(name, found)


def check_clock(ledger_url: str) -> Finding:
    """See that the clock is not behind files that were written before."""
    now = time.time()
    path = _sqlite_path(ledger_url)
    known = [Path(__file__)]
    if path is not None:
        known += [path, path.with_name(f"{path.name}-wal")]
    written = {file.stat().st_mtime: file for file in known if file.exists()}
    newest = max(written)
    if now + _CLOCK_TOLERANCE_SECONDS < newest:
        return Finding.error(
            "clock",
            f"it is {_when(now)}, but {written[newest]} was written on {_when(newest)}",
            "set the clock of this machine: leases and times of jobs depend on it",
        )
    return Finding.ok("clock", _when(now))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite ledger; None when it is on a server."""
    parsed = parse_ledger_url(url)
    return sqlite_path(parsed) if parsed.get_backend_name() == "sqlite" else None


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
