"""The engine's only loop: schedule -> execute -> update.

It owns the scheduler and the workers, and knows sessions only as where requests come from. It is
driven by whoever waits for a completion, one thread at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from engine.errors import RequestError, RequestErrorCode, WorkerError, WorkerFailure
from engine.execution import ExecutionEngine, StepFuture
from engine.listeners import Listeners
from engine.messages import StepDone, StepFailed
from engine.metrics import Bucket, BucketClock, StatsCollector
from engine.outbox import Outbox
from engine.output_processor import OutputProcessor
from engine.request import FinishReason, InferRequest, PartialOutput
from engine.request_factory import RequestFactory
from engine.scheduler import Scheduler
from engine.session import Session, Turn

logger = logging.getLogger(__name__)
# How long an idle loop sleeps before its driver looks around again; arrivals wake it at once.
_IDLE_SECONDS = 0.1
_SHOWN_IDS = 20
# A listener that blocks may not keep a run from stopping.
_FLUSH_SECONDS = 5.0


class EngineLoop:
    """Everything between a turn that is ready and a request that has ended."""

    def __init__(
        self,
        execution: ExecutionEngine,
        scheduler: Scheduler,
        factory: RequestFactory,
        processor: OutputProcessor,
        clock: BucketClock,
        stats: StatsCollector,
    ) -> None:
        self.execution = execution
        self.stats = stats
        self.signal = threading.Event()
        self._clock = clock
        self._scheduler = scheduler
        self._steps: deque[StepFuture] = deque()
        self._factory = factory
        self._processor = processor
        self._outbox = Outbox(processor, Listeners(factory.tokenizer), self.wake)

    def wake(self) -> None:
        """Let a loop that sleeps look around again."""
        if not self.signal.is_set():
            self.signal.set()

    def close(self) -> None:
        """Stop the workers after their last step."""
        self._outbox.close()
        self.execution.stop()

    def kill(self) -> None:
        """Stop the workers at once."""
        self.execution.kill()
        self._outbox.close()

    def iterate(self, sessions: Sequence[Session]) -> None:
        """Do one round: take in requests, hand out steps, book the oldest that is back."""
        self._clock.enter(Bucket.SCHEDULE)
        self._refill(sessions)
        self._hand_out()
        for request in self._scheduler.take_failed():
            self._outbox.put(request)
        if self._scheduler.num_in_flight:
            self._clock.enter(Bucket.WAIT_FOR_DEVICE)
            reply = self._collect()
            self._clock.enter(Bucket.PROCESS_OUTPUT)
            self._book(reply)
        else:
            self._clock.enter(Bucket.IDLE)
            self._outbox.check()
            self.signal.wait(self._sleep_seconds())

    def partials_of(self, session: Session) -> list[PartialOutput]:
        """Return what there is of a session's samples that have not ended: booked tokens alone."""
        turns = self._outbox.turns_of(session)
        inside = [
            _partial_output(request, turns[request.uid])
            for request in self._scheduler.living_requests()
            if request.uid in turns and (request.output_token_ids or turns[request.uid].replies)
        ]
        return inside + session.partials()

    def settle(self) -> None:
        """Finish the steps in flight, and what follows of them in the sessions."""
        self._drain()
        self._outbox.flush(_FLUSH_SECONDS)

    def drop(self, session: Session) -> None:
        """Give up what a session has inside, once the steps in flight are finished."""
        turns = self._outbox.turns_of(session)
        if turns:
            self._drain()
            self._fail(turns)
        session.abandon()

    def _drain(self) -> None:
        while self._scheduler.num_in_flight:
            self._book(self._collect())

    def _fail(self, turns: dict[int, Turn]) -> None:
        error = RequestError(RequestErrorCode.ABORTED, "the run was stopped")
        for request in self._scheduler.living_requests():
            if request.uid in turns:
                self._scheduler.fail(request, error, FinishReason.ABORT)
        for request in self._scheduler.take_failed():
            if request.uid in turns:
                self._outbox.drop(request)
            else:
                self._outbox.put(request)

    def _sleep_seconds(self) -> float:
        wake_at = self._scheduler.wake_at()
        if wake_at is None:
            return _IDLE_SECONDS
        return min(max(wake_at - time.monotonic(), 0.0), _IDLE_SECONDS)

    def _refill(self, sessions: Sequence[Session]) -> None:
        """Keep a bounded number of requests waiting, one of each session in turn."""
        open_sessions = list(sessions)
        while open_sessions and self._scheduler.has_room:
            open_sessions = [session for session in open_sessions if self._take_in(session)]
        is_closed = all(session.intake.is_exhausted for session in sessions)
        self._scheduler.set_intake_closed(is_closed)

    def _take_in(self, session: Session) -> bool:
        """Take one turn of a session; return False when it has none now."""
        turn = None if session.is_congested else session.take()
        if turn is None:
            return False
        requests = self._factory.make(turn, deadline=session.deadline)
        session.add_open(len(requests) - 1)
        self.stats.num_prompt_tokens += len(turn.token_ids)
        leader = None
        for request in requests:
            self._outbox.register(request, session, turn)
            if turn.error is not None:
                self._scheduler.fail(request, turn.error, FinishReason.ERROR)
            else:
                self._scheduler.add(request, after=leader)
            leader = leader or request
        return True

    def _hand_out(self) -> None:
        """Schedule and submit as many steps as may be in flight."""
        scheduler = self._scheduler
        while scheduler.can_schedule:
            started = time.perf_counter()
            step = scheduler.schedule()
            if step is None:
                return
            self.stats.step_scheduled(
                step_id=step.batch.step_id,
                num_prefill_tokens=step.num_prefill_tokens,
                num_decode_tokens=step.num_decode_tokens,
                num_repeated_tokens=step.num_repeated_tokens,
                num_preempted=step.num_preempted,
                num_waiting=scheduler.num_waiting,
                num_running=scheduler.num_running,
                num_free_blocks=scheduler.num_free_blocks,
                schedule_seconds=time.perf_counter() - started,
            )
            try:
                self._steps.append(self.execution.submit(step.batch))
            except WorkerError as error:
                raise self._with_state(str(error), error.failure) from error

    def _collect(self) -> StepDone | StepFailed:
        """Wait for the oldest step; what goes wrong is told with the state of the queues."""
        try:
            return self._steps.popleft().result()
        except WorkerError as error:
            raise self._with_state(str(error), error.failure) from error

    def _with_state(
        self, message: str, failure: WorkerFailure, request_ids: tuple[str, ...] | None = None
    ) -> WorkerError:
        """Return an error that names the requests in flight: one of them may be the reason."""
        scheduler = self._scheduler
        if request_ids is None:
            request_ids = scheduler.in_flight_request_ids()
        return WorkerError(
            f"{message}\nwaiting={scheduler.num_waiting} running={scheduler.num_running} "
            f"steps_in_flight={scheduler.num_in_flight} free_blocks={scheduler.num_free_blocks} "
            f"ids in flight: {', '.join(request_ids[:_SHOWN_IDS])}",
            failure=failure,
            request_ids=request_ids,
        )

    def _book(self, reply: StepDone | StepFailed) -> None:
        """Take in a step that is back, and hand over the requests that ended with it."""
        if isinstance(reply, StepFailed):
            self._recover(reply)
            return
        updates = self._scheduler.update(reply)
        for update in updates:
            request = update.request
            token_id = update.token_id
            is_stopped = token_id is not None and self._push(request, token_id)
            if is_stopped and not request.state.is_terminal:
                self._scheduler.finish(request, FinishReason.STOP)
            if request.state.is_terminal:
                self.stats.num_cached_tokens += request.num_cached_tokens
                self._outbox.put(request)
        timings = reply.timings
        stats = self.stats.step_done(
            num_sampled_tokens=sum(update.token_id is not None for update in updates),
            is_graph_replay=reply.is_graph_replay,
            worker_prepare_seconds=timings.prepare_seconds,
            worker_forward_seconds=timings.forward_seconds,
            worker_sample_seconds=timings.sample_seconds,
        )
        logger.debug("step %s", stats)

    def _push(self, request: InferRequest, token_id: int) -> bool:
        """Show a token to those who look at each one; return True when a text is to be cut."""
        self._outbox.stream(request, token_id)
        return self._processor.push(request, token_id)

    def _recover(self, failed: StepFailed) -> None:
        """Undo a step for which the device had no memory, and go on with smaller ones.

        Raises:
            WorkerError: it failed for another reason, or cannot be made smaller.
        """
        if failed.kind != WorkerFailure.OUT_OF_MEMORY:
            raise self._with_state(
                f"a step failed on the device: {failed.message}", WorkerFailure(failed.kind)
            )
        request_ids = self._scheduler.in_flight_request_ids()
        num_tokens = self._scheduler.roll_back()
        self.stats.step_failed()
        while self._scheduler.num_in_flight:
            reply = self._collect()
            if isinstance(reply, StepFailed):
                self._scheduler.roll_back()
                self.stats.step_failed()
            else:
                self._book(reply)
        if num_tokens <= 1:
            raise self._with_state(
                "the device has no memory for a step of one token; lower "
                "engine.cache.memory_fraction",
                WorkerFailure.OUT_OF_MEMORY,
                request_ids,
            )
        self._scheduler.token_limit = max(num_tokens // 2, 1)
        logger.warning(
            "out of memory in a step of %d tokens; going on with at most %d tokens a step",
            num_tokens,
            self._scheduler.token_limit,
        )


def _partial_output(request: InferRequest, turn: Turn) -> PartialOutput:
    is_scored = request.params.logprobs is not None
    return PartialOutput(
        request_id=request.request_id,
        sample_index=request.sample_index,
        replies=turn.replies,
        token_ids=tuple(request.output_token_ids),
        logprobs=tuple(request.logprobs) if is_scored else None,
    )
