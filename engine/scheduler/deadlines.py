"""Requests that must be done by a certain time."""

import heapq

from engine.request import InferRequest

# Deadlines that may be kept beyond those of living requests.
_SPARE = 1024


class Deadlines:
    """Knows who is late; forgets requests that ended long before their deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, InferRequest]] = []
        self._compact_at = _SPARE

    def watch(self, request: InferRequest) -> None:
        """Take note of a request's deadline, if it has one."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.uid, request))
        if len(self._heap) > self._compact_at:
            # Memory must not grow with the rows that came and went.
            self._heap = [item for item in self._heap if not item[2].state.is_terminal]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + _SPARE

    def take_late(self, now: float) -> list[InferRequest]:
        """Return the living requests whose deadline has passed."""
        late: list[InferRequest] = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.state.is_terminal:
                late.append(request)
        return late

    def next_at(self) -> float | None:
        """Return the next deadline, which may be that of a request that has ended."""
        return self._heap[0][0] if self._heap else None
