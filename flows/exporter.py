"""Writes a job's answers: input order, every column carried, all of it or nothing.

The input and the ledger are walked together, one row at a time; each format has a writer in
flows.outputs. An output holds no times, attempts or hosts, so that a resumed run and an undisturbed
one write the same bytes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine import ConfigError
from flows.config import JobConfig, OutputFormat
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow
from flows.outputs.answers import AnsweredRow, RowWriter
from flows.outputs.answers import ExportSummary as ExportSummary
from flows.outputs.errors_file import ErrorsWriter
from flows.outputs.files import OutputFile, OutputFiles
from flows.outputs.formats import OutputPaths, format_of, paths_of, result_fields
from flows.outputs.jsonl import JsonlWriter
from flows.outputs.manifest import render_manifest
from flows.outputs.openai_batch import OpenAIBatchWriter
from flows.outputs.results import TokenTexts
from flows.records import (
    BadRow,
    ManifestHash,
    OutputNames,
    PromptRecord,
    RecordReader,
)


def export_job(
    config: JobConfig, job: JobRow, ledger: Ledger, reader: RecordReader, output_path: Path
) -> ExportSummary:
    """Write the finished rows of a job, those that failed, and a manifest; old files are replaced.

    A row is finished when all of its samples are.

    Raises:
        ConfigError: the input is not the one that the job was planned with, a column collides
            with a result field, or the output cannot be written.
    """
    paths = paths_of(config, output_path)
    summary = ExportSummary(output_path=paths.output, manifest_path=paths.manifest)
    with OutputFiles() as files:
        export = _Export(config, reader, files, paths)
        answers = _AnswersInOrder(ledger.iter_completions(job.job_key))
        manifest_hash = ManifestHash()
        for record in export.checked_rows(reader):
            manifest_hash.add(record.row_id)
            samples = answers.of(record, reader)
            if samples and len(samples) >= samples[0].num_samples:
                row = AnsweredRow(record=record, samples=tuple(samples))
                summary.count(row)
                export.write(row)
            else:
                summary.num_pending += 1
        if manifest_hash.finish(reader.content_hash()) != job.manifest_hash:
            raise _changed_input(f"the sources of job {job.job_id} do not have the planned rows")
        written = export.finish()
        summary.errors_path = paths.errors if len(written) > 1 else None
        rendered = render_manifest(config, job, export.format, summary, written)
        files.open(paths.manifest).write(rendered)
        files.publish()
    return summary


class _Export:
    """The writers of one export and their files."""

    def __init__(
        self, config: JobConfig, reader: RecordReader, files: OutputFiles, paths: OutputPaths
    ) -> None:
        self.format = format_of(config, paths.output)
        self._names = OutputNames(config.output.result_prefix, result_fields(self.format))
        self._files = files
        self._file = files.open(paths.output)
        self._errors_file = files.open(paths.errors)
        self._writers = self._make_writers(config, reader)

    def checked_rows(self, reader: RecordReader) -> Iterator[PromptRecord | BadRow]:
        """Yield every row of the input; its columns fit into one object with the results."""
        for record in reader.read_all():
            self._names.check(record, reader)
            yield record

    def write(self, row: AnsweredRow) -> None:
        for writer in self._writers:
            writer.write(row)

    def finish(self) -> list[OutputFile]:
        """End the files and return them, that of the errors only when there are any."""
        for writer in self._writers:
            writer.finish()
        if self._errors_file.num_bytes:
            return [self._file, self._errors_file]
        self._files.leave_out(self._errors_file)
        return [self._file]

    def _make_writers(self, config: JobConfig, reader: RecordReader) -> list[RowWriter]:
        texts = TokenTexts(config.engine)
        if self.format is OutputFormat.OPENAI_BATCH:
            model = Path(config.engine.model_path).name
            return [OpenAIBatchWriter(self._file, self._errors_file, texts, model=model)]
        errors_writer = ErrorsWriter(self._errors_file, reader.describe)
        if self.format is OutputFormat.JSONL:
            prefix = config.output.result_prefix
            return [JsonlWriter(self._file, texts, prefix), errors_writer]
        return [self._make_table_writer(config, reader, texts), errors_writer]

    def _make_table_writer(
        self, config: JobConfig, reader: RecordReader, texts: TokenTexts
    ) -> RowWriter:
        # pyarrow takes long to import, and only tables need it.
        from flows.outputs.csv_table import CsvWriter
        from flows.outputs.parquet_table import ParquetWriter
        from flows.outputs.table_columns import TableColumns

        prefix = config.output.result_prefix
        columns = TableColumns(self.checked_rows(reader), config.sampling, prefix)
        if self.format is OutputFormat.CSV:
            return CsvWriter(self._file, columns, texts)
        return ParquetWriter(self._file, columns, texts)


class _AnswersInOrder:
    """Hands each row its completions from a stream that is in the order of the rows."""

    def __init__(self, completions: Iterator[CompletionRow]) -> None:
        self._completions = completions
        self._next = next(completions, None)

    def of(self, row: PromptRecord | BadRow, reader: RecordReader) -> Sequence[CompletionRow]:
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
