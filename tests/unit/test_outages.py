"""Patience: who waits for a server that went away, and for how long."""

import threading
import time
from collections.abc import Callable

import pytest

from flows import outages
from flows.outages import LedgerUnreachableError, Patience

GONE = LedgerUnreachableError("the server is gone")


class Clock:
    """A clock that only waiting moves, and what happens at some second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at, act in self.events:
            if self.now - 1000.0 >= at:
                act()


class Stop(threading.Event):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.sleep(timeout)
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outages, "time", clock)
    return clock


def never() -> bool:
    return False


def seconds_until_given_up(patience: Patience, clock: Clock) -> float:
    started = clock.now
    with pytest.raises(LedgerUnreachableError, match="the server is gone"):
        patience.wait(GONE, never)
    return clock.now - started


def test_a_run_waits_for_a_server_that_comes_back_after_half_an_hour(clock: Clock) -> None:
    patience = Patience(Stop(clock))
    patience.wait(GONE, lambda: clock.now > 2800)
    patience.refuse_if_given_up()


def test_a_server_that_stays_away_for_an_hour_is_given_up(clock: Clock) -> None:
    assert seconds_until_given_up(Patience(Stop(clock)), clock) == pytest.approx(3600, abs=2)


def test_a_run_that_is_told_to_stop_while_it_waits_ends_within_seconds(clock: Clock) -> None:
    stop = Stop(clock)
    clock.events.append((100, stop.set))
    assert seconds_until_given_up(Patience(stop), clock) == pytest.approx(115, abs=4)


def test_all_that_a_stopping_run_still_wants_waits_for_some_seconds_together(clock: Clock) -> None:
    stop = Stop(clock)
    stop.set()
    patience = Patience(stop)
    patience.wait(GONE, lambda: clock.now >= 1010)  # it was back in time, and went away again
    patience.refuse_if_given_up()
    assert seconds_until_given_up(patience, clock) <= 8
    assert seconds_until_given_up(patience, clock) == 0


def test_after_the_last_wait_nobody_tries_again(clock: Clock) -> None:
    stop = Stop(clock)
    stop.set()
    patience = Patience(stop)
    seconds_until_given_up(patience, clock)
    with pytest.raises(LedgerUnreachableError, match="the server is gone"):
        patience.refuse_if_given_up()


def test_one_who_waits_hears_of_the_stop_at_once() -> None:
    stop = threading.Event()
    patience = Patience(stop)
    stop_soon = threading.Timer(0.01, stop.set)
    stop_soon.start()
    began = time.monotonic()
    looks = iter((True,))
    patience.wait(GONE, lambda: next(looks))
    stop_soon.join()
    assert time.monotonic() - began < outages._PAUSE_SECONDS
