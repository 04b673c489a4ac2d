"""The on-disk row index of a job: where each row stands, its id, its tokens, what it repeats.

A SQLite file of one writer, written anew by each plan. It is derived from the input and never the
truth about what is done; that is the ledger.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from engine import ConfigError
from flows.rows import RowLocation

_PAGE_ROWS = 1000

# The columns are the fields of IndexRow.
_SCHEMA = """
CREATE TABLE rows (
    row_index INTEGER PRIMARY KEY,
    source_index INTEGER NOT NULL,
    file_index INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    line INTEGER NOT NULL,
    row_id TEXT NOT NULL,
    num_prompt_tokens INTEGER NOT NULL,
    error_code TEXT,
    error_message TEXT,
    is_skipped INTEGER NOT NULL,
    truncate_prompt_tokens INTEGER,
    request_hash BLOB,
    may_fold INTEGER NOT NULL,
    duplicate_of INTEGER
)
"""
# Built at the end: ids in no order would make each insert look for its place.
_UNIQUE_IDS = "CREATE UNIQUE INDEX rows_by_id ON rows (row_id)"
# A row that is asked for the first time leads those that are the same. The partial index holds
# what may be folded alone, so that a job that samples pays nothing.
_FOLD = (
    "CREATE INDEX foldable_rows ON rows (request_hash, row_index) WHERE may_fold",
    """
    UPDATE rows SET duplicate_of = leaders.row_index
    FROM (
        SELECT request_hash, min(row_index) AS row_index FROM rows WHERE may_fold
        GROUP BY request_hash HAVING count(*) > 1
    ) AS leaders
    WHERE rows.may_fold AND rows.request_hash = leaders.request_hash
        AND rows.row_index > leaders.row_index
    """,
    "DROP INDEX foldable_rows",
    "CREATE INDEX followers ON rows (duplicate_of, row_index) WHERE duplicate_of IS NOT NULL",
)


class IndexRow(NamedTuple):
    """What a plan knows about one row; the fields are the columns of the table, in their order.

    num_prompt_tokens is 0 for a row whose prompt could not be encoded. A row with an error_code is
    not asked; is_skipped tells that it is left out on purpose. truncate_prompt_tokens is laid over
    the row's sampling. request_hash stands for all that is asked, 16 bytes; rows that may_fold and
    have the same one are asked once, and duplicate_of is the row_index of the first of them.
    is_skipped and may_fold are 0 or 1: SQLite's module is slow with True and False.
    """

    row_index: int
    source_index: int
    file_index: int
    offset: int
    line: int
    row_id: str
    num_prompt_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None
    is_skipped: int = 0
    truncate_prompt_tokens: int | None = None
    request_hash: bytes | None = None
    may_fold: int = 0
    duplicate_of: int | None = None

    @property
    def location(self) -> RowLocation:
        """Where the reader finds the row."""
        return RowLocation(
            source_index=self.source_index,
            file_index=self.file_index,
            offset=self.offset,
            line=self.line,
        )


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
        # must be, for an index of ids that are not unique is taken back.
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
        """Add rows; row_index counts up from 0 without a gap."""
        # Plain tuples: the module is slow with their subclasses too.
        self._connection.executemany(_INSERT, map(tuple, rows))

    def publish(self) -> int:
        """Fold the rows that are the same, and put the index in its place.

        Returns:
            Number of rows that follow another.

        Raises:
            DuplicateRowIdError: two rows have one id.
        """
        try:
            self._connection.execute(_UNIQUE_IDS)
        except sqlite3.IntegrityError as error:
            raise DuplicateRowIdError(*self._first_twins()) from error
        for statement in _FOLD:
            self._connection.execute(statement)
        self._connection.execute(
            "CREATE INDEX bad_rows ON rows (row_index) WHERE error_code IS NOT NULL"
        )
        count = "SELECT count(*) FROM rows WHERE duplicate_of IS NOT NULL"
        (num_followers,) = self._connection.execute(count).fetchone()
        self._connection.execute("COMMIT")
        self._connection.close()
        self._temporary.replace(self._path)
        return int(num_followers)

    def _cannot_be_written(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._path}: the row index cannot be written: {error}")

    def _first_twins(self) -> list[IndexRow]:
        twins = (
            f"SELECT {_COLUMNS} FROM rows WHERE row_id = (SELECT row_id FROM rows GROUP BY row_id "
            "HAVING count(*) > 1 ORDER BY min(row_index) LIMIT 1) ORDER BY row_index LIMIT 2"
        )
        return [IndexRow._make(values) for values in self._connection.execute(twins)]


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

    def rows_between(self, first: int, end: int) -> Iterator[IndexRow]:
        """Yield the rows first to end - 1 in input order, bad ones included."""
        query = f"{_SELECT} row_index < ? ORDER BY row_index LIMIT ?"
        return self._pages(query, (end, _PAGE_ROWS), after=first - 1)

    def find(self, row_ids: Iterable[str]) -> dict[str, IndexRow]:
        """Return those of the rows that there are, by id; the ids must fit into one query."""
        ids = tuple(row_ids)
        query = f"SELECT {_COLUMNS} FROM rows WHERE row_id IN ({', '.join('?' * len(ids))})"
        rows = map(IndexRow._make, self._connection.execute(query, ids))
        return {row.row_id: row for row in rows}

    def bad_rows(self) -> Iterator[IndexRow]:
        """Yield the rows that cannot be asked, in input order."""
        query = f"{_SELECT} error_code IS NOT NULL ORDER BY row_index LIMIT ?"
        return self._pages(query, (_PAGE_ROWS,))

    def followers_of(self, row_index: int, first: int, end: int) -> Iterator[IndexRow]:
        """Yield those of the rows first to end - 1 that are the same as the row, in input order."""
        query = f"{_SELECT} duplicate_of = ? AND row_index < ? ORDER BY row_index LIMIT ?"
        return self._pages(query, (row_index, end, _PAGE_ROWS), after=first - 1)

    def first_follower(self, row_index: int, first: int) -> int | None:
        """Return the first row, from `first` on, that is the same as the row; None without one."""
        query = "SELECT min(row_index) FROM rows WHERE duplicate_of = ? AND row_index >= ?"
        (found,) = self._connection.execute(query, (row_index, first)).fetchone()
        return None if found is None else int(found)

    def duplicates_between(self, first: int, end: int) -> Iterator[IndexRow]:
        """Yield those of the rows first to end - 1 that are the same as an earlier row."""
        query = f"{_SELECT} duplicate_of IS NOT NULL AND row_index < ? ORDER BY row_index LIMIT ?"
        return self._pages(query, (end, _PAGE_ROWS), after=first - 1)

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
