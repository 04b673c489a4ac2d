"""Engine stacks: loaded models, one for each device slot, lent to one shard at a time.

A slot is one engine, tensor_parallel_size devices, and a stack owns the locks of its devices as
long as it lives. One that was used well is kept warm for the next shard, until it was idle for too
long or another process waits for its devices. One that failed is never used again, and a slot
whose device is bad is not lent.
"""

import contextvars
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine import EngineConfig, OfflineInference, WorkerError, WorkerFailure
from flows.config import DEFAULT_WARM_SECONDS, JobConfig
from flows.device_line import DeviceLine
from flows.device_locks import DEFAULT_LOCK_DIR, DeviceLocks, Hold
from flows.device_names import device_names, is_exclusive
from flows.device_queue import DeviceLimit

logger = logging.getLogger(__name__)
_WAIT_SECONDS = 0.5  # between two looks at a device that another process has
_IDLE_CHECK_SECONDS = 1.0
# Between two shards of one job nobody else gets the device: each change costs a load.
_SHARD_GAP_SECONDS = 1.0


class StoppedError(Exception):
    """The wait for a slot was given up, because the job was stopped."""


@dataclass(slots=True, kw_only=True)
class _Stack:
    """A slot and what is in it. Who has set is_lent may change the rest."""

    number: int
    config: EngineConfig
    devices: tuple[str, ...]
    is_lent: bool = False
    bad_reason: str | None = None
    hold: Hold | None = None
    engine: OfflineInference | None = None
    idle_since: float = 0.0

    def close_engine(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def release(self) -> None:
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.release()


class StackPool:
    """Lends engines for one engine configuration. Safe to use from several threads."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        locks: DeviceLocks | None = None,
        limit: DeviceLimit | None = None,
        warm_seconds: float = DEFAULT_WARM_SECONDS,
    ) -> None:
        """Make slots of the devices; without `locks` they are shared with whoever uses them too."""
        self._condition = threading.Condition()
        self._line = DeviceLine(locks, limit, self._wake)
        self._stacks = _stacks_of(config, is_locked=locks is not None)
        self._warm_seconds = warm_seconds
        self._idle_watch: threading.Thread | None = None
        self._closing = threading.Event()
        self._context = contextvars.copy_context()  # engines outlive the shards that lent them
        self.num_loads = 0

    @classmethod
    def of_job(cls, config: JobConfig, limit: DeviceLimit | None = None) -> "StackPool":
        """Make the pool of a job. Its devices are locked if they are an accelerator's.

        Others are when the job names a folder for the locks. `limit` counts what is locked.
        """
        locks = None
        if config.device_lock_dir is not None or is_exclusive(config.engine):
            folder = config.device_lock_dir or DEFAULT_LOCK_DIR
            locks = DeviceLocks(folder, config.job_id or config.name)
        return cls(config.engine, locks=locks, limit=limit, warm_seconds=config.warm_seconds)

    @property
    def num_slots(self) -> int:
        """Engines that can run at a time."""
        with self._condition:
            return sum(stack.bad_reason is None for stack in self._stacks)

    def has_idle(self, *, is_warm: bool) -> bool:
        """Tell whether a slot is not lent; with is_warm, one whose engine is loaded."""
        with self._condition:
            return any(
                stack.bad_reason is None
                and not stack.is_lent
                and (stack.engine is not None or not is_warm)
                for stack in self._stacks
            )

    @contextmanager
    def borrow(self, stop: threading.Event | None = None) -> Iterator["Slot"]:
        """Wait for a free slot and lend it; its engine is loaded when it is first asked for.

        When the block ends with an error, the engine is closed and not lent again.

        Raises:
            StoppedError: `stop` is set.
            ConfigError: the locks of the devices cannot be used.
            WorkerError: every device is bad.
        """
        stack = self._take(stop or threading.Event())
        if stack.engine is not None:
            stack.engine.take_stats()  # what was before does not belong to this borrower
        slot = Slot(stack, self)
        try:
            yield slot
        except BaseException:
            slot.close_engine()
            raise
        finally:
            slot.give_back()

    def close(self) -> None:
        """Wait until every slot is given back, and close every warm engine."""
        self._closing.set()
        with self._condition:
            self._condition.wait_for(lambda: not any(stack.is_lent for stack in self._stacks))
            for stack in self._stacks:
                stack.close_engine()
                stack.release()
        self._line.close()  # not under the lock, which its answers need
        self._closing.clear()

    def engine_of(self, stack: _Stack) -> OfflineInference:
        """Return the engine of a borrowed slot, loaded when it is not warm.

        Its statistics begin with the loan: with the loading, or without what came before.

        Raises:
            ConfigError: the engine cannot be loaded and only the user can mend it.
            WorkerError: the machine could not start it.
        """
        if stack.engine is not None:
            return stack.engine
        engine = OfflineInference(stack.config)
        engine.start()
        stack.engine = engine
        with self._condition:
            self.num_loads += 1
        return engine

    def retire(self, stack: _Stack, reason: str) -> None:
        """Lend a slot no more, because its device is bad; its lock becomes free."""
        logger.error("device_ids=%s is bad: %s", stack.config.device_ids, reason)
        stack.close_engine()
        stack.release()
        with self._condition:
            stack.bad_reason = reason
            self._line.leave()  # it may name the bad device
            self._condition.notify_all()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _take(self, stop: threading.Event) -> _Stack:
        with self._condition, self._line.waiting():
            while True:
                if stop.is_set():
                    raise StoppedError("stopped while waiting for a device")
                good = [stack for stack in self._stacks if stack.bad_reason is None]
                if not good:
                    reasons = "; ".join(str(stack.bad_reason) for stack in self._stacks)
                    raise WorkerError(
                        f"no good device is left: {reasons}", failure=WorkerFailure.DEVICE_LOST
                    )
                idle = [stack for stack in good if not stack.is_lent]
                if (stack := self._first_free(idle)) is not None:
                    stack.is_lent = True
                    return stack
                if idle:
                    self._line.wait_for([stack.devices for stack in idle])
                self._condition.wait(_WAIT_SECONDS)

    def _first_free(self, idle: list[_Stack]) -> _Stack | None:
        """Return an idle slot whose devices are ours, a warm one first."""
        for stack in sorted(idle, key=lambda stack: stack.engine is None):
            if stack.hold is None:
                stack.hold = self._line.try_take(stack.devices)
            if stack.hold is not None:
                return stack
        return None

    def give_back(self, stack: _Stack) -> None:
        """Take a slot back; its engine stays warm."""
        if self._warm_seconds == 0:
            stack.close_engine()
        if stack.engine is None:
            stack.release()
        with self._condition:
            stack.is_lent = False
            stack.idle_since = time.monotonic()
            if stack.engine is not None and self._idle_watch is None:
                self._idle_watch = threading.Thread(
                    target=self._context.copy().run,
                    args=(self._watch_idle,),
                    name="idle-engines",
                    daemon=True,
                )
                self._idle_watch.start()
            self._condition.notify_all()

    def _watch_idle(self) -> None:
        """Close engines that nobody here needs; ends when none is idle."""
        while True:
            self._closing.wait(_IDLE_CHECK_SECONDS)
            with self._condition:
                idle = [s for s in self._stacks if s.engine is not None and not s.is_lent]
                if not idle or self._closing.is_set():
                    self._idle_watch = None
                    return
                due = [stack for stack in idle if self._is_due(stack)]
                for stack in due:
                    stack.is_lent = True
            for stack in due:
                stack.close_engine()
                self.give_back(stack)

    def _is_due(self, stack: _Stack) -> bool:
        idle_seconds = time.monotonic() - stack.idle_since
        if idle_seconds >= self._warm_seconds:
            logger.info("closing the engine on %s, idle for %.0f s", stack.devices, idle_seconds)
            return True
        if idle_seconds < _SHARD_GAP_SECONDS or not self._line.is_wanted(stack.devices):
            return False
        logger.info("closing the idle engine on %s: another process waits for it", stack.devices)
        return True


class Slot:
    """A borrowed slot."""

    def __init__(self, stack: _Stack, pool: StackPool) -> None:
        self.number = stack.number
        self._stack = stack
        self._pool = pool
        self._is_borrowed = True

    def engine(self) -> OfflineInference:
        """Return the slot's engine; see StackPool.engine_of."""
        return self._pool.engine_of(self._stack)

    def replace_engine(self) -> OfflineInference:
        """Return a new engine in the place of one that failed."""
        self._stack.close_engine()
        return self.engine()

    def close_engine(self) -> None:
        """Close the engine, unless the slot was given back with it."""
        if self._is_borrowed:
            self._stack.close_engine()

    def retire(self, reason: str) -> None:
        """Give the slot up for good."""
        self._pool.retire(self._stack, reason)

    def give_back(self) -> None:
        """Let another borrow the slot; the second time does nothing."""
        if self._is_borrowed:
            self._is_borrowed = False
            self._pool.give_back(self._stack)


def _stacks_of(config: EngineConfig, *, is_locked: bool) -> list[_Stack]:
    width = config.tensor_parallel_size
    groups = [config.device_ids[i : i + width] for i in range(0, len(config.device_ids), width)]
    configs = [config.model_copy(update={"device_ids": group}) for group in groups]
    return [
        _Stack(
            number=number,
            config=each,
            devices=device_names(each, os.environ) if is_locked else (),
        )
        for number, each in enumerate(configs)
    ]
