"""Waits for the answers of an engine's workers: all of them, and not for ever."""

import time
from collections.abc import Callable, Mapping, Sequence

from engine.errors import WorkerError, WorkerFailure
from engine.messages import FromWorker, StartFailed, StepFailed
from engine.worker.channel import Channel
from engine.worker.process import InlineWorker, Worker

# After the failure of one rank, how long to look for a rank whose death may be the reason.
_AFTERMATH_SECONDS = 1.0
# How soon one who waits notices that nobody wants to wait for long any more.
_LOOK_SECONDS = 0.2


class Patience:
    """How long to wait: `seconds`, or no more than grace_seconds from when is_ending is true."""

    def __init__(
        self,
        seconds: float,
        is_ending: Callable[[], bool] = lambda: False,
        grace_seconds: float = 0,
    ) -> None:
        self._started = time.monotonic()
        self._until = self._started + seconds
        self._is_ending = is_ending
        self._grace_seconds = grace_seconds

    @property
    def waited_seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    def limit(self, seconds: float) -> None:
        """Wait no longer than this from now on."""
        self._until = min(self._until, time.monotonic() + seconds)

    def left_seconds(self) -> float:
        """Return how long to wait still; ask again soon, it may be less by then."""
        if self._is_ending():
            self.limit(self._grace_seconds)
        return self._until - time.monotonic()


def receive_from_all(
    workers: Sequence[Worker], patience: Patience
) -> list[tuple[Worker, FromWorker]]:
    """Return each worker with its next answer, in the order of ranks.

    When one says that it failed, the others may wait for it for ever; then the answers that are
    there are returned.

    Raises:
        WorkerError: a worker died, which is told before any failure that it caused in others, or
            some were silent for too long.
    """
    replies: dict[int, FromWorker] = {}
    has_failed = False
    while len(replies) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in replies}
        ready = _wait_for_any(waiting, patience)
        if not ready:
            if has_failed:
                break
            raise _silence(waiting, patience.waited_seconds)
        for rank in ready:
            reply = waiting[rank].take()
            if reply is None:
                continue
            replies[rank] = reply
            if isinstance(reply, StepFailed | StartFailed) and not has_failed:
                has_failed = True
                patience.limit(_AFTERMATH_SECONDS)
    return [(workers[rank], replies[rank]) for rank in sorted(replies)]


def _wait_for_any(workers: Mapping[int, Worker], patience: Patience) -> list[int]:
    """Return the ranks whose answer, or end, is there; none when patience has run out."""
    ranks: dict[Channel, int] = {}
    for rank, worker in workers.items():
        if isinstance(worker, InlineWorker):
            return [rank]
        ranks[worker.channel] = rank
    left = patience.left_seconds()
    while not (ready := Channel.wait_for_any([*ranks], min(left, _LOOK_SECONDS))) and left > 0:
        left = patience.left_seconds()
    return [ranks[channel] for channel in ready]


def _silence(workers: Mapping[int, Worker], seconds: float) -> WorkerError:
    names = ", ".join(f"{rank} (pid {worker.pid})" for rank, worker in workers.items())
    subject = f"worker rank {names} was" if len(workers) == 1 else f"worker ranks {names} were"
    hints = "".join(worker.log_hint() for worker in workers.values())
    return WorkerError(
        f"{subject} silent for {seconds:.0f} s{hints}", failure=WorkerFailure.TIMEOUT
    )
