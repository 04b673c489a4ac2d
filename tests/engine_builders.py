"""Requests for tests of the engine's policy, and a worker that checks every message it gets.

The worker's KV memory holds, for each slot, a number made of every token up to there, each made
from the slot before it. A token is a function of the last slot, so a block that was shared
wrongly, freed early or written by two changes the answer.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from engine.cache_manager import CacheManager
from engine.config import CacheConfig, SchedulerConfig
from engine.logprobs import ScoredPart, TokenLogprob
from engine.messages import SamplerSpec, ScheduleBatch, StepDone, WorkerTimings
from engine.request import InferRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, TokenUpdate

VOCAB_SIZE = 5
EOS = 0
_MODULUS = (1 << 61) - 1


def infer_request(
    uid: int = 0,
    prompt: list[int] | None = None,
    max_tokens: int = 4,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    deadline: float | None = None,
    prompt_logprobs: int | None = None,
) -> InferRequest:
    """Return a request that waits, with three tokens of prompt unless others are given."""
    token_ids = [1, 2, 3] if prompt is None else prompt
    return InferRequest(
        uid=uid,
        request_id=f"request-{uid}",
        prompt_token_ids=list(token_ids),
        params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        stop_token_ids=stop_token_ids,
        max_total_tokens=len(token_ids) + max_tokens,
        seed=0,
        sampling_key=uid,
        priority=priority,
        deadline=deadline,
    )


def answer_of(request: InferRequest) -> list[int]:
    """Return the tokens that the request gets when it is alone on a machine without limits."""
    state = 0
    for token in request.prompt_token_ids:
        state = _mix(state, token)
    tokens: list[int] = []
    while request.num_prompt_tokens + len(tokens) < request.max_total_tokens:
        tokens.append(_token(state))
        if tokens[-1] in request.stop_token_ids:
            break
        state = _mix(state, tokens[-1])
    return tokens


def scores_of(request: InferRequest) -> list[TokenLogprob]:
    """Return the scores that its prompt gets when it is alone on a machine without limits."""
    state, scores = 0, []
    for token, scored in pairwise(request.prompt_token_ids):
        state = _mix(state, token)
        scores.append(_score(state, scored))
    return scores


def _score(state: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(state % 997), 1)


def _mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % _MODULUS


def _token(state: int) -> int:
    return (state * 2_654_435_761 >> 13) % VOCAB_SIZE


@dataclass(slots=True, kw_only=True)
class _Slot:
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    num_prompt_tokens: int
    sampler: SamplerSpec


@dataclass(slots=True)
class CheckingWorker:
    """Answers steps in order, and fails the test at the first message that makes no sense."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    memory: dict[int, int] = field(default_factory=dict)
    slots: dict[int, _Slot] = field(default_factory=dict)
    outputs: deque[StepDone] = field(default_factory=deque)
    num_computed_tokens: int = 0
    _written: deque[dict[int, set[int]]] = field(default_factory=deque)

    def submit(self, batch: ScheduleBatch) -> None:
        """Take in the differences, run the step, keep its output until `collect`."""
        scheduled = self._take_in(batch)
        counts = list(scheduled.values())
        assert 0 < len(counts) <= self.config.max_num_seqs
        assert min(counts) > 0
        assert sum(counts) <= self.config.max_num_batched_tokens
        self._check_blocks(scheduled)
        sampled: dict[int, int] = {}
        scores: dict[int, ScoredPart] = {}
        for uid, count in scheduled.items():
            first = self.slots[uid].num_computed_tokens
            token = self._compute(self.slots[uid], count)
            if token is not None:
                sampled[uid] = token
            if self.slots[uid].sampler.prompt_logprobs is not None:
                scores[uid] = self._score(self.slots[uid], first)
        self.outputs.append(
            StepDone(
                step_id=batch.step_id,
                uids=list(sampled),
                token_ids=list(sampled.values()),
                prompt_logprobs=scores,
                timings=WorkerTimings(),
            )
        )
        self.num_computed_tokens += sum(counts)

    def collect(self) -> StepDone:
        """Return the oldest output."""
        self._written.popleft()
        return self.outputs.popleft()

    def _take_in(self, batch: ScheduleBatch) -> dict[int, int]:
        in_flight = {uid for step in self._written for uid in step}
        assert not in_flight & set(batch.preempted), "preempted with a step in flight"
        for uid in (*batch.preempted, *batch.finished):
            del self.slots[uid]
        for item in batch.running:
            self.slots[item.uid].block_ids.extend(item.new_block_ids)
        for new in batch.new:
            assert new.uid not in self.slots, "the worker knows this request already"
            assert new.num_computed_tokens % self.block_size == 0
            self.slots[new.uid] = _Slot(
                token_ids=list(new.token_ids),
                num_computed_tokens=new.num_computed_tokens,
                block_ids=list(new.block_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                sampler=new.sampler,
            )
        items = [*batch.running, *batch.new]
        scheduled = {item.uid: item.num_scheduled_tokens for item in items}
        assert len(scheduled) == len(items), "one request twice in a step"
        return scheduled

    def _check_blocks(self, scheduled: dict[int, int]) -> None:
        """Let each block be written by one request only, and by none while others hold it."""
        holders: dict[int, set[int]] = {}
        for uid, slot in self.slots.items():
            assert len(set(slot.block_ids)) == len(slot.block_ids)
            for block_id in slot.block_ids:
                assert 0 <= block_id < self.num_blocks
                holders.setdefault(block_id, set()).add(uid)
        written: dict[int, set[int]] = {}
        for uid, count in scheduled.items():
            slot = self.slots[uid]
            first, last = slot.num_computed_tokens, slot.num_computed_tokens + count
            assert last <= len(slot.token_ids)
            assert last <= len(slot.block_ids) * self.block_size, "no slot for a token"
            size = self.block_size
            written[uid] = {slot.block_ids[position // size] for position in range(first, last)}
            for block_id in written[uid]:
                assert holders[block_id] == {uid}, f"block {block_id} is written but shared"
            for step in self._written:
                others = [blocks for other, blocks in step.items() if other != uid]
                assert written[uid].isdisjoint(set().union(*others)), "freed before it was quiet"
        self._written.append(written)

    def _compute(self, slot: _Slot, count: int) -> int | None:
        """Write the slots of `count` tokens; return the next token when all are computed."""
        for _ in range(count):
            position = slot.num_computed_tokens
            state = self.memory[self._address(slot, position - 1)] if position else 0
            self.memory[self._address(slot, position)] = _mix(state, slot.token_ids[position])
            slot.num_computed_tokens += 1
        if slot.num_computed_tokens < len(slot.token_ids) or slot.sampler.is_scoring_only:
            return None
        token = _token(self.memory[self._address(slot, slot.num_computed_tokens - 1)])
        slot.token_ids.append(token)
        return token

    def _score(self, slot: _Slot, first: int) -> ScoredPart:
        """Score the prompt's tokens after those that were just computed, from `first` on."""
        last = min(slot.num_computed_tokens, slot.num_prompt_tokens - 1)
        scores = [
            _score(self.memory[self._address(slot, position)], slot.token_ids[position + 1])
            for position in range(first, last)
        ]
        return ScoredPart(first + 1, scores)

    def _address(self, slot: _Slot, position: int) -> int:
        block_id = slot.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size


class Rig:
    """A scheduler, its cache and a checking worker, driven as OfflineInference drives them."""

    def __init__(
        self,
        scheduler: SchedulerConfig | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.config = scheduler or SchedulerConfig()
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.cache = CacheManager(cache, num_blocks, block_size=cache.block_size or 16)
        self.scheduler = Scheduler(self.config, self.cache)
        self.worker = CheckingWorker(self.config, num_blocks, block_size)
        self.requests: list[InferRequest] = []
        self.num_repeated_tokens = 0

    def add(self, *requests: InferRequest) -> None:
        """Queue requests."""
        for request in requests:
            self.requests.append(request)
            self.scheduler.add(request)

    def submit(self) -> ScheduleBatch | None:
        """Hand out one step, if there is one."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.num_repeated_tokens += step.num_repeated_tokens
        self.worker.submit(step.batch)
        self.check()
        return step.batch

    def collect(self) -> list[TokenUpdate]:
        """Book the oldest step in flight."""
        updates = self.scheduler.update(self.worker.collect())
        self.check()
        return updates

    def step(self) -> list[TokenUpdate]:
        """Hand out one step and book it."""
        assert self.submit() is not None
        return self.collect()

    def run(self, max_steps: int = 10_000) -> None:
        """Go on until every request has ended."""
        for _ in range(max_steps):
            while self.scheduler.can_schedule and self.submit() is not None:
                pass
            if self.scheduler.num_in_flight:
                self.collect()
            if not self.scheduler.has_unfinished:
                self.check_all_is_free()
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def check(self) -> None:
        """Raise AssertionError when a block leaked or two structures disagree."""
        self.cache.check_integrity(self.requests)

    def check_all_is_free(self) -> None:
        """Raise AssertionError unless every block came back."""
        usage = self.cache.usage
        assert usage.num_free_blocks == usage.num_blocks


def make_rig(
    *, num_blocks: int = 64, enable_prefix_caching: bool = True, block_size: int = 4, **limits: int
) -> Rig:
    """Return a rig whose scheduler has these limits."""
    return Rig(
        SchedulerConfig.model_validate(limits),
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
