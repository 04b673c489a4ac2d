"""A step while it is put together, and when it is handed out.

Nothing of a plan is final before `seal`: the scheduler may take an entry out again when it
preempts its request.
"""

from dataclasses import dataclass, field

import msgspec

from engine.messages import NewRequest, Running, SamplerSpec, ScheduleBatch
from engine.request import InferRequest, RequestState


class Entry(msgspec.Struct, kw_only=True):
    """What one request does in one step; the last three fields are set by `seal`."""

    request: InferRequest
    num_scheduled_tokens: int
    new_block_ids: list[int]
    is_sampling: bool = False
    epoch: int = 0
    num_written_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A step that was handed out: the message, and its counts for the statistics."""

    batch: ScheduleBatch
    entries: tuple[Entry, ...]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_repeated_tokens: int

    @property
    def num_preempted(self) -> int:
        """Requests that lost their blocks since the step before."""
        return len(self.batch.preempted)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The next step, entry by entry, within a budget of tokens; share is the most of a prefill."""

    budget: int
    share: int
    entries: dict[int, Entry] = field(default_factory=dict)
    held_back: set[int] = field(default_factory=set)
    is_short_of_blocks: bool = False

    def schedule(self, request: InferRequest, count: int, new_block_ids: list[int]) -> None:
        """Give a request `count` tokens of this step."""
        self.entries[request.uid] = Entry(
            request=request, num_scheduled_tokens=count, new_block_ids=new_block_ids
        )
        self.budget -= count

    def extend(self, entry: Entry, count: int, new_block_ids: list[int]) -> None:
        """Give an entry of this step more tokens."""
        entry.num_scheduled_tokens += count
        entry.new_block_ids.extend(new_block_ids)
        self.budget -= count

    def hold_back(self, request: InferRequest) -> list[int]:
        """Keep a request out of this step, so that it can be preempted when the last is back.

        Returns the blocks that it was given for this step: the worker will not hear of them.
        """
        self.held_back.add(request.uid)
        return self.preempt(request)

    def preempt(self, request: InferRequest) -> list[int]:
        """Take a request out of this step, since blocks ran out; return those it was given."""
        self.is_short_of_blocks = True
        entry = self.entries.pop(request.uid, None)
        if entry is None:
            return []
        self.budget += entry.num_scheduled_tokens
        return entry.new_block_ids

    def seal(
        self,
        step_id: int,
        known_uids: set[int],
        *,
        preempted_uids: list[int],
        finished_uids: list[int],
    ) -> ScheduledStep:
        """Advance the requests and write the message; adds the new uids to `known_uids`."""
        new: list[NewRequest] = []
        running: list[Running] = []
        num_prefill = num_decode = num_repeated = 0
        for uid, entry in self.entries.items():
            request, count = entry.request, entry.num_scheduled_tokens
            if (
                request.num_uncomputed_tokens == 1
                and request.num_tokens > request.num_prompt_tokens
            ):
                num_decode += 1
            else:
                num_prefill += count
            num_before = request.max_computed_tokens - request.num_computed_tokens
            num_repeated += max(min(count, num_before), 0)
            if uid in known_uids:
                running.append(
                    Running(uid=uid, num_scheduled_tokens=count, new_block_ids=entry.new_block_ids)
                )
            else:
                new.append(_new_request(request, count))
                known_uids.add(uid)
            _advance(entry)
        return ScheduledStep(
            batch=ScheduleBatch(
                step_id=step_id,
                new=new,
                running=running,
                preempted=preempted_uids,
                finished=finished_uids,
            ),
            entries=tuple(self.entries.values()),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            num_repeated_tokens=num_repeated,
        )


def _advance(entry: Entry) -> None:
    request = entry.request
    if request.state is RequestState.READY:
        request.transition_to(RequestState.RUNNING)
    request.num_computed_tokens += entry.num_scheduled_tokens
    request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
    request.num_inflight_steps += 1
    entry.epoch = request.epoch
    entry.num_written_tokens = request.num_computed_tokens
    is_computed = request.num_uncomputed_tokens == 0
    entry.is_sampling = is_computed and not request.params.is_scoring_only
    if entry.is_sampling:
        request.expect_token()


def _new_request(request: InferRequest, num_scheduled_tokens: int) -> NewRequest:
    params = request.params
    return NewRequest(
        uid=request.uid,
        token_ids=request.known_token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_scheduled_tokens=num_scheduled_tokens,
        block_ids=list(request.block_ids),
        sampler=SamplerSpec(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=request.seed,
            sampling_key=request.sampling_key,
            sample_index=request.sample_index,
            min_tokens=params.min_tokens,
            forbidden_token_ids=tuple(sorted(request.stop_token_ids)) if params.min_tokens else (),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            bad_words=request.bad_words_token_ids,
            logprobs=params.logprobs,
            # Not again after a preemption: the prompt's scores are complete by then.
            prompt_logprobs=params.prompt_logprobs if request.is_to_be_scored else None,
            is_scoring_only=params.is_scoring_only,
        ),
    )
