"""Writes a job's answers as JSONL: input order, every column carried, all of it or nothing.

The input and the ledger are walked together, one row at a time. An output holds no times,
attempts or hosts, so that a resumed run and an undisturbed one write the same bytes.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine import ConfigError
from flows.config import JobConfig
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow
from flows.records import (
    ROW_ID_FIELD,
    BadRow,
    ManifestHash,
    OutputNames,
    PromptRecord,
    RecordReader,
    refuse_to_overwrite_a_source,
)
from flows.schema import RowState

# JSON allows them raw; but many readers end a line at the first three, and UTF-8 cannot spell a
# lone surrogate.
_TO_ESCAPE = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


@dataclass(slots=True, kw_only=True)
class ExportSummary:
    """What an export wrote. A row with several samples is several lines, each counted by state."""

    output_path: Path
    num_ok: int = 0
    num_error: int = 0
    num_skipped: int = 0
    num_pending: int = 0

    @property
    def num_lines(self) -> int:
        """Lines written; a pending row has none."""
        return self.num_ok + self.num_error + self.num_skipped

    def count(self, state: RowState) -> None:
        """Count one line."""
        if state == RowState.OK:
            self.num_ok += 1
        elif state == RowState.ERROR:
            self.num_error += 1
        else:
            self.num_skipped += 1


def export_job(
    config: JobConfig, job: JobRow, ledger: Ledger, reader: RecordReader, output_path: Path
) -> ExportSummary:
    """Write the finished rows of a job to output_path; an old file is replaced at the end.

    Raises:
        ConfigError: the input is not the one that the job was planned with, a column collides
            with a result field, or the output cannot be written.
    """
    refuse_to_overwrite_a_source(config.sources, output_path)
    summary = ExportSummary(output_path=output_path)
    names = OutputNames(config.output.result_prefix)
    manifest = ManifestHash()
    answers = _AnswersInOrder(ledger.iter_completions(job.job_key))
    with _replaced_when_complete(output_path) as output:
        for row in reader.read_all():
            names.check(row, reader)
            manifest.add(row.row_id)
            completions = answers.of(row, reader)
            summary.num_pending += not completions
            for completion in completions:
                line = _line(
                    row,
                    completion,
                    config.output.result_prefix,
                    has_several_samples=len(completions) > 1,
                )
                output.write(line)
                summary.count(completion.state)
        if manifest.finish(reader.content_hash()) != job.manifest_hash:
            raise _changed_input(f"the sources of job {job.job_id} do not have the planned rows")
    return summary


class _AnswersInOrder:
    """Hands each row its completions from a stream that is in the order of the rows."""

    def __init__(self, completions: Iterator[CompletionRow]) -> None:
        self._completions = completions
        self._next = next(completions, None)

    def of(self, row: PromptRecord | BadRow, reader: RecordReader) -> list[CompletionRow]:
        """Return the completions of the next row, none while it is pending."""
        found = []
        while self._next is not None and self._next.row_index == row.row_index:
            if self._next.row_id != row.row_id:
                raise _changed_input(
                    f"{reader.describe(row.location)}: found the row {row.row_id!r}, the ledger "
                    f"has an answer to {self._next.row_id!r} there"
                )
            found.append(self._next)
            self._next = next(self._completions, None)
        return found


def _changed_input(found: str) -> ConfigError:
    return ConfigError(
        f"{found}; the input has changed since the job was planned, so bring the old files back "
        "or start a new job"
    )


def _line(
    row: PromptRecord | BadRow,
    completion: CompletionRow,
    result_prefix: str,
    *,
    has_several_samples: bool,
) -> bytes:
    error = None
    if completion.error_code is not None:
        error = {"code": completion.error_code, "message": completion.error_message}
    results: dict[str, Any] = {"text": completion.text}
    if isinstance(row, PromptRecord) and row.turns:
        last = () if completion.text is None else (completion.text,)
        results["replies"] = [*completion.turns, *last]
    results |= {
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_output_tokens": completion.num_output_tokens,
        "error": error,
    }
    if has_several_samples:
        results = {"sample_index": completion.sample_index} | results
    line = {ROW_ID_FIELD: row.row_id} | row.columns
    # A column that is called row_id is the id itself (the plan refuses another): as text, here.
    line[ROW_ID_FIELD] = row.row_id
    line |= {result_prefix + name: value for name, value in results.items()}
    return to_strict_json(line)


def to_strict_json(line: dict[str, Any]) -> bytes:
    """Return the object as one line of UTF-8; what JSON cannot say (NaN, infinity) is null."""
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_with_finite_numbers(line), ensure_ascii=False, allow_nan=False)
    escaped = _TO_ESCAPE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return escaped.encode("utf-8") + b"\n"


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_with_finite_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_finite_numbers(item) for key, item in value.items()}
    return value


@contextmanager
def _replaced_when_complete(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside path that takes its place when the block ends well."""
    # The process id keeps two exports to one path apart; the last one to finish wins.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as output:
            try:
                yield output
                output.flush()
                os.fsync(output.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"{path}: the output cannot be written: {error}") from error


def _sync_folder(folder: Path) -> None:
    # The rename is durable only when the folder that holds the name is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
