"""Engine stacks: loaded models, one for each device slot, lent to one shard at a time.

A slot is one engine, tensor_parallel_size devices. A stack that was used well is kept warm for
the next shard; one that failed is never used again, and a slot whose device is bad is not lent.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine import EngineConfig, OfflineInference, WorkerError, WorkerFailure

logger = logging.getLogger(__name__)


class StackPool:
    """Lends engines for one engine configuration. Safe to use from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        self._condition = threading.Condition()
        self._slots = _slot_configs(config)
        self._idle_slots = list(range(len(self._slots)))[::-1]
        self._bad_slots: dict[int, str] = {}
        self._warm: dict[int, OfflineInference] = {}
        self.num_loads = 0

    @property
    def num_slots(self) -> int:
        """Engines that can run at a time."""
        with self._condition:
            return len(self._slots) - len(self._bad_slots)

    @contextmanager
    def borrow(self) -> Iterator["Slot"]:
        """Wait for a free slot and lend it; its engine is loaded when it is first asked for.

        When the block ends with an error, the engine is closed and not lent again.

        Raises:
            WorkerError: every device is bad.
        """
        slot = Slot(self._take(), self)
        try:
            yield slot
        except BaseException:
            self.discard(slot.number)
            raise
        finally:
            with self._condition:
                if slot.number not in self._bad_slots:
                    self._idle_slots.append(slot.number)
                self._condition.notify_all()

    def close(self) -> None:
        """Wait until every slot is given back, and close every warm engine."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._idle_slots) == self.num_slots)
        for number in list(self._warm):
            self.discard(number)

    def engine_of(self, number: int) -> OfflineInference:
        """Return the engine of a borrowed slot, loaded when it is not warm.

        Its statistics begin with this shard: with its loading, or without what came before.

        Raises:
            ConfigError: the engine cannot be loaded and only the user can mend it.
            WorkerError: the machine could not start it.
        """
        engine = self._warm.get(number)
        if engine is not None:
            engine.take_stats()
            return engine
        engine = OfflineInference(self._slots[number])
        engine.start()
        self._warm[number] = engine
        self.num_loads += 1
        return engine

    def discard(self, number: int) -> None:
        """Close the engine of a borrowed slot; the next one that is asked for is a new one."""
        engine = self._warm.pop(number, None)
        if engine is not None:
            engine.close()

    def retire(self, number: int, reason: str) -> None:
        """Lend a slot no more, because its device is bad."""
        logger.error("device_ids=%s is bad: %s", self._slots[number].device_ids, reason)
        self.discard(number)
        with self._condition:
            self._bad_slots[number] = reason
            self._condition.notify_all()

    def _take(self) -> int:
        with self._condition:
            self._condition.wait_for(lambda: self._idle_slots or self.num_slots == 0)
            if not self._idle_slots:
                reasons = "; ".join(self._bad_slots.values())
                raise WorkerError(
                    f"no good device is left: {reasons}", failure=WorkerFailure.DEVICE_LOST
                )
            return self._idle_slots.pop()


class Slot:
    """A borrowed slot."""

    def __init__(self, number: int, pool: StackPool) -> None:
        self.number = number
        self._pool = pool

    def engine(self) -> OfflineInference:
        """Return the slot's engine; see StackPool.engine_of."""
        return self._pool.engine_of(self.number)

    def replace_engine(self) -> OfflineInference:
        """Return a new engine in the place of one that failed."""
        self._pool.discard(self.number)
        return self.engine()

    def retire(self, reason: str) -> None:
        """Give the slot up for good."""
        self._pool.retire(self.number, reason)


def _slot_configs(config: EngineConfig) -> list[EngineConfig]:
    width = config.tensor_parallel_size
    groups = [config.device_ids[i : i + width] for i in range(0, len(config.device_ids), width)]
    return [config.model_copy(update={"device_ids": group}) for group in groups]
