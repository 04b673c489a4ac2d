"""The worker's own loop: a message in, a message out, and nothing shared.

The same object serves a pipe in a process of its own, and direct calls when run inline.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

from engine.config import EngineConfig
from engine.errors import ConfigError, TokenmillError, WorkerFailure
from engine.layers.pending_step import PendingStep
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    FromWorker,
    ScheduleBatch,
    StartFailed,
    StartWorker,
    StepDone,
    StepFailed,
    ToWorker,
    WorkerReady,
)
from engine.worker.channel import Channel, ChannelClosedError
from engine.worker.mock import MockRunner
from engine.worker.runner import Runner

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.0002


class ModelWorker:
    """Answers each message but Shutdown with exactly one message."""

    def __init__(self) -> None:
        self._runner: Runner | None = None

    def handle(self, message: ToWorker) -> FromWorker | None:
        """Return the answer, or None to Shutdown."""
        match message:
            case StartWorker():
                return self._start(message)
            case AllocateCache():
                return self._allocate(message)
            case ScheduleBatch():
                return self.finish(self.launch(message))
            case _:
                self.close()
                return None

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _start(self, message: StartWorker) -> WorkerReady | StartFailed:
        started = time.perf_counter()
        try:
            config = EngineConfig.model_validate(message.config)
            logger.info("loading model=%s ranks=%d", config.model_path, message.world_size)
            self._runner = _make_runner(config, message)
            num_blocks = self._runner.load()
        except Exception as error:  # noqa: BLE001 - every reason goes to the main process in words
            logger.exception("worker cannot start")
            return self._start_failure(error)
        seconds = time.perf_counter() - started
        logger.info("model loaded device=%s seconds=%.1f", self._runner.device, seconds)
        return WorkerReady(
            num_blocks=num_blocks,
            block_size=self._runner.block_size,
            sliding_window=self._runner.sliding_window,
            device=self._runner.device,
            dtype=self._runner.dtype,
            load_seconds=seconds,
            pid=os.getpid(),
        )

    def _allocate(self, message: AllocateCache) -> CacheAllocated | StartFailed:
        assert self._runner is not None
        started = time.perf_counter()
        try:
            self._runner.allocate(message.num_blocks)
        except Exception as error:  # noqa: BLE001 - every reason goes to the main process in words
            logger.exception("no KV cache")
            return self._start_failure(error, "no KV cache: ")
        return CacheAllocated(warmup_seconds=time.perf_counter() - started)

    def launch(self, batch: ScheduleBatch) -> "_Launched":
        """Begin a step."""
        assert self._runner is not None
        try:
            return _Launched(batch.step_id, self._runner.launch(batch))
        except Exception as error:  # noqa: BLE001 - classified by the backend, judged by the engine
            return _Launched(batch.step_id, self._failure(batch.step_id, error))

    def finish(self, launched: "_Launched") -> StepDone | StepFailed:
        """Wait for the answer to a step that was launched."""
        if isinstance(launched.step, StepFailed):
            return launched.step
        try:
            return launched.step.result()
        except Exception as error:  # noqa: BLE001 - classified by the backend, judged by the engine
            return self._failure(launched.step_id, error)

    def _start_failure(self, error: Exception, what: str = "") -> StartFailed:
        words = self._in_words(error)
        if isinstance(error, ConfigError):
            return StartFailed(is_config_error=True, message=words)
        return StartFailed(is_config_error=False, message=what + words)

    def _in_words(self, error: Exception) -> str:
        if isinstance(error, TokenmillError):
            return str(error)
        return repr(error) if self._runner is None else self._runner.explain_error(error)

    def _failure(self, step_id: int, error: Exception) -> StepFailed:
        assert self._runner is not None
        logger.error("step %d failed", step_id, exc_info=error)
        self._runner.forget_all()
        kind = self._runner.classify_error(error)
        return StepFailed(step_id=step_id, kind=kind, message=self._runner.explain_error(error))


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was begun, or that could not be."""

    step_id: int
    step: PendingStep | StepFailed

    def is_ready(self) -> bool:
        """Tell whether its answer is there."""
        return isinstance(self.step, StepFailed) or self.step.is_ready()


def _make_runner(config: EngineConfig, start: StartWorker) -> Runner:
    """Return the runner of the device; a mock worker never waits for torch to be imported."""
    if config.device == "mock":
        return MockRunner(config)
    from engine.worker.model_runner import ModelRunner

    return ModelRunner(config, start)


def serve(channel: Channel) -> None:
    """Answer messages until Shutdown or until the main process is gone.

    A thread of its own reads. If one thread did both, then with two large messages each side
    could wait for the other to read, for ever.
    """
    worker = ModelWorker()
    inbox: SimpleQueue[ToWorker | None] = SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="reader", daemon=True).start()
    launched: _Launched | None = None
    try:
        while True:
            if launched is not None and not _comes_before(inbox, launched):
                channel.send(worker.finish(launched))
                launched = None
                continue
            message = inbox.get()
            # A step is launched before the one before it is awaited: the device is not to be idle.
            following = worker.launch(message) if isinstance(message, ScheduleBatch) else None
            if launched is not None:
                answer = worker.finish(launched)
                channel.send(answer)
                if isinstance(answer, StepFailed) and following is not None:
                    following = _Launched(following.step_id, _in_vain(following.step_id))
            launched = following
            if following is not None:
                continue
            if message is None or (reply := worker.handle(message)) is None:
                break
            channel.send(reply)
    except ChannelClosedError:
        logger.info("the main process is gone")
    finally:
        worker.close()


def _in_vain(step_id: int) -> StepFailed:
    """Return the answer to a step that was launched on what a failed one has left behind."""
    return StepFailed(
        step_id=step_id, kind=WorkerFailure.OTHER.value, message="the step before it failed"
    )


def _comes_before(inbox: "SimpleQueue[ToWorker | None]", launched: _Launched) -> bool:
    """Wait for a message or for a step; tell whether the message comes before the step's end.

    Devices do not wake a thread that waits for a message too, so both are looked at in turn.
    """
    while not launched.is_ready():
        if not inbox.empty():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _read(channel: Channel, inbox: "SimpleQueue[ToWorker | None]") -> None:
    """Pass on what the main process sends, and at its end None."""
    try:
        while True:
            inbox.put(channel.receive_in_worker())
    except ChannelClosedError:
        logger.info("the pipe to the main process has ended")
    finally:
        inbox.put(None)
