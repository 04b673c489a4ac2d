"""OfflineInference: the front door of the engine, and the owner of its only loop.

schedule -> execute -> update, until every request has ended.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from engine.cache_manager import CacheManager
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    RequestError,
    RequestErrorCode,
    WorkerError,
    WorkerFailure,
)
from engine.execution import ExecutionEngine
from engine.intake import EncodedRequest, Intake
from engine.messages import StepDone, StepFailed
from engine.metrics import Bucket, BucketClock, RunStats, StatsCollector
from engine.model_source import ModelSource
from engine.outbox import Outbox
from engine.output_processor import OutputProcessor
from engine.request import Completion, FinishReason, GenerateRequest
from engine.request_factory import RequestFactory
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.session import Session
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = GenerateRequest | str | Sequence[int] | Sequence[dict[str, Any]]
# How long an idle loop sleeps before it looks at `stop` again; arrivals wake it at once.
_STOP_POLL_SECONDS = 0.1


class OfflineInference:
    """Answers prompts in batches. Building it loads nothing; entering it does.

    Several threads may call `generate` and `run` at a time: their requests share the batches,
    and each call gets its own completions.

    Example:
        with OfflineInference(EngineConfig(model_path="models/qwen")) as llm:
            for completion in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
                print(completion.text)
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._execution: ExecutionEngine | None = None
        self._clock = BucketClock()
        self._drive_lock = threading.Lock()
        self._signal = threading.Event()
        self._sessions: list[Session] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Read the model folder, start the workers, load the model.

        Raises:
            ConfigError: something that only the user can mend, found before weights are loaded.
            WorkerError: the machine could not start a worker.
        """
        if self._execution is not None:
            raise ConfigError("this OfflineInference is open already; use one `with` block")
        self._clock.enter(Bucket.LOAD)
        self.source = ModelSource.inspect(self.config)
        self.tokenizer = Tokenizer.load(self.config, self.source)
        execution = ExecutionEngine(self.config)
        num_blocks = execution.start()
        self._execution = execution
        self._cache = CacheManager(self.config.cache, num_blocks)
        self._scheduler = Scheduler(self.config.scheduler, self._cache)
        self._factory = RequestFactory(self.source)
        self._processor = OutputProcessor(self.tokenizer)
        self._outbox = Outbox(self._processor, self._signal.set)
        self._stats = StatsCollector()
        self._clock.enter(Bucket.IDLE)
        logger.info(
            "engine ready device=%s dtype=%s num_blocks=%d load_seconds=%.1f warmup_seconds=%.1f",
            execution.device,
            execution.dtype,
            num_blocks,
            execution.load_seconds,
            execution.warmup_seconds,
        )

    def close(self) -> None:
        """Stop the workers in order; the object can be entered again."""
        if self._execution is not None:
            execution, self._execution = self._execution, None
            self._outbox.close()
            execution.stop()

    @property
    def device(self) -> str:
        """What the workers really bound."""
        return self._open_execution().device

    @property
    def dtype(self) -> str:
        """The dtype that the model runs in."""
        return self._open_execution().dtype

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return self._open_execution().worker_pids

    def generate(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer every prompt; return the completions in the order of the prompts.

        A prompt is a text, a list of chat messages, a sequence of token ids (list, numpy array or
        tensor), or a GenerateRequest; sampling_params count where a prompt brings none. A prompt
        that cannot be answered has a completion with `error` set. With n samples, a prompt has n
        completions, one after the other.
        """
        self._open_execution()
        params = (
            sampling_params
            if sampling_params is not None
            else self.source.sampling_defaults(self.config)
        )
        requests = [_as_request(prompt, i, params) for i, prompt in enumerate(prompts)]
        order = {request.request_id: i for i, request in enumerate(requests)}
        if len(order) < len(requests):
            raise ConfigError("two requests have one request_id; give each its own")
        needed = {other for request in requests for other in request.depends_on}
        marked = (replace(r, is_dependency=r.request_id in needed) for r in requests)
        return sorted(self.run(marked), key=lambda c: (order[c.request_id], c.sample_index))

    def run(
        self, requests: Iterable[GenerateRequest], *, stop: threading.Event | None = None
    ) -> Iterator[Completion]:
        """Answer a stream of requests, yielding each completion as it finishes.

        Requests are read ahead, in a thread of their own and only so far, so the iterable may be
        endless. When `stop` is set, the steps in flight are finished, what they complete is
        yielded, and the rest is dropped without a completion; closing the generator early drops
        that too.

        Raises:
            WorkerError: a worker died, hangs, or failed a step; the engine cannot go on.
        """
        self._open_execution()
        session = self._open_session(iter(requests))
        try:
            yield from self._serve(session, stop or threading.Event())
        finally:
            self._close_session(session)
            self._clock.enter(Bucket.IDLE)

    def charge(self, bucket: Bucket) -> None:
        """Charge the time from now on to a bucket, such as COMMIT while the caller commits."""
        self._clock.enter(bucket)

    def take_stats(self) -> RunStats:
        """Return what happened since the last call."""
        return self._stats.take(self._clock.take())

    # Sessions.

    def _open_session(self, source: Iterator[GenerateRequest]) -> Session:
        intake = Intake(
            source,
            self._encode,
            depth=self.config.scheduler.max_waiting_requests,
            on_arrival=self._signal.set,
        )
        session = Session(intake, self._encode)
        with self._drive_lock:
            self._sessions.append(session)
        return session

    def _serve(self, session: Session, stop: threading.Event) -> Iterator[Completion]:
        """Yield a session's completions, driving the loop when nobody else does."""
        while True:
            completion = session.pop()
            if completion is not None:
                bucket = self._clock.enter(Bucket.IDLE)
                yield completion
                self._clock.enter(bucket)
                continue
            if session.is_finished():
                return
            with self._driving():
                # Cleared before the last look, so that what comes after it wakes the loop.
                self._signal.clear()
                if session.has_mail or session.is_finished():
                    continue
                if stop.is_set() and not session.is_abandoned:
                    self._stop_session(session)
                else:
                    self._iterate()

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the loop; when a worker fails, nobody can go on with this engine."""
        with self._drive_lock:
            try:
                yield
            except WorkerError as error:
                error.request_ids = self._scheduler.running_request_ids()
                self._abandon()
                raise
            except (Exception, GeneratorExit):
                raise
            except BaseException:
                self._abandon()  # a Ctrl-C may have come in the middle of a message
                raise

    def _close_session(self, session: Session) -> None:
        """Drop what a session still has inside the engine; the engine stays usable."""
        session.intake.close()
        with self._driving():
            self._sessions.remove(session)
            if self._execution is not None:
                self._stop_session(session)

    def _stop_session(self, session: Session) -> None:
        """Finish the steps in flight, and give up what a session has beside."""
        session.intake.close()
        execution = self._open_execution()
        while self._scheduler.num_in_flight:
            self._book(execution.collect())
        uids = self._outbox.requests_of(session)
        error = RequestError(RequestErrorCode.ABORTED, "the run was stopped")
        for request in self._scheduler.living_requests():
            if request.uid in uids:
                self._scheduler.fail(request, error, FinishReason.ABORT)
        for request in self._scheduler.take_failed():
            if request.uid in uids:
                self._outbox.drop(request)
            else:
                self._outbox.put(request)
        session.abandon()

    # The loop.

    def _iterate(self) -> None:
        """Do one round: take in requests, hand out steps, book the oldest that is back."""
        execution = self._open_execution()
        self._clock.enter(Bucket.SCHEDULE)
        self._refill()
        self._hand_out(execution)
        for request in self._scheduler.take_failed():
            self._outbox.put(request)
        if self._scheduler.num_in_flight:
            self._clock.enter(Bucket.WAIT_FOR_DEVICE)
            reply = execution.collect()
            self._clock.enter(Bucket.PROCESS_OUTPUT)
            self._book(reply)
        else:
            self._clock.enter(Bucket.IDLE)
            self._outbox.check()
            self._signal.wait(self._sleep_seconds())

    def _sleep_seconds(self) -> float:
        wake_at = self._scheduler.wake_at()
        if wake_at is None:
            return _STOP_POLL_SECONDS
        return min(max(wake_at - time.monotonic(), 0.0), _STOP_POLL_SECONDS)

    def _refill(self) -> None:
        """Keep a bounded number of requests waiting, shared out among the sessions."""
        limit = self.config.scheduler.max_waiting_requests
        for session in self._sessions:
            while self._scheduler.num_waiting < limit:
                turn = session.take()
                if turn is None:
                    break
                requests = self._factory.make(turn)
                session.add_open(len(requests) - 1)
                self._stats.num_prompt_tokens += len(turn.token_ids)
                for request in requests:
                    self._outbox.register(request, session, turn)
                    if turn.error is not None:
                        self._scheduler.fail(request, turn.error, FinishReason.ERROR)
                    else:
                        leader = requests[0] if request is not requests[0] else None
                        self._scheduler.add(request, after=leader)
        is_closed = all(session.intake.is_exhausted for session in self._sessions)
        self._scheduler.set_intake_closed(is_closed)

    def _encode(self, request: GenerateRequest) -> EncodedRequest:
        """Tokenise a request; called from intakes and the outbox, in their threads."""
        try:
            token_ids = self.tokenizer.encode_request(request)
            self._factory.check_length(len(token_ids), request.sampling_params.max_tokens)
        except RequestError as error:
            return EncodedRequest(request=request, token_ids=[], error=error)
        return EncodedRequest(request=request, token_ids=token_ids)

    def _hand_out(self, execution: ExecutionEngine) -> None:
        """Schedule and submit as many steps as may be in flight."""
        scheduler = self._scheduler
        while scheduler.can_schedule:
            started = time.perf_counter()
            step = scheduler.schedule()
            if step is None:
                return
            self._stats.step_scheduled(
                step_id=step.batch.step_id,
                num_prefill_tokens=step.num_prefill_tokens,
                num_decode_tokens=step.num_decode_tokens,
                num_preempted=step.num_preempted,
                num_waiting=scheduler.num_waiting,
                num_running=scheduler.num_running,
                num_free_blocks=scheduler.num_free_blocks,
                schedule_seconds=time.perf_counter() - started,
            )
            execution.submit(step.batch)

    def _book(self, reply: StepDone | StepFailed) -> None:
        """Take in a step that is back, and hand over the requests that ended with it."""
        if isinstance(reply, StepFailed):
            self._recover(reply)
            return
        updates = self._scheduler.update(reply)
        for update in updates:
            request = update.request
            if self._processor.push(request, update.token_id) and not request.state.is_terminal:
                self._scheduler.finish(request, FinishReason.STOP)
            if request.state.is_terminal:
                self._stats.num_cached_tokens += request.num_cached_tokens
                self._outbox.put(request)
        timings = reply.timings
        stats = self._stats.step_done(
            num_sampled_tokens=len(updates),
            worker_prepare_seconds=timings.prepare_seconds,
            worker_forward_seconds=timings.forward_seconds,
            worker_sample_seconds=timings.sample_seconds,
        )
        logger.debug("step %s", stats)

    def _recover(self, failed: StepFailed) -> None:
        """Undo a step for which the device had no memory, and go on with smaller ones.

        Raises:
            WorkerError: it failed for another reason, or cannot be made smaller.
        """
        if failed.kind != WorkerFailure.OUT_OF_MEMORY:
            raise WorkerError(
                f"a step failed on the device: {failed.message}", failure=WorkerFailure(failed.kind)
            )
        num_tokens = self._scheduler.roll_back()
        self._stats.step_failed()
        execution = self._open_execution()
        while self._scheduler.num_in_flight:
            reply = execution.collect()
            if isinstance(reply, StepFailed):
                self._scheduler.roll_back()
                self._stats.step_failed()
            else:
                self._book(reply)
        if num_tokens <= 1:
            raise WorkerError(
                "the device has no memory for a step of one token; lower "
                "engine.cache.memory_fraction",
                failure=WorkerFailure.OUT_OF_MEMORY,
            )
        self._scheduler.token_limit = max(num_tokens // 2, 1)
        logger.warning(
            "out of memory in a step of %d tokens; going on with at most %d tokens a step",
            num_tokens,
            self._scheduler.token_limit,
        )

    def _abandon(self) -> None:
        """Kill the workers; the engine must be entered again."""
        if self._execution is not None:
            execution, self._execution = self._execution, None
            execution.kill()
            self._outbox.close()

    def _open_execution(self) -> ExecutionEngine:
        if self._execution is None:
            raise ConfigError("this OfflineInference is not open; use it in a `with` block")
        return self._execution


def _as_request(prompt: Prompt, index: int, params: SamplingParams) -> GenerateRequest:
    if isinstance(prompt, GenerateRequest):
        return prompt
    request_id = str(index)
    if isinstance(prompt, str):
        return GenerateRequest(request_id=request_id, prompt=prompt, sampling_params=params)
    items: Sequence[Any] = prompt
    if len(items) and isinstance(items[0], dict):
        return GenerateRequest(request_id=request_id, messages=items, sampling_params=params)
    return GenerateRequest(request_id=request_id, prompt_token_ids=items, sampling_params=params)
