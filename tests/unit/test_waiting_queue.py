"""The order in which waiting requests are admitted."""

import pytest
from engine_builders import infer_request
from hypothesis import given
from hypothesis import strategies as st

from engine.config import OrderPolicy, SchedulerConfig
from engine.request import InferRequest
from engine.scheduler.queue import WaitingQueue


def order_of(requests: list[InferRequest], config: SchedulerConfig) -> list[int]:
    queue = WaitingQueue(config)
    for request in requests:
        queue.push(request)
    return [queue.pop(is_long_allowed=True).uid for _ in requests]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("priority", [3, 0, 1, 2]),
        ("shortest_first", [2, 0, 3, 1]),
        ("longest_first", [1, 3, 0, 2]),
        ("prefix", [1, 3, 2, 0]),
    ],
)
def test_each_policy_has_its_order(order: OrderPolicy, expected: list[int]) -> None:
    requests = [
        infer_request(0, [9, 9, 9], max_tokens=4),
        infer_request(1, [1, 1, 1, 1, 1], max_tokens=9),
        infer_request(2, [5, 5], max_tokens=1),
        infer_request(3, [1, 1, 1, 2], max_tokens=5, priority=-1),
    ]
    assert order_of(requests, SchedulerConfig(order=order)) == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 8))
def test_no_request_is_overtaken_by_more_than_its_age_allows(
    priorities: list[int], aging: int
) -> None:
    requests = [infer_request(uid, priority=p) for uid, p in enumerate(priorities)]
    served = order_of(requests, SchedulerConfig(order="priority", aging_requests=aging))
    lowest = min(priorities)
    for place, uid in enumerate(served):
        overtakers = [other for other in served[:place] if other > uid]
        assert len(overtakers) <= (priorities[uid] - lowest) * aging


def test_long_requests_wait_in_a_lane_of_their_own() -> None:
    config = SchedulerConfig(order="fcfs", long_request_tokens=3, max_long_requests=1)
    queue = WaitingQueue(config)
    for request in (infer_request(0, [1] * 9), infer_request(1, [1] * 3)):
        queue.push(request)
    short, long = queue.first(is_long_allowed=False), queue.first(is_long_allowed=True)
    assert short is not None
    assert long is not None
    assert (short.uid, long.uid) == (1, 0)


def test_discarded_request_is_not_served() -> None:
    requests = [infer_request(uid) for uid in range(3)]
    queue = WaitingQueue(SchedulerConfig())
    for request in requests:
        queue.push(request)
    queue.discard(requests[0])
    assert len(queue) == 2
    assert queue.pop(is_long_allowed=True) is requests[1]
    assert queue.requests() == [requests[2]]


def test_prompt_tokens_are_counted_while_their_request_waits() -> None:
    requests = [infer_request(uid, [1] * (uid + 1)) for uid in range(3)]
    queue = WaitingQueue(SchedulerConfig())
    counts = []
    for request in requests:
        queue.push(request)
        counts.append(queue.num_prompt_tokens)
    queue.discard(requests[0])
    queue.discard(requests[0])
    counts.append(queue.num_prompt_tokens)
    queue.pop(is_long_allowed=True)
    counts.append(queue.num_prompt_tokens)
    assert counts == [1, 3, 6, 5, 3]
