"""OfflineInference: the front door of the engine, and the owner of its only loop.

schedule -> execute -> update, until every request has ended.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from engine.cache_manager import CacheManager
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError, RequestErrorCode, WorkerError
from engine.execution import ExecutionEngine
from engine.messages import StepDone
from engine.metrics import Bucket, BucketClock, RunStats, StatsCollector
from engine.model_source import ModelSource
from engine.output_processor import OutputProcessor
from engine.request import (
    Completion,
    FinishReason,
    GenerateRequest,
    InferRequest,
    sampling_key_of,
)
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = GenerateRequest | str | Sequence[int] | Sequence[dict[str, Any]]


class OfflineInference:
    """Answers prompts in batches. Building it loads nothing; entering it does.

    Example:
        with OfflineInference(EngineConfig(model_path="models/qwen")) as llm:
            for completion in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
                print(completion.text)
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._execution: ExecutionEngine | None = None
        self._clock = BucketClock()
        self._seed = secrets.randbits(63)
        self._uids = itertools.count()

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
        self._processor = OutputProcessor(self.tokenizer)
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
            self._execution.stop()
            self._execution = None

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
        that cannot be answered has a completion with `error` set.
        """
        params = (
            sampling_params
            if sampling_params is not None
            else self.source.sampling_defaults(self.config)
        )
        requests = [_as_request(prompt, i, params) for i, prompt in enumerate(prompts)]
        order = {request.request_id: i for i, request in enumerate(requests)}
        if len(order) < len(requests):
            raise ConfigError("two requests have one request_id; give each its own")
        return sorted(self.run(requests), key=lambda completion: order[completion.request_id])

    def run(
        self, requests: Iterable[GenerateRequest], *, stop: threading.Event | None = None
    ) -> Iterator[Completion]:
        """Answer a stream of requests, yielding each completion as it finishes.

        Requests are taken from the iterable as there is room, so it may be endless. When `stop`
        is set, the steps in flight are finished, what they complete is yielded, and the rest is
        dropped without a completion; closing the generator early drops that too.

        Raises:
            WorkerError: a worker died, hangs, or failed a step; the engine cannot go on.
        """
        execution = self._open_execution()
        source = iter(requests)
        try:
            yield from self._loop(execution, source, stop or threading.Event())
        except WorkerError as error:
            error.request_ids = self._scheduler.running_request_ids()
            execution.kill()
            self._execution = None
            raise
        except GeneratorExit:
            for step_ended in self._drain(execution):
                self._processor.complete(step_ended)
            raise
        finally:
            self._clock.enter(Bucket.IDLE)

    def charge(self, bucket: Bucket) -> None:
        """Charge the time from now on to a bucket, such as COMMIT while the caller commits."""
        self._clock.enter(bucket)

    def take_stats(self) -> RunStats:
        """Return what happened since the last call."""
        return self._stats.take(self._clock.take())

    # The loop.

    def _loop(
        self,
        execution: ExecutionEngine,
        source: Iterator[GenerateRequest],
        stop: threading.Event,
    ) -> Iterator[Completion]:
        is_exhausted = False
        while not is_exhausted or self._scheduler.has_unfinished:
            if stop.is_set():
                yield from self._emit(self._drain(execution))
                return
            self._clock.enter(Bucket.SCHEDULE)
            if not is_exhausted:
                is_exhausted = self._refill(source)
            self._hand_out(execution)
            yield from self._emit(self._scheduler.take_failed())
            if self._scheduler.num_in_flight == 0:
                continue
            self._clock.enter(Bucket.WAIT_FOR_DEVICE)
            output = execution.collect()
            self._clock.enter(Bucket.PROCESS_OUTPUT)
            yield from self._emit(self._book(output))

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

    def _refill(self, source: Iterator[GenerateRequest]) -> bool:
        """Keep one batch of requests waiting; return True when the source has no more."""
        while self._scheduler.num_waiting < self.config.scheduler.max_num_seqs:
            request = next(source, None)
            if request is None:
                return True
            self._admit(request)
        return False

    def _admit(self, request: GenerateRequest) -> None:
        """Make a request the scheduler's; one that cannot be answered fails there at once."""
        error: RequestError | None = None
        token_ids: list[int] = []
        try:
            token_ids = self.tokenizer.encode_request(request)
            self._check_length(len(token_ids))
        except RequestError as failure:
            error = failure
        inner = self._infer_request(request, token_ids)
        self._stats.num_prompt_tokens += len(token_ids)
        if error is None:
            self._scheduler.add(inner)
        else:
            self._scheduler.fail(inner, error, FinishReason.ERROR)

    def _check_length(self, num_tokens: int) -> None:
        limit = self.source.max_model_len
        if num_tokens >= limit:
            raise RequestError(
                RequestErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {num_tokens} tokens; with one token of answer at most {limit} "
                "fit the model (max_model_len); shorten it",
            )

    def _infer_request(self, request: GenerateRequest, token_ids: list[int]) -> InferRequest:
        params, key, timeout = (
            request.sampling_params,
            request.sampling_key,
            request.timeout_seconds,
        )
        eos_token_ids = () if params.ignore_eos else self.source.eos_token_ids
        return InferRequest(
            uid=next(self._uids),
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            params=params,
            stop_token_ids=frozenset((*eos_token_ids, *params.stop_token_ids)),
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.source.max_model_len),
            seed=params.seed if params.seed is not None else self._seed,
            sampling_key=sampling_key_of(request.request_id) if key is None else key,
            priority=request.priority,
            deadline=None if timeout is None else time.monotonic() + timeout,
        )

    def _book(self, output: StepDone) -> list[InferRequest]:
        """Take in a finished step; return the requests that ended with it."""
        updates = self._scheduler.update(output)
        ended: list[InferRequest] = []
        for update in updates:
            request = update.request
            if self._processor.push(request, update.token_id) and not request.state.is_terminal:
                self._scheduler.finish(request, FinishReason.STOP)
            if request.state.is_terminal:
                ended.append(request)
        timings = output.timings
        stats = self._stats.step_done(
            num_sampled_tokens=len(updates),
            worker_prepare_seconds=timings.prepare_seconds,
            worker_forward_seconds=timings.forward_seconds,
            worker_sample_seconds=timings.sample_seconds,
        )
        logger.debug("step %s", stats)
        return ended

    def _emit(self, requests: list[InferRequest]) -> Iterator[Completion]:
        for request in requests:
            self._stats.num_cached_tokens += request.num_cached_tokens
            completion = self._processor.complete(request)
            bucket = self._clock.enter(Bucket.IDLE)
            yield completion
            self._clock.enter(bucket)

    def _drain(self, execution: ExecutionEngine) -> list[InferRequest]:
        """Finish the steps in flight, drop everything else; return what those steps ended."""
        ended: list[InferRequest] = []
        while self._scheduler.num_in_flight:
            ended += self._book(execution.collect())
        error = RequestError(RequestErrorCode.ABORTED, "the run was stopped")
        self._scheduler.fail_all(error, FinishReason.ABORT)
        for request in self._scheduler.take_failed():
            self._processor.complete(request)
        return ended

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
