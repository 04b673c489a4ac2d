"""Which row is to blame when workers die: policy alone, on a shard that is a set of numbers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, OfflineInference, WorkerError, WorkerFailure
from flows.shard_recovery import BadDeviceError, answer_all, isolate

BATCH = 8


class FakeEngine(OfflineInference):
    """Answers the canary, or dies of it."""

    def __init__(self, *, is_well: bool) -> None:
        super().__init__(EngineConfig(model_path="mock", device="mock"))
        self._is_well = is_well

    def generate(self, *_: object) -> list[object]:  # type: ignore[override]
        if not self._is_well:
            raise WorkerError("died of the canary", failure=WorkerFailure.DIED)
        return []


class FakeShard:
    """Rows are answered in order, BATCH of them at a time in flight; poison kills the batch."""

    def __init__(self, num_rows: int, poison: set[int], *, is_device_well: bool = True) -> None:
        self.pending = list(range(num_rows))
        self.poison = poison
        self.is_device_well = is_device_well
        self.is_stopped = False
        self.deaths_to_come: list[WorkerError] = []
        self.answered: list[int] = []
        self.condemned: list[int] = []
        self.accused: list[list[int]] = []
        self._in_flight: list[int] = []

    def answer(self, row_indices: Sequence[int] | None) -> None:
        if self.deaths_to_come:
            self._in_flight = []
            raise self.deaths_to_come.pop()
        asked = self.pending if row_indices is None else row_indices
        todo = [row for row in asked if row in self.pending]
        for first in range(0, len(todo), BATCH):
            self._in_flight = todo[first : first + BATCH]
            if self.poison.intersection(self._in_flight):
                raise WorkerError("killed", failure=WorkerFailure.DIED)
            for row in self._in_flight:
                self.pending.remove(row)
                self.answered.append(row)

    def accuse(self, error: WorkerError) -> list[int]:
        self.accused.append(self._in_flight)
        return self._in_flight

    def unanswered(self, row_indices: Sequence[int]) -> list[int]:
        return [row for row in row_indices if row in self.pending]

    def condemn(self, row_index: int, error: WorkerError) -> None:
        self.pending.remove(row_index)
        self.condemned.append(row_index)

    def replace_engine(self) -> OfflineInference:
        return FakeEngine(is_well=self.is_device_well)


@given(st.integers(1, 60), st.data())
def test_exactly_the_guilty_rows_are_condemned_and_every_other_is_answered(
    num_rows: int, data: st.DataObject
) -> None:
    poison = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=5))
    suspects = data.draw(st.sets(st.integers(0, num_rows - 1), max_size=num_rows))
    shard = FakeShard(num_rows, poison)
    isolate(shard, suspects)
    answer_all(shard)
    assert sorted(shard.condemned) == sorted(poison)
    assert sorted(shard.answered) == [row for row in range(num_rows) if row not in poison]
    # Halving: a death a level, and two of a row that is alone.
    assert len(shard.accused) <= len(poison) * (2 + 1 + num_rows.bit_length())


def test_one_death_alone_condemns_nobody() -> None:
    shard = FakeShard(1, set())
    shard.deaths_to_come = [WorkerError("bad luck", failure=WorkerFailure.DIED)]
    isolate(shard, {0})
    answer_all(shard)
    assert (shard.answered, shard.condemned) == ([0], [])


def test_a_device_whose_next_worker_cannot_answer_the_canary_is_bad() -> None:
    shard = FakeShard(3, {1}, is_device_well=False)
    with pytest.raises(BadDeviceError, match="could not answer the canary either") as caught:
        answer_all(shard)
    assert caught.value.failure is WorkerFailure.DIED
    assert shard.condemned == []


@pytest.mark.parametrize("failure", [WorkerFailure.OUT_OF_MEMORY, WorkerFailure.START_FAILED])
def test_what_no_row_can_cause_is_not_recovered_from(failure: WorkerFailure) -> None:
    shard = FakeShard(3, set())
    shard.deaths_to_come = [WorkerError("no", failure=failure)]
    with pytest.raises(WorkerError, match="no"):
        answer_all(shard)
    assert shard.accused == []


def test_a_stopped_shard_starts_no_worker_in_the_place_of_one_that_died() -> None:
    shard = FakeShard(3, {1})
    shard.is_device_well = False  # another would be found out by its canary
    shard.accuse = lambda error: setattr(shard, "is_stopped", True) or [1]  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="killed"):
        answer_all(shard)


def test_a_worker_that_dies_again_and_again_with_nothing_in_flight_ends_the_shard() -> None:
    shard = FakeShard(3, set())
    shard.deaths_to_come = [WorkerError("idle", failure=WorkerFailure.DIED)] * 3
    with pytest.raises(WorkerError, match="idle"):
        answer_all(shard)
    shard.deaths_to_come = [WorkerError("idle", failure=WorkerFailure.DIED)] * 2
    answer_all(shard)
    assert shard.answered == [0, 1, 2]


def test_a_stopped_shard_isolates_nobody_any_more() -> None:
    shard = FakeShard(20, {3})
    shard.is_stopped = True
    isolate(shard, {3, 4})
    answer_all(shard)
    assert (shard.answered, shard.condemned, shard.accused) == ([], [], [])
