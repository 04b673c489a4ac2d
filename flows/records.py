"""Sources -> PromptRecord: reads the rows of a job, in order or one at its place.

It also says what an output line may be called and which input a job was planned with, because
planner and exporter must agree on both.
"""

from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine import ConfigError, RequestError
from flows.config import ColumnMapping, PromptConfig, SourceConfig, SourceFormat
from flows.prompts import PromptBuilder
from flows.row_fields import read_row_id
from flows.rows import BadRow as BadRow
from flows.rows import PromptRecord as PromptRecord
from flows.rows import RowLocation as RowLocation
from flows.rows import parse_columns, printable
from flows.sources.input_files import InputFile, find_files, source_of_path
from flows.sources.openai_batch import read_batch_request, read_custom_id
from flows.sources.selection import selected_rows
from flows.sources.source_file import SourceFile, SourceRow
from flows.sources.typed_fields import of_csv, of_table

ROW_ID_FIELD = "row_id"
# What an output line adds to the row's own columns, each behind output.result_prefix.
RESULT_FIELDS = (
    "sample_index",
    "text",
    "replies",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "is_truncated",
    "logprobs",
    "reply_logprobs",
    "prompt_logprobs",
    "error",
)


class RecordReader:
    """Reads the rows of all sources, in order. One reader serves one thread.

    Raises:
        ConfigError: a source that is not a readable file, or a template that does not compile.
    """

    def __init__(self, sources: tuple[SourceConfig, ...], prompt: PromptConfig) -> None:
        self.sources = sources
        self._rows = _RowBuilder(prompt)
        self._files = find_files(sources)
        self._rows.check_use(file.format for files in self._files for file in files)
        self._hashes: dict[str, str] | None = None
        self._open: tuple[InputFile, SourceFile] | None = None

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
        """Close the file that read_at has opened."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def read_all(self) -> Iterator[PromptRecord | BadRow]:
        """Yield every row once, in input order; a row that cannot be asked is a BadRow."""
        row_index = 0
        hashes = {}
        for source_index, source in enumerate(self.sources):
            digest = blake2b(digest_size=32)
            for file_index, row in self._rows_of(source_index):
                digest.update(row.content)
                location = RowLocation(
                    source_index=source_index,
                    file_index=file_index,
                    offset=row.offset,
                    line=row.line,
                )
                yield self._read_row(row, row_index, location)
                row_index += 1
            hashes[source.resolved_name] = digest.hexdigest()
        self._hashes = hashes

    def read_at(self, row_index: int, location: RowLocation) -> PromptRecord | BadRow:
        """Return the row that read_all gave at this place.

        Raises:
            ConfigError: the file has changed and no row begins there.
        """
        row = self._file_at(location).row_at(location.offset, location.line)
        if row is None:
            raise ConfigError(
                f"{self.describe(location)}: the row is gone, so the file has changed since the "
                "job was planned; bring the old file back, or start a new job"
            )
        return self._read_row(row, row_index, location)

    def describe(self, location: RowLocation) -> str:
        """Return file and line, as messages name a row."""
        return self._files[location.source_index][location.file_index].describe(location.line)

    @property
    def has_batch_requests(self) -> bool:
        """True when a source is an OpenAI batch file."""
        formats = (file.format for files in self._files for file in files)
        return SourceFormat.OPENAI_BATCH in formats

    def is_batch_request(self, location: RowLocation) -> bool:
        """Tell whether the row is a line of an OpenAI batch file."""
        file = self._files[location.source_index][location.file_index]
        return file.format is SourceFormat.OPENAI_BATCH

    def content_hash(self) -> dict[str, str]:
        """Return a hash of each source's rows by source name; blank lines do not count.

        It is of the rows that read_all gave when it last came to the end; before that, they are
        read here.
        """
        if self._hashes is None:
            for _ in self.read_all():
                pass
        assert self._hashes is not None
        return self._hashes

    def _rows_of(self, source_index: int) -> Iterator[tuple[int, SourceRow]]:
        files = self._files[source_index]

        def count_rows() -> int:
            return sum(file.open().num_rows() for file in files)

        def all_rows() -> Iterator[tuple[int, SourceRow]]:
            for file_index, file in enumerate(files):
                with closing(file.open()) as opened:
                    for row in opened.rows():
                        yield file_index, row

        return selected_rows(self.sources[source_index], all_rows(), count_rows)

    def _file_at(self, location: RowLocation) -> SourceFile:
        # One file is open at a time: a pattern may stand for more files than a process may open.
        file = self._files[location.source_index][location.file_index]
        if self._open is None or self._open[0] is not file:
            self.close()
            self._open = (file, file.open())
        return self._open[1]

    def _read_row(
        self, row: SourceRow, row_index: int, location: RowLocation
    ) -> PromptRecord | BadRow:
        file = self._files[location.source_index][location.file_index]
        mapping = self.sources[location.source_index].columns
        row_id: str | None = None
        columns: dict[str, Any] = row.columns or {}
        try:
            if row.fault is not None:
                raise row.fault
            if row.columns is None:
                columns = parse_columns(row.content)
            row_id = self._rows.read_id(columns, mapping, file.format)
            return PromptRecord(
                row_index=row_index,
                row_id=row_id or file.row_id_of(row.line),
                location=location,
                columns=columns,
                **self._rows.read_request(columns, mapping, file.format),
            )
        except RequestError as error:
            message = printable(f"{self.describe(location)}: {error.message}")
            return BadRow(
                row_index=row_index,
                row_id=row_id or file.row_id_of(row.line),
                location=location,
                error=RequestError(error.code, message),
                columns=columns,
            )


class _RowBuilder:
    """Reads ids and requests from columns, as the format of the file has them."""

    def __init__(self, prompt: PromptConfig) -> None:
        self._builder = PromptBuilder(prompt)
        self._has_templates = prompt.template is not None or prompt.system is not None

    def check_use(self, formats: Iterator[SourceFormat]) -> None:
        """Refuse templates that no row would see.

        Raises:
            ConfigError: all files are batch files, whose lines are whole requests.
        """
        if self._has_templates and set(formats) == {SourceFormat.OPENAI_BATCH}:
            raise ConfigError(
                "prompt.template or prompt.system is set, and every source is an openai_batch "
                "file, whose lines are whole requests; leave them out"
            )

    def read_id(
        self, columns: dict[str, Any], mapping: ColumnMapping, file_format: SourceFormat
    ) -> str | None:
        """Return the row's own id."""
        if file_format is SourceFormat.OPENAI_BATCH:
            return read_custom_id(columns)
        if file_format is SourceFormat.CSV and not columns.get(mapping.id or ""):
            return None
        return read_row_id(columns, mapping)

    def read_request(
        self, columns: dict[str, Any], mapping: ColumnMapping, file_format: SourceFormat
    ) -> dict[str, Any]:
        """Return what is asked, as the fields of a PromptRecord."""
        if file_format is SourceFormat.OPENAI_BATCH:
            return read_batch_request(columns)
        fields = columns
        if file_format is SourceFormat.CSV:
            fields = of_csv(columns, mapping)
        elif file_format is not SourceFormat.JSONL:
            fields = of_table(columns, mapping)
        return self._builder.build(columns, mapping, fields=fields)


class ManifestHash:
    """Says which input a job has: the ids of its rows in order, and the content of its sources."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=32)

    def add(self, row_id: str) -> None:
        """Take in the next row."""
        encoded = row_id.encode("utf-8")
        self._digest.update(b"%d:%s" % (len(encoded), encoded))

    def finish(self, source_hashes: dict[str, str]) -> str:
        """Return the hash; the names of the sources do not count, so a file may be moved."""
        digest = self._digest.copy()
        digest.update("|".join(source_hashes.values()).encode("ascii"))
        return digest.hexdigest()


class OutputNames:
    """The names that an output line adds to the columns of a row, and what collides with them.

    fields are the names that the output's format adds; none, when it carries no columns.
    """

    def __init__(self, result_prefix: str, fields: tuple[str, ...] = RESULT_FIELDS) -> None:
        self._prefix = result_prefix
        self._results = frozenset(result_prefix + name for name in fields)

    def check(self, row: PromptRecord | BadRow, reader: RecordReader) -> None:
        """Make sure that the row's columns and the answer fit into one object.

        Raises:
            ConfigError: names the column, the file, the line and the way out.
        """
        taken = self._results.intersection(row.columns)
        if taken:
            raise ConfigError(
                f"{reader.describe(row.location)}: the column {min(taken)!r} has the name of a "
                f"result field, and one would overwrite the other in the output; set "
                f"output.result_prefix (now {self._prefix!r}), for example to 'answer_'"
            )
        id_column = reader.sources[row.location.source_index].columns.id
        if self._results and ROW_ID_FIELD in row.columns and id_column != ROW_ID_FIELD:
            raise ConfigError(
                f"{reader.describe(row.location)}: the column 'row_id' has the name under which "
                "the output holds the row's id; write columns.id: row_id in the source to use it "
                "as the id, or rename the column"
            )


def refuse_to_overwrite_a_source(sources: tuple[SourceConfig, ...], output_path: Path) -> None:
    """Make sure that the output is not one of the inputs, and will not be one at a resume.

    Raises:
        ConfigError: it is.
    """
    source = source_of_path(sources, output_path)
    if source is not None:
        raise ConfigError(
            f"output.path {output_path} is the source {source}; it would be overwritten, so name "
            "another file"
        )
