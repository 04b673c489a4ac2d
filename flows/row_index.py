"""The on-disk row index of a job: where each row stands, its id, its tokens, its shard.

A SQLite file of one writer, written anew by each plan. It is derived from the input and never the
truth about what is done; that is the ledger.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from engine import ConfigError
from flows.rows import RowLocation

_PAGE_ROWS = 1000

# duplicate_of and component are there for plans that fold equal prompts or join dependent rows.
_SCHEMA = """
CREATE TABLE rows (
    row_index INTEGER PRIMARY KEY,
    source_index INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    line INTEGER NOT NULL,
    row_id TEXT NOT NULL UNIQUE,
    num_prompt_tokens INTEGER NOT NULL,
    shard INTEGER,
    error_code TEXT,
    error_message TEXT,
    duplicate_of INTEGER,
    component INTEGER
)
"""


class IndexRow(NamedTuple):
    """What a plan knows about one row; the fields are the columns of the table, in their order.

    shard is None until the rows are counted. num_prompt_tokens is 0 for a row whose prompt could
    not be encoded.
    """

    row_index: int
    source_index: int
    offset: int
    line: int
    row_id: str
    num_prompt_tokens: int = 0
    shard: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    duplicate_of: int | None = None
    component: int | None = None

    @property
    def location(self) -> RowLocation:
        """Where the reader finds the row."""
        return RowLocation(source_index=self.source_index, offset=self.offset, line=self.line)


_COLUMNS = ", ".join(IndexRow._fields)
_INSERT = f"INSERT INTO rows ({_COLUMNS}) VALUES ({', '.join('?' * len(IndexRow._fields))})"
_SELECT = f"SELECT {_COLUMNS} FROM rows WHERE row_index > ? AND"


class DuplicateRowIdError(Exception):
    """Two rows have one id."""

    def __init__(self, first: IndexRow, second: IndexRow) -> None:
        super().__init__(f"rows {first.row_index} and {second.row_index}: {first.row_id!r}")
        self.first = first
        self.second = second


class RowIndexBuilder:
    """Writes an index under a temporary name; only `publish` makes it appear.

    Raises:
        ConfigError: the folder cannot be written to, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.unlink(missing_ok=True)
            self._connection = sqlite3.connect(self._temporary, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._cannot_be_written(error) from error
        # A crash leaves a file that nobody opens, so nothing needs to survive one; a journal there
        # must be, for a refused row is taken back.
        self._connection.execute("PRAGMA journal_mode = MEMORY")
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute(_SCHEMA)
        self._connection.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._temporary.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error):
            raise self._cannot_be_written(error) from error

    def insert(self, rows: Sequence[IndexRow]) -> None:
        """Add rows; row_index counts up from 0 without a gap.

        Raises:
            DuplicateRowIdError: a row has the id of another.
        """
        try:
            self._connection.executemany(_INSERT, rows)
        except sqlite3.IntegrityError as error:
            first, second = self._find_duplicate(rows)
            raise DuplicateRowIdError(first, second) from error

    def publish(self, *, num_rows: int, num_shards: int) -> None:
        """Give each shard a contiguous range of rows, and put the index in its place."""
        self._connection.execute(
            "UPDATE rows SET shard = row_index * ? / ?", (num_shards, num_rows)
        )
        self._connection.execute("CREATE INDEX rows_by_shard ON rows (shard)")
        self._connection.execute(
            "CREATE INDEX bad_rows ON rows (row_index) WHERE error_code IS NOT NULL"
        )
        self._connection.execute("COMMIT")
        self._connection.close()
        self._temporary.replace(self._path)

    def _cannot_be_written(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._path}: the row index cannot be written: {error}")

    def _find_duplicate(self, rows: Sequence[IndexRow]) -> tuple[IndexRow, IndexRow]:
        # The rows before the refused one are in the table, so the refused one finds its twin.
        query = f"SELECT {_COLUMNS} FROM rows WHERE row_id = ? AND row_index < ?"
        for row in rows:
            values = self._connection.execute(query, (row.row_id, row.row_index)).fetchone()
            if values is not None:
                return IndexRow._make(values), row
        raise AssertionError("the row index refused rows, and no two of them have one id")


class RowIndex:
    """Reads a published index, page by page; it may be replaced meanwhile. One thread each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @staticmethod
    def create(path: Path) -> RowIndexBuilder:
        """Begin a new index that takes the place of the one at path when it is published."""
        return RowIndexBuilder(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the index for reading.

        Raises:
            ConfigError: there is none, or the file is something else.
        """
        try:
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: no row index; plan the job again") from error
        try:
            connection.execute(f"SELECT {_COLUMNS} FROM rows LIMIT 1")
        except sqlite3.Error as error:
            connection.close()
            raise ConfigError(f"{path}: not a row index ({error}); plan the job again") from error
        return cls(connection)

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
        """Close the file."""
        self._connection.close()

    @property
    def count(self) -> int:
        """Number of rows, bad ones included."""
        # row_index has no gaps, so that its maximum says it without a scan.
        (last,) = self._connection.execute("SELECT max(row_index) FROM rows").fetchone()
        return 0 if last is None else int(last) + 1

    def rows_of_shard(self, shard: int) -> Iterator[IndexRow]:
        """Yield the shard's rows in input order, bad ones included."""
        return self._pages(f"{_SELECT} shard = ? ORDER BY row_index LIMIT ?", (shard, _PAGE_ROWS))

    def rows_between(self, first: int, end: int) -> Iterator[IndexRow]:
        """Yield the rows first to end - 1 in input order, bad ones included."""
        query = f"{_SELECT} row_index < ? ORDER BY row_index LIMIT ?"
        return self._pages(query, (end, _PAGE_ROWS), after=first - 1)

    def bad_rows(self) -> Iterator[IndexRow]:
        """Yield the rows that cannot be asked, in input order."""
        query = f"{_SELECT} error_code IS NOT NULL ORDER BY row_index LIMIT ?"
        return self._pages(query, (_PAGE_ROWS,))

    def _pages(
        self, query: str, parameters: tuple[int, ...], *, after: int = -1
    ) -> Iterator[IndexRow]:
        # One short query a page: a shard takes hours and must not keep a statement open.
        last = after
        while True:
            with closing(self._connection.execute(query, (last, *parameters))) as cursor:
                page = [IndexRow._make(values) for values in cursor]
            yield from page
            if len(page) < _PAGE_ROWS:
                return
            last = page[-1].row_index
