"""Turns tokens into text, in a thread of its own, behind the device.

The driver hands over requests that are DONE or ERROR; their completions, or the next turn of
their conversation, appear in their session. Tokens that somebody listens to pass through here
too, before the end of their request.
"""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.listeners import Listeners
from engine.output_processor import OutputProcessor
from engine.request import InferRequest
from engine.session import Session, Turn

logger = logging.getLogger(__name__)


class Outbox:
    """Owns which session and turn each request inside the engine belongs to."""

    def __init__(
        self, processor: OutputProcessor, listeners: Listeners, on_delivery: Callable[[], None]
    ) -> None:
        self._processor = processor
        self._listeners = listeners
        self._on_delivery = on_delivery
        self._owners: dict[int, tuple[Session, Turn]] = {}
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        # Its engine outlives its caller; what it does runs in the contexts of those who wait for it.
        self._thread = threading.Thread(target=self._work, name="tokenmill-outbox", daemon=True)
        self._thread.start()

    def register(self, request: InferRequest, session: Session, turn: Turn) -> None:
        """Note whom a request belongs to."""
        self._owners[request.uid] = (session, turn)
        if turn.request.on_token is not None:
            self._listeners.add(request, turn.request.on_token)

    def stream(self, request: InferRequest, token_id: int) -> None:
        """Hand over a token, if somebody listens to its request."""
        if request.uid in self._listeners:
            self._put(request, self._listeners.tell, request.uid, token_id)

    def put(self, request: InferRequest) -> None:
        """Hand over a request that has ended."""
        self._put(request, self._complete, request)

    def check(self) -> None:
        """Raise what went wrong with an earlier request; it is a bug, and no row's fault."""
        if self._error is not None:
            raise self._error

    def drop(self, request: InferRequest) -> None:
        """Forget a request that was given up; nobody waits for its completion."""
        session, _ = self._owners.pop(request.uid)
        self._processor.forget(request)
        self._listeners.finish(request.uid)
        session.drop_turn()

    def turns_of(self, session: Session) -> dict[int, Turn]:
        """Return the turns of a session that are inside the engine, by the uids of requests."""
        owners = list(self._owners.items())
        return {uid: turn for uid, (owner, turn) in owners if owner is session}

    def flush(self, timeout_seconds: float) -> None:
        """Wait until what was handed over is in its session, but not for ever for a listener."""
        is_done = threading.Event()
        self._queue.put(is_done.set)
        is_done.wait(timeout_seconds)

    def close(self) -> None:
        """Finish what was handed over, then end."""
        self._queue.put(None)
        self._thread.join()

    def _put(self, request: InferRequest, work: Callable[..., None], *arguments: Any) -> None:
        session, _ = self._owners[request.uid]
        self._queue.put(partial(session.context.run, work, *arguments))

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again in the driver's next check
                self._error = error
            self._on_delivery()

    def _complete(self, request: InferRequest) -> None:
        session, turn = self._owners.pop(request.uid)
        self._listeners.finish(request.uid)
        completion = self._processor.complete(request)
        logger.debug(
            "completed request_id=%s sample_index=%d finish_reason=%s tokens=%d",
            completion.request_id,
            completion.sample_index,
            completion.finish_reason.value,
            completion.num_output_tokens,
        )
        session.finish_turn(turn, completion)
