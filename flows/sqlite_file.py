"""The file of an SQLite ledger: where it may lie, and how it is prepared for many processes."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL

from engine import LedgerError

# SQLite's locks and its shared memory do not hold across the hosts of these.
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "virtiofs", "vboxsf",
    }
)  # fmt: skip
# A container's own layer when it runs without root: local, whatever its name says.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})
_WAL_ATTEMPTS = 200


class SqliteFile:
    """The file that a ledger was opened in; it must stay where it is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = _identity(path)

    def refuse_if_moved(self) -> None:
        """Make sure that what is written goes where the next process looks for it.

        SQLite itself would go on: the log of what is written stays behind under the old name.

        Raises:
            LedgerError: the path names another file by now, or none.
        """
        if _identity(self._path) != self._identity:
            raise LedgerError(
                f"ledger {self._path}: the file was moved, deleted or replaced while this process "
                f"used it; put it back, with {_log_of(self._path).name} beside it, then resume the "
                "job"
            )


def prepare_sqlite_file(url: URL, *, must_exist: bool = False) -> SqliteFile:
    """Create the folder, refuse network file systems, and switch the file to WAL.

    With must_exist, nothing is created: whoever only looks on must not leave an empty ledger.

    Raises:
        LedgerError: says why there can be no ledger at that place.
    """
    path = sqlite_path(url)
    if must_exist and not path.exists():
        raise LedgerError(
            f"there is no ledger {path}; go to the folder where the job was started, or name the "
            "ledger with --ledger or TOKENMILL_LEDGER_URL"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"ledger {path}: cannot create its folder: {error.strerror}; change ledger_url"
        ) from error
    refuse_network_file_system(path, Path("/proc/mounts"))
    _refuse_lost_log(path)
    try:
        _switch_to_wal(path)
    except sqlite3.Error as error:
        raise LedgerError(f"ledger {path}: {error}; change ledger_url, or mend the file") from error
    return SqliteFile(path)


def connect_to_file(path: Path, *, timeout_seconds: float) -> sqlite3.Connection:
    """Connect to a file that is there; a new one in its place would throw away the old one's log.

    Raises:
        sqlite3.OperationalError: there is none.
    """
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=timeout_seconds, check_same_thread=False)


def sqlite_path(url: URL) -> Path:
    """Return the file of an SQLite ledger.

    Raises:
        LedgerError: the URL names none.
    """
    if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
        raise LedgerError(
            f"ledger_url {url.render_as_string()}: a ledger must be a file; "
            "write sqlite:///FILE, with four slashes when FILE is an absolute path"
        )
    return Path(str(url.database))


def refuse_network_file_system(path: Path, mounts: Path) -> None:
    """Look up the file system of `path` in a table of mounts in the form of /proc/mounts.

    Raises:
        LedgerError: it is one where SQLite loses rows when two hosts write.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return  # not Linux: nothing is known, nothing is refused
    folder = path.parent.resolve()
    kind, depth = "", -1
    for line in lines:
        _, mount_point, file_system, *_ = line.split(" ")
        point = Path(mount_point.replace("\\040", " ").replace("\\011", "\t"))
        # A later line of the same depth is mounted over the earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = file_system, len(point.parts)
    is_remote_fuse = kind.startswith("fuse.") and kind not in _LOCAL_FUSE
    if kind in _NETWORK_FILE_SYSTEMS or is_remote_fuse:
        raise LedgerError(
            f"ledger {path} lies on a network file system ({kind}), where SQLite can lose rows; "
            "put it on a local disk, or use PostgreSQL: ledger_url: postgresql://USER@HOST/DATABASE"
        )


def _refuse_lost_log(path: Path) -> None:
    """Refuse to begin a ledger beside the log of one that was moved away: SQLite would delete it."""
    log = _log_of(path)
    # In this order: another process may begin the ledger meanwhile, and its file comes first.
    if _size(log) > 0 and _size(path) == 0:
        raise LedgerError(
            f"ledger {path} is not there, but its log {log.name} is, which holds its last commits; "
            f"put the ledger back beside it, or delete {log.name} if nobody needs that ledger"
        )


def _log_of(path: Path) -> Path:
    file = path.resolve()  # SQLite follows a link, and keeps the log beside the file itself
    return file.with_name(f"{file.name}-wal")


def _size(path: Path) -> int:
    status = _status(path)
    return 0 if status is None else status.st_size


def _identity(path: Path) -> tuple[int, int] | None:
    status = _status(path)
    return None if status is None else (status.st_dev, status.st_ino)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _switch_to_wal(path: Path) -> None:
    """Let readers and one writer work at a time; the mode stays with the file.

    The switch needs the file for itself and does not wait for it, so that processes that open a
    new ledger together must try again.
    """
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        for attempt in range(_WAL_ATTEMPTS):
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                is_last = attempt == _WAL_ATTEMPTS - 1
                if is_last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                time.sleep(0.02)
            else:
                return
