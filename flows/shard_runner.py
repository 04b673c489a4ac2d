"""Runs one shard: pending rows in, answers committed. Knows nothing of Prefect."""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from engine import LedgerError, RunStats
from flows.engine_part import EnginePart
from flows.engine_part import ShardJob as ShardJob
from flows.ledger import Ledger
from flows.ledger_rows import Lease
from flows.owner import Owner
from flows.row_feed import RowFeed
from flows.schema import ShardState
from flows.shard_recovery import BadDeviceError, answer_all, isolate
from flows.spare_slots import SpareSlots
from flows.stacks import Slot, StackPool, StoppedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What one attempt at a shard did; counts are rows of this attempt alone.

    num_length samples were cut at max_tokens. num_deduplicated rows got the answer of another row, which saved num_saved_tokens. slot, device and dtype are of the engine that began, None when it was stopped before an engine was loaded; busy_seconds_by_slot is of all that took part.
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
    busy_seconds_by_slot: dict[int, float] = field(default_factory=dict)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the slot that was busy longest had a step in flight."""
        return max(self.busy_seconds_by_slot.values(), default=self.stats.busy_seconds)


def run_shard(
    shard_job: ShardJob,
    shard_index: int,
    *,
    ledger: Ledger,
    stacks: StackPool,
    stop: threading.Event,
    spare: SpareSlots | None = None,
) -> ShardSummary:
    """Answer the pending rows of one shard, on another device when one is bad.

    When `stop` is set, the step in flight is finished, what is there is committed, and the shard
    is left resumable. `spare` slots may take rows too.

    Raises:
        LedgerError: somebody else holds the shard, or the lease was lost.
        TooManyFailedRowsError: more rows of the job failed than may.
        WorkerError: no worker can be started, or no good device is left; what was finished is
            committed.
        ConfigError: the input changed since it was planned.
    """
    spare = SpareSlots(stacks) if spare is None else spare
    parts: list[EnginePart] = []
    num_resumed: int | None = None
    state = ShardState.INTERRUPTED
    try:
        while state is not ShardState.DONE and not (parts and stop.is_set()):
            with stacks.borrow(stop) as slot:  # first, so that a shard that waits holds no lease
                lease = ledger.acquire_shard(
                    shard_job.job.job_key,
                    shard_index,
                    owner=Owner.current(),
                    lease_seconds=shard_job.config.lease_seconds,
                    flow_run_id=shard_job.flow_run_id,
                )
                num_resumed = lease.num_done if num_resumed is None else num_resumed
                shard = _Shard(shard_job, ledger, lease, stop, parts)
                try:
                    state = _run_leased(shard, slot, spare)
                except BadDeviceError as error:
                    slot.retire(str(error))
    except StoppedError:
        pass
    return _summarise(shard_index, state, num_resumed or 0, parts)


def _run_leased(shard: "_Shard", slot: Slot, spare: SpareSlots) -> ShardState:
    """Run the shard and release its lease, however it ends."""
    ledger, lease = shard.ledger, shard.lease
    num_before = len(shard.parts)
    try:
        shard.run(slot, spare)
    except Exception as error:
        _give_up(ledger, lease, error)
        raise
    except BaseException:
        ledger.release_shard(lease, ShardState.INTERRUPTED)
        raise
    state = ShardState.INTERRUPTED if shard.num_left else ShardState.DONE
    stats = sum_stats(part.stats for part in shard.parts[num_before:])
    ledger.release_shard(
        lease,
        state,
        busy_seconds=stats.busy_seconds,
        stats={"preemptions": stats.num_preemptions, "steps": stats.num_steps},
    )
    return state


def _give_up(ledger: Ledger, lease: Lease, error: Exception) -> None:
    """Release a shard that failed; when that fails too, its lease runs out by itself."""
    try:
        ledger.release_shard(lease, ShardState.FAILED, error_message=str(error) or repr(error))
    except LedgerError as second:
        logger.warning("shard=%d could not be given back: %s", lease.shard_index, second)


class _Shard:
    """A shard under one lease, and the engines that answer it: the one that began, and spare ones.

    parts are of this lease and of those before.
    """

    def __init__(
        self,
        shard_job: ShardJob,
        ledger: Ledger,
        lease: Lease,
        stop: threading.Event,
        parts: list[EnginePart],
    ) -> None:
        self.ledger = ledger
        self.lease = lease
        self.parts = parts
        self._shard_job = shard_job
        self._over = _Over(stop)
        self._error: Exception | None = None
        engine = shard_job.config.engine
        self._feed = RowFeed(
            lease,
            stop=self._over,
            num_engines=len(engine.device_ids) // engine.tensor_parallel_size,
            batch_size=engine.scheduler.max_num_seqs,
        )

    @property
    def num_left(self) -> int:
        """Rows that no engine has taken."""
        return self._feed.num_left

    @property
    def num_to_share(self) -> int:
        """Rows that another engine may take."""
        return 0 if self._over.is_set() else self.num_left

    def run(self, slot: Slot, spare: SpareSlots) -> None:
        """Answer every row, but for those that a spare engine which failed has given back.

        The slot is given back before that when only others still work on the shard.
        """
        try:
            with self._part(slot) as part:
                part.copy_done()
                isolate(part, self._suspects())
                spare.share(self)
                answer_all(part)
            slot.give_back()
        except BaseException:
            self._over.set()
            raise
        finally:
            spare.unshare(self)
        if self._error is not None:
            raise self._error

    def help(self, slot: Slot) -> None:
        """Answer rows with another engine until none is left to take."""
        with self._part(slot) as part:
            answer_all(part)

    def fail(self, error: Exception) -> None:
        """End the shard with an error that an engine beside the first one has met."""
        self._error = self._error or error
        self._over.set()

    def _part(self, slot: Slot) -> EnginePart:
        part = EnginePart(self._shard_job, self.ledger, self._feed, slot, self._over)
        self.parts.append(part)
        return part

    def _suspects(self) -> dict[int, int]:
        first, last = self.lease.first_row, self.lease.first_row + self.lease.num_rows - 1
        return self.ledger.suspects_of(self.lease.job_key, first, last)


class _Over(threading.Event):
    """Set when a shard is to end: of itself, or because the whole run is."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set()


def sum_stats(each: Iterable[RunStats]) -> RunStats:
    """Return the figures of several engines or shards together."""
    return reduce(RunStats.plus, each, RunStats())


def _summarise(
    shard_index: int, state: ShardState, num_resumed: int, parts: Sequence[EnginePart]
) -> ShardSummary:
    loaded = [part for part in parts if part.device is not None]
    if not loaded:
        return ShardSummary(shard_index=shard_index, state=state)
    busy_seconds: defaultdict[int, float] = defaultdict(float)
    for part in loaded:
        busy_seconds[part.slot_number] += part.stats.busy_seconds
    return ShardSummary(
        shard_index=shard_index,
        state=state,
        slot=loaded[0].slot_number,
        device=loaded[0].device,
        dtype=loaded[0].dtype,
        num_resumed=num_resumed,
        num_ok=sum(part.counts.num_ok for part in loaded),
        num_error=sum(part.counts.num_error for part in loaded),
        num_length=sum(part.counts.num_length for part in loaded),
        num_deduplicated=sum(part.counts.num_deduplicated for part in loaded),
        num_saved_tokens=sum(part.counts.num_saved_tokens for part in loaded),
        num_worker_deaths=sum(part.num_worker_deaths for part in loaded),
        stats=sum_stats(part.stats for part in loaded),
        busy_seconds_by_slot=dict(busy_seconds),
    )
