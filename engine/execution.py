"""The workers of one engine, one process per rank: start, steps, health, teardown.

A worker's faults come out here as ConfigError or WorkerError, with the path of its log and its
last lines.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from engine.config import EngineConfig
from engine.errors import ConfigError, WorkerError, WorkerFailure
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    FromWorker,
    ScheduleBatch,
    Shutdown,
    StartFailed,
    StartWorker,
    StepDone,
    ToWorker,
    WorkerReady,
)
from engine.worker.channel import Channel, ChannelClosedError
from engine.worker.model_worker import ModelWorker

logger = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", WorkerReady, CacheAllocated)
_LOG_TAIL_BYTES = 4096
_LOG_TAIL_LINES = 12
_STOP_SECONDS = 10


@cache
def _spawner() -> ThreadPoolExecutor:
    """Return the one thread that starts workers and lives as long as the process.

    The parent-death signal of a worker follows the thread that started it.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenmill-spawner")


class WorkerProcess:
    """One rank in a process of its own."""

    def __init__(self, config: EngineConfig, rank: int, log_path: Path) -> None:
        self._config = config
        self._rank = rank
        self.log_path = log_path
        self._channel, theirs = Channel.pair()
        self._process = _spawner().submit(self._spawn, theirs).result()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Send one message; a worker that is gone is reported by `receive`."""
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            raise self._death() from error

    def receive(self, timeout_seconds: float) -> FromWorker:
        """Return the next answer.

        Raises:
            WorkerError: the worker died, or was silent for too long.
        """
        if not self._channel.wait(timeout_seconds):
            raise WorkerError(
                f"worker rank {self._rank} (pid {self.pid}) was silent for {timeout_seconds:.0f} s"
                f"{self._log_hint()}",
                failure=WorkerFailure.TIMEOUT,
            )
        try:
            return self._channel.receive_from_worker()
        except ChannelClosedError as error:
            raise self._death() from error

    def stop(self) -> None:
        """End the worker: ask, wait, and kill if it does not listen."""
        try:
            self._channel.send(Shutdown())
        except ChannelClosedError:
            logger.debug("worker rank %d is gone already", self._rank)
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("worker rank %d does not end, killing it", self._rank)
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End a worker that failed, without asking."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _spawn(self, theirs: Channel) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "engine.worker"]
        arguments = [str(theirs.file_descriptor), str(os.getpid()), self._config.log_level]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command + arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.file_descriptor,),
            )

    def _death(self) -> WorkerError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(
            f"worker rank {self._rank} (pid {self.pid}) {how}{self._log_hint()}",
            failure=WorkerFailure.DIED,
        )

    def _log_hint(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"; its log {self.log_path} ends with:\n  " + "\n  ".join(lines or ["(empty)"])


class InlineWorker:
    """One rank in this process, for debugging and tests: same messages, no pipe."""

    def __init__(self) -> None:
        self._worker = ModelWorker()
        self._replies: deque[FromWorker] = deque()
        self.pid = os.getpid()

    def send(self, message: ToWorker) -> None:
        """Handle the message at once and keep the answer."""
        reply = self._worker.handle(message)
        if reply is not None:
            self._replies.append(reply)

    def receive(self, timeout_seconds: float) -> FromWorker:
        """Return the oldest answer."""
        return self._replies.popleft()

    def stop(self) -> None:
        """Release everything."""
        self._worker.close()

    def kill(self) -> None:
        """Release everything; there is no process to kill."""
        self._worker.close()


class ExecutionEngine:
    """Sends each step to every rank and returns what rank 0 sampled, in order."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._workers: list[WorkerProcess | InlineWorker] = []
        self.device = "none"
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

    def collect(self) -> StepDone:
        """Wait for the oldest step; every rank answers, rank 0's tokens count.

        Raises:
            WorkerError: a worker died, was silent for watchdog_seconds, or failed the step.
        """
        timeout = self._config.runtime.watchdog_seconds
        replies = [worker.receive(timeout) for worker in self._workers]
        for reply in replies:
            if not isinstance(reply, StepDone):
                failure = WorkerFailure(getattr(reply, "kind", WorkerFailure.OTHER))
                raise WorkerError(f"a step failed on the device: {reply}", failure=failure)
        first = replies[0]
        assert isinstance(first, StepDone)
        return first

    def stop(self) -> None:
        """End the workers in order, after their last step."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()

    def kill(self) -> None:
        """End the workers at once."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _start(self) -> int:
        config = self._config
        device_ids = config.device_ids[: config.tensor_parallel_size]
        if len(device_ids) > 1:
            raise ConfigError(
                f"engine.tensor_parallel_size is {len(device_ids)}; this version runs one rank"
            )
        self._workers = [self._make_worker(rank) for rank in range(len(device_ids))]
        for rank, worker in enumerate(self._workers):
            worker.send(
                StartWorker(
                    config=config.model_dump(mode="json"),
                    rank=rank,
                    world_size=len(device_ids),
                    device_id=device_ids[rank],
                )
            )
        ready = [self._expect(worker, WorkerReady) for worker in self._workers]
        num_blocks = min(reply.num_blocks for reply in ready)
        self.device, self.dtype = ready[0].device, ready[0].dtype
        self.load_seconds = max(reply.load_seconds for reply in ready)
        for worker in self._workers:
            worker.send(AllocateCache(num_blocks=num_blocks))
        allocated = [self._expect(worker, CacheAllocated) for worker in self._workers]
        self.warmup_seconds = max(reply.warmup_seconds for reply in allocated)
        return num_blocks

    def _make_worker(self, rank: int) -> WorkerProcess | InlineWorker:
        if self._config.runtime.inline:
            return InlineWorker()
        folder = self._config.log_dir or Path(tempfile.gettempdir()) / "tokenmill-logs"
        folder.mkdir(parents=True, exist_ok=True)
        log_path = folder / f"worker-{os.getpid()}-{id(self):x}-rank{rank}.log"
        return WorkerProcess(self._config, rank, log_path)

    def _expect(self, worker: WorkerProcess | InlineWorker, kind: type[_Reply]) -> _Reply:
        reply = worker.receive(self._config.runtime.start_timeout_seconds)
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, StartFailed) and reply.is_config_error:
            raise ConfigError(reply.message)
        raise WorkerError(
            f"worker (pid {worker.pid}) could not start: {getattr(reply, 'message', reply)}",
            failure=WorkerFailure.START_FAILED,
        )
