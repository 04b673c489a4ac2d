"""What every format gives: the rows of one file in order, and one row at its place."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from engine import RequestError


class SourceRow(NamedTuple):
    """A row as it stands in its file.

    offset is what the format seeks by, line what a person looks for, from 1. content is what the
    hash of the source takes in: the line of a text file with one LF at its end. columns are None
    where content is a line of JSON that nobody has parsed yet. A row with a fault cannot be asked.
    """

    offset: int
    line: int
    content: bytes
    columns: dict[str, Any] | None = None
    fault: RequestError | None = None


class SourceFile(Protocol):
    """One open file. It may be read in order and at places by turns, by one thread."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield every row from the first on.

        Raises:
            ConfigError: the file cannot be read, or is not of this format.
        """
        ...

    def num_rows(self) -> int:
        """Return how many rows there are; this may read the file."""
        ...

    def row_at(self, offset: int, line: int) -> SourceRow | None:
        """Return the row that `rows` gave with this offset and line; None when it is gone."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...
