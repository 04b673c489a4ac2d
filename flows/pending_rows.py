"""The rows of a shard that have no result: as requests for the engine, and back as results.

Requests are made in a thread of the engine, results in the shard's own. Rows that ask the same
are asked once a shard: the first of them leads, the others get what it gets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from engine import (
    Completion,
    ConfigError,
    FinishReason,
    GenerateRequest,
    PartialOutput,
    Reply,
    RequestError,
    SamplingParams,
)
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, DoneSamples, PartialRow
from flows.logprob_blob import StoredLogprobs
from flows.records import BadRow, RecordReader
from flows.row_feed import RowFeed
from flows.row_index import IndexRow, RowIndex
from flows.row_sampling import RowSampling
from flows.schema import RowState

_PAGE_ROWS = 1000
# Answers may be megabytes long, so that fewer of them are held in memory at a time.
_PAGE_ANSWERS = 100


class _OpenRow(msgspec.Struct, kw_only=True):
    """A row that the engine works on."""

    row: IndexRow
    num_samples: int
    num_left: int
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """What one engine did for a shard, in rows; num_length counts samples cut at max_tokens."""

    num_ok: int = 0
    num_error: int = 0
    num_length: int = 0
    num_deduplicated: int = 0
    num_saved_tokens: int = 0


class PendingRows:
    """Asks one engine about rows of a lease, and keeps count of those that are being answered.

    Other engines may be asked about other rows of the same lease; the feed shares them out.
    """

    def __init__(
        self,
        ledger: Ledger,
        feed: RowFeed,
        reader: RecordReader,
        *,
        index_path: Path,
        sampling: SamplingParams,
        timeout_seconds: float | None,
    ) -> None:
        self._ledger = ledger
        self._feed = feed
        self._lease = feed.lease
        self._reader = reader
        self._index_path = index_path
        self._sampling = RowSampling(sampling)
        self._timeout_seconds = timeout_seconds
        self._first = feed.lease.first_row
        self._end = feed.lease.first_row + feed.lease.num_rows
        self._open: dict[str, _OpenRow] = {}
        # Taken from the feed and without a result, those that were not asked yet among them.
        self._taken: set[int] = set()
        # Two counters, for each is changed by one thread alone.
        self._num_asked = 0
        self._num_answered = 0
        # For the shard's own thread; requests are made with a connection of their own.
        self._index = RowIndex.open(index_path)
        duplicates = self._index.duplicates_between(self._first, self._end)
        self._has_duplicates = next(duplicates, None) is not None
        self.counts = RowCounts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._index.close()

    def give_back(self, *, but: Sequence[int] = ()) -> None:
        """Let another engine, or this one later, answer what this one was to answer."""
        rows = self._taken.difference(but)
        self._taken -= rows
        self._feed.give_back(rows)

    # Requests.

    def requests(self) -> Iterator[GenerateRequest]:
        """Yield a request for each row without a result, as the feed gives them out."""
        self._forget_open()
        with RowIndex.open(self._index_path) as index:
            while span := self._feed.take(lambda: self._num_asked - self._num_answered):
                self._taken.update(span)
                page = list(index.rows_between(span.start, span.stop))
                yield from self._requests_of_page(index, page)

    def requests_of(self, row_indices: Sequence[int]) -> Iterator[GenerateRequest]:
        """Yield a request for each of these rows that has no result."""
        self._forget_open()
        with RowIndex.open(self._index_path) as index:
            for row_index in row_indices:
                page = list(index.rows_between(row_index, row_index + 1))
                yield from self._requests_of_page(index, page)

    def _requests_of_page(
        self, index: RowIndex, page: Sequence[IndexRow]
    ) -> Iterator[GenerateRequest]:
        first, last = page[0].row_index, page[-1].row_index
        done = self._ledger.done_samples(self._lease.job_key, range(first, last + 1))
        partials = self._partials_of(first, last)
        for row in page:
            samples = done.get(row.row_index)
            is_done = samples is not None and samples.is_complete
            if not is_done and row.error_code is None and self._leads(index, row):
                yield self._to_request(row, samples, partials.get(row.row_index, ()))
            else:
                self._taken.discard(row.row_index)

    def _forget_open(self) -> None:
        self._open.clear()
        self._num_asked = self._num_answered = 0

    def _leads(self, index: RowIndex, row: IndexRow) -> bool:
        """Tell whether the row is the first of its kind in this shard."""
        if row.duplicate_of is None:
            return True
        if row.duplicate_of >= self._first:
            return False
        return index.first_follower(row.duplicate_of, self._first) == row.row_index

    def _to_request(
        self, row: IndexRow, done: DoneSamples | None, partials: Sequence[PartialRow]
    ) -> GenerateRequest:
        record = self._reader.read_at(row.row_index, row.location)
        if isinstance(record, BadRow) or record.row_id != row.row_id:
            raise ConfigError(
                f"{self._reader.describe(row.location)}: the row changed since the job was "
                "planned; put the file back, or start a new job"
            )
        params = self._sampling.of(record, truncate_prompt_tokens=row.truncate_prompt_tokens).params
        request = record.to_request(params, default_timeout_seconds=self._timeout_seconds)
        left = set(range(params.n)) - (set() if done is None else done.indices)
        self._open[row.row_id] = _OpenRow(row=row, num_samples=params.n, num_left=len(left))
        self._num_asked += len(left)
        if done is None and not partials:
            return request
        return replace(
            request,
            sample_indices=None if len(left) == params.n else tuple(sorted(left)),
            partials=tuple(_to_outputs(row.row_id, partials, left)),
        )

    def _partials_of(self, first: int, last: int) -> dict[int, list[PartialRow]]:
        rows = self._ledger.partials_of(self._lease.job_key, first, last)
        return {index: list(of_row) for index, of_row in groupby(rows, lambda row: row.row_index)}

    # Results.

    def results_of(self, completion: Completion) -> Iterator[CompletionRow]:
        """Yield what a completion is in the ledger, for its row and for those that ask the same."""
        open_row = self._open[completion.request_id]
        open_row.num_left -= 1
        open_row.has_failed |= completion.error is not None
        self._num_answered += 1
        self._feed.wake()
        if not open_row.num_left:
            del self._open[completion.request_id]
            self._taken.discard(open_row.row.row_index)
            self._count(has_failed=open_row.has_failed)
        self.counts.num_length += completion.finish_reason is FinishReason.LENGTH
        result = _to_row(completion, open_row)
        yield result
        yield from self._copies_to_followers(open_row.row, result)

    def fail(self, row_index: int, error: RequestError) -> Iterator[CompletionRow]:
        """Yield error results for the samples that a row has not, because of the row itself."""
        open_row = next(o for o in self._open.values() if o.row.row_index == row_index)
        row = open_row.row
        del self._open[row.row_id]
        self._taken.discard(row_index)
        self._count(has_failed=True)
        done = self._ledger.done_samples(self._lease.job_key, [row_index]).get(row_index)
        left = set(range(open_row.num_samples)) - (set() if done is None else done.indices)
        for sample_index in sorted(left):
            result = CompletionRow(
                row_index=row_index,
                sample_index=sample_index,
                row_id=row.row_id,
                state=RowState.ERROR,
                error_code=error.code.value,
                error_message=error.message,
                finish_reason="error",
                num_prompt_tokens=row.num_prompt_tokens,
                num_samples=open_row.num_samples,
                request_hash=row.request_hash,
            )
            yield result
            yield from self._copies_to_followers(row, result)

    def copies_of_done(self) -> Iterator[CompletionRow]:
        """Yield results for rows that ask what another row was answered before."""
        duplicates = self._index.duplicates_between(self._first, self._end)
        pending = self._without_result(duplicates)
        while page := list(islice(pending, _PAGE_ANSWERS)):
            for row, answer in self._with_answers(page):
                yield self._copy(answer, row)

    def partial_rows(self, partials: Iterable[PartialOutput]) -> Iterator[PartialRow]:
        """Yield what the ledger keeps of samples that go on."""
        for partial in partials:
            row_index = self._open[partial.request_id].row.row_index
            for turn_index, reply in enumerate(partial.replies):
                yield PartialRow(
                    row_index=row_index,
                    sample_index=partial.sample_index,
                    turn_index=turn_index,
                    token_ids=reply.token_ids,
                    logprobs=StoredLogprobs(output=tuple(reply.logprobs or ())),
                    text=reply.text,
                )
            yield PartialRow(
                row_index=row_index,
                sample_index=partial.sample_index,
                turn_index=len(partial.replies),
                token_ids=partial.token_ids,
                logprobs=StoredLogprobs(output=tuple(partial.logprobs or ())),
            )

    def row_indices_of(self, request_ids: Iterable[str]) -> list[int]:
        """Return the rows of those of the requests that are open."""
        return sorted(self._open[name].row.row_index for name in request_ids if name in self._open)

    def without_result(self, row_indices: Sequence[int]) -> list[int]:
        """Return those of the rows that have no result in the ledger yet."""
        if not row_indices:
            return []
        done = self._ledger.done_samples(self._lease.job_key, row_indices)
        return [i for i in row_indices if i not in done or not done[i].is_complete]

    def _count(self, *, has_failed: bool) -> None:
        if has_failed:
            self.counts.num_error += 1
        else:
            self.counts.num_ok += 1

    def _copies_to_followers(self, row: IndexRow, result: CompletionRow) -> Iterator[CompletionRow]:
        if not self._has_duplicates or not row.may_fold:
            return
        leader = row.row_index if row.duplicate_of is None else row.duplicate_of
        followers = self._index.followers_of(leader, row.row_index + 1, self._end)
        for follower in self._without_result(followers):
            yield self._copy(result, follower)

    def _copy(self, answer: CompletionRow, row: IndexRow) -> CompletionRow:
        self.counts.num_deduplicated += 1
        self.counts.num_saved_tokens += answer.num_prompt_tokens + answer.num_output_tokens
        self._count(has_failed=answer.state is RowState.ERROR)
        return replace(answer, row_index=row.row_index, row_id=row.row_id)

    def _with_answers(self, page: Sequence[IndexRow]) -> Iterator[tuple[IndexRow, CompletionRow]]:
        """Yield rows with what the first of their kind has got, in the job or else in this shard."""
        leaders = {row.duplicate_of for row in page if row.duplicate_of is not None}
        in_shard = {row: self._index.first_follower(row, self._first) for row in leaders}
        wanted = {row for row in (*leaders, *in_shard.values()) if row is not None}
        answers: dict[int | None, CompletionRow] = {}
        for answer in self._ledger.read_rows(self._lease.job_key, wanted):
            answers.setdefault(answer.row_index, answer)
        for row in page:
            assert row.duplicate_of is not None
            first = answers.get(row.duplicate_of, answers.get(in_shard[row.duplicate_of]))
            if first is not None:
                yield row, first

    def _without_result(self, rows: Iterator[IndexRow]) -> Iterator[IndexRow]:
        while page := list(islice(rows, _PAGE_ROWS)):
            # Not as a range: followers may lie as far apart as the shard is long.
            done = self._ledger.done_samples(self._lease.job_key, [row.row_index for row in page])
            yield from (row for row in page if row.row_index not in done)


def _to_row(completion: Completion, open_row: _OpenRow) -> CompletionRow:
    error, row = completion.error, open_row.row
    logprobs = StoredLogprobs(
        output=tuple(completion.logprobs or ()),
        prompt=tuple(completion.prompt_logprobs or ()),
        turns=tuple(tuple(reply.logprobs or ()) for reply in completion.replies),
    )
    return CompletionRow(
        row_index=row.row_index,
        sample_index=completion.sample_index,
        row_id=row.row_id,
        state=RowState.OK if error is None else RowState.ERROR,
        error_code=None if error is None else error.code.value,
        error_message=None if error is None else error.message,
        finish_reason=completion.finish_reason.value,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
        text=completion.text if error is None else None,
        token_ids=completion.token_ids,
        turns=tuple(reply.text for reply in completion.replies),
        logprobs=logprobs or None,
        num_samples=open_row.num_samples,
        is_truncated=completion.is_truncated,
        request_hash=row.request_hash,
    )


def _to_outputs(
    request_id: str, rows: Iterable[PartialRow], wanted: set[int]
) -> Iterator[PartialOutput]:
    """Put the turns of each sample together again."""
    for sample_index, turns in groupby(rows, lambda row: row.sample_index):
        if sample_index not in wanted:
            continue
        replies: list[Reply] = []
        partial = PartialOutput(request_id=request_id, sample_index=sample_index)
        for turn in turns:
            logprobs = turn.logprobs.output if turn.logprobs else None
            token_ids = tuple(turn.token_ids)
            if turn.text is None:
                partial = replace(partial, token_ids=token_ids, logprobs=logprobs)
            else:
                replies.append(Reply(text=turn.text, token_ids=token_ids, logprobs=logprobs))
        yield replace(partial, replies=tuple(replies))
