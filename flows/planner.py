"""Plans a job before any weights load: reads, checks and counts every row, and indexes it.

A bad row becomes an error row of the index and the job goes on. What only the user can mend (two
rows with one id, a column that collides with a result field, no rows) stops the job here.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from engine import ConfigError, SamplingParams
from flows.config import JobConfig
from flows.outputs.formats import planned_result_fields
from flows.records import (
    BadRow,
    ManifestHash,
    OutputNames,
    PromptRecord,
    RecordReader,
    refuse_to_overwrite_a_source,
)
from flows.row_index import DuplicateRowIdError, IndexRow, RowIndex, RowIndexBuilder
from flows.row_indexer import PromptEncoder, RowIndexer
from flows.rows import shown

logger = logging.getLogger(__name__)

_BATCH_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found in the input. Prompt lengths are of the rows that can be asked.

    num_bad_rows have an error, num_skipped_rows are left out on purpose. num_duplicate_rows are the
    same as an earlier row and take its answer.
    """

    index_path: Path
    num_rows: int
    num_bad_rows: int
    num_skipped_rows: int
    num_duplicate_rows: int
    num_prompt_tokens: int
    prompt_tokens_p50: int
    prompt_tokens_p95: int
    prompt_tokens_max: int
    manifest_hash: str
    source_hashes: dict[str, str]

    def open_index(self) -> RowIndex:
        """Open the row index that this plan has written."""
        return RowIndex.open(self.index_path)


@dataclass(slots=True)
class _Tally:
    """Counts rows as they pass. Lengths are counted by value: there are few different ones."""

    num_rows: int = 0
    num_bad_rows: int = 0
    num_skipped_rows: int = 0
    num_rows_by_length: Counter[int] = field(default_factory=Counter)
    manifest: ManifestHash = field(default_factory=ManifestHash)

    def add(self, rows: list[IndexRow]) -> None:
        for row in rows:
            self.num_rows += 1
            self.manifest.add(row.row_id)
            if row.error_code is None:
                self.num_rows_by_length[row.num_prompt_tokens] += 1
            elif row.is_skipped:
                self.num_skipped_rows += 1
            else:
                self.num_bad_rows += 1

    def length_at(self, percent: int) -> int:
        """Return the nearest-rank percentile of the prompt lengths, 0 when there are none."""
        rank = -(-self.num_rows_by_length.total() * percent // 100)
        for length in sorted(self.num_rows_by_length):
            rank -= self.num_rows_by_length[length]
            if rank <= 0:
                return length
        return 0


class _OtherModels:
    """Rows of batch files that name a model which is not the one that answers them."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._names = (model_path, Path(model_path).name, None)
        self._num_rows = 0
        self._first = ""

    def add(self, rows: Iterable[PromptRecord | BadRow], reader: RecordReader) -> None:
        """Take in what rows ask for."""
        for row in rows:
            if isinstance(row, BadRow) or not reader.is_batch_request(row.location):
                continue
            name = row.columns["body"].get("model")
            if name not in self._names:
                self._first = self._first or f"{reader.describe(row.location)}: {shown(name)}"
                self._num_rows += 1

    def warn(self) -> None:
        """Say it once."""
        if self._num_rows:
            logger.warning(
                "%d row(s) of batch files name another model (%s); all are answered by %s",
                self._num_rows, self._first, self._model_path,
            )  # fmt: skip


def plan_job(
    config: JobConfig,
    reader: RecordReader,
    encoder: PromptEncoder,
    *,
    max_model_len: int,
    index_path: Path,
    default_sampling: SamplingParams,
) -> Plan:
    """Read every row once and write the row index of the job.

    Args:
        config: the job.
        reader: reads the job's sources.
        encoder: counts the tokens of a prompt.
        max_model_len: most tokens of prompt and answer together.
        index_path: where the index goes; an old one is replaced.
        default_sampling: the sampling of a row without overrides.

    Raises:
        ConfigError: two rows have one id, a column collides with a result field, there are no
            rows, or the output would overwrite a source.
    """
    if config.output.path is not None:
        refuse_to_overwrite_a_source(config.sources, config.output.path)
    indexer = RowIndexer(
        reader,
        encoder,
        default_sampling,
        max_model_len=max_model_len,
        too_long=config.too_long,
        deduplicate=config.deduplicate,
    )
    names = OutputNames(config.output.result_prefix, planned_result_fields(config))
    tally = _Tally()
    other_models = _OtherModels(config.engine.model_path)
    with RowIndex.create(index_path) as builder:
        rows = reader.read_all()
        while batch := list(islice(rows, _BATCH_ROWS)):
            for row in batch:
                names.check(row, reader)
            if reader.has_batch_requests:
                other_models.add(batch, reader)
            indexed = [indexer.index(row) for row in batch]
            builder.insert(indexed)
            tally.add(indexed)
        if not tally.num_rows:
            paths = ", ".join(source.path for source in config.sources)
            raise ConfigError(f"no rows in {paths}; wanted at least one")
        num_duplicate_rows = _publish(builder, reader)
    if indexer.num_outgrowing:
        logger.warning(
            "%d conversation(s) outgrow max_model_len %d if every reply takes its max_tokens; a "
            "row whose next turn does not fit then fails with prompt_too_long",
            indexer.num_outgrowing, max_model_len,
        )  # fmt: skip
    other_models.warn()
    plan = _summarise(tally, index_path, reader.content_hash(), num_duplicate_rows)
    logger.info(
        "planned rows=%s bad_rows=%s skipped_rows=%s duplicate_rows=%s prompt_tokens=%s "
        "longest_prompt_tokens=%s",
        plan.num_rows, plan.num_bad_rows, plan.num_skipped_rows, plan.num_duplicate_rows,
        plan.num_prompt_tokens, plan.prompt_tokens_max,
    )  # fmt: skip
    return plan


def _publish(builder: RowIndexBuilder, reader: RecordReader) -> int:
    try:
        return builder.publish()
    except DuplicateRowIdError as error:
        first = reader.describe(error.first.location)
        second = reader.describe(error.second.location)
        raise ConfigError(
            f"two rows have the id {error.second.row_id!r}: {first} and {second}; give each row "
            "an id of its own, or set columns.id: null in the source to number rows by line"
        ) from error


def _summarise(
    tally: _Tally, index_path: Path, source_hashes: dict[str, str], num_duplicate_rows: int
) -> Plan:
    lengths = tally.num_rows_by_length
    return Plan(
        index_path=index_path,
        num_rows=tally.num_rows,
        num_bad_rows=tally.num_bad_rows,
        num_skipped_rows=tally.num_skipped_rows,
        num_duplicate_rows=num_duplicate_rows,
        num_prompt_tokens=sum(length * count for length, count in lengths.items()),
        prompt_tokens_p50=tally.length_at(50),
        prompt_tokens_p95=tally.length_at(95),
        prompt_tokens_max=max(lengths, default=0),
        manifest_hash=tally.manifest.finish(source_hashes),
        source_hashes=source_hashes,
    )
