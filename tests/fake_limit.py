"""A limit on devices that is kept in memory, and can fail or fall silent."""

import threading
import time
from collections.abc import Callable
from uuid import UUID, uuid4

from flows.device_queue import LimitReachedError

WAIT_SECONDS = 30


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class FakeLimit:
    """A limit with some slots.

    `error` is what every call raises, the first `failures` fail, and all wait for `silence`.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.leases: dict[UUID, int] = {}
        self.renewed: list[UUID] = []
        self.in_use: list[int] = []
        self.num_asked = 0
        self.error: Exception | None = None
        self.failures = 0
        self.silence: threading.Event | None = None
        self.threads: set[str] = set()

    def take(self, num_slots: int, num_in_use: int) -> UUID | None:
        self.num_asked += 1
        self._answer()
        self.in_use.append(num_in_use)
        num_taken = sum(self.leases.values())
        if num_taken + num_slots > self.num_slots:
            raise LimitReachedError(
                f"{num_slots} of {self.num_slots} slots, {num_taken} are in use"
            )
        lease_id = uuid4()
        self.leases[lease_id] = num_slots
        return lease_id

    def renew(self, lease_id: UUID) -> None:
        self._answer()
        self.renewed.append(lease_id)

    def give_back(self, lease_id: UUID) -> None:
        self._answer()
        del self.leases[lease_id]

    def _answer(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.silence is not None:
            self.silence.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        if self.failures:
            self.failures -= 1
            raise OSError("503 Service Unavailable")
