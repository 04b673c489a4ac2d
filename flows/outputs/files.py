"""Files that appear all together when they are complete, or not at all.

Each is written under a temporary name, hashed on the way, and brought to the disk before the first
of them gets its name. They get their names in the order in which they were opened, so that the last
can vouch for the others: killed in between, its hashes do not match them.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Self

from engine import ConfigError

_CHUNK_BYTES = 1 << 18


class OutputFile:
    """One file under its temporary name; use OutputFiles.open. Also a sink for pyarrow."""

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        # The process id keeps two exports to one path apart; the last one to finish wins.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._digest = sha256()
        self._chunk: list[bytes] = []
        self._num_waiting = 0
        with _said_of(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_what_dead_exports_left(path)
            self._handle: BinaryIO = self._temporary.open("wb", buffering=0)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def sha256(self) -> str:
        """Return the hash of all that was written."""
        self.flush()
        return self._digest.hexdigest()

    def write(self, data: bytes) -> int:
        """Append; the file is written in larger pieces.

        Raises:
            ConfigError: the disk does not take it.
        """
        if self._handle.closed:
            return len(data)  # pyarrow ends a file that an error has discarded
        self._chunk.append(bytes(data))
        self._num_waiting += len(data)
        self.num_bytes += len(data)
        if self._num_waiting >= _CHUNK_BYTES:
            self.flush()
        return len(data)

    def tell(self) -> int:
        """Return the position, as pyarrow asks for it."""
        return self.num_bytes

    def flush(self) -> None:
        """Hand what waits to the operating system."""
        piece = memoryview(b"".join(self._chunk))
        self._chunk.clear()
        self._num_waiting = 0
        self._digest.update(piece)
        with _said_of(self.path):
            while piece:
                piece = piece[self._handle.write(piece) :]

    def sync(self) -> None:
        """Bring everything to the disk."""
        self.flush()
        with _said_of(self.path):
            os.fsync(self._handle.fileno())

    def publish(self) -> None:
        """Give the file its name."""
        with _said_of(self.path):
            self._temporary.replace(self.path)
        self._handle.close()

    def discard(self) -> None:
        """Remove the file, unless it has its name."""
        if not self._handle.closed:
            self._temporary.unlink(missing_ok=True)
            self._handle.close()


class OutputFiles:
    """The files of one export; leaving the block without publish removes what was written."""

    def __init__(self) -> None:
        self._files: list[OutputFile] = []
        self._stale: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files:
            file.discard()

    def open(self, path: Path) -> OutputFile:
        """Begin a file.

        Raises:
            ConfigError: it cannot be written.
        """
        file = OutputFile(path)
        self._files.append(file)
        return file

    def leave_out(self, file: OutputFile) -> None:
        """Publish without this file; one of that name which is there is removed."""
        self._files.remove(file)
        self._stale.append(file.path)
        file.discard()

    def publish(self) -> None:
        """Give all files their names.

        Raises:
            ConfigError: the disk is full, or a folder may not be written.
        """
        *first, last = self._files
        for file in self._files:
            file.sync()
        for path in self._stale:
            with _said_of(path):
                path.unlink(missing_ok=True)
        for file in first:
            file.publish()
        # The last vouches for the others, so their names must be on the disk before its own.
        for folder in sorted({path.parent for path in [*self._stale, *(f.path for f in first)]}):
            _sync_folder(folder)
        last.publish()
        _sync_folder(last.path.parent)


def _remove_what_dead_exports_left(path: Path) -> None:
    """Remove temporary files of exports to this path that were killed; a living one locks its own."""
    start, end = f".{path.name}.", ".tmp"
    for entry in os.scandir(path.parent):
        pid = entry.name.removeprefix(start).removesuffix(end)
        if entry.name != f"{start}{pid}{end}" or not pid.isdigit():
            continue
        with suppress(OSError), open(entry.path, "rb") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: the output cannot be written: {error}") from error


def _sync_folder(folder: Path) -> None:
    # A rename is durable only when the folder that holds the name is.
    with _said_of(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
