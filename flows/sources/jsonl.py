"""Lines of JSON, one row each; OpenAI's batch files are such lines too."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import BinaryIO

from engine import RequestError, RequestErrorCode
from flows.sources.byte_streams import open_lines, unreadable
from flows.sources.source_file import SourceRow

MAX_LINE_BYTES = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20


class JsonlFile:
    """One file of lines. A line ends at LF alone: U+2028 and the like are part of a text."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle: BinaryIO | None = None

    def rows(self) -> Iterator[SourceRow]:
        """Yield each line that is not blank; it is parsed by whoever needs its columns."""
        number, offset = 0, 0
        with open_lines(self._path) as handle:
            readline = handle.readline
            try:
                while raw := readline(MAX_LINE_BYTES + 1):
                    number += 1
                    line = raw if offset else raw.removeprefix(_BYTE_ORDER_MARK)
                    if len(raw) > MAX_LINE_BYTES:
                        rest, digest = _skip_line(handle, raw)
                        yield SourceRow(offset, number, digest, fault=line_too_long())
                        offset += rest
                    elif line.strip():
                        yield SourceRow(offset, number, line.rstrip(b"\r\n") + b"\n")
                    offset += len(raw)
            except OSError as error:
                raise unreadable(self._path, number, error) from error

    def num_rows(self) -> int:
        """Read the file and return how many of its lines are not blank."""
        return sum(1 for _ in self.rows())

    def row_at(self, offset: int, line: int) -> SourceRow | None:
        """Return the row at a byte offset of the unpacked text."""
        if self._handle is None:
            self._handle = open_lines(self._path)
        try:
            self._handle.seek(offset)
            raw = self._handle.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise unreadable(self._path, line - 1, error) from error
        if len(raw) > MAX_LINE_BYTES:
            return SourceRow(offset, line, b"", fault=line_too_long())
        content = raw if offset else raw.removeprefix(_BYTE_ORDER_MARK)
        return SourceRow(offset, line, content.rstrip(b"\r\n") + b"\n") if content.strip() else None

    def close(self) -> None:
        """Close what row_at has opened."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


def line_too_long() -> RequestError:
    """Return the error of a line that is not read to its end."""
    return RequestError(
        RequestErrorCode.BAD_ROW,
        f"the line is longer than {MAX_LINE_BYTES >> 20} MiB; cut the row down, or look for a "
        "line end that is missing",
    )


def _skip_line(handle: BinaryIO, start: bytes) -> tuple[int, bytes]:
    """Read on to the end of the line; return how much that was, and a hash of the whole line."""
    digest = blake2b(start)
    count = 0
    while not start.endswith(b"\n"):
        start = handle.readline(_CHUNK_BYTES)
        if not start:
            break
        digest.update(start)
        count += len(start)
    return count, digest.digest()
