"""Which requests run in the next step, and how many tokens of each.

There is no prefill and no decode phase: each request has num_computed_tokens, which catches up
with num_tokens, and a step gives each request some tokens. Chunked prefill, prefix reuse and
recompute after a preemption all fall out of that one subtraction.

The scheduler sees no tensor and no device. It hands out ScheduleBatch messages and takes back
StepDone messages; up to num_steps_in_flight of them may be out at once.
"""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from engine.cache_manager import CacheManager
from engine.config import SchedulerConfig
from engine.errors import CacheExhaustedError, RequestError
from engine.messages import StepDone
from engine.request import FinishReason, InferRequest, RequestState
from engine.scheduler import refusals
from engine.scheduler.batching import BatchView, make_batching_policy
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.plan import ScheduledStep, StepPlan
from engine.scheduler.queue import Followers, WaitingQueue
from engine.scheduler.running import RunningSet


class TokenUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One request got one token; the request's state tells whether it ended with it.

    A request whose prompt was only scored ends without one.
    """

    request: InferRequest
    token_id: int | None


class Scheduler:
    """Owns every InferRequest from `add` until it is DONE or ERROR."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._batching = make_batching_policy(config)
        self._waiting = WaitingQueue(config)
        self._followers = Followers()
        self._running = RunningSet(config)
        self._deadlines = Deadlines()
        self._in_flight: deque[ScheduledStep] = deque()
        self._preempted_uids: list[int] = []
        self._finished_uids: list[int] = []
        self._failed: list[InferRequest] = []
        self._known_uids: set[int] = set()
        self._next_step_id = 0
        self._is_intake_closed = False
        self.token_limit = config.max_num_batched_tokens

    # What a caller may ask.

    @property
    def num_waiting(self) -> int:
        """Requests that own no blocks yet."""
        return len(self._waiting) + len(self._followers)

    @property
    def has_room(self) -> bool:
        """True when another request may be added without reading too far ahead."""
        return (
            self.num_waiting < self._config.max_waiting_requests
            and self._waiting.num_prompt_tokens < self._config.max_waiting_tokens
        )

    @property
    def num_running(self) -> int:
        """Requests that own blocks."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps handed out whose results are not back."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """True while a request waits or runs, or a step is out."""
        return bool(self.num_waiting or self._running or self._in_flight)

    @property
    def can_schedule(self) -> bool:
        """True when another step may be handed out."""
        return len(self._in_flight) < self._config.num_steps_in_flight

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free."""
        return self._cache.usage.num_free_blocks

    def in_flight_request_ids(self) -> tuple[str, ...]:
        """Return the ids of the living requests that have a step in flight."""
        in_flight = (r.request_id for r in self._running if r.num_inflight_steps)
        return tuple(dict.fromkeys(in_flight))  # samples of one prompt have one id

    def wake_at(self) -> float | None:
        """Return when `schedule` may have something to do although nobody arrived."""
        times = [self._deadlines.next_at()]
        if len(self._waiting):
            times.append(self._batching.wake_at(self._view()))
        return min((moment for moment in times if moment is not None), default=None)

    # The three verbs of the loop.

    def add(self, request: InferRequest, *, after: InferRequest | None = None) -> None:
        """Queue a request; one that can never fit ends in ERROR at once.

        One that comes `after` another waits until that one's prompt is computed, whose blocks it
        then shares: so do the samples of one prompt.
        """
        request.arrival_time = self._clock()
        self._deadlines.watch(request)
        if not self._cache.can_ever_fit(request.max_written_tokens):
            self.fail(
                request, refusals.never_fits(request, self._cache.num_tokens), FinishReason.ERROR
            )
        elif after is not None and not after.state.is_terminal:
            self._followers.hold_back(request, after)
        else:
            self._enqueue(request)

    def set_intake_closed(self, is_closed: bool) -> None:  # noqa: FBT001
        """Say whether more requests may come; policies that wait for them stop waiting."""
        self._is_intake_closed = is_closed

    def schedule(self) -> ScheduledStep | None:
        """Put the next step together and hand it out.

        Returns None only when idle, when every request waits for a step in flight, or when the
        batching policy waits for more requests until `wake_at`.

        Raises:
            CacheExhaustedError: requests are there, nothing is in flight, and none can move.
        """
        self._expire()
        share = max(int(self.token_limit * self._config.max_prefill_fraction), 1)
        plan = StepPlan(budget=self.token_limit, share=share)
        self._plan_running(plan)
        is_held_back = not plan.is_short_of_blocks and self._plan_waiting(plan)
        self._give_away_rest(plan)
        if plan.entries:
            return self._hand_out(plan)
        if not self._in_flight and self.has_unfinished and not is_held_back:
            usage = self._cache.usage
            raise CacheExhaustedError(
                f"{self.num_waiting} waiting and {len(self._running)} running requests, but none "
                f"can move with {usage.num_free_blocks} of {usage.num_blocks} KV blocks free"
            )
        return None

    def update(self, output: StepDone) -> list[TokenUpdate]:
        """Book the oldest step in flight; return the tokens of requests that are still alive."""
        step = self._in_flight.popleft()
        assert output.step_id == step.batch.step_id, "steps come back in order"
        token_of = dict(zip(output.uids, output.token_ids, strict=True))
        updates: list[TokenUpdate] = []
        for entry in step.entries:
            request = entry.request
            request.num_inflight_steps -= 1
            if request.state.is_terminal:
                self._free_when_quiet(request)
            elif entry.epoch == request.epoch:
                self._cache.publish(request, entry.num_written_tokens)
                self._cache.release_left_behind(request, entry.num_written_tokens)
                if request.uid in output.prompt_logprobs:
                    request.add_scores(output.prompt_logprobs[request.uid])
                is_prompt_done = entry.num_written_tokens >= request.num_prompt_tokens
                if is_prompt_done and len(self._followers):
                    self._release_followers(request)
                if entry.is_sampling:
                    request.append_token(token_of[request.uid], output.logprobs.get(request.uid))
                    self._finish_if_complete(request)
                    updates.append(TokenUpdate(request=request, token_id=token_of[request.uid]))
                elif is_prompt_done and request.params.is_scoring_only:
                    self.finish(request, FinishReason.LENGTH)
                    updates.append(TokenUpdate(request=request, token_id=None))
        return updates

    def roll_back(self) -> int:
        """Undo the oldest step in flight, which failed; return how many tokens it had.

        The worker has forgotten every request, so each is sent anew. Blocks that earlier steps
        wrote are kept: nothing but the failed step is computed again.
        """
        step = self._in_flight.popleft()
        for entry in step.entries:
            request = entry.request
            request.num_inflight_steps -= 1
            if request.state.is_terminal:
                self._free_when_quiet(request)
            elif entry.epoch == request.epoch:
                request.num_computed_tokens -= entry.num_scheduled_tokens
                if entry.is_sampling:
                    request.give_up_token()
        self._known_uids.clear()
        return sum(entry.num_scheduled_tokens for entry in step.entries)

    # How a request ends.

    def finish(self, request: InferRequest, reason: FinishReason) -> None:
        """End a running request well; its blocks go back when its last step is done."""
        request.finish_reason = reason
        request.transition_to(RequestState.DONE)
        self._forget(request)

    def fail(self, request: InferRequest, error: RequestError, reason: FinishReason) -> None:
        """End a request with an error, wherever it is."""
        request.error, request.finish_reason = error, reason
        request.transition_to(RequestState.ERROR)
        self._waiting.discard(request)
        self._followers.discard(request)
        self._failed.append(request)
        self._forget(request)

    def living_requests(self) -> list[InferRequest]:
        """Return every request that waits or runs."""
        return [*self._waiting.requests(), *self._followers.requests(), *self._running]

    def take_failed(self) -> list[InferRequest]:
        """Return the requests that ended in ERROR since the last call."""
        failed, self._failed = self._failed, []
        return failed

    # The rules.

    def _plan_running(self, plan: StepPlan) -> None:
        """Give every running request its next tokens, preempting when blocks run out."""
        for request in self._running:
            if request.state is not RequestState.RUNNING or request.uid in plan.held_back:
                continue
            if request.num_pending_tokens and request.is_out_of_budget:
                continue  # its last token is in flight
            count = self._num_tokens_for(request, plan)
            if count > 0:
                self._grow_or_preempt(plan, request, count)

    def _num_tokens_for(self, request: InferRequest, plan: StepPlan) -> int:
        """Return a request's tokens of this step; one prefill gets no more than its share."""
        return min(request.num_uncomputed_tokens, plan.budget, plan.share)

    def _grow_or_preempt(self, plan: StepPlan, request: InferRequest, count: int) -> None:
        target = request.num_computed_tokens + count
        while (new_blocks := self._cache.try_grow(request, target)) is None:
            victim = self._running.choose_victim()
            if victim.num_inflight_steps:
                # Its step must come back before its blocks can.
                self._cache.shrink(victim, plan.hold_back(victim))
                return
            self._preempt(plan, victim)
            if victim is request:
                return
        plan.schedule(request, count, new_blocks)

    def _plan_waiting(self, plan: StepPlan) -> bool:
        """Admit waiting requests in order, until one does not fit.

        Returns True when the batching policy holds them back.
        """
        if not len(self._waiting):
            return False
        num_admissible = self._batching.num_admissible(self._view())
        is_held_back = num_admissible == 0
        while plan.budget > 0 and num_admissible > 0:
            is_long_allowed = self._running.is_long_allowed
            request = self._waiting.first(is_long_allowed=is_long_allowed)
            if request is None or not self._try_admit(request):
                break
            self._waiting.pop(is_long_allowed=is_long_allowed)
            self._running.add(request)
            count = self._num_tokens_for(request, plan)
            plan.schedule(request, count, list(request.block_ids))
            self._batching.note_admission()
            num_admissible -= 1
        return is_held_back

    def _try_admit(self, request: InferRequest) -> bool:
        """Admit a request when a slot is free, its blocks are, and nothing it needs is missing.

        The third check is made before a request comes here: one that depends on others, or
        shares the prompt of another, is queued only when those are ready.
        """
        if len(self._running) >= self._config.max_num_seqs:
            return False
        if self._config.kv_reservation == "full":
            num_tokens, num_spare = request.max_written_tokens, 0
        else:
            # A block for each who runs: else the newcomer is preempted as soon as they grow.
            num_tokens, num_spare = request.num_known_tokens, len(self._running)
        if not self._cache.try_admit(request, num_tokens, num_spare_blocks=num_spare):
            return False
        if request.num_preemptions == 0:
            # Tokens that it begins with may be cached too, and are no part of the prompt.
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.transition_to(RequestState.READY)
        return True

    def _give_away_rest(self, plan: StepPlan) -> None:
        """Let prefills go beyond their share when nobody else wants the rest of the step."""
        for entry in plan.entries.values():
            request = entry.request
            missing = request.num_uncomputed_tokens - entry.num_scheduled_tokens
            count = min(missing, plan.budget)
            if count <= 0:
                continue
            target = request.num_computed_tokens + entry.num_scheduled_tokens + count
            new_blocks = self._cache.try_grow(request, target)
            if new_blocks is not None:
                plan.extend(entry, count, new_blocks)

    # Bookkeeping.

    def _preempt(self, plan: StepPlan, request: InferRequest) -> None:
        plan.preempt(request)
        # Sent with the next step that goes out: this plan may come to nothing.
        self._preempted_uids.append(request.uid)
        self._cache.free(request)
        request.num_computed_tokens = 0
        request.epoch += 1
        request.num_preemptions += 1
        request.transition_to(RequestState.WAITING)
        self._running.remove(request)
        self._known_uids.discard(request.uid)
        # It keeps its uid and arrival time, and so its place before those who came later.
        self._waiting.push(request)

    def _hand_out(self, plan: StepPlan) -> ScheduledStep:
        step = plan.seal(
            self._next_step_id,
            self._known_uids,
            preempted_uids=self._preempted_uids,
            finished_uids=self._finished_uids,
        )
        self._next_step_id += 1
        self._preempted_uids, self._finished_uids = [], []
        self._in_flight.append(step)
        return step

    def _finish_if_complete(self, request: InferRequest) -> None:
        if request.output_token_ids[-1] in request.stop_token_ids:
            self.finish(request, FinishReason.STOP)
        elif request.num_known_tokens >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    def _enqueue(self, request: InferRequest) -> None:
        self._waiting.push(request)
        self._batching.note_arrival(self._clock())

    def _release_followers(self, leader: InferRequest) -> None:
        for request in self._followers.release(leader):
            if request.prompt_token_ids is leader.prompt_token_ids and not leader.is_to_be_scored:
                request.prompt_logprobs = leader.prompt_logprobs
            self._enqueue(request)

    def _forget(self, request: InferRequest) -> None:
        self._deadlines.forget(request)
        self._running.remove(request)
        if request.uid in self._known_uids:
            self._known_uids.discard(request.uid)
            self._finished_uids.append(request.uid)
        self._free_when_quiet(request)
        self._release_followers(request)

    def _free_when_quiet(self, request: InferRequest) -> None:
        """Give the blocks back once no step in flight writes to them."""
        if request.num_inflight_steps == 0 and request.block_ids:
            self._cache.free(request)

    def _view(self) -> BatchView:
        return BatchView(
            now=self._clock(),
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            oldest_arrival=self._waiting.oldest_arrival,
            is_intake_closed=self._is_intake_closed or not self.has_room,
        )

    def _expire(self) -> None:
        for request in self._deadlines.take_late(self._clock()):
            self.fail(request, refusals.too_late(request), FinishReason.TIMEOUT)
