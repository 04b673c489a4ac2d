"""From a turn to the requests that the scheduler knows: one for each sample."""

import itertools
import secrets
import time

from engine.errors import RequestError, RequestErrorCode
from engine.model_source import ModelSource
from engine.partials import may_go_on
from engine.request import InferRequest, sampling_key_of
from engine.sampling_params import SamplingParams
from engine.session import Turn
from engine.tokenizer import Tokenizer


class RequestFactory:
    """Gives out uids, and fills in what the model and the engine decide about a request."""

    def __init__(self, source: ModelSource, tokenizer: Tokenizer) -> None:
        self._source = source
        self.tokenizer = tokenizer
        self._uids = itertools.count()
        # Of requests that bring no seed; a job always brings one.
        self._seed = secrets.randbits(63)

    def make(self, turn: Turn, *, deadline: float | None = None) -> list[InferRequest]:
        """Return the requests of a turn, one a sample, the first sample first.

        deadline is that of the whole run; a request's own may come earlier.
        """
        timeout = turn.request.timeout_seconds
        if timeout is not None:
            own_deadline = time.monotonic() + timeout
            deadline = own_deadline if deadline is None else min(deadline, own_deadline)
        samples = turn.sample_indices
        if samples is None:
            samples = turn.request.wanted_samples
        return [self._make_sample(turn, index, deadline) for index in samples]

    def check_length(self, num_tokens: int, max_tokens: int) -> None:
        """Refuse a prompt that leaves no room for an answer.

        Raises:
            RequestError: the prompt is too long, with the numbers.
        """
        limit = self._source.max_model_len
        if num_tokens + min(max_tokens, 1) > limit:
            answer = "; with one token of answer" if max_tokens else ";"
            raise RequestError(
                RequestErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {num_tokens} tokens{answer} at most {limit} fit the model "
                "(max_model_len); shorten it",
            )

    def _make_sample(self, turn: Turn, sample_index: int, deadline: float | None) -> InferRequest:
        request, params = turn.request, turn.request.sampling_params
        key = request.sampling_key
        num_prompt = len(turn.token_ids)
        bad_words = params.bad_words if turn.error is None else ()
        made = InferRequest(
            uid=next(self._uids),
            request_id=request.request_id,
            prompt_token_ids=turn.token_ids,
            params=params,
            stop_token_ids=self._stop_token_ids(params),
            max_total_tokens=min(num_prompt + params.max_tokens, self._source.max_model_len),
            seed=params.seed if params.seed is not None else self._seed,
            sampling_key=sampling_key_of(request.request_id) if key is None else key,
            sample_index=sample_index,
            priority=request.priority,
            deadline=deadline,
            bad_words_token_ids=self.tokenizer.bad_words_token_ids(bad_words),
            is_truncated=turn.is_truncated,
        )
        partial = turn.partial_of(sample_index) if turn.error is None else None
        if partial is not None and may_go_on(made, partial, self.tokenizer):
            made.go_on_from(partial)
        return made

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return what ends a generation at once; a stop string may be the name of such a token.

        A control token that is left out of the text could never be found there.
        """
        eos_token_ids = () if params.ignore_eos else self._source.eos_token_ids
        named = self.tokenizer.control_token_ids(params.stop) if params.skip_special_tokens else ()
        return frozenset((*eos_token_ids, *params.stop_token_ids, *named))
