"""A million rows through a whole job on the mock device: how fast, in how much memory, at what cost.

`python tests/bench/million_rows.py [--rows N] [--postgres URL]` plans, answers and exports rows of
JSONL as a user's job would, Prefect left out, and prints rows/s, CPU and peak memory of each stage.
Answers are cut at 4 tokens (--max-tokens): what is measured is what a row costs the job, and each
further token is work of the engine and of the mock alone. Exits 1 when a claim does not hold:
5,000 rows/s on SQLite from the first row read to the output's name; no stage needs more memory in
its second half than in its first (from 200,000 rows on); and what the job layer computes is at most 3% of the CPU of a
job that a real model takes ten minutes for.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil

from engine import Completion
from flows import engine_part
from flows.job_file import validate_job_config
from flows.job_run import JobOutcome, JobRun
from flows.ledger import CompletionRow
from flows.pending_rows import PendingRows
from flows.shard_writer import ShardWriter

WANTED_ROWS_PER_SECOND = 5000
MAX_GROWTH_MB = 8.0
# With fewer, caches and pools of a fixed size are still filling in the second half.
MIN_ROWS_FOR_MEMORY = 200_000
MAX_JOB_LAYER_SHARE = 0.03
# HumanEval with the demo model on two CPU cores: 64 rows in 52 s, which keep a core busy.
REAL_SECONDS = 600
REAL_ROWS = REAL_SECONDS * 64 // 52
WARM_UP_ROWS = 2000
_SAMPLE_SECONDS = 0.1
_TIMED_CALLS = 101
Result = TypeVar("Result")
_WRITER, _INTAKE = "writer-0", "tokenmill-intake"


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage of the job, as the watch saw it; CPU seconds are of the main process."""

    name: str
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)

    def peak_mb(self, begin: float, end: float) -> float:
        """Return the most memory between two shares of the stage's time."""
        first, last = begin * self.wall_seconds, end * self.wall_seconds
        inside = [mb for at, mb in self.memory if first <= at <= last]
        return max(inside, default=self.memory[-1][1] if self.memory else 0.0)


class Watch:
    """Looks at memory and at the threads of this process, from a thread of its own."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.thread_seconds: dict[str, float] = {}
        self._process = psutil.Process()
        self._stop = threading.Event()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        stage = Stage(name=name)
        watcher = threading.Thread(target=self._look_on, args=(stage, time.perf_counter()))
        started, cpu = time.perf_counter(), time.process_time()
        watcher.start()
        try:
            yield
        finally:
            stage.wall_seconds = time.perf_counter() - started
            stage.cpu_seconds = time.process_time() - cpu
            self._stop.set()
            watcher.join()
            self._stop.clear()
            self.stages.append(stage)

    def _look_on(self, stage: Stage, started: float) -> None:
        while True:
            megabytes = self._process.memory_info().rss / 1e6
            stage.memory.append((time.perf_counter() - started, megabytes))
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            for thread in self._process.threads():
                if thread.id in names:
                    key = f"{stage.name}/{names[thread.id]}"
                    self.thread_seconds[key] = thread.user_time + thread.system_time
            if self._stop.wait(_SAMPLE_SECONDS):
                return


class ResultClock:
    """CPU seconds that results take in the loop's thread, which is the engine's otherwise.

    One call in a hundred and one is timed and stands for the others: to look at this clock takes
    longer than much of what it times.
    """

    seconds = 0.0
    num_calls = 0

    @classmethod
    def time(cls, work: Callable[[], Result]) -> Result:
        cls.num_calls += 1
        if cls.num_calls % _TIMED_CALLS:
            return work()
        started = time.thread_time()
        result = work()
        cls.seconds += _TIMED_CALLS * (time.thread_time() - started)
        return result


class TimedRows(PendingRows):
    def results_of(self, completion: Completion) -> Iterator[CompletionRow]:
        results = super().results_of(completion)
        return iter(ResultClock.time(lambda: list(results)))


class TimedWriter(ShardWriter):
    def put(self, row: CompletionRow) -> None:
        put = super().put
        ResultClock.time(lambda: put(row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One job that has run to its end."""

    num_rows: int
    outcome: JobOutcome
    watch: Watch
    num_output_tokens: int
    bucket_seconds: Mapping[str, float]
    worker_cpu_seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.num_rows / sum(stage.wall_seconds for stage in self.watch.stages)

    def job_layer_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of all that is not the engine's, by what they were spent on."""
        cpu = {stage.name: stage.cpu_seconds for stage in self.watch.stages}
        return {
            "plan": cpu["plan"],
            # With the engine's tokenizer, which works in the same thread.
            "make requests": self.watch.thread_seconds[f"answer/{_INTAKE}"],
            "take results": ResultClock.seconds,
            "commit": self.watch.thread_seconds[f"answer/{_WRITER}"],
            "export": cpu["export"],
        }


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="ascii") as file:
        file.writelines(f'{{"id": "q{i}", "prompt": "question {i}"}}\n' for i in range(count))


def job_mapping(folder: Path, ledger_url: str, max_tokens: int) -> dict[str, Any]:
    """Return a job of which only the sizes of a step are not as they are by default.

    The mock device has no memory to fill; in steps as small as a real device's, the cost of the
    step itself would hide what a row costs.
    """
    return {
        "name": "million-rows",
        "job_id": f"million-rows-{folder.name}-{os.getpid()}",
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "sampling": {"max_tokens": max_tokens, "temperature": 1.0},
        "seed": 1,
        "engine": {
            "model_path": "mock",
            "device": "mock",
            "scheduler": {"max_num_seqs": 1024, "max_num_batched_tokens": 32768},
        },
        "ledger_url": ledger_url,
        "job_dir": str(folder / "job"),
    }


def run_job(folder: Path, num_rows: int, args: argparse.Namespace) -> Measured:
    """Run one job as a user would, and look on."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", num_rows)
    ledger_url = args.postgres or f"sqlite:///{folder / 'ledger.sqlite'}"
    config = validate_job_config(job_mapping(folder, ledger_url, args.max_tokens), origin="bench")
    ResultClock.seconds = 0.0
    worker_cpu = _children_cpu()
    watch = Watch()
    with ExitStack() as stack:
        with watch.stage("plan"):
            run = stack.enter_context(JobRun.open(config))
        with watch.stage("answer"):
            summary = run.run_shard(0)
        with watch.stage("export"):
            outcome = run.finish([summary], {})
    assert outcome.output_path is not None
    with outcome.output_path.open("rb") as output:
        assert sum(1 for _ in output) == num_rows, "a row is missing"
    return Measured(
        num_rows=num_rows,
        outcome=outcome,
        watch=watch,
        num_output_tokens=summary.stats.num_output_tokens,
        bucket_seconds=summary.stats.bucket_seconds,
        worker_cpu_seconds=_children_cpu() - worker_cpu,
    )


def _children_cpu() -> float:
    """Return the CPU seconds of worker processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def print_stages(measured: Measured) -> None:
    num_rows, watch = measured.num_rows, measured.watch
    print("stage     wall s   rows/s   CPU s   us/row   peak MB at 10%   50%   100% of the stage")
    for stage in watch.stages:
        print(
            f"{stage.name:8s}{stage.wall_seconds:8.1f}{num_rows / stage.wall_seconds:9.0f}"
            f"{stage.cpu_seconds:8.1f}{stage.cpu_seconds / num_rows * 1e6:9.1f}"
            f"{stage.peak_mb(0, 0.1):17.1f}{stage.peak_mb(0, 0.5):6.1f}{stage.peak_mb(0, 1):7.1f}"
        )
    wall = sum(stage.wall_seconds for stage in watch.stages)
    cpu = sum(stage.cpu_seconds for stage in watch.stages)
    print(
        f"{'total':8s}{wall:8.1f}{num_rows / wall:9.0f}{cpu:8.1f}{cpu / num_rows * 1e6:9.1f}\n"
        f"worker process: {measured.worker_cpu_seconds:.1f} CPU s, "
        f"{measured.num_output_tokens} output tokens"
    )
    print("\nmain loop while answering, wall s by bucket:")
    print("  " + "  ".join(f"{k} {s:.1f}" for k, s in measured.bucket_seconds.items() if s >= 0.05))
    print("threads while answering, CPU us a row:")
    threads = {
        name.removeprefix("answer/"): seconds
        for name, seconds in watch.thread_seconds.items()
        if name.startswith("answer/")
    }
    # The main thread has planned before.
    threads["MainThread"] -= watch.thread_seconds["plan/MainThread"]
    shown = {k: s / num_rows * 1e6 for k, s in threads.items()}
    print("  " + "  ".join(f"{k} {us:.1f}" for k, us in shown.items() if us >= 0.5))


def check(measured: Measured, fixed_seconds: float, *, is_sqlite: bool) -> bool:
    """Print each claim and whether it holds; return True when all do."""
    num_rows = measured.num_rows
    parts = measured.job_layer_seconds()
    per_row = sum(parts.values()) / num_rows
    share = (fixed_seconds + per_row * REAL_ROWS) / REAL_SECONDS
    listed = ", ".join(f"{k} {s / num_rows * 1e6:.0f}" for k, s in parts.items())
    print(
        f"\njob layer: {per_row * 1e6:.0f} CPU us a row ({listed}), and {fixed_seconds:.1f} s a run"
    )
    claims = [
        (
            share <= MAX_JOB_LAYER_SHARE,
            f"of the CPU of a real job of {REAL_SECONDS} s and {REAL_ROWS} rows that is "
            f"{share:.2%} (at most {MAX_JOB_LAYER_SHARE:.0%})",
        )
    ]
    for stage in measured.watch.stages if num_rows >= MIN_ROWS_FOR_MEMORY else ():
        growth = stage.peak_mb(0.5, 1) - stage.peak_mb(0, 0.5)
        claims.append(
            (
                growth <= MAX_GROWTH_MB,
                f"{stage.name}: the second half needs {growth:+.1f} MB more than the first "
                f"(at most {MAX_GROWTH_MB:g})",
            )
        )
    if is_sqlite:
        claims.append(
            (
                measured.rows_per_second >= WANTED_ROWS_PER_SECOND,
                f"{measured.rows_per_second:.0f} rows/s overall (at least {WANTED_ROWS_PER_SECOND})",
            )
        )
    for holds, claim in claims:
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    return all(holds for holds, _ in claims)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A million rows through a job on the mock device.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=4, help="most tokens of an answer")
    parser.add_argument(
        "--postgres", metavar="URL", help="ledger on PostgreSQL; speed is not checked"
    )
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    timed = mock.patch.multiple(engine_part, PendingRows=TimedRows, ShardWriter=TimedWriter)
    with timed, tempfile.TemporaryDirectory(dir=args.folder) as name:
        # Once with a few rows: what a run costs however many rows there are, imports included.
        run_job(Path(name) / "warm-up", WARM_UP_ROWS, args)
        fixed_seconds = time.process_time()
        measured = run_job(Path(name) / "measured", args.rows, args)
    print_stages(measured)
    return 0 if check(measured, fixed_seconds, is_sqlite=args.postgres is None) else 1


if __name__ == "__main__":
    sys.exit(main())
