"""Engine stacks: loaded models, one for each device slot, lent to one shard at a time.

A slot is one engine, tensor_parallel_size devices. A stack that was used well is kept warm for
the next shard; one that failed is never used again.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine import EngineConfig, OfflineInference

logger = logging.getLogger(__name__)


class StackPool:
    """Lends engines for one engine configuration. Safe to use from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        self._lock = threading.Lock()
        self._slots = _slot_configs(config)
        self._free = threading.Semaphore(len(self._slots))
        self._idle_slots = list(range(len(self._slots)))[::-1]
        self._warm: dict[int, OfflineInference] = {}
        self.num_loads = 0

    @property
    def num_slots(self) -> int:
        """Engines that can run at a time."""
        return len(self._slots)

    @contextmanager
    def borrow(self) -> Iterator["Slot"]:
        """Wait for a free slot and lend it; its engine is loaded when it is first asked for.

        When the block ends with an error, the engine is closed and not lent again.
        """
        self._free.acquire()
        with self._lock:
            number = self._idle_slots.pop()
        try:
            yield Slot(number, self)
        except BaseException:
            self._discard(number)
            raise
        finally:
            with self._lock:
                self._idle_slots.append(number)
            self._free.release()

    def close(self) -> None:
        """Wait until every slot is given back, and close every warm engine."""
        for _ in self._slots:
            self._free.acquire()
        for slot in list(self._warm):
            self._discard(slot)
        self._free.release(len(self._slots))

    def engine_of(self, slot: int) -> OfflineInference:
        """Return the engine of a borrowed slot, loaded when it is not warm.

        Raises:
            ConfigError: the engine cannot be loaded and only the user can mend it.
            WorkerError: the machine could not start it.
        """
        engine = self._warm.get(slot)
        if engine is None:
            engine = OfflineInference(self._slots[slot])
            engine.start()
            self._warm[slot] = engine
            self.num_loads += 1
        return engine

    def _discard(self, slot: int) -> None:
        engine = self._warm.pop(slot, None)
        if engine is not None:
            engine.close()


class Slot:
    """A borrowed slot."""

    def __init__(self, number: int, pool: StackPool) -> None:
        self.number = number
        self._pool = pool

    def engine(self) -> OfflineInference:
        """Return the slot's engine; see StackPool.engine_of."""
        return self._pool.engine_of(self.number)


def _slot_configs(config: EngineConfig) -> list[EngineConfig]:
    width = config.tensor_parallel_size
    groups = [config.device_ids[i : i + width] for i in range(0, len(config.device_ids), width)]
    return [config.model_copy(update={"device_ids": group}) for group in groups]
