"""Plans a job before any weights load: reads, checks and counts every row, and indexes it.

A bad row becomes an error row of the index and the job goes on. What only the user can mend (two
rows with one id, a column that collides with a result field, no rows) stops the job here.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine import ConfigError, GenerateRequest, RequestError, RequestErrorCode, SamplingParams
from flows.config import JobConfig
from flows.records import (
    BadRow,
    ManifestHash,
    OutputNames,
    PromptRecord,
    RecordReader,
    refuse_to_overwrite_a_source,
)
from flows.row_index import DuplicateRowIdError, IndexRow, RowIndex, RowIndexBuilder
from flows.rows import printable

logger = logging.getLogger(__name__)

_BATCH_ROWS = 1000
# Stands for a reply that is not there yet: one token. Some chat templates refuse an empty one.
_SHORTEST_REPLY = "."


class PromptEncoder(Protocol):
    """What turns a request into the tokens that the model will see."""

    def encode_request(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            RequestError: the prompt cannot be encoded.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found in the input. Prompt lengths are of the rows that can be asked."""

    index_path: Path
    num_rows: int
    num_bad_rows: int
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
    num_rows_by_length: Counter[int] = field(default_factory=Counter)
    manifest: ManifestHash = field(default_factory=ManifestHash)

    def add(self, rows: list[IndexRow]) -> None:
        for row in rows:
            self.num_rows += 1
            self.manifest.add(row.row_id)
            if row.error_code is None:
                self.num_rows_by_length[row.num_prompt_tokens] += 1
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
    indexer = _RowIndexer(reader, encoder, default_sampling, max_model_len)
    names = OutputNames(config.output.result_prefix)
    tally = _Tally()
    with RowIndex.create(index_path) as builder:
        rows = reader.read_all()
        while batch := list(islice(rows, _BATCH_ROWS)):
            for row in batch:
                names.check(row, reader)
            indexed = [indexer.index(row) for row in batch]
            _insert(builder, indexed, reader)
            tally.add(indexed)
        if not tally.num_rows:
            paths = ", ".join(str(source.path) for source in config.sources)
            raise ConfigError(f"no rows in {paths}; wanted one JSON object on each line")
        builder.publish(num_rows=tally.num_rows, num_shards=config.shards)
    if indexer.num_outgrowing:
        logger.warning(
            "%d conversation(s) outgrow max_model_len %d if every reply takes its max_tokens; a "
            "row whose next turn does not fit then fails with prompt_too_long",
            indexer.num_outgrowing, max_model_len,
        )  # fmt: skip
    plan = _summarise(tally, index_path, reader.content_hash())
    logger.info(
        "planned rows=%s bad_rows=%s prompt_tokens=%s longest_prompt_tokens=%s",
        plan.num_rows, plan.num_bad_rows, plan.num_prompt_tokens, plan.prompt_tokens_max,
    )  # fmt: skip
    return plan


class _RowIndexer:
    """Checks one row at a time and counts its tokens."""

    def __init__(
        self,
        reader: RecordReader,
        encoder: PromptEncoder,
        default_sampling: SamplingParams,
        max_model_len: int,
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._default_sampling = default_sampling
        self._max_model_len = max_model_len
        self.num_outgrowing = 0  # conversations that long replies would make too long

    def index(self, row: PromptRecord | BadRow) -> IndexRow:
        """Return the row as the index holds it, with what is wrong with it."""
        location = row.location
        indexed = IndexRow(
            row.row_index, location.source_index, location.offset, location.line, row.row_id
        )
        if isinstance(row, BadRow):
            return _refused(indexed, row.error.code, row.error.message)
        try:
            params = self._default_sampling.overlaid(row.sampling)
            _check_sampling(row, params)
            request = row.to_request(params)
            num_tokens = len(self._encoder.encode_request(request))
            indexed = indexed._replace(num_prompt_tokens=num_tokens)
            if request.turns:
                self._check_conversation(request)
            elif num_tokens + min(params.max_tokens, 1) > self._max_model_len:
                raise self._too_long(f"the prompt has {num_tokens} tokens", "the prompt")
        except RequestError as error:
            message = f"{self._reader.describe(location)}: {error.message}"
            return _refused(indexed, error.code, message)
        return indexed

    def _check_conversation(self, request: GenerateRequest) -> None:
        """Refuse a conversation whose last turn cannot fit even after the shortest replies.

        What longer replies leave no room for is the engine's to refuse, turn by turn.
        """
        messages = list(request.messages or ())
        for turn in request.turns:
            messages.append({"role": "assistant", "content": _SHORTEST_REPLY})
            messages.append({"role": "user", "content": turn})
        whole = replace(request, messages=messages, turns=())
        num_tokens = len(self._encoder.encode_request(whole))
        num_turns = len(request.turns) + 1
        if num_tokens + 1 > self._max_model_len:
            found = f"the last of its {num_turns} turns has a prompt of {num_tokens} tokens or more"
            raise self._too_long(found, "the conversation")
        longest = num_tokens + num_turns * request.sampling_params.max_tokens
        self.num_outgrowing += longest > self._max_model_len

    def _too_long(self, found: str, what: str) -> RequestError:
        return RequestError(
            RequestErrorCode.PROMPT_TOO_LONG,
            f"{found} and its answer needs at least one, more than max_model_len "
            f"{self._max_model_len}; shorten {what} or raise engine.max_model_len",
        )


def _check_sampling(row: PromptRecord, params: SamplingParams) -> None:
    """Refuse sampling that the engine knows and a job does not."""
    if params.n > 1:
        problem = f"n is {params.n}, and a job keeps one answer of each row so far; leave n out"
    elif row.turns and params.is_scoring_only:
        problem = "max_tokens is 0, and a conversation needs replies; raise it"
    else:
        return
    raise RequestError(RequestErrorCode.INVALID_SAMPLING_PARAMS, f"sampling parameter {problem}")


def _refused(row: IndexRow, code: RequestErrorCode, message: str) -> IndexRow:
    return row._replace(error_code=code.value, error_message=printable(message))


def _insert(builder: RowIndexBuilder, rows: list[IndexRow], reader: RecordReader) -> None:
    try:
        builder.insert(rows)
    except DuplicateRowIdError as error:
        first = reader.describe(error.first.location)
        second = reader.describe(error.second.location)
        raise ConfigError(
            f"two rows have the id {error.second.row_id!r}: {first} and {second}; give each row "
            "an id of its own, or set columns.id: null in the source to number rows by line"
        ) from error


def _summarise(tally: _Tally, index_path: Path, source_hashes: dict[str, str]) -> Plan:
    lengths = tally.num_rows_by_length
    return Plan(
        index_path=index_path,
        num_rows=tally.num_rows,
        num_bad_rows=tally.num_bad_rows,
        num_prompt_tokens=sum(length * count for length, count in lengths.items()),
        prompt_tokens_p50=tally.length_at(50),
        prompt_tokens_p95=tally.length_at(95),
        prompt_tokens_max=max(lengths, default=0),
        manifest_hash=tally.manifest.finish(source_hashes),
        source_hashes=source_hashes,
    )
