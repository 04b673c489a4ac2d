"""The order in which waiting requests are admitted: one key for each policy, one heap a lane.

A key never changes while a request waits, so that ten thousand waiting requests cost no more
than a thousand.
"""

import heapq
from collections.abc import Callable
from typing import Any

from engine.config import OrderPolicy, SchedulerConfig
from engine.request import InferRequest

# Tokens of a prompt that the prefix order compares; what differs later shares few blocks less.
_PREFIX_TOKENS = 1024
_Heap = list[tuple[Any, int]]  # key and uid


class WaitingQueue:
    """Requests that own no blocks, in the order of a policy, in two lanes.

    Very long requests have a lane of their own, so that only so many of them run at a time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._key = _key_of(config.order, config.aging_requests)
        self._is_long = config.is_long
        self._lane: _Heap = []
        self._long_lane: _Heap = []
        self._requests: dict[int, InferRequest] = {}
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def oldest_arrival(self) -> float:
        """When the request arrived that has waited longest; somebody must be waiting."""
        return next(iter(self._requests.values())).arrival_time

    def push(self, request: InferRequest) -> None:
        """Add a request; one that was preempted gets its old place back."""
        lane = self._long_lane if self._is_long(request.num_prompt_tokens) else self._lane
        heapq.heappush(lane, (self._key(request), request.uid))
        self._requests[request.uid] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    def first(self, *, is_long_allowed: bool) -> InferRequest | None:
        """Return the next request without taking it out."""
        lane = self._next_lane(is_long_allowed=is_long_allowed)
        return self._requests[lane[0][1]] if lane else None

    def pop(self, *, is_long_allowed: bool) -> InferRequest:
        """Take the next request out; there must be one."""
        lane = self._next_lane(is_long_allowed=is_long_allowed)
        request = self._requests[heapq.heappop(lane)[1]]
        self.discard(request)
        return request

    def discard(self, request: InferRequest) -> None:
        """Forget a request, if it waits here; its place goes when it comes first."""
        if self._requests.pop(request.uid, None) is not None:
            self.num_prompt_tokens -= request.num_prompt_tokens

    def requests(self) -> list[InferRequest]:
        """Return every waiting request, in no order."""
        return list(self._requests.values())

    def _next_lane(self, *, is_long_allowed: bool) -> _Heap:
        for lane in (self._lane, self._long_lane):
            while lane and lane[0][1] not in self._requests:
                heapq.heappop(lane)  # discarded while it waited
        if not self._long_lane or not is_long_allowed:
            return self._lane
        if not self._lane:
            return self._long_lane
        return min(self._lane, self._long_lane, key=lambda lane: lane[0])


class Followers:
    """Requests that wait until another one's prompt is computed, to share its blocks."""

    def __init__(self) -> None:
        self._groups: dict[int, list[InferRequest]] = {}
        self._leader_uid_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._leader_uid_of)

    def hold_back(self, request: InferRequest, leader: InferRequest) -> None:
        """Keep a request until `release` is called for its leader."""
        self._groups.setdefault(leader.uid, []).append(request)
        self._leader_uid_of[request.uid] = leader.uid

    def release(self, leader: InferRequest) -> list[InferRequest]:
        """Return and forget those who waited for the leader."""
        group = self._groups.pop(leader.uid, [])
        for request in group:
            del self._leader_uid_of[request.uid]
        return group

    def discard(self, request: InferRequest) -> None:
        """Forget a request, if it waits here."""
        leader_uid = self._leader_uid_of.pop(request.uid, None)
        if leader_uid is not None:
            self._groups[leader_uid].remove(request)

    def requests(self) -> list[InferRequest]:
        """Return everyone who waits for another."""
        return [request for group in self._groups.values() for request in group]


def _key_of(order: OrderPolicy, aging_requests: int) -> Callable[[InferRequest], Any]:
    keys: dict[OrderPolicy, Callable[[InferRequest], Any]] = {
        "fcfs": lambda request: request.uid,
        # Ageing by the clock would be `priority - waited`; the clock is the same for all who
        # wait, so it cancels, and the arrival number stands for the moment of arrival.
        "priority": lambda request: request.uid + request.priority * aging_requests,
        "shortest_first": lambda request: request.max_total_tokens,
        "longest_first": lambda request: -request.max_total_tokens,
        "prefix": lambda request: request.prompt_token_ids[:_PREFIX_TOKENS],
    }
    return keys[order]
