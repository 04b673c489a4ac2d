"""Runs one shard: pending rows in, answers committed. Knows nothing of Prefect."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from engine import (
    Bucket,
    GenerateRequest,
    OfflineInference,
    PartialOutput,
    RequestError,
    RequestErrorCode,
    RunStats,
    SamplingParams,
    WorkerError,
)
from flows.config import JobConfig
from flows.ledger import Ledger
from flows.ledger_rows import JobRow, Lease
from flows.owner import Owner
from flows.pending_rows import PendingRows
from flows.records import RecordReader
from flows.schema import ShardState
from flows.shard_recovery import BadDeviceError, answer_all
from flows.shard_writer import STREAM_NAME, ShardWriter
from flows.stacks import Slot, StackPool, StoppedError

logger = logging.getLogger(__name__)


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
    """What one attempt at a shard did; counts are rows of this attempt alone.

    num_length samples were cut at max_tokens. num_deduplicated rows got the answer of another row, which saved num_saved_tokens. device and dtype are None when it was stopped before an engine was loaded.
    """

    shard_index: int
    state: ShardState
    slot: int | None = None
    device: str | None = None
    dtype: str | None = None
    num_resumed: int = 0
    num_ok: int = 0
    num_error: int = 0
    num_length: int = 0
    num_deduplicated: int = 0
    num_saved_tokens: int = 0
    num_worker_deaths: int = 0
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
    """Answer the pending rows of one shard, on another device when one is bad.

    When `stop` is set, the step in flight is finished, what is there is committed, and the shard
    is left resumable.

    Raises:
        LedgerError: somebody else holds the shard, or the lease was lost.
        TooManyFailedRowsError: more rows of the job failed than may.
        WorkerError: no worker can be started, or no good device is left; what was finished is
            committed.
        ConfigError: the input changed since it was planned.
    """
    try:
        while True:
            with stacks.borrow(stop) as slot:  # first, so that a shard that waits holds no lease
                lease = ledger.acquire_shard(
                    shard_job.job.job_key,
                    shard_index,
                    owner=Owner.current(),
                    lease_seconds=shard_job.config.lease_seconds,
                    flow_run_id=flow_run_id,
                )
                try:
                    return _run_leased(shard_job, ledger, lease, slot, stop)
                except BadDeviceError as error:
                    slot.retire(str(error))
    except StoppedError:
        return ShardSummary(shard_index=shard_index, state=ShardState.INTERRUPTED)


def _run_leased(
    shard_job: ShardJob, ledger: Ledger, lease: Lease, slot: Slot, stop: threading.Event
) -> ShardSummary:
    """Run the shard and release its lease, however it ends."""
    try:
        summary = _ShardRun(shard_job, ledger, lease, slot, stop).run()
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
    """One attempt at one shard; see shard_recovery.RecoverableShard for its public methods."""

    def __init__(
        self,
        shard_job: ShardJob,
        ledger: Ledger,
        lease: Lease,
        slot: Slot,
        stop: threading.Event,
    ) -> None:
        self._job_dir = shard_job.job_dir
        self._config = shard_job.config
        self._ledger = ledger
        self._lease = lease
        self._slot = slot
        self._stop = stop
        self._stats = RunStats()
        self._num_worker_deaths = 0
        self._writer = ShardWriter(
            ledger,
            lease,
            self._config,
            max_failed_rows=self._config.max_failed_of(shard_job.job.num_rows),
            stream_path=self._job_dir / STREAM_NAME if self._config.stream_output else None,
        )
        self._reader = RecordReader(self._config.sources, self._config.prompt)
        self._rows = PendingRows(
            ledger,
            lease,
            self._reader,
            index_path=shard_job.index_path,
            sampling=shard_job.sampling,
            timeout_seconds=self._config.row_timeout_seconds,
        )

    def run(self) -> ShardSummary:
        """Answer every pending row, and commit every answer."""
        # The writer comes first: its heartbeat keeps the lease while a model loads.
        with self._writer, self._reader, self._rows:
            engine = self._use(self._slot.engine())
            for row in self._rows.copies_of_done():
                self._writer.put(row)
            self._writer.flush()
            answer_all(self, self._suspects())
        engine = self._slot.engine()
        counts = self._rows.counts
        return ShardSummary(
            shard_index=self._lease.shard_index,
            state=ShardState.DONE if self._rows.is_done else ShardState.INTERRUPTED,
            slot=self._slot.number,
            device=engine.device,
            dtype=engine.dtype,
            num_resumed=self._lease.num_done,
            num_ok=counts.num_ok,
            num_error=counts.num_error,
            num_length=counts.num_length,
            num_deduplicated=counts.num_deduplicated,
            num_saved_tokens=counts.num_saved_tokens,
            num_worker_deaths=self._num_worker_deaths,
            stats=self._stats,
        )

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def answer(self, row_indices: Sequence[int] | None) -> None:
        rows = self._rows
        requests = rows.requests() if row_indices is None else rows.requests_of(row_indices)
        try:
            self._answer(self._slot.engine(), requests)
        finally:
            self._writer.flush()

    def accuse(self, error: WorkerError) -> list[int]:
        self._num_worker_deaths += 1
        accused = self._rows.row_indices_of(error.request_ids)
        if accused:
            self._ledger.add_suspects(self._lease, accused)
        return accused

    def unanswered(self, row_indices: Sequence[int]) -> list[int]:
        return self._rows.without_result(row_indices)

    def condemn(self, row_index: int, error: WorkerError) -> None:
        reason = f"a worker died whenever this row was asked, also when it was alone: {error}"
        logger.error("row_index=%d gets engine_crash: %s", row_index, error)
        for row in self._rows.fail(row_index, RequestError(RequestErrorCode.ENGINE_CRASH, reason)):
            self._writer.put(row)
        self._writer.flush()

    def replace_engine(self) -> OfflineInference:
        return self._use(self._slot.replace_engine())

    def _use(self, engine: OfflineInference) -> OfflineInference:
        self._writer.device = engine.device
        return engine

    def _answer(self, engine: OfflineInference, requests: Iterator[GenerateRequest]) -> None:
        completions = engine.run(
            requests,
            stop=self._stop,
            on_partials=self._put_partials,
            partial_seconds=self._config.partial_seconds,
        )
        try:
            with closing(completions):
                for completion in completions:
                    engine.charge(Bucket.COMMIT)
                    for row in self._rows.results_of(completion):
                        self._writer.put(row)
        finally:
            self._stats = self._stats.plus(engine.take_stats())

    def _put_partials(self, partials: list[PartialOutput]) -> None:
        self._writer.put_partials(self._rows.partial_rows(partials))

    def _suspects(self) -> dict[int, int]:
        first, last = self._lease.first_row, self._lease.first_row + self._lease.num_rows - 1
        return self._ledger.suspects_of(self._lease.job_key, first, last)
