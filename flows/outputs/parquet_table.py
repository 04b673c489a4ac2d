"""Parquet: a line for each sample, with typed columns, in row groups of bounded size."""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flows.outputs.answers import AnsweredRow
from flows.outputs.column_kinds import Kind, ListOf, Simple, StructOf, fitted
from flows.outputs.files import OutputFile
from flows.outputs.results import TokenTexts
from flows.outputs.table_columns import TableColumns

# A row group is held in memory until it is written: so many lines, or about so many bytes.
_GROUP_LINES = 10_000
_GROUP_BYTES = 32_000_000
_BYTES_OF_A_VALUE = 64
_TYPES = {
    Simple.NULL: pa.string(),
    Simple.BOOL: pa.bool_(),
    Simple.INT: pa.int64(),
    Simple.BIG_INT: pa.int64(),
    Simple.FLOAT: pa.float64(),
    Simple.TEXT: pa.string(),
    Simple.JSON: pa.string(),
}


class ParquetWriter:
    """Writes the rows that failed too, so that each row of the input has its line."""

    def __init__(self, file: OutputFile, columns: TableColumns, texts: TokenTexts) -> None:
        self._columns = columns
        self._texts = texts
        types = [_type_of(kind) for kind in columns.kinds]
        self._schema = pa.schema(list(zip(columns.names, types, strict=True)))
        self._parquet = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._lines: list[list[Any]] = []
        self._num_bytes = 0

    def write(self, row: AnsweredRow) -> None:
        """Take a line for each sample."""
        for sample in row.samples:
            values = self._columns.values(row, sample, self._texts)
            line = [
                fitted(value, kind) for value, kind in zip(values, self._columns.kinds, strict=True)
            ]
            self._lines.append(line)
            self._num_bytes += _num_bytes_of(line)
        if len(self._lines) >= _GROUP_LINES or self._num_bytes >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        """Write the last row group and the footer."""
        if self._lines:
            self._write_group()
        self._parquet.close()

    def _write_group(self) -> None:
        arrays = [
            pa.array(values, type=field.type)
            for values, field in zip(zip(*self._lines, strict=True), self._schema, strict=True)
        ]
        self._parquet.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._lines.clear()
        self._num_bytes = 0


def _num_bytes_of(value: Any) -> int:
    """Return about how much memory the value takes."""
    if isinstance(value, list):
        return _BYTES_OF_A_VALUE + sum(map(_num_bytes_of, value))
    if isinstance(value, dict):
        return _BYTES_OF_A_VALUE + sum(map(_num_bytes_of, value.values()))
    return _BYTES_OF_A_VALUE + (len(value) if isinstance(value, str) else 0)


def _type_of(kind: Kind) -> Any:
    if isinstance(kind, ListOf):
        return pa.list_(_type_of(kind.item))
    if isinstance(kind, StructOf):
        return pa.struct([(name, _type_of(part)) for name, part in kind.fields])
    return _TYPES[kind]
