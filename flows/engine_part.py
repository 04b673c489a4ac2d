"""What one engine does for one shard: takes rows, asks, commits. A shard may have several."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
from flows.ledger_rows import JobRow
from flows.pending_rows import PendingRows
from flows.records import RecordReader
from flows.row_feed import RowFeed
from flows.shard_writer import STREAM_NAME, ShardWriter
from flows.stacks import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What every shard of a job shares. sampling is the job's, with its seed filled in."""

    config: JobConfig
    job: JobRow
    index_path: Path
    sampling: SamplingParams
    job_dir: Path
    flow_run_id: str | None = None


class EnginePart:
    """A context manager: when it ends, its answers are committed and the rest is given back.

    It has a writer of its own: several of them may commit under one lease.
    """

    def __init__(
        self,
        shard_job: ShardJob,
        ledger: Ledger,
        feed: RowFeed,
        slot: Slot,
        stop: threading.Event,
    ) -> None:
        self.slot_number = slot.number
        self.device: str | None = None
        self.dtype: str | None = None
        self.num_worker_deaths = 0
        self.stats = RunStats()
        self._config = shard_job.config
        self._ledger = ledger
        self._lease = feed.lease
        self._slot = slot
        self._stop = stop
        self._writer = ShardWriter(
            ledger,
            feed.lease,
            self._config,
            max_failed_rows=self._config.max_failed_of(shard_job.job.num_rows),
            stream_path=shard_job.job_dir / STREAM_NAME if self._config.stream_output else None,
        )
        self._reader = RecordReader(self._config.sources, self._config.prompt)
        self._rows = PendingRows(
            ledger,
            feed,
            self._reader,
            index_path=shard_job.index_path,
            sampling=shard_job.sampling,
            timeout_seconds=self._config.row_timeout_seconds,
        )
        self.counts = self._rows.counts
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Load the engine, unless it is warm."""
        with ExitStack() as exits:
            # After the writer's end, so that what it has committed is not asked again.
            exits.callback(self._rows.give_back)
            # The writer comes first: its heartbeat keeps the lease while a model loads.
            for each in (self._writer, self._reader, self._rows):
                exits.enter_context(each)
            self._use(self._slot.engine())
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.__exit__(*exc_info)  # type: ignore[arg-type]

    def copy_done(self) -> None:
        """Commit results of rows that ask what others were answered before."""
        for row in self._rows.copies_of_done():
            self._writer.put(row)
        self._writer.flush()

    # What shard_recovery.RecoverableShard asks for.

    @property
    def is_stopped(self) -> bool:
        """True when the shard is to end."""
        return self._stop.is_set()

    def answer(self, row_indices: Sequence[int] | None) -> None:
        """Answer these rows, or those that the feed gives out."""
        rows = self._rows
        requests = rows.requests() if row_indices is None else rows.requests_of(row_indices)
        try:
            self._answer(self._slot.engine(), requests)
        except WorkerError as error:
            if row_indices is None:  # who isolates rows keeps the others of them
                rows.give_back(but=rows.row_indices_of(error.request_ids))
            raise
        finally:
            self._writer.flush()

    def accuse(self, error: WorkerError) -> list[int]:
        """Write down the rows that were in flight when the worker died."""
        self.num_worker_deaths += 1
        accused = self._rows.row_indices_of(error.request_ids)
        if accused:
            self._ledger.add_suspects(self._lease, accused)
        return accused

    def unanswered(self, row_indices: Sequence[int]) -> list[int]:
        """Return those of the rows without a result."""
        return self._rows.without_result(row_indices)

    def condemn(self, row_index: int, error: WorkerError) -> None:
        """Give the row an error result."""
        reason = f"a worker died whenever this row was asked, also when it was alone: {error}"
        logger.error("row_index=%d gets engine_crash: %s", row_index, error)
        for row in self._rows.fail(row_index, RequestError(RequestErrorCode.ENGINE_CRASH, reason)):
            self._writer.put(row)
        self._writer.flush()

    def replace_engine(self) -> OfflineInference:
        """Start a new engine in the slot."""
        return self._use(self._slot.replace_engine())

    def _use(self, engine: OfflineInference) -> OfflineInference:
        self.device, self.dtype = engine.device, engine.dtype
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
            self.stats = self.stats.plus(engine.take_stats())

    def _put_partials(self, partials: list[PartialOutput]) -> None:
        self._writer.put_partials(self._rows.partial_rows(partials))
