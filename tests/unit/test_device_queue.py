"""A limit on devices that somebody else counts: asked, renewed and given back, never relied on."""

import threading
from collections.abc import Iterator

import pytest
from fake_limit import FakeLimit, wait_until

from flows import device_queue
from flows.device_queue import DeviceQueue, Place


def granted(queue: DeviceQueue, num_devices: int) -> Place:
    """Ask for slots, and wait until they are granted."""
    place = queue.ask(num_devices)
    wait_until(lambda: place.refusal == "")
    return place


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(device_queue, "_PATIENCE_SECONDS", 0.03)
    monkeypatch.setattr(device_queue, "_RENEW_SECONDS", 0.01)


class TestQueue:
    """The thread that talks to the limit."""

    @pytest.fixture
    def limit(self) -> FakeLimit:
        return FakeLimit(2)

    @pytest.fixture
    def queue(self, limit: FakeLimit) -> Iterator[DeviceQueue]:
        queue = DeviceQueue(limit, lambda: 5, lambda: None)
        yield queue
        for place in list(queue._places):
            queue.give_back(place)
        queue.close()

    def test_slots_are_granted_renewed_and_given_back(
        self, queue: DeviceQueue, limit: FakeLimit
    ) -> None:
        place = granted(queue, 2)
        assert list(limit.leases.values()) == [2]
        wait_until(lambda: len(limit.renewed) > 2)
        assert set(limit.renewed) == set(limit.leases)
        queue.give_back(place)
        queue.close()
        assert limit.leases == {}
        assert limit.threads == {"device-queue"}

    def test_what_is_given_back_before_it_is_granted_is_given_back_then(
        self, queue: DeviceQueue, limit: FakeLimit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_queue, "_RENEW_SECONDS", 600.0)
        limit.silence = threading.Event()
        place = queue.ask(1)
        wait_until(lambda: limit.num_asked)
        queue.give_back(place)
        limit.silence.set()
        queue.close()
        assert (limit.num_asked, limit.leases) == (1, {})

    def test_a_full_limit_is_asked_again_for_a_moment_and_then_refuses_with_its_words(
        self, queue: DeviceQueue, limit: FakeLimit
    ) -> None:
        first = granted(queue, 2)
        second = queue.ask(1)
        wait_until(lambda: second.refusal is not None)
        assert second.refusal == "1 of 2 slots, 2 are in use"
        assert limit.num_asked > 2
        queue.give_back(second)
        third = queue.ask(1)
        queue.give_back(first)
        wait_until(lambda: third.refusal is not None)
        assert third.refusal == ""

    def test_devices_that_wait_for_their_slots_are_not_in_use(
        self, queue: DeviceQueue, limit: FakeLimit
    ) -> None:
        granted(queue, 2)
        refused = queue.ask(1)
        wait_until(lambda: refused.refusal)
        assert limit.in_use[0] == 5 - 2
        assert set(limit.in_use[1:]) == {5 - 1}

    @pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("wrong setting")])
    def test_a_limit_that_cannot_be_asked_grants_everything_and_one_line_says_so(
        self,
        queue: DeviceQueue,
        limit: FakeLimit,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(device_queue, "_ANSWER_SECONDS", 0.05)
        limit.error = error
        places = [queue.ask(8), queue.ask(8)]
        wait_until(lambda: [place.refusal for place in places] == ["", ""])
        wait_until(lambda: caplog.records)
        for place in places:
            queue.give_back(place)
        queue.close()  # there is nothing to give back
        assert queue._places == []
        assert [str(error) in record.getMessage() for record in caplog.records] == [True]

    def test_what_was_granted_without_the_limit_counts_when_it_answers_again(
        self, queue: DeviceQueue, limit: FakeLimit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_queue, "_ANSWER_SECONDS", 0.05)
        limit.error = OSError("no route")
        place = granted(queue, 2)
        assert limit.leases == {}
        limit.error = None
        wait_until(lambda: limit.leases)
        queue.give_back(place)
        queue.close()
        assert limit.leases == {}

    def test_one_failure_of_a_busy_server_is_no_reason_to_go_on_without_it(
        self,
        queue: DeviceQueue,
        limit: FakeLimit,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        limit.failures = 1
        place = queue.ask(1)
        wait_until(lambda: place.refusal is not None)
        monkeypatch.setattr(device_queue, "_ANSWER_SECONDS", 0.05)
        assert list(limit.leases.values()) == [1]
        wait_until(lambda: len(limit.renewed) > 10)  # longer than it has patience with failures
        limit.failures = 1
        wait_until(lambda: not limit.failures)
        limit.failures = 1
        queue.give_back(place)
        queue.close()
        assert (limit.failures, limit.leases, caplog.records) == (0, {}, [])

    def test_a_limit_that_is_silent_is_not_waited_for_long(
        self, queue: DeviceQueue, limit: FakeLimit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_queue, "_ANSWER_SECONDS", 0.05)
        monkeypatch.setattr(device_queue, "_CLOSE_SECONDS", 0.05)
        limit.silence = threading.Event()
        places = [queue.ask(1), queue.ask(1)]
        wait_until(lambda: [place.refusal for place in places] == ["", ""])
        queue.close()
        limit.silence.set()
        wait_until(lambda: len(limit.leases) == 2)  # so that it counts right from then on
        for place in places:
            queue.give_back(place)
        wait_until(lambda: limit.leases == {})

    def test_a_lease_that_cannot_be_renewed_for_a_time_is_kept_and_given_back(
        self,
        queue: DeviceQueue,
        limit: FakeLimit,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        place = queue.ask(1)
        wait_until(lambda: limit.renewed)
        monkeypatch.setattr(device_queue, "_ANSWER_SECONDS", 0.05)
        limit.error = OSError("gone for a while")
        wait_until(lambda: caplog.records)
        limit.error = None
        num_renewed = len(limit.renewed)
        wait_until(lambda: len(limit.renewed) > num_renewed + 2)
        assert place.refusal == ""
        queue.give_back(place)
        queue.close()
        assert limit.leases == {}

    def test_the_thread_ends_when_nothing_is_held_and_begins_again(
        self, queue: DeviceQueue, limit: FakeLimit
    ) -> None:
        for _ in range(2):
            place = queue.ask(1)
            wait_until(lambda place=place: place.refusal == "")
            queue.give_back(place)
            wait_until(lambda: queue._thread is None)
        assert (limit.num_asked, limit.leases) == (2, {})
