"""The workers of one engine, one process per rank: start, steps, health, teardown.

A worker's faults come out here as ConfigError or WorkerError, with the path of its log and its
last lines.
"""

import logging
import tempfile
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from msgspec import structs

from engine.config import EngineConfig
from engine.errors import ConfigError, WorkerError, WorkerFailure
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    FromWorker,
    ScheduleBatch,
    StartFailed,
    StartWorker,
    StepDone,
    StepFailed,
    WorkerReady,
)
from engine.model_source import ModelSource
from engine.private_folder import private_folder
from engine.worker.answers import Patience, receive_from_all
from engine.worker.log_files import new_log_path
from engine.worker.process import InlineWorker, Worker, WorkerProcess

logger = logging.getLogger(__name__)
# How long the end waits for a step of which nobody knows whether it will ever come.
_GRACE_SECONDS = 10.0
_Reply = TypeVar("_Reply", WorkerReady, CacheAllocated)


class StepFuture:
    """A step that every rank was given, and its answer when that is there.

    Workers answer in order, so the answer to a step comes after those to the steps before it.
    """

    def __init__(self, step_id: int, answer_oldest: Callable[[], None]) -> None:
        self.step_id = step_id
        self.answer: StepDone | StepFailed | None = None
        self._answer_oldest = answer_oldest

    def result(self) -> StepDone | StepFailed:
        """Wait until every rank has answered; rank 0's tokens count.

        A step that failed on any rank has failed; its message ends with the worker's log.

        Raises:
            WorkerError: a worker died, was silent for watchdog_seconds, answered another step, or
                failed a step that others share. None of its engine's steps has an answer then.
        """
        while self.answer is None:
            self._answer_oldest()
        return self.answer


class ExecutionEngine:
    """Sends each step to every rank and returns what rank 0 sampled, in order.

    One thread at a time may use it; `num_in_flight` any may ask.
    Once is_ending says that nobody wants more than the steps in flight, a worker that hangs is
    waited for no longer than _GRACE_SECONDS, or twice the slowest step so far.
    """

    def __init__(self, config: EngineConfig, is_ending: Callable[[], bool] = lambda: False) -> None:
        self._config = config
        self._is_ending = is_ending
        self._slowest_seconds = 0.0
        self._workers: list[Worker] = []
        self._in_flight: deque[StepFuture] = deque()
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None
        self.device = "none"
        self.block_size = 0
        self.sliding_window: int | None = None
        self.dtype: str = config.dtype
        self.load_seconds = 0.0
        self.warmup_seconds = 0.0

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def num_in_flight(self) -> int:
        """Steps handed out that are not answered by every rank."""
        return len(self._in_flight)

    def start(self) -> int:
        """Start the workers, load the model, allocate the KV pool; return its number of blocks.

        Raises:
            ConfigError: something that only the user can mend.
            WorkerError: with START_FAILED; a worker could not start, died, or was silent.
        """
        try:
            return self._start()
        except WorkerError as error:
            self.kill()
            raise WorkerError(
                f"the engine could not start: {error}", failure=WorkerFailure.START_FAILED
            ) from error
        except BaseException:
            self.kill()
            raise

    def submit(self, batch: ScheduleBatch) -> StepFuture:
        """Hand a step to every rank.

        Raises:
            WorkerError: a worker is dead, or takes no message.
        """
        for worker in self._workers:
            worker.send(batch)
        future = StepFuture(batch.step_id, self._answer_oldest)
        self._in_flight.append(future)
        return future

    def stop(self) -> None:
        """Finish the steps in flight, then end the workers in order; kill those that hang."""
        try:
            self._finish_steps()
            idle = [worker for worker in self._workers if not worker.num_due]
            for worker in idle:
                worker.ask_to_stop()
            for worker in idle:
                worker.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        """End the workers at once; steps in flight have no answer."""
        workers, self._workers = self._workers, []
        self._in_flight.clear()
        for worker in workers:
            worker.kill()
        if self._rendezvous is not None:
            self._rendezvous.cleanup()
            self._rendezvous = None

    def _answer_oldest(self) -> None:
        """Give the oldest step in flight its answer, see StepFuture.result."""
        if not self._in_flight:
            raise WorkerError("a step has no answer: its engine was closed, or failed before")
        step = self._in_flight[0]
        try:
            step.answer = self._receive_answer(step.step_id)
        except WorkerError:
            self._in_flight.clear()  # the workers are of no use any more
            raise
        self._in_flight.popleft()

    def _receive_answer(self, step_id: int) -> StepDone | StepFailed:
        grace_seconds = max(_GRACE_SECONDS, 2 * self._slowest_seconds)
        watchdog_seconds = self._config.runtime.watchdog_seconds
        patience = Patience(watchdog_seconds, self._is_ending, grace_seconds)
        answers = receive_from_all(self._workers, patience)
        self._slowest_seconds = max(self._slowest_seconds, patience.waited_seconds)
        replies = [(worker, _as_answer(reply, step_id)) for worker, reply in answers]
        for worker, reply in replies:
            if isinstance(reply, StepFailed):
                where = f"worker (pid {worker.pid}): {reply.message}{worker.log_hint()}"
                if len(self._workers) > 1:
                    # The other ranks wait for an exchange that will never come.
                    failure = WorkerFailure(reply.kind)
                    raise WorkerError(f"a step failed in {where}", failure=failure)
                return structs.replace(reply, message=where)
        return replies[0][1]

    def _finish_steps(self) -> None:
        """Wait for the steps in flight, whose answers nobody wants."""
        num_steps = self.num_in_flight
        try:
            while self._in_flight:
                self._answer_oldest()
        except WorkerError as error:
            logger.warning("of %d steps in flight at the end, not all ended: %s", num_steps, error)

    def _start(self) -> int:
        config = self._config
        num_ranks = config.tensor_parallel_size
        if num_ranks > 1:
            _check_heads(ModelSource.inspect(config), num_ranks)
            self._rendezvous = tempfile.TemporaryDirectory(prefix="tokenmill-ranks-")
        # On the CPU all ranks are on the one device.
        device_ids = config.device_ids * num_ranks if config.device == "cpu" else config.device_ids
        for rank in range(num_ranks):
            self._workers.append(self._make_worker(rank))
        for rank, worker in enumerate(self._workers):
            worker.send(
                StartWorker(
                    config=config.model_dump(mode="json"),
                    rank=rank,
                    world_size=num_ranks,
                    device_id=device_ids[rank],
                    rendezvous_dir=self._rendezvous.name if self._rendezvous else "",
                )
            )
        ready = self._expect_all(WorkerReady)
        num_blocks = min(reply.num_blocks for reply in ready)
        self.device = ", ".join(dict.fromkeys(reply.device for reply in ready))
        self.dtype = ready[0].dtype
        self.block_size = ready[0].block_size
        self.sliding_window = ready[0].sliding_window
        self.load_seconds = max(reply.load_seconds for reply in ready)
        for worker in self._workers:
            worker.send(AllocateCache(num_blocks=num_blocks))
        allocated = self._expect_all(CacheAllocated)
        self.warmup_seconds = max(reply.warmup_seconds for reply in allocated)
        return num_blocks

    def _make_worker(self, rank: int) -> Worker:
        if self._config.runtime.inline:
            return InlineWorker()
        folder = self._config.log_dir or private_folder() / "logs"
        return WorkerProcess(self._config, rank, new_log_path(folder, rank))

    def _expect_all(self, kind: type[_Reply]) -> list[_Reply]:
        """Return each rank's answer; what only the user can mend is told before its consequences."""
        patience = Patience(self._config.runtime.start_timeout_seconds)
        answers = receive_from_all(self._workers, patience)
        for _, reply in answers:
            if isinstance(reply, StartFailed) and reply.is_config_error:
                raise ConfigError(reply.message)
        for worker, reply in answers:
            if not isinstance(reply, kind):
                raise WorkerError(
                    f"worker (pid {worker.pid}): {getattr(reply, 'message', reply)}"
                    f"{worker.log_hint()}"
                )
        return [reply for _, reply in answers if isinstance(reply, kind)]


def _as_answer(reply: FromWorker, step_id: int) -> StepDone | StepFailed:
    """Return a worker's message as the answer to a step.

    Raises:
        WorkerError: it answers another step.
    """
    assert isinstance(reply, StepDone | StepFailed), f"a worker answered a step with {reply}"
    if reply.step_id != step_id:
        raise WorkerError(
            f"the answer to step {step_id} was lost: that to {reply.step_id} came instead"
        )
    return reply


def _check_heads(source: ModelSource, num_ranks: int) -> None:
    """Refuse a number of ranks that whole heads cannot be shared out to.

    Raises:
        ConfigError: with the numbers; a model folder that does not name them is judged when it is
            loaded.
    """
    heads, kv_heads = source.num_attention_heads, source.num_key_value_heads
    found = None
    if heads % num_ranks:
        found = f"{heads} attention heads; it must divide them"
    elif kv_heads and kv_heads % num_ranks and num_ranks % kv_heads:
        found = f"{kv_heads} key-value heads; one must divide the other"
    if found is not None:
        raise ConfigError(
            f"engine.tensor_parallel_size is {num_ranks}, but {source.path} has {found}"
        )
