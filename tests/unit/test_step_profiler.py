"""A trace holds the steps that were asked for and no others, and costs nobody a step."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import EngineConfig
from engine.backends.base import Fetched
from engine.backends.cpu import CpuBackend
from engine.backends.profiler import StepProfiler
from engine.messages import NewRequest, Running, SamplerSpec, ScheduleBatch

SAMPLER = SamplerSpec(
    temperature=0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sampling_key=0, sample_index=0
)


def new(uid: int, num_tokens: int, num_scheduled: int, num_computed: int = 0) -> NewRequest:
    return NewRequest(
        uid=uid,
        token_ids=[1] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        num_scheduled_tokens=num_scheduled,
        block_ids=[],
        sampler=SAMPLER,
    )


def batch(
    step_id: int,
    *added: NewRequest,
    running: dict[int, int] | None = None,
    preempted: tuple[int, ...] = (),
    finished: tuple[int, ...] = (),
) -> ScheduleBatch:
    return ScheduleBatch(
        step_id=step_id,
        new=list(added),
        running=[
            Running(uid=uid, num_scheduled_tokens=count, new_block_ids=[])
            for uid, count in (running or {}).items()
        ],
        preempted=list(preempted),
        finished=list(finished),
    )


def run_step(profiler: StepProfiler, step: ScheduleBatch) -> None:
    """Do what a runner on a host does: a step has ended when its launch has."""
    with profiler.step(step):
        with profiler.phase("prepare"):
            numbers = torch.ones(8)
        with profiler.phase("forward"):
            numbers = torch.cumsum(numbers, dim=0)
        profiler.watch(step.step_id, CpuBackend().fetch(numbers)).numpy()


class LateNumbers(Fetched):
    """Numbers of a device, which are there when somebody has waited for them."""

    def is_ready(self) -> bool:
        return False

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.zeros(1)


def launch(profiler: StepProfiler, step: ScheduleBatch) -> Callable[[], object]:
    """Do what a runner on a device does: launch a step; return what awaits it."""
    with profiler.step(step):
        return profiler.watch(step.step_id, LateNumbers()).numpy


def traces(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def ranges(folder: Path) -> list[tuple[str, float, float]]:
    """Return our own ranges of the only trace, in order: name, start and end in microseconds."""
    (path,) = traces(folder)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    ours.sort(key=lambda event: event["ts"])
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in ours]


def names(folder: Path) -> list[str]:
    return [name for name, _, _ in ranges(folder)]


def steps_of(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith("step ")]


def test_only_the_steps_that_were_asked_for_are_in_the_trace(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(2, 4), rank=3)
    run_step(profiler, batch(0, new(7, 5, 5)))
    for step_id in range(1, 6):
        run_step(profiler, batch(step_id, running={7: 1}))
    profiler.close()
    assert steps_of(tmp_path) == [
        "step 2: 0 prefill tokens of 0 requests, 1 decode row",
        "step 3: 0 prefill tokens of 0 requests, 1 decode row",
    ]
    (path,) = traces(tmp_path)
    assert path.name.startswith("rank3-steps-2-3-")
    assert path.name.endswith(".json.gz")


def test_a_step_says_how_much_of_it_is_prefill_and_how_much_decode(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(1, 7), rank=0)
    run_step(profiler, batch(0, new(1, 3, 3)))
    # Nine tokens in chunks of 4, 4 and 1: the last is prefill though it is one token.
    run_step(profiler, batch(1, new(2, 9, 4), running={1: 1}))
    run_step(profiler, batch(2, new(3, 2, 2), running={1: 1, 2: 4}))
    run_step(profiler, batch(3, running={1: 1, 2: 1, 3: 1}))
    run_step(profiler, batch(4, running={2: 1, 3: 1}, preempted=(1,)))
    # It comes again with what it had generated; four of its seven tokens are in the prefix cache.
    run_step(profiler, batch(5, new(1, 7, 3, num_computed=4), finished=(2, 3)))
    run_step(profiler, batch(6, running={1: 1}))
    profiler.close()
    assert steps_of(tmp_path) == [
        "step 1: 4 prefill tokens of 1 request, 1 decode row",
        "step 2: 6 prefill tokens of 2 requests, 1 decode row",
        "step 3: 1 prefill token of 1 request, 2 decode rows",
        "step 4: 0 prefill tokens of 0 requests, 2 decode rows",
        "step 5: 3 prefill tokens of 1 request, 0 decode rows",
        "step 6: 0 prefill tokens of 0 requests, 1 decode row",
    ]


def test_phases_lie_within_their_step_and_waits_between_steps(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(2), rank=0)
    for step_id in range(2):
        run_step(profiler, batch(step_id, new(step_id, 4, 4)))
    found = ranges(tmp_path)
    words = "4 prefill tokens of 1 request, 0 decode rows"
    assert [name for name, _, _ in found] == [
        f"step 0: {words}", "prepare", "forward", "wait for the device: step 0",
        "wait for the next batch",
        f"step 1: {words}", "prepare", "forward", "wait for the device: step 1",
        "wait for the device: end of the trace",
    ]  # fmt: skip
    for step in (0, 5):
        (_, start, end), phases = found[step], found[step + 1 : step + 4]
        ends = [start, *(phase_end for _, _, phase_end in phases)]
        assert all(before <= begin for before, (_, begin, _) in zip(ends, phases, strict=False))
        assert ends[-1] <= end
    assert found[0][2] <= found[4][1] < found[4][2] <= found[5][1]


def test_on_a_device_waits_for_it_are_told_from_waits_for_the_host(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(2), rank=0)
    await_first = launch(profiler, batch(0, new(1, 1, 1)))
    await_second = launch(profiler, batch(1, running={1: 1}))
    await_first()
    await_second()
    assert names(tmp_path) == [
        "step 0: 1 prefill token of 1 request, 0 decode rows",
        "wait for the device or the next batch",
        "step 1: 0 prefill tokens of 0 requests, 1 decode row",
        "wait for the device or the next batch",
        "wait for the device: step 0",
        "wait for the device or the next batch",
        "wait for the device: step 1",
        "wait for the device: end of the trace",
    ]


def test_a_step_that_follows_is_not_in_the_trace_though_it_is_launched_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend()
    synchronized: list[bool] = []
    monkeypatch.setattr(backend, "synchronize", lambda: synchronized.append(True))
    profiler = StepProfiler(backend, tmp_path, range(1), rank=0)
    await_first = launch(profiler, batch(0, new(1, 1, 1)))
    assert synchronized == []
    await_second = launch(profiler, batch(1, running={1: 1}))
    assert synchronized == [True]  # or the device's part of step 0 would not be there
    await_first()
    await_second()
    assert steps_of(tmp_path) == ["step 0: 1 prefill token of 1 request, 0 decode rows"]


def test_nobody_pays_for_a_trace_that_nobody_asked_for(tmp_path: Path) -> None:
    config = EngineConfig(model_path="none", log_dir=tmp_path / "logs")
    profiler = StepProfiler.of(config, CpuBackend(), rank=0)
    fetched = LateNumbers()
    with profiler.step(batch(0, new(1, 1, 1))):
        assert isinstance(profiler.phase("forward"), nullcontext)
        assert profiler.watch(0, fetched) is fetched
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_worker_that_ends_before_the_first_step_says_so_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path / "profile", range(5, 7), rank=0)
    run_step(profiler, batch(0, new(1, 1, 1)))
    assert caplog.messages == []
    profiler.close()
    (message,) = caplog.messages
    assert "ended before step 5" in message
    assert traces(tmp_path / "profile") == []
    profiler.close()
    assert len(caplog.messages) == 1


def test_worker_that_ends_among_the_steps_writes_those_that_there_were(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(1, 60), rank=0)
    for step_id in range(3):
        run_step(profiler, batch(step_id, new(step_id, 1, 1)))
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    profiler.close()
    assert len(steps_of(tmp_path)) == 2
    (path,) = traces(tmp_path)
    assert path.name.startswith("rank0-steps-1-2-")


def test_log_says_where_the_trace_is_before_and_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    profiler = StepProfiler(CpuBackend(), tmp_path, range(1), rank=0)
    run_step(profiler, batch(0, new(1, 1, 1)))
    before, after = caplog.messages
    assert "profiling steps 0 to 0" in before
    assert str(tmp_path) in before
    assert str(traces(tmp_path)[0]) in after
    assert "ui.perfetto.dev" in after


class BrokenProfile:
    def __init__(self, broken: str) -> None:
        self._broken = broken

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def export_chrome_trace(self, path: str) -> None:
        if self._broken != "nothing":
            Path(path).write_text('{"traceEv', encoding="utf-8")
        self._do("export")

    def _do(self, what: str) -> None:
        if what == self._broken:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("start", "No space left"),
        ("stop", "No space left"),
        ("export", "No space left"),
        ("nothing", "the device's profiler has made none"),
    ],
)
def test_a_profiler_that_fails_costs_no_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    reason: str,
) -> None:
    backend = CpuBackend()
    monkeypatch.setattr(backend, "make_profile", lambda _: BrokenProfile(broken))
    profiler = StepProfiler(backend, tmp_path, range(2), rank=0)
    for step_id in range(3):
        run_step(profiler, batch(step_id, new(step_id, 1, 1)))
    profiler.close()
    (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("no trace is written: ")
    assert reason in message
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_lost_at_the_end_of_the_trace_is_the_next_steps_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = CpuBackend()

    def lose() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(backend, "synchronize", lose)
    profiler = StepProfiler(backend, tmp_path, range(1), rank=0)
    run_step(profiler, batch(0, new(1, 1, 1)))
    assert "no trace is written: device lost" in caplog.messages
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_step_passes_and_the_trace_goes_on(tmp_path: Path) -> None:
    profiler = StepProfiler(CpuBackend(), tmp_path, range(2), rank=0)
    with pytest.raises(ValueError, match="broken step"), profiler.step(batch(0, new(1, 1, 1))):
        raise ValueError("broken step")
    run_step(profiler, batch(1, new(1, 1, 1)))
    assert [name[:7] for name in steps_of(tmp_path)] == ["step 0:", "step 1:"]


KILLED_WORKER = """
import sys, time
from pathlib import Path
from engine.backends.cpu import CpuBackend
from engine.backends.profiler import StepProfiler
from engine.messages import ScheduleBatch

class SlowProfile:
    def start(self): pass
    def stop(self): pass
    def export_chrome_trace(self, path):
        Path(path).write_text('{"traceEvents": [')
        print("half", flush=True)
        time.sleep(60)

class Backend(CpuBackend):
    def make_profile(self, scratch): return SlowProfile()

profiler = StepProfiler(Backend(), Path(sys.argv[1]), range(1), rank=0)
with profiler.step(ScheduleBatch(step_id=0, new=[], running=[], preempted=[], finished=[])):
    pass
profiler.close()
"""


def test_worker_that_is_killed_while_it_writes_leaves_no_half_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "half\n"
        worker.kill()
    assert worker.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*.json"))  # it was within a trace
    assert list(tmp_path.glob("[!.]*")) == []


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"log_dir": "job/logs"}, "job/profile"),
        ({"log_dir": "job/logs", "profile_dir": "traces"}, "traces"),
        ({}, f"temporary/tokenmill-{os.getuid()}/profile"),
    ],
)
def test_traces_go_where_the_settings_say_else_beside_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], wanted: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    folders = {name: tmp_path / folder for name, folder in settings.items()}
    runtime = {"profile_steps": [0, 1], "profile_dir": folders.get("profile_dir")}
    config = EngineConfig.model_validate(
        {"model_path": "none", "log_dir": folders.get("log_dir"), "runtime": runtime}
    )
    run_step(StepProfiler.of(config, CpuBackend(), rank=0), batch(0, new(1, 1, 1)))
    assert len(steps_of(tmp_path / wanted)) == 1


@pytest.mark.parametrize("steps", [[-1, 1], [0, 0], [0, 65], [1], [0, 1, 2], 3])
def test_a_range_that_cannot_be_traced_is_refused(steps: object) -> None:
    with pytest.raises(ValueError, match=r"runtime\.profile_steps"):
        EngineConfig.model_validate({"model_path": "none", "runtime": {"profile_steps": steps}})
