"""One job's place in the line for devices that other processes have."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flows.device_locks import DeviceLocks, Hold, Ticket

logger = logging.getLogger(__name__)
_REPORT_SECONDS = 60.0


class DeviceLine:
    """All threads of the job share one ticket; they take turns, under a lock of their own.

    Without `locks` every device is free, and nobody waits.
    """

    def __init__(self, locks: DeviceLocks | None) -> None:
        self._locks = locks
        self._num_waiting = 0
        self._ticket: Ticket | None = None
        self._report_at = 0.0

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
                self._report_at = 0.0

    def try_take(self, devices: tuple[str, ...]) -> Hold | None:
        """Take all of the devices or none; see DeviceLocks.try_take."""
        return Hold() if self._locks is None else self._locks.try_take(devices, self._ticket)

    def wait_for(self, slots: Sequence[tuple[str, ...]]) -> None:
        """Line up for the devices of any of the slots, and say now and then who has them.

        Raises:
            ConfigError: the folder of the locks cannot be used.
        """
        assert self._locks is not None, "without locks every device is free"
        if self._ticket is None:
            self._ticket = self._locks.line_up(tuple(d for devices in slots for d in devices))
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            whats = (self._locks.describe(devices, self._ticket) for devices in slots)
            logger.info("waiting for %s", "; or for ".join(whats))

    def leave(self) -> None:
        """Give the place up; whoever still waits takes a new one, behind the others."""
        if self._ticket is not None:
            self._ticket.leave()
            self._ticket = None

    def is_wanted(self, devices: tuple[str, ...]) -> bool:
        """Tell whether another process waits for one of the devices."""
        return self._locks is not None and self._locks.is_wanted(devices, self._ticket)
