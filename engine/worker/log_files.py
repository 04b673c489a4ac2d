"""The log files of workers: one for each, and in a folder no more than are of use.

A worker inherits its log as stdout and stderr, and with it a lock that lasts as long as any
process has the file open. So whether a log may be deleted is asked of the kernel, not of a pid.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from engine.errors import ConfigError

# A crash of eight ranks, and the restarts that look for its cause, are still there to be read.
MAX_LOGS = 50
_TAIL_BYTES = 4096
_TAIL_LINES = 12


def new_log_path(folder: Path, rank: int) -> Path:
    """Return the path of a new worker's log, in a folder that has room for it.

    The oldest logs beyond MAX_LOGS are deleted, but none of a worker that lives.

    Raises:
        ConfigError: the folder cannot be used.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"worker-{stamp}-{uuid4().hex[:8]}-rank{rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(
            f"no worker log can be written to {folder}: {error}; set engine.log_dir to another "
            "folder"
        ) from error
    for log in sorted(folder.glob("worker-*.log"), key=_age_seconds)[MAX_LOGS:]:
        if not _is_in_use(log):
            with suppress(OSError):  # it stays, then; the next start tries again
                log.unlink(missing_ok=True)
    return path


@contextmanager
def opened_for_worker(path: Path) -> Iterator[BinaryIO]:
    """Open a log for a worker to inherit, together with the lock that says that it is in use."""
    with path.open("ab") as log:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_SH)
        yield log


def tail(path: Path) -> str:
    """Return the path of a log and its last lines, as the end of a message."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"; its log cannot be read: {error}"
    return f"; its log {path} ends with:\n  " + "\n  ".join(lines or ["(empty)"])


def _age_seconds(log: Path) -> float:
    """Return a log's age; one that another process has just deleted is the oldest."""
    try:
        return time.time() - log.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _is_in_use(log: Path) -> bool:
    try:
        with log.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by a worker, or not to be told on this file system
        return True
    return False
