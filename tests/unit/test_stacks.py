"""StackPool: one engine for each slot, lent to one shard at a time, kept warm while it is well."""

import threading
from collections.abc import Iterator

import pytest

from engine import ConfigError, EngineConfig, OfflineInference
from flows.stacks import StackPool

WAIT_SECONDS = 30


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
    assert [config.device_ids for config in pool._slots] == groups
