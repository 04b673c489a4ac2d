"""Where the time and the tokens went: one step (StepStats), one run (RunStats).

Time is charged exclusively: the main loop is in one bucket at a time, so the buckets add up to
the wall clock. Work that overlaps with it (the worker's own seconds) is reported apart.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec


class Bucket(StrEnum):
    """What the main loop is doing."""

    LOAD = "load"
    COMPILE = "compile"
    SCHEDULE = "schedule"
    WAIT_FOR_DEVICE = "wait_for_device"
    PROCESS_OUTPUT = "process_output"
    COMMIT = "commit"
    IDLE = "idle"


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Counts are of this step; worker_* seconds overlap with the main loop."""

    step_id: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_repeated_tokens: int
    num_sampled_tokens: int
    num_preempted: int
    num_free_blocks: int
    is_graph_replay: bool
    schedule_seconds: float
    execute_seconds: float
    worker_prepare_seconds: float
    worker_forward_seconds: float
    worker_sample_seconds: float


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or one shard of it: sums over its steps, and wall seconds by bucket.

    busy_seconds is the time with at least one step in flight. num_computed_tokens counts every
    token of every step; num_repeated_tokens of them had been computed before, and were lost by a
    preemption or a step that failed. Of num_decode_steps, in which no prompt was computed, the
    device replayed num_graph_steps as captured graphs.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_decode_steps: int = 0
    num_graph_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_repeated_tokens: int = 0
    num_preemptions: int = 0
    peak_running: int = 0
    busy_seconds: float = 0.0
    worker_forward_seconds: float = 0.0
    bucket_seconds: dict[str, float] = {}

    @property
    def wall_seconds(self) -> float:
        """All seconds, over every bucket."""
        return sum(self.bucket_seconds.values())

    def plus(self, other: "RunStats") -> "RunStats":
        """Return the stats of both runs together; peaks are maxima, everything else is a sum."""
        names = set(self.bucket_seconds) | set(other.bucket_seconds)
        merged = {
            name: self.bucket_seconds.get(name, 0.0) + other.bucket_seconds.get(name, 0.0)
            for name in sorted(names)
        }
        summed = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name not in ("bucket_seconds", "peak_running")
        }
        return RunStats(
            **summed, bucket_seconds=merged, peak_running=max(self.peak_running, other.peak_running)
        )


class BucketClock:
    """Charges the passing seconds to one bucket at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[Bucket, float] = {}
        self._bucket = Bucket.IDLE
        self._since = clock()

    def enter(self, bucket: Bucket) -> Bucket:
        """Charge the time since the last call to the old bucket, and return that bucket."""
        now = self._clock()
        old = self._bucket
        self._seconds[old] = self._seconds.get(old, 0.0) + now - self._since
        self._bucket, self._since = bucket, now
        return old

    def take(self) -> dict[str, float]:
        """Return the seconds by bucket since the last take, and start anew."""
        self.enter(self._bucket)
        seconds = {bucket.value: self._seconds[bucket] for bucket in sorted(self._seconds)}
        self._seconds = {}
        return seconds


class StatsCollector:
    """Adds up the steps of a run, in the order in which they are handed out and come back."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in_flight: deque[tuple[float, dict[str, Any]]] = deque()
        self._busy_since = 0.0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._total = RunStats()

    def step_scheduled(self, **counts: Any) -> None:
        """Note a step that goes out now; counts are the first fields of StepStats."""
        now = self._clock()
        if not self._in_flight:
            self._busy_since = now
        self._in_flight.append((now, counts))

    def step_done(self, **counts: Any) -> StepStats:
        """Note that the oldest step is back; counts are the rest of StepStats."""
        now = self._clock()
        started, scheduled = self._in_flight.popleft()
        step = StepStats(**scheduled, **counts, execute_seconds=now - started)
        self._total = self._total.plus(
            RunStats(
                num_steps=1,
                num_decode_steps=int(not step.num_prefill_tokens),
                num_graph_steps=int(step.is_graph_replay and not step.num_prefill_tokens),
                num_output_tokens=step.num_sampled_tokens,
                num_computed_tokens=step.num_prefill_tokens + step.num_decode_tokens,
                num_repeated_tokens=step.num_repeated_tokens,
                num_preemptions=step.num_preempted,
                peak_running=step.num_running,
                busy_seconds=now - self._busy_since,
                worker_forward_seconds=step.worker_forward_seconds,
            )
        )
        self._busy_since = now
        return step

    def step_failed(self) -> None:
        """Note that the oldest step came to nothing."""
        now = self._clock()
        self._in_flight.popleft()
        self._total = self._total.plus(
            RunStats(num_failed_steps=1, busy_seconds=now - self._busy_since)
        )
        self._busy_since = now

    def take(self, bucket_seconds: dict[str, float]) -> RunStats:
        """Return the sums since the last take, with these wall seconds, and start anew."""
        counts = RunStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            bucket_seconds=bucket_seconds,
        )
        total = self._total.plus(counts)
        self._total = RunStats()
        self.num_prompt_tokens = self.num_cached_tokens = 0
        return total
