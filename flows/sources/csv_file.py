"""CSV with a header: each record is a row whose values are strings."""

import csv
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from engine import ConfigError, RequestError, RequestErrorCode
from flows.rows import shown
from flows.sources.byte_streams import CODECS, open_lines, unreadable
from flows.sources.jsonl import MAX_LINE_BYTES
from flows.sources.source_file import SourceRow

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The module's own limit on a cell is 128 KiB, less than a long prompt; it is one for the process.
csv.field_size_limit(MAX_LINE_BYTES)


class CsvFile:
    """One file of records; a quoted cell may hold line ends. Tabs part the cells of a .tsv file."""

    def __init__(self, path: str) -> None:
        self._path = path
        packed = PurePosixPath(path)
        plain = packed.stem if packed.suffix.lower() in CODECS else packed.name
        self._delimiter = "\t" if plain.lower().endswith(".tsv") else ","
        self._handle: BinaryIO | None = None
        self._header: tuple[list[str], bytes] = ([], b"")

    def rows(self) -> Iterator[SourceRow]:
        """Yield each record; empty lines between them are none."""
        with open_lines(self._path) as handle:
            lines = _Lines(self._path, handle)
            reader = self._reader(lines)
            header = self._read_header(reader, lines)
            while (row := self._next_row(reader, lines, header)) is not None:
                yield row

    def num_rows(self) -> int:
        """Read the file and return how many records it has."""
        return sum(1 for _ in self.rows())

    def row_at(self, offset: int, line: int) -> SourceRow | None:
        """Return the record that begins at a byte offset of the unpacked text."""
        if self._handle is None:
            self._handle = open_lines(self._path)
            lines = _Lines(self._path, self._handle)
            self._header = self._read_header(self._reader(lines), lines)
        self._handle.seek(offset)
        lines = _Lines(self._path, self._handle, offset=offset, number=line - 1)
        row = self._next_row(self._reader(lines), lines, self._header)
        return row if row is not None and row.offset == offset else None

    def close(self) -> None:
        """Close what row_at has opened."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _reader(self, lines: "_Lines") -> Any:
        # strict: else a quote that is never closed takes the rest of the file in silence.
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _read_header(self, reader: Any, lines: "_Lines") -> tuple[list[str], bytes]:
        try:
            names: list[str] = next(reader, [])
        except csv.Error as error:
            raise ConfigError(f"{self._path}: line 1 is no header of CSV: {error}") from error
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{self._path}: the header has two columns called {twice!r}; rename one of them"
            )
        if lines.is_mended:
            raise ConfigError(f"{self._path}: the header is not UTF-8; save the file as UTF-8")
        return names, lines.take()

    def _next_row(
        self, reader: Any, lines: "_Lines", header: tuple[list[str], bytes]
    ) -> SourceRow | None:
        while True:
            offset, line = lines.offset, lines.number + 1
            fault: RequestError | None = None
            cells: list[str] = []
            try:
                cells = next(reader)
            except StopIteration:
                return None
            except csv.Error as error:
                fault = self._broken_record(error, line, lines.number)
            is_mended = lines.is_mended
            raw = lines.take()
            names, content = header[0], header[1] + raw
            if fault is None and not cells:
                continue
            if fault is None and is_mended:
                fault = _not_utf8(raw)
            if fault is None and len(cells) != len(names):
                fault = _wrong_number(cells, names)
            columns = None if fault else dict(zip(names, cells, strict=True))
            return SourceRow(offset, line, content, columns=columns or {}, fault=fault)

    def _broken_record(self, error: csv.Error, first: int, last: int) -> RequestError:
        if "unexpected end" in str(error) or "field limit" in str(error):
            raise ConfigError(
                f"{self._path}, line {first}: a quoted cell is not closed in {last - first + 1} "
                "lines, so that nobody can tell the rows behind it apart; close the quote, or "
                'write a quote inside a quoted cell twice ("")'
            ) from error
        where = "the line" if first == last else f"lines {first} to {last}"
        return RequestError(
            RequestErrorCode.BAD_ROW,
            f"{where} cannot be read as CSV: {error}; write a quote inside a quoted cell twice "
            '("")',
        )


class _Lines:
    """Hands lines to the reader of CSV, and knows where it stands and what it has taken."""

    def __init__(self, path: str, handle: BinaryIO, *, offset: int = 0, number: int = 0) -> None:
        self.offset = offset
        self.number = number
        self.is_mended = False  # a line was not UTF-8, and is not what it was
        self._path = path
        self._handle = handle
        self._taken: list[bytes] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        try:
            raw = self._handle.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise unreadable(self._path, self.number, error) from error
        if not raw:
            raise StopIteration
        if len(raw) > MAX_LINE_BYTES:
            raise ConfigError(
                f"{self._path}, line {self.number + 1}: longer than {MAX_LINE_BYTES >> 20} MiB"
            )
        line = raw if self.offset else raw.removeprefix(_BYTE_ORDER_MARK)
        self.offset += len(raw)
        self.number += 1
        self._taken.append(line)
        try:
            return line.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self.is_mended = True
            return line.decode("utf-8", "replace")

    def take(self) -> bytes:
        """Return what was read since the last call, with one LF at its end."""
        taken = b"".join(self._taken)
        self._taken.clear()
        self.is_mended = False
        return taken.rstrip(b"\r\n") + b"\n"


def _not_utf8(raw: bytes) -> RequestError:
    try:
        raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        return RequestError(
            RequestErrorCode.BAD_ROW,
            f"byte {raw[error.start]:#04x} at position {error.start + 1} of the row is not UTF-8; "
            "save the file as UTF-8 text",
        )
    raise AssertionError("a row was mended that is UTF-8")


def _wrong_number(cells: list[str], names: list[str]) -> RequestError:
    return RequestError(
        RequestErrorCode.BAD_ROW,
        f"found {len(cells)} cell(s), the header has {len(names)} column(s); the first cell is "
        f"{shown(cells[0])}; put a cell that holds a comma or a line end into quotes",
    )
