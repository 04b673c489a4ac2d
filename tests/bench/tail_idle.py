"""How long devices have nothing left to do while the last of them still works.

`python tests/bench/tail_idle.py [ROWS]` runs one job on four mock devices in several ways, for
answers whose lengths are log-normal, in random order and sorted. It prints for each way:

- tail idle: the share of the device time between the last row of a slot and the end of the job;
- full: how much of the places of the batches the job has used while it lasted.

A step of the mock takes the same time however many rows are in it, as one of a device does that
waits for its memory.
"""

# ruff: noqa: E402 - the path to the tests' own modules comes first

import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from job_builders import Row, make_job

from engine import Completion, GenerateRequest, OfflineInference
from flows import job_run
from flows.config import JobConfig
from flows.job_run import JobRun
from flows.spare_slots import SpareSlots

NUM_SLOTS = 4
MAX_NUM_SEQS = 8
STEP_SECONDS = 0.02
MEAN_TOKENS = 20
MAX_TOKENS = 160


class SlotClock:
    """Notes when the job began to ask, and when each slot had its last answer."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.last: dict[tuple[int, ...], float] = {}

    def note(self, engine: OfflineInference) -> None:
        self.last[tuple(engine.config.device_ids)] = time.monotonic()

    def timed(self) -> Any:
        run, clock = OfflineInference.run, self

        def timed_run(
            engine: OfflineInference, requests: Iterable[GenerateRequest], **options: Any
        ) -> Iterator[Completion]:
            clock.started = clock.started or time.monotonic()
            for completion in run(engine, requests, **options):
                clock.note(engine)
                yield completion

        return mock.patch.object(OfflineInference, "run", timed_run)

    @property
    def seconds(self) -> float:
        assert self.started is not None
        return max(self.last.values()) - self.started

    @property
    def idle_share(self) -> float:
        end = max(self.last.values())
        idle = sum(end - last for last in self.last.values())
        idle += (NUM_SLOTS - len(self.last)) * self.seconds  # a slot that was never used
        return idle / (NUM_SLOTS * self.seconds)


def make_rows(num_rows: int, *, is_sorted: bool) -> list[Row]:
    """Return rows whose answers have exactly so many tokens as a log-normal draw says."""
    numbers = random.Random(5)
    lengths = [
        min(int(numbers.lognormvariate(0.0, 0.8) * MEAN_TOKENS / 1.4) + 1, MAX_TOKENS)
        for _ in range(num_rows)
    ]
    if is_sorted:
        lengths.sort()
    return [
        {"prompt": f"row {index}", "sampling": {"min_tokens": length, "max_tokens": length}}
        for index, length in enumerate(lengths)
    ]


def measure(
    title: str,
    rows: list[Row],
    *,
    is_shared: bool = False,
    longest_first: bool = False,
    **changes: Any,
) -> None:
    """Run the job once and print what was seen; without is_shared, a slot keeps to its shards."""
    spare_slots = SpareSlots if is_shared else lambda stacks, *_, **__: SpareSlots(stacks)
    with (
        mock.patch.object(job_run, "SpareSlots", spare_slots),
        tempfile.TemporaryDirectory() as name,
    ):
        config = make_job(
            Path(name), rows, sampling={"temperature": 0}, deduplicate=False, commit_rows=64,
            engine__device_ids=list(range(NUM_SLOTS)), engine__log_level="WARNING",
            engine__scheduler={"max_num_seqs": MAX_NUM_SEQS},
            engine__runtime={"inline": True, "mock_step_seconds": STEP_SECONDS}, **changes,
        )  # fmt: skip
        clock = SlotClock()
        with clock.timed():
            num_tokens = run(config, longest_first=longest_first)
        places = NUM_SLOTS * MAX_NUM_SEQS * clock.seconds / STEP_SECONDS
        print(
            f"{title:40}  {clock.seconds:6.1f} s  tail idle {clock.idle_share:6.1%}  "
            f"full {num_tokens / places:5.1%}",
            flush=True,
        )


def run(config: JobConfig, *, longest_first: bool) -> int:
    with JobRun.open(config) as run, ThreadPoolExecutor(run.num_slots) as threads:
        shards = run.pending_shards()
        summaries = list(threads.map(run.run_shard, shards[::-1] if longest_first else shards))
        assert run.finish(summaries, {}).exit_code == 0
        return sum(summary.stats.num_output_tokens for summary in summaries)


def main(num_rows: int) -> None:
    for is_sorted in (False, True):
        rows = make_rows(num_rows, is_sorted=is_sorted)
        print(f"{num_rows} rows, {'sorted by length' if is_sorted else 'in random order'}")
        for shards in (1, 4, 16, 64):
            measure(f"{shards} shard(s)", rows, shards=shards)
        if is_sorted:
            measure("64 shards, the longest first", rows, shards=64, longest_first=True)
        for shards in (1, 4):
            measure(f"{shards} shard(s), slots share rows", rows, shards=shards, is_shared=True)


if __name__ == "__main__":
    main(*[int(word) for word in sys.argv[1:]] or [800])
