"""When waiting requests may join the batch: continuous, static and dynamic, one interface.

A policy only says how many may be admitted now; who comes first is the queue's affair, and
whether they fit is the scheduler's.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from engine.config import SchedulerConfig

# Arrivals of the last seconds decide what the dynamic policy expects of the next ones.
_RATE_WINDOW_SECONDS = 5.0
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """What a policy may look at. Seconds are on the scheduler's clock.

    is_intake_closed tells that nobody else comes before some who wait are admitted.
    """

    now: float
    num_waiting: int
    num_running: int
    oldest_arrival: float
    is_intake_closed: bool


class BatchingPolicy(ABC):
    """Decides how many waiting requests may be admitted."""

    def note_arrival(self, now: float) -> None:  # noqa: B027 - most policies do not care
        """Take note that a request arrived."""

    def note_admission(self) -> None:  # noqa: B027
        """Take note that a request was admitted."""

    @abstractmethod
    def num_admissible(self, view: BatchView) -> int:
        """Return how many requests may be admitted now; 0 waits."""

    @abstractmethod
    def wake_at(self, view: BatchView) -> float | None:
        """Return when a batch that waits is started even if nobody else arrives."""


class ContinuousBatching(BatchingPolicy):
    """Everybody joins as soon as there is room."""

    def num_admissible(self, view: BatchView) -> int:
        """Return no limit."""
        return _UNLIMITED

    def wake_at(self, view: BatchView) -> float | None:
        """Return None: nobody is ever kept waiting."""
        return None


class StaticBatching(BatchingPolicy):
    """A batch is filled, runs to its end, and only then comes the next."""

    def __init__(self, *, max_batch_size: int, max_wait_seconds: float) -> None:
        self._max_batch_size = max_batch_size
        self._max_wait_seconds = max_wait_seconds
        self._num_missing = 0

    def note_admission(self) -> None:
        """Count a member of the batch that is being started."""
        self._num_missing -= 1

    def num_admissible(self, view: BatchView) -> int:
        """Return what is missing in the batch; who is in it is settled when it starts."""
        if view.num_running == 0:
            is_due = self._is_due(view)
            self._num_missing = min(view.num_waiting, self._max_batch_size) if is_due else 0
        return self._num_missing

    def wake_at(self, view: BatchView) -> float | None:
        """Return when the oldest request has waited long enough."""
        return view.oldest_arrival + self._max_wait_seconds

    def _is_due(self, view: BatchView) -> bool:
        is_full = view.num_waiting >= self._max_batch_size
        is_late = view.now >= view.oldest_arrival + self._max_wait_seconds
        return is_full or is_late or view.is_intake_closed


class DynamicBatching(BatchingPolicy):
    """Requests join in groups: a group waits until it is full or until waiting does not pay.

    The time-out adapts to the arrivals of the last seconds: it is what the missing requests are
    expected to take, at most max_wait_seconds, and nothing when none is expected in that time.
    """

    def __init__(self, *, max_batch_size: int, max_wait_seconds: float) -> None:
        self._max_batch_size = max_batch_size
        self._max_wait_seconds = max_wait_seconds
        self._arrivals: deque[float] = deque()

    def note_arrival(self, now: float) -> None:
        """Take the arrival into the rate."""
        self._arrivals.append(now)
        self._forget_old(now)

    def timeout_seconds(self, now: float, num_waiting: int) -> float:
        """Return how long a group of `num_waiting` waits for the rest of it."""
        self._forget_old(now)
        span = max(now - self._arrivals[0], 1e-9) if self._arrivals else 0.0
        if len(self._arrivals) < 2:
            return 0.0 if span > self._max_wait_seconds else self._max_wait_seconds
        seconds_each = span / len(self._arrivals)
        if seconds_each > self._max_wait_seconds:
            return 0.0
        num_missing = max(self._max_batch_size - num_waiting, 0)
        return min(num_missing * seconds_each, self._max_wait_seconds)

    def num_admissible(self, view: BatchView) -> int:
        """Return one group when it is full or has waited long enough."""
        if view.num_waiting == 0:
            return 0
        is_full = view.num_waiting >= self._max_batch_size
        is_due = view.now >= self._due_at(view)
        return self._max_batch_size if is_full or is_due or view.is_intake_closed else 0

    def wake_at(self, view: BatchView) -> float | None:
        """Return when the group that waits has waited long enough."""
        return self._due_at(view)

    def _due_at(self, view: BatchView) -> float:
        return view.oldest_arrival + self.timeout_seconds(view.now, view.num_waiting)

    def _forget_old(self, now: float) -> None:
        while self._arrivals and now - self._arrivals[0] > _RATE_WINDOW_SECONDS:
            self._arrivals.popleft()


def make_batching_policy(config: SchedulerConfig) -> BatchingPolicy:
    """Return the policy that the configuration names."""
    if config.batching == "continuous":
        return ContinuousBatching()
    make = StaticBatching if config.batching == "static" else DynamicBatching
    return make(
        max_batch_size=min(config.max_batch_size or config.max_num_seqs, config.max_num_seqs),
        max_wait_seconds=config.max_wait_ms / 1000,
    )
