"""JSONL: one line for each sample, the row's columns and then the results."""

from typing import Any

from flows.outputs.answers import AnsweredRow
from flows.outputs.files import OutputFile
from flows.outputs.results import TokenTexts, results_of
from flows.outputs.strict_json import to_strict_json
from flows.records import ROW_ID_FIELD


class JsonlWriter:
    """Writes the rows that failed too, so that each row of the input has its line."""

    def __init__(self, file: OutputFile, texts: TokenTexts, result_prefix: str) -> None:
        self._file = file
        self._texts = texts
        self._prefix = result_prefix

    def write(self, row: AnsweredRow) -> None:
        """Write a line for each sample."""
        for sample in row.samples:
            line: dict[str, Any] = {ROW_ID_FIELD: row.record.row_id} | row.record.columns
            # A column of that name is the id itself (the plan refuses another): as text, here.
            line[ROW_ID_FIELD] = row.record.row_id
            results = results_of(row, sample, self._texts)
            line |= {self._prefix + name: value for name, value in results.items()}
            self._file.write(to_strict_json(line))

    def finish(self) -> None:
        """Nothing ends the file."""
