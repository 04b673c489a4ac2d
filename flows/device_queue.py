"""Asks somebody else, in a thread of its own, whether devices of this host may be in use.

The locks of the devices are the truth, and nobody waits for this one long, an engine never: what
is not answered is granted, and what cannot be renewed or given back is left to end by itself.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol
from uuid import UUID

logger = logging.getLogger(__name__)
_ANSWER_SECONDS = 10.0  # a busy server fails now and then
_RENEW_SECONDS = 20.0
_RETRY_SECONDS = 0.5
# Whoever had the devices gives its slots back a moment after their locks.
_PATIENCE_SECONDS = 3.0
_CLOSE_SECONDS = 5.0


class LimitReachedError(Exception):
    """Not that many slots are free; the message says what is waited for."""


class DeviceLimit(Protocol):
    """Slots for devices, which somebody else counts. Every call may take long and raise anything."""

    def take(self, num_slots: int, num_in_use: int) -> UUID | None:
        """Take slots and return their lease; None when nobody counts.

        Args:
            num_slots: how many.
            num_in_use: devices of this host that are locked, without those that wait for slots.

        Raises:
            LimitReachedError: so many are not free.
        """
        ...

    def renew(self, lease_id: UUID) -> None:
        """Keep slots for some time more."""
        ...

    def give_back(self, lease_id: UUID) -> None:
        """Let others have the slots."""
        ...


class Place:
    """Slots for the devices of one engine: asked for, granted or refused, given back."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.asked_at = self.due = time.monotonic()
        self.answer: str | None = None
        self.lease_id: UUID | None = None
        self.is_over = False
        self.failing_since: float | None = None

    @property
    def refusal(self) -> str | None:
        """None while there is no answer; empty when the slots are granted, else why not."""
        if self.answer is None and time.monotonic() - self.asked_at >= _ANSWER_SECONDS:
            self.answer = ""
        return self.answer


class DeviceQueue:
    """Takes, renews and gives back the slots of one run."""

    def __init__(
        self, limit: DeviceLimit, num_locked: Callable[[], int], answered: Callable[[], None]
    ) -> None:
        """Wait for the first question.

        Args:
            limit: who is asked.
            num_locked: counts the devices of this host that are locked.
            answered: is called, in the queue's thread, when there may be an answer.
        """
        self._limit = limit
        self._num_locked = num_locked
        self._answered = answered
        self._changed = threading.Condition()
        self._places: list[Place] = []  # those for which something is still to be done
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def ask(self, num_devices: int) -> Place:
        """Ask for slots, for devices that this process has locked."""
        place = Place(num_devices)
        with self._changed:
            self._places.append(place)
            if self._thread is None:
                run = contextvars.copy_context().run  # its log lines belong to the flow run
                self._thread = threading.Thread(
                    target=run, args=(self._work,), name="device-queue", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return place

    def give_back(self, place: Place) -> None:
        """Let others have the slots, as soon as the thread comes to it."""
        with self._changed:
            place.is_over = True
            place.due = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Wait, for a moment at most, until all that was given back is back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._places, _CLOSE_SECONDS)

    def _work(self) -> None:
        while (place := self._next()) is not None:
            was_over = place.is_over
            try:
                is_done = self._serve(place, was_over=was_over)
                place.failing_since = None
            except Exception as error:  # noqa: BLE001 - no shard may fail because of a limit
                is_done = self._fail(place, error) and was_over
            self._note(place, is_done=is_done, was_over=was_over)
            self._answered()

    def _next(self) -> Place | None:
        """Wait for a place that is due; None when nothing is to come, and the thread ends."""
        with self._changed:
            while self._places:
                place = min(self._places, key=lambda place: place.due)
                seconds = place.due - time.monotonic()
                if seconds <= 0:
                    return place
                self._changed.wait(seconds)
            self._thread = None
            return None

    def _serve(self, place: Place, *, was_over: bool) -> bool:
        """Do what is due, and return True if nothing is to come."""
        if was_over:
            if place.lease_id is not None:
                self._limit.give_back(place.lease_id)
            return True
        if place.lease_id is None:
            return self._take(place)
        self._limit.renew(place.lease_id)
        return False

    def _take(self, place: Place) -> bool:
        with self._changed:
            asking = [each for each in self._places if each.lease_id is None and not each.is_over]
        num_in_use = max(0, self._num_locked() - sum(each.num_slots for each in asking))
        answer = ""
        try:
            place.lease_id = self._limit.take(place.num_slots, num_in_use)
        except LimitReachedError as error:
            if time.monotonic() - place.asked_at < _PATIENCE_SECONDS:
                return False
            answer = str(error)
        if place.answer is None:
            place.answer = answer
        return place.lease_id is None

    def _fail(self, place: Place, error: Exception) -> bool:
        """Say so, and return True, when the limit has failed for as long as one waits for it."""
        now = time.monotonic()
        if place.failing_since is None:
            place.failing_since = now
        is_waited_for = place.lease_id is None and place.refusal is None
        is_recent = place.lease_id is not None and now - place.failing_since < _ANSWER_SECONDS
        if is_waited_for or is_recent:
            return False
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "the limit of the devices does not answer as it should, their locks count without "
                "it: %r", error,
            )  # fmt: skip
        return True

    def _note(self, place: Place, *, is_done: bool, was_over: bool) -> None:
        """Forget a place for which nothing is to be done any more, or say when it is due again."""
        with self._changed:
            if is_done:
                self._places.remove(place)
                self._changed.notify_all()
            elif was_over or place.answer is None:
                place.due = time.monotonic() + _RETRY_SECONDS
            elif not place.is_over:
                place.due = time.monotonic() + _RENEW_SECONDS
