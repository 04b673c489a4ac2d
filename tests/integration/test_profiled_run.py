"""A run with real workers: the trace that it leaves, and what the next start takes from it."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_device import LateDevice, late_device

from engine import EngineConfig, GenerateRequest, OfflineInference, SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

NUM_ROWS = 6
MAX_TOKENS = 12
PHASES = ["prepare", "forward", "sample"]


def run(model: Path, folder: Path, **settings: Any) -> list[list[int]]:
    """Answer rows with a worker process whose logs are in folder/logs; return their tokens."""
    values = {
        "model_path": str(model),
        "device": "cpu",
        "log_dir": folder / "logs",
        "runtime": {"num_threads": 1},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 24},
    }
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    requests = [
        GenerateRequest(
            request_id=f"row-{row}",
            prompt_token_ids=list(range(3, 8 + 5 * row)),
            sampling_params=params,
        )
        for row in range(NUM_ROWS)
    ]
    with OfflineInference(EngineConfig.model_validate(values | settings)) as engine:
        return [list(completion.token_ids) for completion in engine.generate(requests)]


def log_of(folder: Path, rank: int = 0) -> str:
    (path,) = (folder / "logs").glob(f"*-rank{rank}.log")
    return path.read_text(encoding="utf-8")


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return sorted((event for event in events if "dur" in event), key=lambda event: event["ts"])


def within(events: list[dict[str, Any]], outer: dict[str, Any], category: str) -> list[str]:
    start, end = outer["ts"], outer["ts"] + outer["dur"]
    return [
        event["name"]
        for event in events
        if event.get("cat") == category
        and event is not outer
        and start <= event["ts"]
        and event["ts"] + event["dur"] <= end
    ]


def test_trace_of_a_run_shows_the_steps_that_were_asked_for(
    tiny_llama: Path, tmp_path: Path
) -> None:
    plain = run(tiny_llama, tmp_path / "plain", runtime={"num_threads": 1, "inline": True})
    runtime = {"num_threads": 1, "profile_steps": [0, 5]}
    assert run(tiny_llama, tmp_path / "traced", runtime=runtime) == plain
    (path,) = (tmp_path / "traced" / "profile").iterdir()
    assert re.fullmatch(r"rank0-steps-0-4-\d{8}-\d{6}-pid\d+\.json\.gz", path.name)
    events = events_of(path)
    steps = [event for event in events if event["name"].startswith("step ")]
    words = [re.findall(r"\d+", step["name"]) for step in steps]
    assert [int(number) for number, *_ in words] == [0, 1, 2, 3, 4]
    # Prompts of 5, 10, 15 and 20 tokens fill the first steps, in chunks of at most 24 tokens.
    prefill = [int(tokens) for _, tokens, *_ in words]
    assert sum(prefill) == 5 + 10 + 15 + 20
    assert prefill[0] == 24
    assert int(words[-1][-1]) == 4  # decode rows
    for step in steps:
        names = within(events, step, "user_annotation")
        assert [name for name in names if name in PHASES] == PHASES
        (forward,) = (
            event
            for event in events
            if event["name"] == "forward" and step["ts"] <= event["ts"] <= step["ts"] + step["dur"]
        )
        assert "aten::mm" in within(events, forward, "cpu_op")
    waits = [event for event in events if event["name"] == "wait for the next batch"]
    assert len(waits) == 4
    log = log_of(tmp_path / "traced")
    assert "profiling steps 0 to 4" in log
    assert str(path) in log


def test_trace_of_a_device_tells_waits_for_it_from_waits_for_the_host(
    tiny_llama: Path, tmp_path: Path
) -> None:
    runtime = {"num_threads": 1, "profile_steps": [1, 4]}
    with late_device(LateDevice(num_asks=2000)):
        run(tiny_llama, tmp_path, runtime=runtime)
    (path,) = (tmp_path / "profile").iterdir()
    events = [event for event in events_of(path) if event.get("cat") == "user_annotation"]
    launched = {
        event["name"].partition(":")[0]: event for event in events if "row" in event["name"]
    }
    assert list(launched) == [f"step {number}" for number in range(1, 5)]
    awaited = {event["name"]: event for event in events if "wait" in event["name"]}
    for number in range(1, 4):
        wait, following = (
            awaited[f"wait for the device: step {number}"],
            launched[f"step {number + 1}"],
        )
        assert following["ts"] + following["dur"] <= wait["ts"]
    assert "wait for the device or the next batch" in awaited
    assert events[-1]["name"] == "wait for the device: end of the trace"


class MeasuredDevice(LateDevice):
    """A late device whose memory is measured."""

    num_measured = 0

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        self.num_measured += 1
        return 1 << 20

    def keep_kernels(self, folder: Path) -> None:
        """Keep none: they are those of this process, and other tests need them too."""


def test_second_start_does_not_measure_the_largest_step_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with late_device(MeasuredDevice()) as device:
        for start in ("first", "second"):
            run(tiny_llama, tmp_path / start, cache_dir=tmp_path / "cache")
        assert isinstance(device, MeasuredDevice)
        assert device.num_measured == 1
        run(
            tiny_llama,
            tmp_path / "third",
            cache_dir=tmp_path / "cache",
            scheduler={"max_num_seqs": 5},
        )
        assert device.num_measured == 2


def test_run_that_is_over_before_the_first_step_to_trace_says_so(
    tiny_llama: Path, tmp_path: Path
) -> None:
    run(tiny_llama, tmp_path, runtime={"num_threads": 1, "profile_steps": [5000, 2]})
    assert not (tmp_path / "profile").exists()
    assert "no trace is written: this worker ended before step 5000" in log_of(tmp_path)


def test_second_start_takes_its_kernels_from_the_first(tiny_llama: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    first = run(tiny_llama, tmp_path / "first", cache_dir=cache_dir)
    (folder,) = cache_dir.iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert len([path for path in kept if path.suffix == ".nbc"]) >= 9
    assert run(tiny_llama, tmp_path / "second", cache_dir=cache_dir) == first
    assert {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()
    } == kept  # nothing was compiled
    assert f"cache miss key={folder.name} folder={folder} contents=none" in log_of(
        tmp_path / "first"
    )
    assert f"cache hit key={folder.name} folder={folder} contents={len(kept) - 1} files" in log_of(
        tmp_path / "second"
    )


def test_each_rank_has_a_log_and_a_trace_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    runtime = {"num_threads": 2, "profile_steps": [2, 2]}
    run(tiny_llama, tmp_path, runtime=runtime, tensor_parallel_size=2)
    traces = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert [name[:16] for name in traces] == ["rank0-steps-2-3-", "rank1-steps-2-3-"]
    for rank in range(2):
        # torch's profiler says by itself that it starts and stops.
        lines = [line for line in log_of(tmp_path, rank).splitlines() if line[:5] != "USDT:"]
        wanted = re.compile(rf"\d{{4}}-\S+ \S+ INFO rank={rank} pid=\d+ engine\.\S+: \S.*")
        assert [line for line in lines if not wanted.fullmatch(line)] == []
        assert any("model loaded device=cpu" in line for line in lines)
        assert any(traces[rank] in line for line in lines)
