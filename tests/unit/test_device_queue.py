"""A limit on devices that somebody else counts: asked, renewed and given back, never relied on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from engine import EngineConfig
from flows import device_line, device_queue, stacks
from flows.device_line import DeviceLine
from flows.device_locks import DeviceLocks
from flows.device_queue import DeviceQueue, LimitReachedError
from flows.stacks import StackPool, StoppedError

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


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(device_queue, "_PATIENCE_SECONDS", 0.03)
    monkeypatch.setattr(device_queue, "_RENEW_SECONDS", 0.01)
    monkeypatch.setattr(device_line, "_REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(stacks, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(stacks, "_IDLE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(stacks, "_SHARD_GAP_SECONDS", 0.0)


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
        place = queue.ask(2)
        wait_until(lambda: place.refusal == "")
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
        first = queue.ask(2)
        wait_until(lambda: first.refusal == "")
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
        granted = queue.ask(2)
        wait_until(lambda: granted.refusal == "")
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
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        limit.error = error
        places = [queue.ask(8), queue.ask(8)]
        wait_until(lambda: [place.refusal for place in places] == ["", ""])
        for place in places:
            queue.give_back(place)
        wait_until(lambda: queue._thread is None)  # there is nothing to give back
        assert [str(error) in record.getMessage() for record in caplog.records] == [True]

    def test_what_was_granted_without_the_limit_counts_when_it_answers_again(
        self, queue: DeviceQueue, limit: FakeLimit
    ) -> None:
        limit.error = OSError("no route")
        place = queue.ask(2)
        wait_until(lambda: place.refusal == "")
        assert limit.leases == {}
        limit.error = None
        wait_until(lambda: limit.leases)
        queue.give_back(place)
        queue.close()
        assert limit.leases == {}

    def test_one_failure_of_a_busy_server_is_no_reason_to_go_on_without_it(
        self, queue: DeviceQueue, limit: FakeLimit, caplog: pytest.LogCaptureFixture
    ) -> None:
        limit.failures = 1
        place = queue.ask(1)
        wait_until(lambda: place.refusal is not None)
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
        self, queue: DeviceQueue, limit: FakeLimit, caplog: pytest.LogCaptureFixture
    ) -> None:
        place = queue.ask(1)
        wait_until(lambda: limit.renewed)
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


MakePool = Callable[..., StackPool]


class TestPool:
    """Engines, their locks and the limit together."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "locks"

    @pytest.fixture
    def make_pool(self, folder: Path) -> Iterator[MakePool]:
        pools: list[StackPool] = []

        def make(limit: FakeLimit | None, num_devices: int = 1, **changes: object) -> StackPool:
            values = {"model_path": "mock", "device": "mock", "runtime": {"inline": True}}
            config = EngineConfig.model_validate(
                values | {"device_ids": range(num_devices)} | changes
            )
            locks = DeviceLocks(folder, f"job-{len(pools)}")
            pools.append(StackPool(config, locks=locks, limit=limit))
            return pools[-1]

        yield make
        for pool in pools:
            pool.close()

    def test_a_warm_engine_keeps_its_slots_and_they_go_with_its_devices(
        self, make_pool: MakePool, folder: Path
    ) -> None:
        limit = FakeLimit(2)
        pool = make_pool(limit, 2)
        with pool.borrow(), pool.borrow() as slot:
            slot.engine()
            assert sorted(limit.leases.values()) == [1, 1]
        wait_until(lambda: list(limit.leases.values()) == [1])
        assert DeviceLocks(folder, "").num_locked() == 1
        with pool.borrow() as slot:
            slot.engine()
        assert (pool.num_loads, limit.num_asked) == (1, 2)
        pool.close()
        assert limit.leases == {}
        assert DeviceLocks(folder, "").num_locked() == 0

    def test_an_engine_over_two_devices_takes_two_slots(self, make_pool: MakePool) -> None:
        limit = FakeLimit(4)
        pool = make_pool(limit, 4, tensor_parallel_size=2, runtime={})
        with pool.borrow(), pool.borrow():
            assert list(limit.leases.values()) == [2, 2]

    def test_nothing_is_asked_where_no_device_is_locked(self) -> None:
        config = EngineConfig(model_path="mock", device="mock")
        limit = FakeLimit(0)
        with StackPool(config, limit=limit).borrow():
            pass
        assert limit.num_asked == 0

    def test_a_device_that_another_has_is_waited_for_without_its_slots(
        self, make_pool: MakePool
    ) -> None:
        limit = FakeLimit(1)
        one, other = make_pool(limit), make_pool(limit)
        with one.borrow():
            waiting = _Borrower(other)
            wait_until(lambda: one._line.is_wanted(("mock:0",)))
            assert limit.num_asked == 1
        wait_until(waiting.has_borrowed.is_set)
        waiting.end()
        assert limit.num_asked >= 2

    def test_who_waits_for_slots_keeps_neither_device_nor_place_from_others(
        self,
        make_pool: MakePool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(device_line, "_REFUSED_SECONDS", 600.0)
        caplog.set_level("INFO", "flows")
        limit, stop = FakeLimit(1), threading.Event()
        one, other, without = make_pool(limit, 2), make_pool(limit, 2), make_pool(None, 2)
        with one.borrow(), ExitStack() as others:
            others.enter_context(without.borrow())
            waiting = _Borrower(other, stop)
            wait_until(lambda: one._line.is_wanted(("mock:1",)))
            others.close()
            wait_until(lambda: other._line._refused_until)
            with without.borrow() as slot:
                assert slot.number == 1
        assert not waiting.has_borrowed.is_set()
        stop.set()
        waiting.thread.join(WAIT_SECONDS)
        lines = [record.getMessage() for record in caplog.records]
        assert lines[0].startswith("waiting for device mock:0, held by")
        assert lines[1:] == ["waiting for 1 of 1 slots, 1 are in use"]

    def test_after_a_refusal_the_devices_are_left_alone_for_a_while(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_line, "_REFUSED_SECONDS", 600.0)
        locks = DeviceLocks(folder, "job")
        line = DeviceLine(locks, FakeLimit(0), lambda: None)
        with line.waiting():
            wait_until(lambda: line.try_take(("mock:0",)) or line._refused_until)
            assert line.try_take(("mock:0",)) is None
            assert locks.num_locked() == 0

    def test_it_waits_until_the_limit_has_room_and_the_log_says_of_what(
        self, make_pool: MakePool, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "flows")
        limit = FakeLimit(1)
        one, other = make_pool(limit, 2), make_pool(limit, 2)
        with one.borrow():
            waiting = _Borrower(other)
            wait_until(lambda: "waiting for 1 of 1 slots, 1 are in use" in caplog.text)
            limit.num_slots = 2
            wait_until(waiting.has_borrowed.is_set)
            assert waiting.slot is not None
            assert waiting.slot.number == 1
        waiting.end()

    def test_a_warm_engine_of_the_own_run_is_lent_while_the_limit_refuses_another(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_line, "_REFUSED_SECONDS", 600.0)
        limit = FakeLimit(1)
        pool = make_pool(limit, 2)
        with pool.borrow() as slot:
            engine = slot.engine()
            second = _Borrower(pool)
            wait_until(lambda: pool._line._refused_until)
        wait_until(second.has_borrowed.is_set)
        assert second.slot is not None
        assert second.slot.engine() is engine
        second.end()

    def test_one_engine_asks_for_one_place(self, make_pool: MakePool) -> None:
        limit = FakeLimit(8)
        limit.silence = threading.Event()
        borrower = _Borrower(make_pool(limit, 8))
        wait_until(lambda: limit.num_asked)
        threading.Timer(0.1, limit.silence.set).start()
        wait_until(borrower.has_borrowed.is_set)
        borrower.end()
        assert limit.num_asked == 1

    def test_a_job_that_is_stopped_gives_back_what_it_asked_for(
        self, make_pool: MakePool, folder: Path
    ) -> None:
        limit = FakeLimit(1)
        limit.silence = threading.Event()
        stop = threading.Event()
        pool = make_pool(limit)
        waiting = _Borrower(pool, stop)
        wait_until(lambda: limit.num_asked)
        stop.set()
        waiting.thread.join(WAIT_SECONDS)
        assert isinstance(waiting.error, StoppedError)
        assert DeviceLocks(folder, "").num_locked() == 0
        limit.silence.set()
        pool.close()
        assert (limit.num_asked, limit.leases) == (1, {})

    def test_two_engines_never_share_a_device_whatever_the_limit_says(
        self, make_pool: MakePool
    ) -> None:
        one, other = make_pool(FakeLimit(8)), make_pool(FakeLimit(8))
        with one.borrow():
            waiting = _Borrower(other)
            wait_until(lambda: one._line.is_wanted(("mock:0",)))
            assert not waiting.has_borrowed.is_set()
        waiting.end()


class _Borrower:
    def __init__(self, pool: StackPool, stop: threading.Event | None = None) -> None:
        self.slot: stacks.Slot | None = None
        self.error: Exception | None = None
        self.has_borrowed = threading.Event()
        self._may_end = threading.Event()
        self.thread = threading.Thread(target=self._borrow, args=(pool, stop), daemon=True)
        self.thread.start()

    def _borrow(self, pool: StackPool, stop: threading.Event | None) -> None:
        try:
            with pool.borrow(stop) as self.slot:
                self.has_borrowed.set()
                self._may_end.wait(WAIT_SECONDS)
        except StoppedError as error:
            self.error = error

    def end(self) -> None:
        assert self.has_borrowed.wait(WAIT_SECONDS)
        self._may_end.set()
        self.thread.join(WAIT_SECONDS)
