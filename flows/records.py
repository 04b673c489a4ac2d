"""Sources -> PromptRecord: reads the input files of a job, line by line or one row at a time.

It also says what an output line may be called and which input a job was planned with, because
planner and exporter must agree on both.
"""

import difflib
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from engine import ConfigError, RequestError
from flows.config import PromptConfig, SourceConfig
from flows.prompts import PromptBuilder
from flows.row_fields import read_row_id
from flows.rows import BadRow as BadRow
from flows.rows import PromptRecord as PromptRecord
from flows.rows import RowLocation as RowLocation
from flows.rows import parse_columns, printable

ROW_ID_FIELD = "row_id"
# What an output line adds to the row's own columns, each behind output.result_prefix.
RESULT_FIELDS = (
    "sample_index",
    "text",
    "replies",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "error",
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_MAX_NEIGHBOURS = 10_000


class RecordReader:
    """Reads the rows of all sources, in order. One reader serves one thread.

    Raises:
        ConfigError: a source that is not a readable file, or a template that does not compile.
    """

    def __init__(self, sources: tuple[SourceConfig, ...], prompt: PromptConfig) -> None:
        self.sources = sources
        self._builder = PromptBuilder(prompt)
        for index, source in enumerate(sources):
            _check_source(index, source.path)
        self._row_id_starts = [printable(source.resolved_name) for source in sources]
        self._handles: dict[int, BinaryIO] = {}
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that read_at has opened."""
        self._handles.clear()
        self._exit_stack.close()

    def read_all(self) -> Iterator[PromptRecord | BadRow]:
        """Yield every row once, in input order; a line that cannot be asked is a BadRow."""
        row_index = 0
        for source_index, source in enumerate(self.sources):
            for offset, number, line in _rows_of_file(source):
                location = RowLocation(source_index=source_index, offset=offset, line=number)
                yield self._read_row(line, row_index, location)
                row_index += 1

    def read_at(self, row_index: int, location: RowLocation) -> PromptRecord | BadRow:
        """Return the row that read_all gave at this place.

        Raises:
            ConfigError: the file has changed and no row begins there.
        """
        handle = self._handles.get(location.source_index)
        if handle is None:
            handle = _open(self.sources[location.source_index].path)
            self._handles[location.source_index] = self._exit_stack.enter_context(handle)
        handle.seek(location.offset)
        line = _without_mark(handle.readline(), location.offset)
        if not line.strip():
            raise ConfigError(
                f"{self.describe(location)}: the row is gone, so the file has changed since the "
                "job was planned; bring the old file back, or start a new job"
            )
        return self._read_row(line, row_index, location)

    def describe(self, location: RowLocation) -> str:
        """Return file and line, as messages name a row."""
        return f"{self.sources[location.source_index].path}, line {location.line}"

    def content_hash(self) -> dict[str, str]:
        """Return a hash of each source's rows by source name; blank lines do not count."""
        hashes = {}
        for source in self.sources:
            digest = blake2b(digest_size=32)
            for _, _, line in _rows_of_file(source):
                digest.update(line.rstrip(b"\r\n") + b"\n")
            hashes[source.resolved_name] = digest.hexdigest()
        return hashes

    def _read_row(
        self, line: bytes, row_index: int, location: RowLocation
    ) -> PromptRecord | BadRow:
        mapping = self.sources[location.source_index].columns
        row_id = f"{self._row_id_starts[location.source_index]}:{location.line}"
        columns = {}
        try:
            columns = parse_columns(line)
            row_id = read_row_id(columns, mapping) or row_id
            return self._builder.build(
                columns, mapping, row_index=row_index, row_id=row_id, location=location
            )
        except RequestError as error:
            message = printable(f"{self.describe(location)}: {error.message}")
            return BadRow(
                row_index=row_index,
                row_id=row_id,
                location=location,
                error=RequestError(error.code, message),
                columns=columns,
            )


class ManifestHash:
    """Says which input a job has: the ids of its rows in order, and the content of its sources."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=32)

    def add(self, row_id: str) -> None:
        """Take in the next row."""
        encoded = row_id.encode("utf-8")
        self._digest.update(b"%d:%s" % (len(encoded), encoded))

    def finish(self, source_hashes: dict[str, str]) -> str:
        """Return the hash; the names of the sources do not count, so a file may be moved."""
        digest = self._digest.copy()
        digest.update("|".join(source_hashes.values()).encode("ascii"))
        return digest.hexdigest()


class OutputNames:
    """The names that an output line adds to the columns of a row, and what collides with them."""

    def __init__(self, result_prefix: str) -> None:
        self._prefix = result_prefix
        self._results = frozenset(result_prefix + name for name in RESULT_FIELDS)

    def check(self, row: PromptRecord | BadRow, reader: RecordReader) -> None:
        """Make sure that the row's columns and the answer fit into one object.

        Raises:
            ConfigError: names the column, the file, the line and the way out.
        """
        taken = self._results.intersection(row.columns)
        if taken:
            raise ConfigError(
                f"{reader.describe(row.location)}: the column {min(taken)!r} has the name of a "
                f"result field, and one would overwrite the other in the output; set "
                f"output.result_prefix (now {self._prefix!r}), for example to 'answer_'"
            )
        id_column = reader.sources[row.location.source_index].columns.id
        if ROW_ID_FIELD in row.columns and id_column != ROW_ID_FIELD:
            raise ConfigError(
                f"{reader.describe(row.location)}: the column 'row_id' has the name under which "
                "the output holds the row's id; write columns.id: row_id in the source to use it "
                "as the id, or rename the column"
            )


def refuse_to_overwrite_a_source(sources: tuple[SourceConfig, ...], output_path: Path) -> None:
    """Make sure that the output is not one of the inputs.

    Raises:
        ConfigError: it is.
    """
    for source in sources:
        try:
            is_source = output_path.samefile(source.path)
        except OSError:
            # There is no such file yet, or it cannot be seen; then writing it will say why.
            is_source = False
        if is_source:
            raise ConfigError(
                f"output.path {output_path} is the source {source.path}; it would be "
                "overwritten, so name another file"
            )


def _check_source(index: int, path: Path) -> None:
    place = f"sources.{index}.path: {path}"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{place}: no such file; {_hint_for_missing(path)}") from error
    except OSError as error:
        raise ConfigError(f"{place}: cannot read the source: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{place} is not a regular file; wanted a JSONL file")
    _open(path).close()


def _hint_for_missing(path: Path) -> str:
    try:
        names = sorted(islice((entry.name for entry in path.parent.iterdir()), _MAX_NEIGHBOURS))
    except OSError:
        return f"its folder {path.parent} cannot be listed either"
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "check the name"


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the source: {error.strerror}") from error


def _rows_of_file(source: SourceConfig) -> Iterator[tuple[int, int, bytes]]:
    """Yield byte offset, line number and bytes of each line that is a row, up to the limit.

    A binary file is split at \\n alone: U+2028 and the like are part of a text.
    """
    num_rows, offset = 0, 0
    with _open(source.path) as handle:
        for number, raw in enumerate(handle, start=1):
            line = _without_mark(raw, offset)
            if line.strip():
                if num_rows == source.limit:
                    return
                yield offset, number, line
                num_rows += 1
            offset += len(raw)


def _without_mark(line: bytes, offset: int) -> bytes:
    return line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line
