"""From tokens to text: stop strings, the text of an answer, the Completion that leaves.

A text without stop strings is decoded once, at its end. Stop strings are looked for in text, so
that one that spans tokens is found, and the text is cut before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.detokenizer import IncrementalDecoder
from engine.logprobs import TokenLogprob
from engine.request import Completion, FinishReason, InferRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class _StopSearch:
    """The text of one request so far, and how far it was searched."""

    decoder: IncrementalDecoder
    text: str = ""
    cut_at: int | None = None

    def push(self, token_id: int, params: SamplingParams, *, is_armed: bool) -> bool:
        """Add a token; return True when a stop string is complete."""
        searched = len(self.text)
        self.text += self.decoder.push(token_id)
        return is_armed and self._search(searched, params)

    def replay(self, token_ids: Sequence[int], params: SamplingParams) -> bool:
        """Add the first tokens of an answer; return True when a stop string is complete."""
        return any(
            self.push(token_id, params, is_armed=_is_past_minimum(count, params))
            for count, token_id in enumerate(token_ids, start=1)
        )

    def finish(self, params: SamplingParams, *, is_armed: bool) -> None:
        """Add what the decoder held back, and search it too."""
        searched = len(self.text)
        self.text += self.decoder.finish()
        if is_armed:
            self._search(searched, params)

    def _search(self, searched: int, params: SamplingParams) -> bool:
        """Find the first stop string in the new text; it may begin in the old."""
        if len(self.text) == searched:
            return False
        found = [
            (position, position + len(word))
            for word in params.stop
            if (position := self.text.find(word, max(0, searched - len(word) + 1))) >= 0
        ]
        if found:
            begin, end = min(found)
            self.cut_at = end if params.include_stop_str_in_output else begin
        return bool(found)


class OutputProcessor:
    """Keeps what is needed to turn a request's tokens into its Completion."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._searches: dict[int, _StopSearch] = {}

    def push(self, request: InferRequest, token_id: int) -> bool:
        """Take in one token; return True when it completes a stop string."""
        params = request.params
        if not params.stop or _ends_on_hidden_stop(request):
            return False
        search = self._searches.get(request.uid)
        if search is None:
            search = self._searches[request.uid] = _new_search(self._tokenizer, params)
            search.replay(request.output_token_ids[:-1], params)  # those of an earlier run
        num_tokens = len(request.output_token_ids)
        return search.push(token_id, params, is_armed=_is_past_minimum(num_tokens, params))

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
            logprobs=_logprobs(request),
            prompt_logprobs=_prompt_logprobs(request),
            is_truncated=request.is_truncated,
        )

    def _text(self, request: InferRequest, search: _StopSearch | None) -> str:
        if search is not None and search.cut_at is None:
            is_armed = _is_past_minimum(len(request.output_token_ids), request.params)
            search.finish(request.params, is_armed=is_armed)
        if search is not None and search.cut_at is not None:
            return search.text[: search.cut_at]
        token_ids = request.output_token_ids
        return self._tokenizer.decode(
            token_ids[:-1] if _ends_on_hidden_stop(request) else token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
        )


def holds_stop_string(
    tokenizer: Tokenizer, params: SamplingParams, token_ids: Sequence[int]
) -> bool:
    """Tell whether an answer would have ended within these tokens, by a stop string."""
    return bool(params.stop) and _new_search(tokenizer, params).replay(token_ids, params)


def _new_search(tokenizer: Tokenizer, params: SamplingParams) -> _StopSearch:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
    return _StopSearch(decoder=decoder)


def _is_past_minimum(num_tokens: int, params: SamplingParams) -> bool:
    """Tell whether a stop string may end here: as with an EOS, min_tokens tokens come before."""
    return num_tokens > params.min_tokens


def _ends_on_hidden_stop(request: InferRequest) -> bool:
    """Tell whether the last token is a stop token, which is no part of the text."""
    token_ids = request.output_token_ids
    is_stop = bool(token_ids) and token_ids[-1] in request.stop_token_ids
    return is_stop and not request.params.include_stop_str_in_output


def _logprobs(request: InferRequest) -> tuple[TokenLogprob, ...] | None:
    if request.error is not None or request.params.logprobs is None:
        return None
    return tuple(request.logprobs)


def _prompt_logprobs(request: InferRequest) -> tuple[TokenLogprob | None, ...] | None:
    if request.error is not None or request.params.prompt_logprobs is None:
        return None
    return (None, *request.prompt_logprobs)
