"""Gets a shard through the death of its workers: a bad device is told from a bad row.

After a death, a new worker answers a canary prompt. When it cannot, the device is bad. When it
can, a row that was in flight may be guilty: the suspects run again in halves, until the guilty one
is alone.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from engine import (
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    WorkerError,
    WorkerFailure,
)

logger = logging.getLogger(__name__)
# A row is guilty when this many workers died of it while it was alone: once may be bad luck.
_CRASHES_ALONE = 2
# Deaths in a row of which none can be laid on a row, before the shard gives up.
_MAX_FRUITLESS_DEATHS = 3
_RECOVERABLE = (
    WorkerFailure.DIED,
    WorkerFailure.DEVICE_LOST,
    WorkerFailure.TIMEOUT,
    WorkerFailure.OTHER,
)


class BadDeviceError(WorkerError):
    """A new worker on the same device could not answer the canary either."""


class RecoverableShard(Protocol):
    """What recovery needs of a shard; everything that is answered is committed on the way."""

    @property
    def is_stopped(self) -> bool:
        """True when the run is to end."""
        ...

    def answer(self, row_indices: Sequence[int] | None) -> None:
        """Answer these rows, or all that are pending.

        Raises:
            WorkerError: the worker died meanwhile.
        """
        ...

    def accuse(self, error: WorkerError) -> list[int]:
        """Write down the rows that were in flight when the worker died, and return them."""
        ...

    def unanswered(self, row_indices: Sequence[int]) -> list[int]:
        """Return those of the rows that have no result yet."""
        ...

    def condemn(self, row_index: int, error: WorkerError) -> None:
        """Give the row an error result, because workers die of it."""
        ...

    def replace_engine(self) -> OfflineInference:
        """Start a new engine on the same device."""
        ...


def answer_all(shard: RecoverableShard) -> None:
    """Answer every pending row.

    Raises:
        BadDeviceError: the device is bad; what is pending may be answered on another.
        WorkerError: no worker could be started, workers die and no row can be blamed, or one died
            after the shard was stopped.
    """
    num_fruitless = 0
    while not shard.is_stopped:
        try:
            shard.answer(None)
        except WorkerError as error:
            accused = _revive(shard, error)
            num_fruitless = 0 if accused else num_fruitless + 1
            if num_fruitless == _MAX_FRUITLESS_DEATHS:
                raise
            isolate(shard, accused)
        else:
            return


def isolate(shard: RecoverableShard, suspects: Collection[int]) -> None:
    """Answer the suspects in groups, halving each group of which a worker dies.

    Raises:
        BadDeviceError: as of `answer_all`.
        WorkerError: no worker could be started.
    """
    groups = [sorted(suspects)] if suspects else []
    crashes_alone = Counter[int]()
    while groups and not shard.is_stopped:
        group = groups.pop()
        try:
            shard.answer(group)
        except WorkerError as error:
            _revive(shard, error)
            left = shard.unanswered(group)
            if len(left) != 1:
                half = len(left) // 2
                groups += [part for part in (left[half:], left[:half]) if part]
                continue
            (row_index,) = left
            crashes_alone[row_index] += 1
            if crashes_alone[row_index] < _CRASHES_ALONE:
                groups.append(left)
            else:
                shard.condemn(row_index, error)


def _revive(shard: RecoverableShard, error: WorkerError) -> list[int]:
    """Put a new worker in the place of the dead one, and return the rows that were in flight."""
    if error.failure not in _RECOVERABLE:
        raise error
    accused = shard.accuse(error)
    if shard.is_stopped:  # nobody waits for another worker
        raise error
    logger.warning(
        "a worker failed with %d row(s) in flight, starting another: %s", len(accused), error
    )
    engine = shard.replace_engine()
    canary = GenerateRequest(
        request_id="canary",
        prompt="Hello",
        sampling_params=SamplingParams(max_tokens=4, temperature=0),
    )
    try:
        engine.generate([canary])
    except WorkerError as second:
        raise BadDeviceError(
            f"a new worker on {engine.config.device} {list(engine.config.device_ids)} could not "
            f"answer the canary either: {second}",
            failure=second.failure,
        ) from second
    return accused
