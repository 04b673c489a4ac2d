"""Shares the rows of a shard out to the engines that answer it.

An engine takes spans of rows as it gets through them. What it may hold beside those of its batch
shrinks with what is left, so that at the end of a job every engine finds something to take.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from flows.ledger_rows import Lease

_MAX_SPAN = 1000
_LOOK_SECONDS = 0.1
# Whoever waits takes a row after so many looks: its engine may have died, and nobody would say so.
_MAX_LOOKS = 10
# Rows that wait inside an engine for a place in its batch, as a part of the batch, so that the
# device need not wait for the next row to be read.
_LEAST_RESERVE = 8


class RowFeed:
    """The rows of a lease that no engine has taken. Safe to use from several threads."""

    def __init__(
        self,
        lease: Lease,
        *,
        stop: threading.Event,
        num_engines: int = 1,
        batch_size: int = 1,
    ) -> None:
        """Offer every row of the shard.

        Args:
            lease: of the shard.
            stop: when it is set, whoever waits for rows goes on without.
            num_engines: how many may take rows at a time; one alone may take all at once.
            batch_size: samples that one engine answers at a time.
        """
        self.lease = lease
        first, end = lease.first_row, lease.first_row + lease.num_rows
        self._spans = deque([range(first, end)] if first < end else [])
        self._num_left = end - first
        self._stop = stop
        self._num_engines = num_engines
        self._batch_size = batch_size
        self._num_waiting = 0
        self._condition = threading.Condition()

    @property
    def num_left(self) -> int:
        """Rows that can be taken."""
        return self._num_left

    def take(self, num_open: Callable[[], int]) -> range | None:
        """Return the next rows, None when none are left; waits while the engine has enough.

        Args:
            num_open: how many samples the engine has been asked and has not answered.
        """
        with self._condition:
            num_looks = 0
            while self._num_left and not self._stop.is_set():
                size = self._size_of_span(num_open())
                if size == 0 and num_looks == _MAX_LOOKS:
                    size = 1
                if size:
                    return self._cut(size)
                self._num_waiting += 1
                self._condition.wait(_LOOK_SECONDS)
                self._num_waiting -= 1
                num_looks += 1
            return None

    def wake(self) -> None:
        """Look again whether one that waits may have rows: its engine has answered some."""
        if self._num_waiting:
            with self._condition:
                self._condition.notify_all()

    def give_back(self, rows: Iterable[int]) -> None:
        """Offer rows again that were taken and got no result."""
        spans = list(_spans_of(sorted(rows)))
        with self._condition:
            self._spans.extendleft(reversed(spans))
            self._num_left += sum(map(len, spans))
            self._condition.notify_all()

    def _size_of_span(self, num_open: int) -> int:
        """Return how many rows an engine may take now, 0 when it is to come again later."""
        if self._num_engines == 1:
            return _MAX_SPAN
        fair = min(self._num_left // (2 * self._num_engines), _MAX_SPAN)
        reserve = max(fair, self._batch_size // _LEAST_RESERVE, 1)
        room = self._batch_size + reserve - num_open
        # Not row by row while there are many: each span costs queries.
        return room if room > reserve // 2 else 0

    def _cut(self, size: int) -> range:
        span = self._spans.popleft()
        if rest := span[size:]:
            self._spans.appendleft(rest)
        self._num_left -= len(span[:size])
        return span[:size]


def _spans_of(rows: list[int]) -> Iterable[range]:
    """Yield the rows, which are in order, as spans without gaps."""
    if not rows:
        return
    first = rows[0]
    for row, following in pairwise(rows):
        if following != row + 1:
            yield range(first, row + 1)
            first = following
    yield range(first, rows[-1] + 1)
