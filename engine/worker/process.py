"""The workers of one engine as the main process sees them: start, messages, death.

A worker's faults come out here as WorkerError, with the path of its log and its last lines.
"""

import logging
import os
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import WorkerError, WorkerFailure
from engine.messages import FromWorker, LogLine, Shutdown, ToWorker
from engine.worker import log_files
from engine.worker.channel import Channel, ChannelClosedError, ChannelStuckError
from engine.worker.model_worker import ModelWorker

logger = logging.getLogger(__name__)
_STOP_SECONDS = 10
_ENVIRONMENT = {
    # How long an OpenMP thread spins before it sleeps. By default it spins so long that one other
    # busy process on the machine makes a worker ten times slower.
    "GOMP_SPINCOUNT": "1000",
    "TQDM_DISABLE": "1",  # in a log a progress bar is one line without end
    "ASCEND_SLOG_PRINT_TO_STDOUT": "1",  # CANN's errors, which it else writes to ~/ascend/log
}


@cache
def _spawner() -> ThreadPoolExecutor:
    """Return the one thread that starts workers and lives as long as the process.

    The parent-death signal of a worker follows the thread that started it.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenmill-spawner")


class WorkerProcess:
    """One rank in a process of its own. num_due answers have not come yet.

    Raises:
        WorkerError: the operating system starts no process.
    """

    def __init__(self, config: EngineConfig, rank: int, log_path: Path) -> None:
        self._config = config
        self._rank = rank
        self.log_path = log_path
        self.num_due = 0
        self.channel, theirs = Channel.pair(config.runtime.watchdog_seconds)
        try:
            self._process = _spawner().submit(self._spawn, theirs).result()
        except OSError as error:
            self.channel.close()
            raise WorkerError(
                f"no process can be started for worker rank {rank}: {error}",
                failure=WorkerFailure.START_FAILED,
            ) from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Send one message that will be answered.

        Raises:
            WorkerError: the worker is dead, or so stuck that it takes no message.
        """
        self.num_due += 1
        try:
            self.channel.send(message)
        except ChannelClosedError as error:
            raise self._death() from error
        except ChannelStuckError as error:
            raise WorkerError(
                f"worker rank {self._rank} (pid {self.pid}) has taken no message for "
                f"{self._config.runtime.watchdog_seconds:.0f} s{self.log_hint()}",
                failure=WorkerFailure.TIMEOUT,
            ) from error

    def take(self) -> FromWorker | None:
        """Return the answer that waits in the pipe; None when it was a line for the log.

        Raises:
            WorkerError: the worker died.
        """
        try:
            reply = self.channel.receive_from_worker()
        except ChannelClosedError as error:
            raise self._death() from error
        if isinstance(reply, LogLine):
            # By the thread that waits for answers, which belongs to the shard that they are for.
            logging.getLogger(reply.name).log(reply.level, "rank=%d %s", self._rank, reply.text)
            return None
        self.num_due -= 1
        return reply

    def ask_to_stop(self) -> None:
        """Tell the worker that no message follows."""
        try:
            self.channel.send(Shutdown())
        except (ChannelClosedError, ChannelStuckError):
            logger.debug("worker rank %d is gone already, or will have to be killed", self._rank)

    def stop(self) -> None:
        """Wait until the worker, which was asked to stop, has ended; kill it if it does not."""
        self.channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("worker rank %d does not end, killing it", self._rank)
            self.kill()

    def kill(self) -> None:
        """End the worker without asking, if it lives."""
        self.channel.close()
        self._process.kill()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(  # noqa: TRY400 - the trace says nothing
                "worker rank %d (pid %d) was killed, but a driver of its device holds it; the "
                "device may be of no use until it has ended",
                self._rank,
                self.pid,
            )

    def log_hint(self) -> str:
        """Return the path of the log and its last lines, as the end of a message."""
        return log_files.tail(self.log_path)

    def _spawn(self, theirs: Channel) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "engine.worker"]
        numbers = (theirs.file_descriptor, os.getpid())
        arguments = [*map(str, numbers), self._config.log_level, str(self._rank)]
        with log_files.opened_for_worker(self.log_path) as log:
            return subprocess.Popen(
                command + arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.file_descriptor,),
                env={**_ENVIRONMENT, **os.environ},
            )

    def _death(self) -> WorkerError:
        return WorkerError(
            f"worker rank {self._rank} (pid {self.pid}) {self._end()}{self.log_hint()}",
            failure=WorkerFailure.DIED,
        )

    def _end(self) -> str:
        """Say how the process ended."""
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its pipe, but does not end"
        if code == -signal.SIGKILL:
            return "was killed by signal 9, as the kernel does when memory runs out"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


class InlineWorker:
    """One rank in this process, for debugging and tests: same messages, no pipe."""

    def __init__(self) -> None:
        self._worker = ModelWorker()
        self._replies: deque[FromWorker] = deque()
        self.num_due = 0
        self.pid = os.getpid()

    def send(self, message: ToWorker) -> None:
        """Handle the message at once and keep the answer."""
        self.num_due += 1
        reply = self._worker.handle(message)
        if reply is not None:
            self._replies.append(reply)

    def take(self) -> FromWorker:
        """Return the oldest answer."""
        self.num_due -= 1
        return self._replies.popleft()

    def ask_to_stop(self) -> None:
        """Do nothing: `stop` is heard at once."""

    def stop(self) -> None:
        """Release everything."""
        self._worker.close()

    def kill(self) -> None:
        """Release everything; there is no process to kill."""
        self._worker.close()

    def log_hint(self) -> str:
        """Return nothing: it logs where this process logs."""
        return ""


Worker = WorkerProcess | InlineWorker
