"""When requests may join: three policies behind one interface, on a clock of the test's own."""

from engine.config import SchedulerConfig
from engine.scheduler.batching import (
    BatchView,
    ContinuousBatching,
    DynamicBatching,
    StaticBatching,
    make_batching_policy,
)


def view(
    now: float,
    *,
    num_waiting: int = 1,
    num_running: int = 0,
    oldest_arrival: float = 0.0,
    is_intake_closed: bool = False,
) -> BatchView:
    return BatchView(
        now=now,
        num_waiting=num_waiting,
        num_running=num_running,
        oldest_arrival=oldest_arrival,
        is_intake_closed=is_intake_closed,
    )


def dynamic_policy() -> DynamicBatching:
    return DynamicBatching(max_batch_size=8, max_wait_seconds=1.0)


def test_one_configuration_key_chooses_the_policy() -> None:
    kinds = {
        name: type(make_batching_policy(SchedulerConfig(batching=name)))
        for name in ("continuous", "static", "dynamic")
    }
    assert kinds == {
        "continuous": ContinuousBatching,
        "static": StaticBatching,
        "dynamic": DynamicBatching,
    }


def test_static_waits_for_a_full_batch_or_for_its_time() -> None:
    policy = StaticBatching(max_batch_size=4, max_wait_seconds=1.0)
    assert policy.num_admissible(view(0.5, num_waiting=3)) == 0
    assert policy.wake_at(view(0.5, num_waiting=3)) == 1.0
    assert policy.num_admissible(view(0.5, num_waiting=4)) == 4
    assert policy.num_admissible(view(1.0, num_waiting=3)) == 3


def test_static_lets_nobody_join_a_batch_that_runs() -> None:
    policy = StaticBatching(max_batch_size=4, max_wait_seconds=1.0)
    assert policy.num_admissible(view(2.0, num_waiting=2)) == 2
    policy.note_admission()
    policy.note_admission()
    assert policy.num_admissible(view(3.0, num_waiting=9, num_running=2)) == 0
    assert policy.num_admissible(view(3.0, num_waiting=9, num_running=1)) == 0
    assert policy.num_admissible(view(4.0, num_waiting=9, num_running=0)) == 4


def test_static_does_not_wait_for_requests_that_cannot_come() -> None:
    policy = StaticBatching(max_batch_size=4, max_wait_seconds=1.0)
    assert policy.num_admissible(view(0.0, num_waiting=1, is_intake_closed=True)) == 1


def test_dynamic_timeout_shrinks_as_arrivals_come_faster() -> None:
    timeouts = {}
    for gap in (0.01, 0.1):
        policy = dynamic_policy()
        for number in range(20):
            policy.note_arrival(number * gap)
        timeouts[gap] = policy.timeout_seconds(20 * gap, num_waiting=3)
    # Five are missing: they are expected in five gaps.
    assert 0.04 < timeouts[0.01] < 0.07
    assert 0.4 < timeouts[0.1] < 0.7


def test_dynamic_does_not_wait_when_the_next_arrival_is_too_far_off() -> None:
    policy = dynamic_policy()
    for number in range(3):
        policy.note_arrival(number * 2.0)
    assert policy.timeout_seconds(4.0, num_waiting=1) == 0.0


def test_dynamic_forgets_a_burst_that_is_long_over() -> None:
    policy = dynamic_policy()
    for number in range(100):
        policy.note_arrival(number * 0.001)
    policy.note_arrival(60.0)
    assert policy.timeout_seconds(60.0, num_waiting=1) == 1.0


def test_dynamic_group_goes_when_full_or_late() -> None:
    policy = dynamic_policy()
    policy.note_arrival(0.0)
    assert policy.num_admissible(view(0.5, num_waiting=1)) == 0
    assert policy.num_admissible(view(0.5, num_waiting=8)) == 8
    assert policy.num_admissible(view(1.0, num_waiting=1)) == 8
