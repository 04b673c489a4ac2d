"""The workers of one engine, one process per rank: start, steps, health, teardown.

A worker's faults come out here as ConfigError or WorkerError, with the path of its log and its
last lines.
"""

import logging
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from engine.config import EngineConfig
from engine.errors import ConfigError, WorkerError, WorkerFailure
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    ScheduleBatch,
    StartFailed,
    StartWorker,
    StepDone,
    StepFailed,
    WorkerReady,
)
from engine.model_source import ModelSource
from engine.worker.process import InlineWorker, Worker, WorkerProcess, receive_from_all

logger = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", WorkerReady, CacheAllocated)


class ExecutionEngine:
    """Sends each step to every rank and returns what rank 0 sampled, in order."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._workers: list[Worker] = []
        self._rendezvous: tempfile.TemporaryDirectory[str] | None = None
        self.device = "none"
        self.sliding_window: int | None = None
        self.dtype: str = config.dtype
        self.load_seconds = 0.0
        self.warmup_seconds = 0.0

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    def start(self) -> int:
        """Start the workers, load the model, allocate the KV pool; return its number of blocks.

        Raises:
            ConfigError: something that only the user can mend.
            WorkerError: the machine could not start a worker.
        """
        try:
            return self._start()
        except BaseException:
            self.kill()
            raise

    def submit(self, batch: ScheduleBatch) -> None:
        """Hand a step to every rank."""
        for worker in self._workers:
            worker.send(batch)

    def collect(self) -> StepDone | StepFailed:
        """Wait for the oldest step; every rank answers, and rank 0's tokens count.

        A step that failed on any rank has failed; its message ends with the worker's log.

        Raises:
            WorkerError: a worker died, was silent for watchdog_seconds, or failed a step that
                others share.
        """
        answers = receive_from_all(self._workers, self._config.runtime.watchdog_seconds)
        for worker, reply in answers:
            if isinstance(reply, StepFailed):
                where = f"worker (pid {worker.pid}): {reply.message}{worker.log_hint()}"
                if len(self._workers) > 1:
                    # The other ranks wait for an exchange that will never come.
                    failure = WorkerFailure(reply.kind)
                    raise WorkerError(f"a step failed in {where}", failure=failure)
                return structs.replace(reply, message=where)
        first = answers[0][1]
        assert isinstance(first, StepDone), f"a worker answered a step with {first}"
        return first

    def stop(self) -> None:
        """End the workers in order, after their last step."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.ask_to_stop()
        for worker in workers:
            worker.stop()
        self._forget_rendezvous()

    def kill(self) -> None:
        """End the workers at once."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        self._forget_rendezvous()

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
        self.sliding_window = ready[0].sliding_window
        self.load_seconds = max(reply.load_seconds for reply in ready)
        for worker in self._workers:
            worker.send(AllocateCache(num_blocks=num_blocks))
        allocated = self._expect_all(CacheAllocated)
        self.warmup_seconds = max(reply.warmup_seconds for reply in allocated)
        return num_blocks

    def _forget_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.cleanup()
            self._rendezvous = None

    def _make_worker(self, rank: int) -> Worker:
        if self._config.runtime.inline:
            return InlineWorker()
        folder = self._config.log_dir or Path(tempfile.gettempdir()) / "tokenmill-logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / f"worker-{os.getpid()}-{id(self):x}-rank{rank}.log"
        return WorkerProcess(self._config, rank, log_path)

    def _expect_all(self, kind: type[_Reply]) -> list[_Reply]:
        """Return each rank's answer; what only the user can mend is told before its consequences."""
        answers = receive_from_all(self._workers, self._config.runtime.start_timeout_seconds)
        for _, reply in answers:
            if isinstance(reply, StartFailed) and reply.is_config_error:
                raise ConfigError(reply.message)
        for worker, reply in answers:
            if not isinstance(reply, kind):
                raise WorkerError(
                    f"worker (pid {worker.pid}) could not start: "
                    f"{getattr(reply, 'message', reply)}{worker.log_hint()}",
                    failure=WorkerFailure.START_FAILED,
                )
        return [reply for _, reply in answers if isinstance(reply, kind)]


def _check_heads(source: ModelSource, num_ranks: int) -> None:
    """Refuse a number of ranks that whole heads cannot be shared out to.

    Raises:
        ConfigError: with the numbers; a model folder that does not name them is judged when it is
            loaded.
    """
    heads, kv_heads = source.num_attention_heads, source.num_key_value_heads
    if heads % num_ranks:
        raise ConfigError(
            f"engine.tensor_parallel_size is {num_ranks}, but {source.path} has {heads} attention "
            "heads; it must divide them"
        )
    if kv_heads and kv_heads % num_ranks and num_ranks % kv_heads:
        raise ConfigError(
            f"engine.tensor_parallel_size is {num_ranks}, but {source.path} has {kv_heads} "
            "key-value heads; one must divide the other"
        )
