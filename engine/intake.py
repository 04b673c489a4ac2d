"""Reads a caller's requests and tokenises them ahead, in a thread of its own.

The device never waits for text: while a step runs, the next requests are being encoded. What is
encoded ahead is bounded, so memory does not grow with the input.
"""

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from engine.config import SchedulerConfig
from engine.errors import RequestError
from engine.request import GenerateRequest

logger = logging.getLogger(__name__)
# A source that waits for somebody else cannot be interrupted.
_CLOSE_SECONDS = 5.0


class EncodedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its prompt's tokens, or the reason why it has none."""

    request: GenerateRequest
    token_ids: list[int] = []
    error: RequestError | None = None
    is_truncated: bool = False


class Intake:
    """One caller's requests, read ahead as far as the scheduler lets as many wait.

    The source is iterated, and closed, in the thread of the intake alone.
    """

    def __init__(
        self,
        source: Iterator[GenerateRequest],
        encode: Callable[[GenerateRequest], EncodedRequest],
        config: SchedulerConfig,
        on_arrival: Callable[[], None],
    ) -> None:
        self._source = source
        self._encode = encode
        self._depth = config.max_waiting_requests
        self._max_tokens = config.max_waiting_tokens
        self._num_tokens = 0
        self._on_arrival = on_arrival
        self._condition = threading.Condition()
        self._items: deque[EncodedRequest] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_ended = False
        context = contextvars.copy_context()  # its log lines belong to the caller
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name="tokenmill-intake", daemon=True
        )
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """True when the source has no more and everything was taken."""
        with self._condition:
            return self._is_ended and not self._items and self._error is None

    def poll(self) -> EncodedRequest | None:
        """Return the next request, or None when none is ready yet or ever.

        Raises:
            BaseException: what the caller's source raised, once everything before it was taken.
        """
        with self._condition:
            if self._items:
                item = self._items.popleft()
                self._num_tokens -= len(item.token_ids)
                # Not for each one: waking a thread costs more than it then encodes.
                if self._filled() <= 0.5:
                    self._condition.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Stop reading, and wait until the source is closed, unless it does not answer."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the caller's requests do not end; their thread is left behind")

    def _work(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 - raised again where the requests are taken
            self._error = error
        with self._condition:
            self._is_ended = True
        self._on_arrival()

    def _read(self) -> None:
        try:
            for request in self._source:
                # What depends on others has no prompt yet.
                is_ready = not request.depends_on
                item = self._encode(request) if is_ready else EncodedRequest(request=request)
                if not self._put(item):
                    break
        finally:
            if hasattr(self._source, "close"):
                self._source.close()

    def _put(self, item: EncodedRequest) -> bool:
        """Add an item when there is room; return False when nobody wants it any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._filled() < 1 or self._is_closed)
            if self._is_closed:
                return False
            self._items.append(item)
            self._num_tokens += len(item.token_ids)
        self._on_arrival()
        return True

    def _filled(self) -> float:
        """Return how much is read ahead of what may be."""
        return max(len(self._items) / self._depth, self._num_tokens / self._max_tokens)
