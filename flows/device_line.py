"""One job's place in the line for devices that other processes have.

Where a limit counts the devices too, it is asked once their locks are held, and they are given up
when it refuses. So nobody keeps its slots while waiting for devices, and no two can wait for each
other; a limit that errs lends no device twice.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from flows.device_locks import DeviceLocks, Hold, Ticket
from flows.device_queue import DeviceLimit, DeviceQueue, Place

logger = logging.getLogger(__name__)
_REPORT_SECONDS = 60.0
# After a refusal. Others may have the devices meanwhile, so nobody is kept waiting behind it.
_REFUSED_SECONDS = 5.0


class DeviceLine:
    """All threads of the job share one ticket; they take turns, under a lock of their own.

    Without `locks` every device is free, and nobody waits.
    """

    def __init__(
        self, locks: DeviceLocks | None, limit: DeviceLimit | None, wake: Callable[[], None]
    ) -> None:
        """Take a limit into account where there is one; `wake` is called when it has answered."""
        self._locks = locks
        self._queue = None
        if locks is not None and limit is not None:
            self._queue = DeviceQueue(limit, locks.num_locked, wake)
        self._num_waiting = 0
        self._ticket: Ticket | None = None
        self._report_at: dict[str, float] = {}
        self._asked: dict[tuple[str, ...], tuple[Hold, Place]] = {}
        self._refused_until = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a thread that wants devices; the last one gives the ticket up."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self.leave()
                self._report_at.clear()
                while self._asked:
                    self._asked.popitem()[1][0].release()

    def try_take(self, devices: tuple[str, ...]) -> Hold | None:
        """Take all of the devices or none; None also as long as the limit has not granted them.

        Raises:
            ConfigError: the folder of the locks cannot be used.
        """
        if self._locks is None:
            return Hold()
        if self._queue is None:
            return self._locks.try_take(devices, self._ticket)
        if devices not in self._asked and not self._ask(self._locks, self._queue, devices):
            return None
        hold, place = self._asked[devices]
        if place.refusal is None:
            return None
        del self._asked[devices]
        if not place.refusal:
            return hold
        hold.release()
        self.leave()
        self._refused_until = time.monotonic() + _REFUSED_SECONDS
        self._report("limit", lambda: str(place.refusal))
        return None

    def wait_for(self, slots: Sequence[tuple[str, ...]]) -> None:
        """Line up for the devices of any of the slots, and say now and then who has them.

        Raises:
            ConfigError: the folder of the locks cannot be used.
        """
        if self._asked or time.monotonic() < self._refused_until:
            return  # it is the limit that is waited for
        locks = self._locks
        assert locks is not None, "without locks every device is free"
        if self._ticket is None:
            self._ticket = locks.line_up(tuple(d for devices in slots for d in devices))
        whats = (locks.describe(devices, self._ticket) for devices in slots)
        self._report("devices", lambda: "; or for ".join(whats))

    def leave(self) -> None:
        """Give the place up; whoever still waits takes a new one, behind the others."""
        if self._ticket is not None:
            self._ticket.leave()
            self._ticket = None

    def is_wanted(self, devices: tuple[str, ...]) -> bool:
        """Tell whether another process waits for one of the devices."""
        return self._locks is not None and self._locks.is_wanted(devices, self._ticket)

    def close(self) -> None:
        """Wait a moment until the limit knows what was released."""
        if self._queue is not None:
            self._queue.close()

    def _ask(self, locks: DeviceLocks, queue: DeviceQueue, devices: tuple[str, ...]) -> bool:
        """Lock devices that are free and ask for their slots, as often as threads wait for some."""
        if len(self._asked) >= self._num_waiting or time.monotonic() < self._refused_until:
            return False
        hold = locks.try_take(devices, self._ticket)
        if hold is None:
            return False
        place = queue.ask(len(devices))
        hold.at_end(partial(queue.give_back, place))
        self._asked[devices] = (hold, place)
        return True

    def _report(self, kind: str, what: Callable[[], str]) -> None:
        now = time.monotonic()
        if now >= self._report_at.get(kind, 0.0):
            self._report_at[kind] = now + _REPORT_SECONDS
            logger.info("waiting for %s", what())
