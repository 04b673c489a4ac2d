"""OfflineInference: the front door of the engine.

Each call of `run` is a session; whoever waits for a completion drives the one loop (loop.py),
for all sessions.
"""

import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from msgspec.structs import replace

from engine.cache_manager import CacheManager
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError, WorkerError
from engine.execution import ExecutionEngine
from engine.intake import EncodedRequest, Intake
from engine.loop import EngineLoop
from engine.metrics import Bucket, BucketClock, RunStats, StatsCollector
from engine.model_source import ModelSource
from engine.output_processor import OutputProcessor
from engine.partials import OnPartials, PartialReports
from engine.request import Completion, GenerateRequest, PartialOutput
from engine.request_factory import RequestFactory
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.session import Session
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = GenerateRequest | str | Sequence[int] | Sequence[dict[str, Any]]


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
        self._loop: EngineLoop | None = None
        self._stats = StatsCollector()
        self._failure: WorkerError | None = None
        self._clock = BucketClock()
        self._drive_lock = threading.Lock()
        self._sessions: list[Session] = []
        self._is_closing = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Read the model folder, start the workers, load the model.

        Raises:
            ConfigError: something that only the user can mend, found before weights are loaded.
            WorkerError: the machine could not start a worker.
        """
        if self._loop is not None:
            raise ConfigError("this OfflineInference is open already; use one `with` block")
        self._clock.enter(Bucket.LOAD)
        self.source = ModelSource.inspect(self.config)
        self.tokenizer = Tokenizer.load(self.config, self.source)
        self._factory = RequestFactory(self.source, self.tokenizer)
        execution = ExecutionEngine(self.config, self._is_ending)
        num_blocks = execution.start()
        cache = CacheManager(
            self.config.cache,
            num_blocks,
            block_size=execution.block_size,
            sliding_window=execution.sliding_window,
        )
        scheduler = Scheduler(self.config.scheduler, cache)
        processor = OutputProcessor(self.tokenizer)
        self._loop = EngineLoop(
            execution, scheduler, self._factory, processor, self._clock, self._stats
        )
        self._failure = None
        self._is_closing = False
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
        """Stop the workers in order; the object can be entered again.

        A run that another thread is in the middle of ends with a ConfigError, after its step.
        """
        self._is_closing = True
        with self._drive_lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    @property
    def device(self) -> str:
        """What the workers really bound."""
        return self._open_loop().execution.device

    @property
    def dtype(self) -> str:
        """The dtype that the model runs in."""
        return self._open_loop().execution.dtype

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return self._open_loop().execution.worker_pids

    def generate(
        self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answer every prompt; return the completions in the order of the prompts.

        A prompt is a text, a list of chat messages, a sequence of token ids (list, numpy array or
        tensor), or a GenerateRequest; sampling_params count where a prompt brings none. With n
        samples, a prompt has n completions, one after the other; where it cannot be answered, each
        has its `error` set.
        """
        self._open_loop()
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
        self,
        requests: Iterable[GenerateRequest],
        *,
        stop: threading.Event | None = None,
        timeout_seconds: float | None = None,
        on_partials: OnPartials | None = None,
        partial_seconds: float = 10.0,
    ) -> Generator[Completion, None, None]:
        """Answer a stream of requests, yielding each completion as it finishes.

        Requests are read ahead, in a thread of their own and only so far, so the iterable may be
        endless. When `stop` is set, the steps in flight are finished, what they complete is
        yielded, and the rest is dropped without a completion; closing the generator early drops
        that too. After timeout_seconds, whatever is not finished ends with finish_reason timeout.

        on_partials gets what there is of the samples that are not finished, every partial_seconds
        and once more when `stop` was set or a worker failed: in the thread that iterates, between
        two completions, so that none is among them whose completion is there. What it raises ends
        the run.

        Raises:
            WorkerError: a worker died, hangs, or failed a step; the engine cannot go on. What came
                back before is yielded first.
        """
        on_arrival = self._open_loop().wake
        intake = Intake(iter(requests), self._encode, self.config.scheduler, on_arrival)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        session = Session(intake, self._encode, stop or threading.Event(), deadline)
        with self._drive_lock:
            self._sessions.append(session)
        try:
            yield from self._serve(session, PartialReports(on_partials, partial_seconds))
        finally:
            self._close_session(session)
            self._clock.enter(Bucket.IDLE)

    def charge(self, bucket: Bucket) -> None:
        """Charge the time from now on to a bucket, such as COMMIT while the caller commits."""
        self._clock.enter(bucket)

    def take_stats(self) -> RunStats:
        """Return what happened since the last call, also when the engine has failed."""
        return self._stats.take(self._clock.take())

    # Sessions.

    def _serve(self, session: Session, reports: PartialReports) -> Iterator[Completion]:
        loop = self._open_loop()
        try:
            yield from self._answer(session, reports)
        except WorkerError:
            yield from iter(session.pop, None)
            self._tell(reports, loop.partials_of(session))
            raise

    def _answer(self, session: Session, reports: PartialReports) -> Iterator[Completion]:
        """Yield a session's completions, driving the loop when nobody else does."""
        while True:
            if reports.is_due:
                with self._driving() as loop:
                    partials = loop.partials_of(session)
                self._tell(reports, partials)
            completion = session.pop()
            if completion is not None:
                bucket = self._clock.enter(Bucket.IDLE)
                yield completion
                self._clock.enter(bucket)
            elif session.is_finished():
                return
            elif session.stop.is_set() and not session.is_abandoned:
                self._stop(session, reports)
            else:
                self._drive(session)

    def _drive(self, session: Session) -> None:
        with self._driving() as loop:
            # Cleared before the last look, so that what comes after it wakes the loop.
            loop.signal.clear()
            if not session.has_mail and not session.is_finished():
                loop.iterate(self._sessions)

    def _stop(self, session: Session, reports: PartialReports) -> None:
        """Finish the steps in flight, tell what there is, and drop the rest."""
        session.intake.close()
        with self._driving() as loop:
            partials = []
            if reports.is_wanted:
                loop.settle()
                partials = loop.partials_of(session)
            loop.drop(session)
        self._tell(reports, partials)

    def _tell(self, reports: PartialReports, partials: list[PartialOutput]) -> None:
        bucket = self._clock.enter(Bucket.IDLE)
        reports.tell(partials)
        self._clock.enter(bucket)

    @contextmanager
    def _driving(self) -> Iterator[EngineLoop]:
        """Hold the loop; when a worker fails, nobody can go on with this engine."""
        with self._drive_lock:
            loop = self._open_loop()
            try:
                yield loop
            except WorkerError as error:
                self._abandon(error)
                raise
            except (Exception, GeneratorExit):
                raise
            except BaseException:
                self._abandon(None)  # a Ctrl-C may have come in the middle of a message
                raise

    def _close_session(self, session: Session) -> None:
        """Drop what a session still has inside the engine; the engine stays usable."""
        session.intake.close()
        with self._drive_lock:
            self._sessions.remove(session)
        if self._loop is not None:
            # Who asks next is told if a worker fails now; the caller may have a reason of its own.
            with suppress(WorkerError), self._driving() as loop:
                loop.drop(session)

    def _is_ending(self) -> bool:
        """Tell whether nobody wants more than the steps in flight."""
        return self._is_closing or all(session.stop.is_set() for session in self._sessions)

    def _encode(self, request: GenerateRequest) -> EncodedRequest:
        """Tokenise a request; called from intakes and the outbox, in their threads."""
        try:
            prompt = self.tokenizer.encode(request)
            self._factory.check_length(len(prompt.token_ids), request.sampling_params.max_tokens)
        except RequestError as error:
            return EncodedRequest(request=request, token_ids=[], error=error)
        return EncodedRequest(
            request=request, token_ids=prompt.token_ids, is_truncated=prompt.is_truncated
        )

    def _abandon(self, failure: WorkerError | None) -> None:
        """Kill the workers; the engine must be entered again."""
        loop, self._loop, self._failure = self._loop, None, failure
        if loop is not None:
            loop.kill()

    def _open_loop(self) -> EngineLoop:
        if self._loop is not None:
            return self._loop
        if self._failure is not None:
            raise WorkerError(
                f"the engine failed while another run used it: {self._failure}",
                failure=self._failure.failure,
            ) from self._failure
        raise ConfigError("this OfflineInference is not open; use it in a `with` block")


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
