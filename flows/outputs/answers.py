"""A row with its answers, as writers take it, and the count of such rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from flows.ledger_rows import CompletionRow
from flows.rows import BadRow, PromptRecord
from flows.schema import RowState

_WORST_FIRST = (RowState.ERROR, RowState.SKIPPED, RowState.OK)


class AnsweredRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the input and all of its samples."""

    record: PromptRecord | BadRow
    samples: tuple[CompletionRow, ...]

    @property
    def worst(self) -> CompletionRow:
        """Return the first sample that failed, else one that was skipped, else the first."""
        return min(self.samples, key=lambda sample: _WORST_FIRST.index(sample.state))


class RowWriter(Protocol):
    """Writes rows to one file, or to one for answers and one for errors."""

    def write(self, row: AnsweredRow) -> None:
        """Take the next row of the input that has its result."""

    def finish(self) -> None:
        """Write what ends the file; nothing is written afterwards."""


@dataclass(slots=True, kw_only=True)
class ExportSummary:
    """What an export wrote. A row of several samples is one row, and as bad as its worst sample.

    num_length counts the samples that max_tokens cut, num_truncated the rows whose prompt was
    cut. errors_path is None when no line was written there.
    """

    output_path: Path
    manifest_path: Path
    errors_path: Path | None = None
    num_ok: int = 0
    num_error: int = 0
    num_skipped: int = 0
    num_pending: int = 0
    num_samples: int = 0
    num_length: int = 0
    num_truncated: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the input."""
        return self.num_ok + self.num_error + self.num_skipped + self.num_pending

    def describe(self) -> str:
        """Return the counts as people read them."""
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        cut = f"; {self.num_length} cut at max_tokens" if self.num_length else ""
        pending = f", {self.num_pending} pending" if self.num_pending else ""
        return f"{self.num_ok} ok, {self.num_error} failed{skipped}{pending}{cut}"

    def count(self, row: AnsweredRow) -> None:
        """Count a row that has its result."""
        state = row.worst.state
        self.num_ok += state is RowState.OK
        self.num_error += state is RowState.ERROR
        self.num_skipped += state is RowState.SKIPPED
        self.num_samples += len(row.samples)
        self.num_length += sum(sample.finish_reason == "length" for sample in row.samples)
        self.num_truncated += row.samples[0].is_truncated
