"""Which requests run in the next step, and how many tokens of each.

There is no prefill and no decode phase: each request has num_computed_tokens, which catches up
with num_tokens, and a step gives each request some tokens. Chunked prefill, prefix reuse and
recompute after a preemption all fall out of that one subtraction.

The scheduler sees no tensor and no device. It hands out ScheduleBatch messages and takes back
StepDone messages; up to num_steps_in_flight of them may be out at once.
"""

import heapq
import time
from collections import deque
from dataclasses import dataclass

from engine.cache_manager import CacheManager
from engine.config import SchedulerConfig
from engine.errors import CacheExhaustedError, RequestError, RequestErrorCode
from engine.messages import StepDone
from engine.request import FinishReason, InferRequest, RequestState
from engine.scheduler.plan import ScheduledStep, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUpdate:
    """One request got one token; the request's state tells whether it ended with it."""

    request: InferRequest
    token_id: int


class Scheduler:
    """Owns every InferRequest from `add` until it is DONE or ERROR."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache
        self._waiting: list[tuple[int, int, InferRequest]] = []
        self._waiting_uids: set[int] = set()
        self._running: list[InferRequest] = []
        self._deadlines: list[tuple[float, int, InferRequest]] = []
        self._in_flight: deque[ScheduledStep] = deque()
        self._finished_uids: list[int] = []
        self._failed: list[InferRequest] = []
        self._known_uids: set[int] = set()
        self._next_step_id = 0

    # What a caller may ask.

    @property
    def num_waiting(self) -> int:
        """Requests that own no blocks yet."""
        return len(self._waiting_uids)

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
        return bool(self._waiting_uids or self._running or self._in_flight)

    @property
    def can_schedule(self) -> bool:
        """True when another step may be handed out."""
        return len(self._in_flight) < self._config.num_steps_in_flight

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free."""
        return self._cache.usage.num_free_blocks

    def running_request_ids(self) -> tuple[str, ...]:
        """Return the ids of the requests that own blocks."""
        return tuple(request.request_id for request in self._running)

    # The three verbs of the loop.

    def add(self, request: InferRequest) -> None:
        """Queue a request; one that can never fit ends in ERROR at once."""
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.uid, request))
        # The last token is sampled but never written, so it needs no room.
        if not self._cache.can_ever_fit(request.max_total_tokens - 1):
            usage = self._cache.usage
            self.fail(
                request,
                RequestError(
                    RequestErrorCode.KV_CAPACITY,
                    f"the prompt of {request.num_prompt_tokens} tokens and max_tokens "
                    f"{request.params.max_tokens} need up to {request.max_total_tokens} tokens of "
                    f"KV cache, which has {usage.num_blocks * self._cache.block_size}; lower "
                    "max_tokens or raise engine.cache.kv_cache_gib",
                ),
                FinishReason.ERROR,
            )
            return
        self._queue(request)

    def schedule(self) -> ScheduledStep | None:
        """Put the next step together and hand it out.

        Returns None only when idle or when every request waits for a step in flight.

        Raises:
            CacheExhaustedError: requests are there, nothing is in flight, and none can move.
        """
        self._expire()
        plan = StepPlan(budget=self._config.max_num_batched_tokens)
        self._plan_running(plan)
        if not plan.preempted:
            self._plan_waiting(plan)
        if plan.entries:
            step = plan.seal(self._next_step_id, self._known_uids, self._finished_uids)
            self._next_step_id += 1
            self._finished_uids = []
            self._in_flight.append(step)
            return step
        if not self._in_flight and (self._waiting_uids or self._running):
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
                if entry.is_sampling:
                    token_id = token_of[request.uid]
                    self._append(request, token_id)
                    updates.append(TokenUpdate(request=request, token_id=token_id))
        return updates

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
        self._waiting_uids.discard(request.uid)
        self._failed.append(request)
        self._forget(request)

    def fail_all(self, error: RequestError, reason: FinishReason) -> None:
        """End every request that waits or runs."""
        waiting = [item[2] for item in self._waiting]
        for request in (*waiting, *list(self._running)):
            if not request.state.is_terminal:
                self.fail(request, error, reason)

    def take_failed(self) -> list[InferRequest]:
        """Return the requests that ended in ERROR since the last call."""
        failed, self._failed = self._failed, []
        return failed

    # The rules.

    def _plan_running(self, plan: StepPlan) -> None:
        """Give every running request its next tokens, preempting when blocks run out."""
        for request in list(self._running):
            if request.state is not RequestState.RUNNING:
                continue
            if request.num_pending_tokens and request.is_out_of_budget:
                continue  # its last token is in flight
            count = min(request.num_uncomputed_tokens, plan.budget)
            if count > 0:
                self._grow_or_preempt(plan, request, count)

    def _grow_or_preempt(self, plan: StepPlan, request: InferRequest, count: int) -> None:
        target = request.num_computed_tokens + count
        while (new_blocks := self._cache.try_grow(request, target)) is None:
            victim = self._choose_victim()
            if victim is None:
                return  # everyone has a step in flight: their blocks may come back
            self._preempt(plan, victim)
            if victim is request:
                return
        plan.schedule(request, count, new_blocks)

    def _choose_victim(self) -> InferRequest | None:
        """Pick the least computed request of the lowest priority: the least work is lost."""
        candidates = [request for request in self._running if request.num_inflight_steps == 0]
        return max(
            candidates,
            key=lambda r: (r.priority, -r.num_computed_tokens, r.uid),
            default=None,
        )

    def _preempt(self, plan: StepPlan, request: InferRequest) -> None:
        plan.preempt(request)
        self._cache.free(request)
        request.num_computed_tokens = 0
        request.epoch += 1
        request.num_preemptions += 1
        request.transition_to(RequestState.WAITING)
        self._running.remove(request)
        self._known_uids.discard(request.uid)
        self._queue(request)

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in order, until one does not fit."""
        while plan.budget > 0 and (request := self._first_waiting()) is not None:
            if not self._try_admit(request):
                return
            heapq.heappop(self._waiting)
            self._waiting_uids.discard(request.uid)
            self._running.append(request)
            count = min(request.num_uncomputed_tokens, plan.budget)
            plan.schedule(request, count, list(request.block_ids))

    def _try_admit(self, request: InferRequest) -> bool:
        """Admit a request when a slot and enough device resources are free."""
        if len(self._running) >= self._config.max_num_seqs:
            return False
        is_full = self._config.kv_reservation == "full"
        num_tokens = request.max_total_tokens - 1 if is_full else request.num_known_tokens
        if not self._cache.try_admit(request, num_tokens):
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.transition_to(RequestState.READY)
        return True

    # Bookkeeping.

    def _append(self, request: InferRequest, token_id: int) -> None:
        request.num_pending_tokens -= 1
        request.output_token_ids.append(token_id)
        if token_id in request.stop_token_ids:
            self.finish(request, FinishReason.STOP)
        elif request.num_known_tokens >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    def _queue(self, request: InferRequest) -> None:
        # A preempted request keeps its uid and so its place before everyone who came later.
        heapq.heappush(self._waiting, (request.priority, request.uid, request))
        self._waiting_uids.add(request.uid)

    def _first_waiting(self) -> InferRequest | None:
        while self._waiting:
            request = self._waiting[0][2]
            if request.state is RequestState.WAITING:
                return request
            heapq.heappop(self._waiting)  # ended while it waited
        return None

    def _forget(self, request: InferRequest) -> None:
        if request in self._running:
            self._running.remove(request)
        if request.uid in self._known_uids:
            self._known_uids.discard(request.uid)
            self._finished_uids.append(request.uid)
        self._free_when_quiet(request)

    def _free_when_quiet(self, request: InferRequest) -> None:
        """Give the blocks back once no step in flight writes to them."""
        if request.num_inflight_steps == 0 and request.block_ids:
            self._cache.free(request)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if not request.state.is_terminal:
                error = RequestError(
                    RequestErrorCode.TIMEOUT,
                    f"not finished in time: {len(request.output_token_ids)} of at most "
                    f"{request.params.max_tokens} tokens generated; raise the row's timeout",
                )
                self.fail(request, error, FinishReason.TIMEOUT)
