"""Requests that must be done by a certain time."""

import heapq

from engine.request import InferRequest

# Deadlines that may be kept beyond those of living requests.
_SPARE = 1024


class Deadlines:
    """Knows who is late; keeps the moments of requests that ended for a while, not the requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._living: dict[int, InferRequest] = {}

    def watch(self, request: InferRequest) -> None:
        """Take note of a request's deadline, if it has one."""
        if request.deadline is None:
            return
        self._living[request.uid] = request
        heapq.heappush(self._heap, (request.deadline, request.uid))
        if len(self._heap) > 2 * len(self._living) + _SPARE:
            # Memory must not grow with the rows that came and went.
            self._heap = [item for item in self._heap if item[1] in self._living]
            heapq.heapify(self._heap)

    def forget(self, request: InferRequest) -> None:
        """Let go of a request that has ended."""
        self._living.pop(request.uid, None)

    def take_late(self, now: float) -> list[InferRequest]:
        """Return the living requests whose deadline has passed."""
        late: list[InferRequest] = []
        while self._heap and self._heap[0][0] <= now:
            request = self._living.pop(heapq.heappop(self._heap)[1], None)
            if request is not None:
                late.append(request)
        return late

    def next_at(self) -> float | None:
        """Return the next deadline, which may be that of a request that has ended."""
        return self._heap[0][0] if self._heap else None
