"""Some steps of a worker on request, as a trace that shows what waited for what.

A trace is a Chrome trace, compressed. In it each step is a range that carries its number and what
it was made of, and holds the ranges of its phases. Phases are the host's: on an NPU or GPU they
are the launches, and what the device did with them is in the device's own rows of the trace. What
lies outside of steps is named too: the worker waits for a device, or for the next batch.
"""

import gzip
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch.profiler import record_function

from engine.backends.base import Array, DeviceBackend, Fetched, Profile
from engine.config import EngineConfig
from engine.messages import ScheduleBatch
from engine.private_folder import private_folder

logger = logging.getLogger(__name__)
_MIB = 1 << 20
_COMPRESS_LEVEL = 6
_HOW_TO_OPEN = "open it at https://ui.perfetto.dev or in chrome://tracing, as it is"


class StepProfiler:
    """Records the steps of one worker that were asked for, and does nothing in all others.

    One thread launches steps and awaits them, and that thread's work is what is recorded.
    """

    def __init__(self, backend: DeviceBackend, folder: Path, steps: range, *, rank: int) -> None:
        self._backend = backend
        self._folder = folder
        self._steps = steps
        self._rank = rank
        self._is_over = not steps
        self._profile: Profile | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._composition = _Composition()
        self._recorded: list[int] = []  # ids of steps
        self._in_flight: set[int] = set()
        self._is_in_step = False
        self._idle: AbstractContextManager[object] | None = None

    @classmethod
    def of(cls, config: EngineConfig, backend: DeviceBackend, *, rank: int) -> "StepProfiler":
        """Return the profiler that the configuration asks for."""
        start, count = config.runtime.profile_steps or (0, 0)
        return cls(backend, _folder_of(config), range(start, start + count), rank=rank)

    @contextmanager
    def step(self, batch: ScheduleBatch) -> Iterator[None]:
        """Make the launch of a step a range of the trace, if the step was asked for."""
        if self._is_over:
            yield
            return
        words = self._composition.describe(batch)
        if batch.step_id >= self._steps.stop:
            self._finish()
        elif batch.step_id in self._steps and self._profile is None:
            self._begin()
        if self._profile is None:
            yield
            return
        self._end_idling()
        self._recorded.append(batch.step_id)
        self._in_flight.add(batch.step_id)
        self._is_in_step = True
        try:
            with record_function(f"step {batch.step_id}: {words}"):
                yield
        except BaseException:
            self._in_flight.discard(batch.step_id)
            raise
        finally:
            self._is_in_step = False
            self._go_on()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Make a part of a step's launch a range within the step's."""
        return nullcontext() if self._profile is None else record_function(name)

    def watch(self, step_id: int, fetched: Fetched) -> Fetched:
        """Return the numbers that end a step such that to wait for them is a range."""
        return fetched if self._profile is None else _Watched(step_id, fetched, self)

    @contextmanager
    def waiting(self, step_id: int) -> Iterator[None]:
        """Make the wait for a step's numbers a range; the step has ended with it."""
        self._end_idling()
        try:
            with self.phase(f"wait for the device: step {step_id}"):
                yield
        finally:
            self._in_flight.discard(step_id)
            if not self._is_in_step:
                self._go_on()

    def close(self) -> None:
        """Write what there is; say so when no step that was asked for came."""
        if not self._is_over and self._profile is None:
            logger.warning(
                "no trace is written: this worker ended before step %d, the first of "
                "engine.runtime.profile_steps; lower it",
                self._steps.start,
            )
        self._finish()

    def _begin(self) -> None:
        """Start to record; a profiler that cannot is no reason to fail a step."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Hidden, and gone in the end: a worker that is killed leaves no half of a trace.
            self._scratch = tempfile.TemporaryDirectory(dir=self._folder, prefix=".trace-")
            profile = self._backend.make_profile(Path(self._scratch.name))
            profile.start()
        except (OSError, RuntimeError) as error:
            self._give_up(error)
            return
        self._profile = profile
        logger.info(
            "profiling steps %d to %d, which makes them slower; the trace will be in %s",
            self._steps.start,
            self._steps.stop - 1,
            self._folder,
        )

    def _go_on(self) -> None:
        """After a step or a wait: stop when the last step has ended, else name what follows."""
        if self._profile is None:
            return
        if self._recorded[-1] == self._steps.stop - 1 and not self._in_flight:
            self._finish()
            return
        device = "the device or " if self._in_flight else ""
        self._idle = self.phase(f"wait for {device}the next batch")
        self._idle.__enter__()

    def _end_idling(self) -> None:
        if self._idle is not None:
            self._idle.__exit__(None, None, None)
            self._idle = None

    def _finish(self) -> None:
        """Write the trace; that it cannot be written is no reason to fail a step."""
        profile, self._is_over = self._profile, True
        if profile is None:
            return
        self._end_idling()
        try:
            with self.phase("wait for the device: end of the trace"):
                self._backend.synchronize()
            profile.stop()
            self._write(profile)
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        self._profile = None
        self._clear_scratch()

    def _write(self, profile: Profile) -> None:
        assert self._scratch is not None
        started = time.perf_counter()
        first, last = self._recorded[0], self._recorded[-1]
        # The time, because a pid is used again, and folders are shared by containers.
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"rank{self._rank}-steps-{first}-{last}-{stamp}-pid{os.getpid()}.json"
        plain, packed = (Path(self._scratch.name) / f"{name}{end}" for end in ("", ".gz"))
        profile.export_chrome_trace(str(plain))
        if not plain.exists():  # torch_npu's profiler raises nothing, but says it in the log
            raise RuntimeError("the device's profiler has made none; the lines above may say why")
        with plain.open("rb") as source, gzip.open(packed, "wb", _COMPRESS_LEVEL) as target:
            shutil.copyfileobj(source, target)
        path = packed.replace(self._folder / packed.name)
        logger.info(
            "wrote the trace of %d steps in %.1f s: %s (%.1f MiB); %s",
            len(self._recorded),
            time.perf_counter() - started,
            path,
            path.stat().st_size / _MIB,
            _HOW_TO_OPEN,
        )

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        logger.warning("no trace is written: %s", error)
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.cleanup()


class _Watched(Fetched):
    """Numbers for which to wait is a range of the trace."""

    def __init__(self, step_id: int, fetched: Fetched, profiler: StepProfiler) -> None:
        self._step_id = step_id
        self._fetched = fetched
        self._profiler = profiler

    def is_ready(self) -> bool:
        """Ask the device."""
        return self._fetched.is_ready()

    def numpy(self) -> Array:
        """Wait for them."""
        with self._profiler.waiting(self._step_id):
            return self._fetched.numpy()


class _Composition:
    """Tells prefill from decode, which a batch does not say: its numbers are differences."""

    def __init__(self) -> None:
        # Tokens of each request, by uid, that it came with and that are not computed.
        self._uncomputed: dict[int, int] = {}

    def describe(self, batch: ScheduleBatch) -> str:
        """Take in a batch; return in words what it is made of."""
        for uid in (*batch.preempted, *batch.finished):
            self._uncomputed.pop(uid, None)
        for new in batch.new:
            self._uncomputed[new.uid] = len(new.token_ids) - new.num_computed_tokens
        num_prefill_tokens = num_prefilling = num_decoding = 0
        scheduled = [(item.uid, item.num_scheduled_tokens) for item in batch.running]
        scheduled += [(item.uid, item.num_scheduled_tokens) for item in batch.new]
        for uid, count in scheduled:
            if (missing := self._uncomputed.get(uid, 0)) > 0:
                num_prefilling += 1
                num_prefill_tokens += count
                self._uncomputed[uid] = missing - count
            else:
                num_decoding += 1
        return (
            f"{_count(num_prefill_tokens, 'prefill token')} of "
            f"{_count(num_prefilling, 'request')}, {_count(num_decoding, 'decode row')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _folder_of(config: EngineConfig) -> Path:
    """Return where traces go: where the settings say, else beside the folder of the logs."""
    if config.runtime.profile_dir is not None:
        return config.runtime.profile_dir
    folder = private_folder() if config.log_dir is None else config.log_dir.absolute().parent
    return folder / "profile"
