"""A request outside the engine, inside it, and the answer that leaves.

GenerateRequest is what a caller hands in, InferRequest is the one mutable object of the engine
(owned by the Scheduler), Completion is what comes out. None of them knows a tensor or a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from engine.errors import InvalidTransitionError, RequestError
from engine.logprobs import ScoredPart, TokenLogprob
from engine.sampling_params import SamplingParams


class RequestState(StrEnum):
    """Where an InferRequest is in its life; DONE and ERROR are terminal."""

    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    ERROR = "error"

    @property
    def is_terminal(self) -> bool:
        """True when nothing will happen to the request any more."""
        return self in _TERMINAL


_TERMINAL = (RequestState.DONE, RequestState.ERROR)
_EDGES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.READY, RequestState.ERROR}),
    RequestState.READY: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.ERROR}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.DONE, RequestState.ERROR}),
    RequestState.DONE: frozenset(),
    RequestState.ERROR: frozenset(),
}


class FinishReason(StrEnum):
    """Why a request ended; separate from its state."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


def sampling_key_of(request_id: str) -> int:
    """Return the 63-bit number that stands for this request in the random draws.

    It depends on the id alone, so that a draw depends neither on the batch nor on the attempt.
    """
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StreamedToken(Struct, frozen=True, kw_only=True):
    """One token as it comes; text is what became certain by it, often empty or a piece of a word.

    token_id is None when only text that was held back is left. A stop string is cut from the
    completion, not from what was streamed before it was complete.
    """

    request_id: str
    sample_index: int
    token_id: int | None
    text: str


class Reply(Struct, frozen=True, kw_only=True):
    """What was answered in an earlier turn of a conversation."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


class PartialOutput(Struct, frozen=True, kw_only=True):
    """What there is of one sample that has not ended: to be stored, and to go on from.

    replies are those of the turns that are finished; token_ids belong to the turn in progress,
    and logprobs too, one a token, where they were asked for.
    """

    request_id: str
    sample_index: int = 0
    replies: tuple[Reply, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One prompt and how to answer it; exactly one of prompt, messages, prompt_token_ids is set.

    prompt_token_ids may be a list, a numpy array or a tensor of one dimension.

    turns are later user messages of a conversation: each is asked after the reply to the one
    before, and the completion brings all replies. depends_on are ids of the same run whose
    completions this one waits for; build_messages then makes its messages from their texts by
    id. A request that others depend on has is_dependency set (`generate` sees to that itself).

    sample_indices are the samples to answer, out of the n that are asked for; None is all.
    partials are samples to go on with: each ends as if it had never been interrupted, on condition
    that the prompt, the parameters and the seed are the same. One that cannot be gone on with
    (tokens that the model has not, or with which it would have ended) is not used, with a
    warning: its sample, or that turn of it, starts over. Prompts are scored again.

    on_token is called with each token as it comes, from a thread of the engine's own; tokens of
    partials have come before and are not told again.
    """

    request_id: str
    prompt: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    sampling_key: int | None = None
    priority: int = 0
    timeout_seconds: float | None = None
    turns: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    build_messages: Callable[[dict[str, str]], Sequence[dict[str, Any]]] | None = None
    is_dependency: bool = False
    on_token: Callable[[StreamedToken], None] | None = None
    sample_indices: tuple[int, ...] | None = None
    partials: tuple[PartialOutput, ...] = ()

    @property
    def wanted_samples(self) -> tuple[int, ...]:
        """Indices of the samples to answer."""
        if self.sample_indices is not None:
            return self.sample_indices
        return tuple(range(self.sampling_params.n))


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to one sample of one request.

    text and token_ids are empty when `error` is set. num_cached_tokens counts the prompt tokens
    that the prefix cache supplied. replies are those of the turns before the last, whose answer
    is the text. logprobs and prompt_logprobs are None unless they were asked for; there is one
    for each token, and None for the first of the prompt. is_truncated tells that
    truncate_prompt_tokens has cut a prompt, of any turn.
    """

    request_id: str
    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: RequestError | None = None
    replies: tuple[Reply, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    is_truncated: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated in all turns, those that ended a text included."""
        return len(self.token_ids) + sum(len(reply.token_ids) for reply in self.replies)


def failed_completion(request_id: str, sample_index: int, error: RequestError) -> Completion:
    """Return the completion of a sample that never ran."""
    return Completion(
        request_id=request_id,
        sample_index=sample_index,
        text="",
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=0,
        error=error,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class InferRequest:
    """One sample as the engine works on it. Only `transition_to` changes its state.

    num_computed_tokens counts tokens whose KV is written or being written by a step in flight.
    num_pending_tokens counts tokens that a step in flight will sample: the scheduler plans with
    them before it knows them; num_tokens counts them too. epoch is raised at preemption, so that a stale output is dropped.
    block_hashes grow with the tokens and survive a preemption, since tokens are never taken back.
    The first num_released_blocks of block_ids were given back: they have left the window.
    max_computed_tokens is the most that num_computed_tokens has ever been.
    logprobs are those of the output; prompt_logprobs begin with the prompt's second token.
    """

    uid: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    seed: int
    sampling_key: int
    sample_index: int = 0
    priority: int = 0
    deadline: float | None = None
    arrival_time: float = 0.0
    state: RequestState = RequestState.WAITING
    epoch: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_released_blocks: int = 0
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    num_inflight_steps: int = 0
    num_preemptions: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    is_truncated: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and generated tokens whose values are known here."""
        return self.num_tokens - self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that still need a step before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_out_of_budget(self) -> bool:
        """True when the tokens known and in flight use up max_tokens or the model's length."""
        return self.num_tokens >= self.max_total_tokens

    @property
    def max_written_tokens(self) -> int:
        """Most tokens that take room in the KV cache: the last one sampled is never written."""
        return max(self.max_total_tokens - 1, self.num_prompt_tokens)

    @property
    def is_to_be_scored(self) -> bool:
        """True while log probabilities of its prompt were asked for and are not complete."""
        is_asked = self.params.prompt_logprobs is not None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def add_scores(self, part: ScoredPart) -> None:
        """Take in log probabilities of the prompt; those of a preempted attempt are replaced."""
        del self.prompt_logprobs[part.start - 1 :]
        self.prompt_logprobs += part.logprobs

    def go_on_from(self, partial: PartialOutput) -> None:
        """Begin with the tokens of an earlier run, like a request that was preempted."""
        self.output_token_ids = list(partial.token_ids)
        self.logprobs = list(partial.logprobs or ())
        self.num_tokens += len(partial.token_ids)

    def known_token_ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the prompt and what was generated so far, or the positions [start, stop)."""
        num_prompt = len(self.prompt_token_ids)
        stop = self.num_known_tokens if stop is None else stop
        of_prompt = self.prompt_token_ids[start:stop]
        if stop <= num_prompt:
            return of_prompt
        return of_prompt + self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]

    def expect_token(self) -> None:
        """Count a token that a step in flight will sample."""
        self.num_pending_tokens += 1
        self.num_tokens += 1

    def give_up_token(self) -> None:
        """Take back `expect_token`: the step failed."""
        self.num_pending_tokens -= 1
        self.num_tokens -= 1

    def append_token(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Add the oldest token that was expected, and its log probability if there is one."""
        self.num_pending_tokens -= 1
        self.output_token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    def transition_to(self, state: RequestState) -> None:
        """Move along an edge of the state machine.

        Raises:
            InvalidTransitionError: the state machine has no such edge.
        """
        if state not in _EDGES[self.state]:
            raise InvalidTransitionError(
                f"request {self.request_id!r} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state
