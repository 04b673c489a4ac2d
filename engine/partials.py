"""Partial outputs: what of them may be gone on from, and when a caller is told of new ones.

A partial output that does not fit its request changes no answer: what it belongs to starts over.
"""

import logging
import time
from collections.abc import Callable, Sequence

from engine.logprobs import TokenLogprob
from engine.output_processor import holds_stop_string
from engine.request import GenerateRequest, InferRequest, PartialOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
OnPartials = Callable[[list[PartialOutput]], None]


def usable_partials(request: GenerateRequest) -> tuple[PartialOutput, ...]:
    """Return those partial outputs of a request whose replies can be gone on from, one a sample.

    Of two for one sample the last counts.
    """
    found = {}
    for partial in request.partials:
        problem = _problem_with_replies(request, partial)
        if problem is None:
            found[partial.sample_index] = partial
        else:
            _warn(partial, problem)
    return tuple(found.values())


def may_go_on(request: InferRequest, partial: PartialOutput, tokenizer: Tokenizer) -> bool:
    """Tell whether a request that begins with these tokens ends as if it had made them itself."""
    if not partial.token_ids:
        return False
    problem = _problem_with_tokens(request, partial, tokenizer)
    if problem is not None:
        _warn(partial, problem)
    return problem is None


class PartialReports:
    """Tells a caller of partial outputs, every so many seconds, in the caller's own thread."""

    def __init__(self, on_partials: OnPartials | None, seconds: float) -> None:
        self._on_partials = on_partials
        self._seconds = seconds
        self._due_at = time.monotonic() + seconds

    @property
    def is_wanted(self) -> bool:
        """True when somebody wants to be told."""
        return self._on_partials is not None

    @property
    def is_due(self) -> bool:
        """True when it is time to tell again."""
        return self.is_wanted and time.monotonic() >= self._due_at

    def tell(self, partials: list[PartialOutput]) -> None:
        """Pass the partial outputs on, if there are any; what the caller raises comes out."""
        if partials and self._on_partials is not None:
            self._on_partials(partials)
        self._due_at = time.monotonic() + self._seconds


def _problem_with_replies(request: GenerateRequest, partial: PartialOutput) -> str | None:
    params = request.sampling_params
    if partial.request_id != request.request_id:
        return f"it belongs to {partial.request_id!r}"
    if partial.sample_index not in request.wanted_samples:
        return "no such sample is wanted"
    if len(partial.replies) > len(request.turns):
        return f"all {len(partial.replies)} turns have a reply"
    if not all(_is_scored(reply.token_ids, reply.logprobs, params) for reply in partial.replies):
        return "log probabilities of a reply are missing"
    return None


def _problem_with_tokens(
    request: InferRequest, partial: PartialOutput, tokenizer: Tokenizer
) -> str | None:
    token_ids = partial.token_ids
    if request.num_prompt_tokens + len(token_ids) >= request.max_total_tokens:
        return f"{len(token_ids)} tokens are all that may be generated"
    if any(not 0 <= token < tokenizer.vocab_size for token in token_ids):
        return f"a token is outside of the vocabulary of {tokenizer.vocab_size}"
    if not request.stop_token_ids.isdisjoint(token_ids):
        return "a stop token is among its tokens"
    if not _is_scored(token_ids, partial.logprobs, request.params):
        return "log probabilities are missing"
    if holds_stop_string(tokenizer, request.params, token_ids):
        return "a stop string is in its text"
    return None


def _is_scored(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, params: SamplingParams
) -> bool:
    return params.logprobs is None or len(logprobs or ()) == len(token_ids)


def _warn(partial: PartialOutput, problem: str) -> None:
    logger.warning(
        "a partial output of request_id=%s sample_index=%d is not used, it starts over: %s",
        partial.request_id,
        partial.sample_index,
        problem,
    )
