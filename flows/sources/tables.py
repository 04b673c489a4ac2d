"""Rows of Arrow record batches, as JSON knows values; one batch is in memory at a time."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from engine import ConfigError, RequestError, RequestErrorCode
from flows.sources.source_file import SourceRow

_PIECE_ROWS = 256
_Converter = Callable[[Any], Any]


class TableFile(ABC):
    """One table; a row is sought by its number, from 0."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._batches: Iterator[tuple[int, pa.RecordBatch]] | None = None
        self._first = 0
        self._rows: list[SourceRow] = []

    @abstractmethod
    def batches_from(self, row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches with the numbers of their first rows, beginning at or before a row.

        Raises:
            ConfigError: the table cannot be opened.
        """

    def rows(self) -> Iterator[SourceRow]:
        """Yield every row."""
        for first, batch in self._guarded(0):
            yield from _read_batch(batch, first)

    def num_rows(self) -> int:
        """Return how many rows there are."""
        return sum(batch.num_rows for _, batch in self._guarded(0))

    def row_at(self, offset: int, line: int) -> SourceRow | None:
        """Return the row with this number."""
        if self._batches is None or offset < self._first:
            self._batches, self._rows = self._guarded(offset), []
        while offset >= self._first + len(self._rows) or not self._rows:
            following = next(self._batches, None)
            if following is None:
                self._batches = None
                return None
            self._first, batch = following
            self._rows = list(_read_batch(batch, self._first))
        return self._rows[offset - self._first]

    def close(self) -> None:
        """Forget the batch at hand and close its file."""
        self._batches, self._rows = None, []

    def _guarded(self, row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        last = row
        try:
            for first, batch in self.batches_from(row):
                # As Python's objects a batch takes many times its size.
                for start in range(0, batch.num_rows, _PIECE_ROWS):
                    piece = batch.slice(start, _PIECE_ROWS)
                    if first + start + piece.num_rows > row:
                        yield first + start, piece
                last = first + batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{self._path}: cannot be read beyond row {last}: {error}; make or fetch the file "
                "again"
            ) from error


def check_names(path: str, schema: pa.Schema) -> None:
    """Make sure that a row can be an object.

    Raises:
        ConfigError: two columns have one name.
    """
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: two columns are called {twice!r}; rename one of them")


def _read_batch(batch: pa.RecordBatch, first: int) -> Iterator[SourceRow]:
    converters = {
        field.name: converter
        for field in batch.schema
        if (converter := _converter_of(field.type)) is not None
    }
    for number, found in enumerate(_objects(batch), start=first):
        if isinstance(found, RequestError):
            yield SourceRow(number, number + 1, b"", columns={}, fault=found)
            continue
        for name, converter in converters.items():
            if found[name] is not None:
                found[name] = converter(found[name])
        yield SourceRow(number, number + 1, msgspec.json.encode(found), columns=found)


def _objects(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | RequestError]:
    try:
        yield from batch.to_pylist()
    except (UnicodeDecodeError, ValueError, pa.ArrowException):
        # One value that Python cannot hold must not cost its neighbours.
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except (UnicodeDecodeError, ValueError, pa.ArrowException) as error:
                yield RequestError(
                    RequestErrorCode.BAD_ROW, f"a value of the row cannot be read: {error}"
                )


def _converter_of(kind: pa.DataType) -> _Converter | None:
    """Return what makes JSON of a value of this type; None for values that are so already."""
    types = pa.types
    if isinstance(kind, pa.UuidType):
        return str
    if isinstance(kind, pa.BaseExtensionType):
        return _converter_of(kind.storage_type)
    if types.is_dictionary(kind):
        return _converter_of(kind.value_type)
    for matches, make_converter in _NESTED:
        if matches(kind):
            return make_converter(kind)
    for matches, converter in _LEAVES:
        if matches(kind):
            return converter
    return None


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


_LEAVES: tuple[tuple[Callable[[pa.DataType], bool], _Converter], ...] = (
    (pa.types.is_duration, lambda value: value.total_seconds()),
    (pa.types.is_temporal, lambda value: value.isoformat()),
    (pa.types.is_decimal, str),
    (pa.types.is_binary, _base64),
    (pa.types.is_large_binary, _base64),
    (pa.types.is_fixed_size_binary, _base64),
    (pa.types.is_binary_view, _base64),
)


def _list_converter(kind: pa.DataType) -> _Converter | None:
    inner = _converter_of(kind.value_type)
    if inner is None:
        return None
    return lambda values: [None if value is None else inner(value) for value in values]


def _struct_converter(kind: pa.DataType) -> _Converter | None:
    converters = {
        field.name: converter
        for field in kind
        if (converter := _converter_of(field.type)) is not None
    }
    if not converters:
        return None

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        changed = {
            name: converter(value[name])
            for name, converter in converters.items()
            if value[name] is not None
        }
        return value | changed

    return convert


def _map_converter(kind: pa.DataType) -> _Converter:
    of_key, of_item = _converter_of(kind.key_type), _converter_of(kind.item_type)

    def convert(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        return {
            str(key if of_key is None else of_key(key)): item
            if item is None or of_item is None
            else of_item(item)
            for key, item in pairs
        }

    return convert


_NESTED: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], _Converter | None]], ...
] = (
    (pa.types.is_map, _map_converter),
    (pa.types.is_struct, _struct_converter),
    (pa.types.is_list, _list_converter),
    (pa.types.is_large_list, _list_converter),
    (pa.types.is_fixed_size_list, _list_converter),
    (pa.types.is_list_view, _list_converter),
    (pa.types.is_large_list_view, _list_converter),
)
