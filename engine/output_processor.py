"""From tokens to text: stop strings, the text of an answer, the Completion that leaves.

A text without stop strings is decoded once, at its end. Stop strings are looked for in text, so
that one that spans tokens is found, and the text is cut before it.
"""

from dataclasses import dataclass

from engine.request import Completion, FinishReason, InferRequest
from engine.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(slots=True, kw_only=True)
class _StopSearch:
    """The text of one request so far, and how far it was searched."""

    decoder: IncrementalDecoder
    text: str = ""
    cut_at: int | None = None

    def push(self, token_id: int, stop: tuple[str, ...], *, is_armed: bool) -> bool:
        """Add a token; return True when a stop string is complete."""
        searched = len(self.text)
        self.text += self.decoder.push(token_id)
        return is_armed and self._search(searched, stop)

    def finish(self, stop: tuple[str, ...]) -> None:
        """Add what the decoder held back, and search it too."""
        searched = len(self.text)
        self.text += self.decoder.finish()
        self._search(searched, stop)

    def _search(self, searched: int, stop: tuple[str, ...]) -> bool:
        """Find the first stop string in the new text; it may begin in the old."""
        if len(self.text) == searched:
            return False
        found = [
            position
            for word in stop
            if (position := self.text.find(word, max(0, searched - len(word) + 1))) >= 0
        ]
        if found:
            self.cut_at = min(found)
        return bool(found)


class OutputProcessor:
    """Keeps what is needed to turn a request's tokens into its Completion."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._searches: dict[int, _StopSearch] = {}

    def push(self, request: InferRequest, token_id: int) -> bool:
        """Take in one token; return True when it completes a stop string."""
        params = request.params
        if not params.stop:
            return False
        search = self._searches.get(request.uid)
        if search is None:
            search = _StopSearch(decoder=IncrementalDecoder(self._tokenizer))
            self._searches[request.uid] = search
        is_armed = len(request.output_token_ids) >= params.min_tokens
        return search.push(token_id, params.stop, is_armed=is_armed)

    def forget(self, request: InferRequest) -> None:
        """Drop a request that was given up."""
        self._searches.pop(request.uid, None)

    def complete(self, request: InferRequest) -> Completion:
        """Return the answer of a request that is DONE or ERROR, and forget the request."""
        assert request.finish_reason is not None
        search = self._searches.pop(request.uid, None)
        text, reason = "", request.finish_reason
        if request.error is None:
            text = self._text(request, search)
            if search is not None and search.cut_at is not None:
                reason = FinishReason.STOP
        return Completion(
            request_id=request.request_id,
            sample_index=request.sample_index,
            text=text,
            token_ids=() if request.error else tuple(request.output_token_ids),
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            error=request.error,
        )

    def _text(self, request: InferRequest, search: _StopSearch | None) -> str:
        if search is not None and search.cut_at is None:
            search.finish(request.params.stop)
        if search is None or search.cut_at is None:
            return self._tokenizer.decode(request.output_token_ids)
        return search.text[: search.cut_at]
