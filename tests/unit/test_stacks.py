"""StackPool: one engine for each slot, lent to one shard at a time, kept warm while it is well."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job

from engine import ConfigError, EngineConfig, OfflineInference
from flows import device_line, stacks
from flows.device_locks import DeviceLocks
from flows.experiments import list_experiments
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.schema import JobState
from flows.stacks import StackPool, StoppedError

WAIT_SECONDS = 30
MakePool = Callable[..., StackPool]


def make_config(**changes: object) -> EngineConfig:
    values = {"model_path": "mock", "device": "mock", "runtime": {"inline": True}}
    return EngineConfig.model_validate(values | changes)


@pytest.fixture
def pool() -> Iterator[StackPool]:
    pool = StackPool(make_config(device_ids=[0, 1]))
    yield pool
    pool.close()


def is_open(engine: OfflineInference) -> bool:
    try:
        return bool(engine.worker_pids)
    except ConfigError:
        return False


class Borrower:
    """A thread that borrows a slot and keeps it until it is told to give it back."""

    def __init__(self, pool: StackPool, stop: threading.Event | None = None) -> None:
        self._pool = pool
        self._stop = stop
        self._has_borrowed = threading.Event()
        self._may_return = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._borrow, daemon=True)
        self._thread.start()

    def _borrow(self) -> None:
        try:
            with self._pool.borrow(self._stop):
                self._has_borrowed.set()
                self._may_return.wait(WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - told by `error`
            self._error = error

    def is_still_waiting(self, seconds: float = 0.1) -> None:
        assert not self._has_borrowed.wait(seconds)
        assert self._thread.is_alive()

    def has_borrowed(self) -> None:
        assert self._has_borrowed.wait(WAIT_SECONDS)

    def give_back(self) -> None:
        self.has_borrowed()
        self._may_return.set()
        self._thread.join(WAIT_SECONDS)

    def error(self) -> Exception | None:
        self._thread.join(WAIT_SECONDS)
        return self._error


def test_nothing_is_loaded_before_an_engine_is_asked_for(pool: StackPool) -> None:
    with pool.borrow():
        assert pool.num_loads == 0


def test_an_engine_stays_warm_for_the_next_shard(pool: StackPool) -> None:
    with pool.borrow() as slot:
        first = slot.engine()
        assert slot.engine() is first
    with pool.borrow() as slot:
        assert slot.engine() is first
    assert pool.num_loads == 1


def test_an_engine_that_saw_an_error_is_closed_and_not_lent_again(pool: StackPool) -> None:
    engines: list[OfflineInference] = []

    def lose_the_device() -> None:
        with pool.borrow() as slot:
            engines.append(slot.engine())
            assert is_open(engines[0])
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        lose_the_device()
    assert not is_open(engines[0])
    with pool.borrow() as slot:
        assert slot.engine() is not engines[0]
        assert is_open(slot.engine())


def test_an_error_after_a_slot_was_given_back_leaves_its_engine_to_others(pool: StackPool) -> None:
    lending = pool.borrow()
    slot = lending.__enter__()
    engine = slot.engine()
    slot.give_back()
    error = RuntimeError("too late to be the engine's")
    assert not lending.__exit__(RuntimeError, error, None)
    assert is_open(engine)
    with pool.borrow() as following:
        assert following.engine() is engine


def test_an_engine_that_could_not_be_loaded_gives_its_slot_back(tmp_path: object) -> None:
    pool = StackPool(make_config(device="cpu", model_path=f"{tmp_path}/none"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="none"), pool.borrow() as slot:
            slot.engine()
    pool.close()


def test_each_borrower_has_an_engine_of_its_own(pool: StackPool) -> None:
    with pool.borrow() as one, pool.borrow() as other:
        assert one.number != other.number
        assert one.engine() is not other.engine()
    assert pool.num_loads == 2


def test_a_warm_engine_is_lent_before_another_is_loaded(pool: StackPool) -> None:
    with pool.borrow(), pool.borrow() as second:
        engine = second.engine()
    with pool.borrow() as slot:
        assert slot.engine() is engine
    assert pool.num_loads == 1


def test_who_finds_no_free_slot_waits_for_one() -> None:
    pool = StackPool(make_config())
    has_borrowed = threading.Event()

    def borrow() -> None:
        with pool.borrow():
            has_borrowed.set()

    waiting = threading.Thread(target=borrow, daemon=True)
    with pool.borrow():
        waiting.start()
        assert not has_borrowed.wait(0.05)
    assert has_borrowed.wait(WAIT_SECONDS)
    waiting.join(WAIT_SECONDS)


def test_closing_waits_for_borrowers_and_closes_every_engine() -> None:
    pool = StackPool(make_config())
    may_return = threading.Event()
    is_lent = threading.Event()
    engines: list[OfflineInference] = []

    def borrow() -> None:
        with pool.borrow() as slot:
            engines.append(slot.engine())
            is_lent.set()
            may_return.wait(WAIT_SECONDS)
            assert is_open(engines[0])

    borrower = threading.Thread(target=borrow, daemon=True)
    borrower.start()
    assert is_lent.wait(WAIT_SECONDS)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    may_return.set()
    closing.join(WAIT_SECONDS)
    borrower.join(WAIT_SECONDS)
    assert not closing.is_alive()
    assert not is_open(engines[0])


def test_a_pool_can_be_closed_twice_and_used_again(pool: StackPool) -> None:
    pool.close()
    pool.close()
    with pool.borrow() as slot:
        assert is_open(slot.engine())


@pytest.mark.parametrize(
    ("device_ids", "width", "groups"),
    [([0], 1, [(0,)]), ([4, 5, 6, 7], 1, [(4,), (5,), (6,), (7,)]), ([0, 1, 2, 3], 2, [(0, 1), (2, 3)])],
)  # fmt: skip
def test_devices_are_shared_out_to_slots_by_tensor_parallel_size(
    device_ids: list[int], width: int, groups: list[tuple[int, ...]]
) -> None:
    config = make_config(device_ids=device_ids, tensor_parallel_size=width, runtime={})
    pool = StackPool(config)
    assert pool.num_slots == len(groups)
    assert [stack.config.device_ids for stack in pool._stacks] == groups


class TestLockedDevices:
    """Two pools are two processes: their files are locked independently."""

    @pytest.fixture(autouse=True)
    def in_a_hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stacks, "_WAIT_SECONDS", 0.01)
        monkeypatch.setattr(stacks, "_IDLE_CHECK_SECONDS", 0.01)
        monkeypatch.setattr(stacks, "_SHARD_GAP_SECONDS", 0.0)

    @pytest.fixture
    def make_pool(self, tmp_path: Path) -> Iterator[MakePool]:
        pools: list[StackPool] = []

        def make(job_id: str, warm_seconds: float = 60.0, **config: object) -> StackPool:
            locks = DeviceLocks(tmp_path / "locks", job_id)
            pools.append(StackPool(make_config(**config), locks=locks, warm_seconds=warm_seconds))
            return pools[-1]

        yield make
        for pool in pools:
            pool.close()

    def test_eight_devices_are_four_slots_of_two_and_the_fifth_borrower_waits(
        self, make_pool: MakePool
    ) -> None:
        config = {"device_ids": range(8), "tensor_parallel_size": 2, "runtime": {}}
        one, other = make_pool("one", **config), make_pool("other", **config)
        with ExitStack() as borrowed:
            lent = [borrowed.enter_context(pool.borrow()) for pool in (one, other, one, other)]
            devices = [slot._stack.devices for slot in lent]
            assert sorted(devices) == [(f"mock:{i}", f"mock:{i + 1}") for i in (0, 2, 4, 6)]
            fifth = Borrower(one)
            fifth.is_still_waiting()
            borrowed.close()
            fifth.has_borrowed()
        fifth.give_back()

    def test_a_device_is_waited_for_until_the_engine_of_another_process_is_closed(
        self, make_pool: MakePool, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        caplog.set_level("INFO", "flows")
        one, other = make_pool("one"), make_pool("other")
        with one.borrow() as slot:
            engine = slot.engine()
            waiting = Borrower(other)
            waiting.is_still_waiting()
            assert is_open(engine), "an engine in use is not closed for others"
        waiting.has_borrowed()
        assert not is_open(engine)
        waiting.give_back()
        lines = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
        assert len(lines) == 1
        held_by = f"waiting for device mock:0, held by process {os.getpid()} of job one since "
        assert lines[0].startswith(held_by)
        assert list((tmp_path / "locks").glob("*.waiting")) == []

    def test_who_holds_the_device_is_said_again_while_one_waits(
        self,
        make_pool: MakePool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(device_line, "_REPORT_SECONDS", 0.03)
        caplog.set_level("INFO", "flows")
        with make_pool("one").borrow():
            waiting = Borrower(make_pool("other"))
            waiting.is_still_waiting(0.3)
        waiting.give_back()
        assert 2 < sum("held by process" in r.getMessage() for r in caplog.records) < 12

    def test_a_job_that_is_stopped_waits_no_longer(
        self, make_pool: MakePool, tmp_path: Path
    ) -> None:
        stop = threading.Event()
        with make_pool("one").borrow():
            waiting = Borrower(make_pool("other"), stop)
            waiting.is_still_waiting()
            stop.set()
            assert isinstance(waiting.error(), StoppedError)
            assert list((tmp_path / "locks").glob("*.waiting")) == []

    def test_the_next_shard_goes_before_another_process(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stacks, "_SHARD_GAP_SECONDS", 60.0)
        one = make_pool("one")
        with one.borrow() as slot:
            engine = slot.engine()
            waiting = Borrower(make_pool("other"))
            waiting.is_still_waiting()
        waiting.is_still_waiting()
        with one.borrow() as slot:
            assert slot.engine() is engine
        one.close()
        waiting.give_back()
        assert one.num_loads == 1

    def test_a_free_device_is_taken_while_others_are_busy(self, make_pool: MakePool) -> None:
        both = {"device_ids": [0, 1]}
        with make_pool("one", **both).borrow(), make_pool("other", **both).borrow() as slot:
            assert slot.number == 1

    def test_a_bad_device_keeps_its_lock_free(self, make_pool: MakePool) -> None:
        one = make_pool("one", device_ids=[0, 1])
        with one.borrow() as slot:
            slot.engine()
            slot.retire("it answers nonsense")
            with make_pool("other").borrow() as other:
                assert other.engine()

    def test_a_model_that_cannot_be_loaded_keeps_no_device(
        self, make_pool: MakePool, tmp_path: Path
    ) -> None:
        one = make_pool("one", device="cpu", model_path=f"{tmp_path}/none")
        with pytest.raises(ConfigError, match="none"), one.borrow() as slot:
            slot.engine()
        with make_pool("other", device="cpu").borrow() as slot:
            assert slot.number == 0

    def test_an_idle_engine_is_closed_after_warm_seconds_and_its_device_is_free(
        self, make_pool: MakePool
    ) -> None:
        one = make_pool("one", warm_seconds=0.1)
        with one.borrow() as slot:
            engine = slot.engine()
        assert is_open(engine)
        deadline = time.monotonic() + WAIT_SECONDS
        while is_open(engine):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        Borrower(make_pool("other")).give_back()

    def test_an_engine_in_use_is_not_closed_beside_an_idle_one(self, make_pool: MakePool) -> None:
        one = make_pool("one", warm_seconds=0.1, device_ids=[0, 1])
        with one.borrow() as slot:
            engine = slot.engine()
            with one.borrow() as second:
                idle_engine = second.engine()
            waiting = Borrower(make_pool("other", device_ids=[0, 1]))
            waiting.give_back()
            assert not is_open(idle_engine)
            assert is_open(engine)

    def test_without_warm_seconds_each_shard_loads_anew(self, make_pool: MakePool) -> None:
        one = make_pool("one", warm_seconds=0.0)
        for _ in range(2):
            with one.borrow() as slot:
                engine = slot.engine()
            assert not is_open(engine)
            with make_pool("other").borrow():
                pass
        assert one.num_loads == 2


@pytest.mark.parametrize(
    ("device", "folder", "expected"),
    [
        ("cpu", None, None),
        ("mock", None, None),
        ("mock", "/srv/locks", "/srv/locks"),
        ("cpu", "/srv/locks", "/srv/locks"),
        ("npu", None, "/tmp/tokenmill-devices"),
        ("cuda", "/srv/locks", "/srv/locks"),
    ],
)
def test_an_accelerator_is_locked_and_another_device_only_when_asked(
    tmp_path: Path, device: str, folder: str | None, expected: str | None
) -> None:
    config = make_job(tmp_path, questions(1), device_lock_dir=folder, engine__device=device)
    locks = StackPool.of_job(config)._line._locks
    assert (None if locks is None else str(locks.folder)) == expected


def test_the_experiment_log_counts_one_load_for_all_shards_of_a_run(tmp_path: Path) -> None:
    config = make_job(tmp_path, questions(6), shards=3, device_lock_dir=tmp_path / "locks")
    _, summaries = run_job(config)
    with Ledger.open(config.resolved_ledger_url) as ledger:
        stats = list_experiments(ledger)[0].stats
    assert (len(summaries), stats["num_loads"]) == (3, 1)


def test_a_job_that_is_stopped_before_it_gets_its_device_is_left_resumable(tmp_path: Path) -> None:
    config = make_job(tmp_path, questions(6), shards=1, device_lock_dir=tmp_path / "locks")
    assert (hold := DeviceLocks(tmp_path / "locks", "another").try_take(("mock:0",))) is not None
    with JobRun.open(config) as run:
        threading.Timer(0.1, run.stop.set).start()
        outcome = run.finish([run.run_shard(0)], {})
    hold.release()
    assert outcome.state is JobState.INTERRUPTED
    assert run_job(config)[0].state is JobState.FINISHED
