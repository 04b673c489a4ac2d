"""The failed rows in a file of their own: what was wrong, what to do, and the row itself."""

from collections.abc import Callable
from typing import Any

from flows.outputs.answers import AnsweredRow
from flows.outputs.faults import fault_of
from flows.outputs.files import OutputFile
from flows.outputs.strict_json import to_strict_json
from flows.records import ROW_ID_FIELD
from flows.rows import RowLocation
from flows.schema import RowState


class ErrorsWriter:
    """One line for each row that failed; of several samples the first that failed speaks."""

    def __init__(self, file: OutputFile, describe: Callable[[RowLocation], str]) -> None:
        self._file = file
        self._describe = describe

    def write(self, row: AnsweredRow) -> None:
        """Write a line if the row has failed."""
        sample = row.worst
        if sample.state is not RowState.ERROR:
            return
        line: dict[str, Any] = {
            ROW_ID_FIELD: row.record.row_id,
            "where": self._describe(row.record.location),
        }
        if sample.num_samples > 1:
            line["sample_index"] = sample.sample_index
        line |= {
            "code": sample.error_code,
            "message": sample.error_message,
            "remedy": fault_of(sample.error_code).remedy,
            "columns": row.record.columns,
        }
        self._file.write(to_strict_json(line))

    def finish(self) -> None:
        """Nothing ends the file."""
