"""Runs one shard: pending rows in, answers committed. Knows nothing of Prefect."""

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from engine import (
    Bucket,
    Completion,
    ConfigError,
    GenerateRequest,
    OfflineInference,
    RunStats,
    SamplingParams,
)
from flows.config import JobConfig
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow, Lease
from flows.owner import Owner
from flows.records import BadRow, RecordReader
from flows.row_index import IndexRow, RowIndex
from flows.schema import RowState, ShardState
from flows.shard_writer import ShardWriter
from flows.stacks import Slot, StackPool

logger = logging.getLogger(__name__)
_PAGE_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What every shard of a job shares. sampling is the job's, with its seed filled in."""

    config: JobConfig
    job: JobRow
    index_path: Path
    sampling: SamplingParams
    job_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What one attempt at a shard did; counts are of this attempt alone.

    device and dtype are None when it was stopped before an engine was loaded.
    """

    shard_index: int
    state: ShardState
    slot: int
    device: str | None = None
    dtype: str | None = None
    num_resumed: int = 0
    num_ok: int = 0
    num_error: int = 0
    stats: RunStats = field(default_factory=RunStats)


def run_shard(
    shard_job: ShardJob,
    shard_index: int,
    *,
    ledger: Ledger,
    stacks: StackPool,
    stop: threading.Event,
    flow_run_id: str | None = None,
) -> ShardSummary:
    """Answer the pending rows of one shard.

    When `stop` is set, the step in flight is finished, what is there is committed, and the shard
    is left resumable.

    Raises:
        LedgerError: somebody else holds the shard, or the lease was lost.
        WorkerError: a worker failed; what was finished is committed.
        ConfigError: the input changed since it was planned.
    """
    with stacks.borrow() as slot:  # first, so that a shard that waits holds no lease
        if stop.is_set():
            return ShardSummary(
                shard_index=shard_index, state=ShardState.INTERRUPTED, slot=slot.number
            )
        lease = ledger.acquire_shard(
            shard_job.job.job_key,
            shard_index,
            owner=Owner.current(),
            lease_seconds=shard_job.config.lease_seconds,
            flow_run_id=flow_run_id,
        )
        try:
            summary = _ShardRun(shard_job, ledger, lease, stop).answer_all(slot)
        except Exception as error:
            ledger.release_shard(lease, ShardState.FAILED, error_message=str(error) or repr(error))
            raise
        except BaseException:
            ledger.release_shard(lease, ShardState.INTERRUPTED)
            raise
        ledger.release_shard(
            lease,
            summary.state,
            busy_seconds=summary.stats.busy_seconds,
            stats={"preemptions": summary.stats.num_preemptions, "steps": summary.stats.num_steps},
        )
        return summary


class _ShardRun:
    """One attempt at one shard."""

    def __init__(
        self, shard_job: ShardJob, ledger: Ledger, lease: Lease, stop: threading.Event
    ) -> None:
        self._shard_job = shard_job
        self._ledger = ledger
        self._lease = lease
        self._stop = stop
        self._row_index_of: dict[str, int] = {}
        self._is_exhausted = False
        self._num_resumed = 0
        self._num_ok = 0
        self._num_error = 0

    def answer_all(self, slot: Slot) -> ShardSummary:
        """Run every pending row, commit every answer."""
        job_dir, config = self._shard_job.job_dir, self._shard_job.config
        stream_path = job_dir / "stream.jsonl" if config.stream_output else None
        # The writer comes first: its heartbeat keeps the lease while a model loads.
        with (
            ShardWriter(self._ledger, self._lease, config, stream_path=stream_path) as writer,
            RecordReader(config.sources, config.prompt) as reader,
        ):
            engine = slot.engine()
            writer.device = engine.device
            engine.take_stats()
            with closing(engine.run(self._pending(reader), stop=self._stop)) as completions:
                for completion in completions:
                    engine.charge(Bucket.COMMIT)
                    writer.put(self._to_row(completion))
            stats = engine.take_stats()
            return self._summary(slot.number, engine, stats)

    def _pending(self, reader: RecordReader) -> Iterator[GenerateRequest]:
        """Yield the rows that have no result yet, page by page."""
        with RowIndex.open(self._shard_job.index_path) as index:
            first, end = self._lease.first_row, self._lease.first_row + self._lease.num_rows
            rows = index.rows_between(first, end)
            while page := list(islice(rows, _PAGE_ROWS)):
                done = self._ledger.done_rows(
                    self._lease.job_key, page[0].row_index, page[-1].row_index
                )
                for row in page:
                    if (row.row_index, 0) in done:
                        self._num_resumed += 1
                    elif row.error_code is None:
                        yield self._to_request(row, reader)
        self._is_exhausted = True

    def _to_request(self, row: IndexRow, reader: RecordReader) -> GenerateRequest:
        record = reader.read_at(row.row_index, row.location)
        if isinstance(record, BadRow) or record.row_id != row.row_id:
            raise ConfigError(
                f"{reader.describe(row.location)}: the row changed since the job was planned; "
                "put the file back, or start a new job"
            )
        self._row_index_of[row.row_id] = row.row_index
        return record.to_request(
            self._shard_job.sampling.overlaid(record.sampling),
            default_timeout_seconds=self._shard_job.config.row_timeout_seconds,
        )

    def _to_row(self, completion: Completion) -> CompletionRow:
        error = completion.error
        if error is None:
            self._num_ok += 1
        else:
            self._num_error += 1
        return CompletionRow(
            row_index=self._row_index_of.pop(completion.request_id),
            sample_index=completion.sample_index,
            row_id=completion.request_id,
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
        )

    def _summary(self, slot: int, engine: OfflineInference, stats: RunStats) -> ShardSummary:
        is_done = self._is_exhausted and not self._row_index_of
        return ShardSummary(
            shard_index=self._lease.shard_index,
            state=ShardState.DONE if is_done else ShardState.INTERRUPTED,
            slot=slot,
            device=engine.device,
            dtype=engine.dtype,
            num_resumed=self._num_resumed,
            num_ok=self._num_ok,
            num_error=self._num_error,
            stats=stats,
        )
