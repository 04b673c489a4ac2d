"""Callers who want tokens as they come, and what happens when their code raises.

Everything here runs in the outbox's thread: a slow or broken callback holds up no step.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.detokenizer import IncrementalDecoder
from engine.request import InferRequest, StreamedToken
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Listener:
    request: InferRequest
    callback: Callable[[StreamedToken], None]
    decoder: IncrementalDecoder


class Listeners:
    """Calls each request's callback with its tokens, until it raises."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._listeners: dict[int, _Listener] = {}

    def __contains__(self, uid: int) -> bool:
        return uid in self._listeners

    def add(self, request: InferRequest, callback: Callable[[StreamedToken], None]) -> None:
        """Call back for this request from now on, and not for tokens that it begins with."""
        decoder = IncrementalDecoder(
            self._tokenizer, skip_special_tokens=request.params.skip_special_tokens
        )
        for token_id in request.output_token_ids:
            decoder.push(token_id)
        self._listeners[request.uid] = _Listener(
            request=request, callback=callback, decoder=decoder
        )

    def tell(self, uid: int, token_id: int) -> None:
        """Pass on one token, with the text that became certain by it."""
        listener = self._listeners.get(uid)
        if listener is not None:
            self._call(listener, token_id, listener.decoder.push(token_id))

    def finish(self, uid: int) -> None:
        """Pass on the text that was held back, and forget the request."""
        listener = self._listeners.pop(uid, None)
        if listener is not None and (tail := listener.decoder.finish()):
            self._call(listener, None, tail)

    def _call(self, listener: _Listener, token_id: int | None, text: str) -> None:
        request = listener.request
        token = StreamedToken(
            request_id=request.request_id,
            sample_index=request.sample_index,
            token_id=token_id,
            text=text,
        )
        try:
            listener.callback(token)
        except Exception:
            logger.exception(
                "on_token of request_id=%s raised and is not called again", request.request_id
            )
            self._listeners.pop(request.uid, None)
