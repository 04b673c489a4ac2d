"""Engines, the locks of their devices, and a limit that counts them too."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_limit import WAIT_SECONDS, FakeLimit, wait_until

from engine import EngineConfig
from flows import device_line, device_queue, stacks
from flows.device_line import DeviceLine
from flows.device_locks import DeviceLocks
from flows.stacks import StackPool, StoppedError


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_queue, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(device_queue, "_PATIENCE_SECONDS", 0.03)
    monkeypatch.setattr(device_line, "_REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(stacks, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(stacks, "_IDLE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(stacks, "_SHARD_GAP_SECONDS", 0.0)


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
