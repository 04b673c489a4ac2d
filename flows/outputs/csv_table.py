"""CSV as RFC 4180 has it: a line for each sample, quoted where need be, UTF-8 without a mark.

Null is an empty cell, nested values are JSON text. A cell that a spreadsheet would take for a
formula is left as it is: an output is data, and does not change it.
"""

import csv
from typing import Any

from flows.outputs.answers import AnsweredRow
from flows.outputs.files import OutputFile
from flows.outputs.results import TokenTexts
from flows.outputs.strict_json import json_text
from flows.outputs.table_columns import TableColumns
from flows.rows import without_surrogates


class CsvWriter:
    """Writes the rows that failed too, so that each row of the input has its line."""

    def __init__(self, file: OutputFile, columns: TableColumns, texts: TokenTexts) -> None:
        self._columns = columns
        self._texts = texts
        self._csv = csv.writer(_Utf8(file), lineterminator="\r\n")
        self._csv.writerow(columns.names)

    def write(self, row: AnsweredRow) -> None:
        """Write a line for each sample."""
        for sample in row.samples:
            values = self._columns.values(row, sample, self._texts)
            self._csv.writerow([_cell(value) for value in values])

    def finish(self) -> None:
        """Nothing ends the file."""


class _Utf8:
    def __init__(self, file: OutputFile) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(text.encode("utf-8"))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str(without_surrogates(value))
    return json_text(value)
