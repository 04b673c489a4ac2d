"""Jobs that die or stop after so many commits, without a process of their own: quick, and exact."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from engine import LedgerError
from flows.config import JobConfig
from flows.job_run import JobOutcome, JobRun
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow
from flows.shard_runner import ShardSummary
from flows.shard_writer import ShardWriter

# One row after the other, so that the nth commit is of the nth row.
ONE_BY_ONE: dict[str, Any] = {"shards": 1, "engine__scheduler": {"max_num_seqs": 1}}


@contextmanager
def after_each_commit(act: Callable[[int], None]) -> Iterator[None]:
    """Commit each row for itself, and call back with the number of the commit."""
    commit, put, number = Ledger.commit, ShardWriter.put, 0

    def put_and_wait(self: ShardWriter, row: CompletionRow) -> None:
        put(self, row)
        self.flush()

    def noted_commit(self: Ledger, *arguments: Any, **options: Any) -> int:
        nonlocal number
        num_failed = commit(self, *arguments, **options)
        number += 1
        act(number)
        return num_failed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "commit", noted_commit)
        patch.setattr(ShardWriter, "put", put_and_wait)
        yield


def die_after(config: JobConfig, num_commits: int) -> None:
    """Let a job end as a kill ends it: so many commits are there, and nothing comes after them."""

    def die(number: int) -> None:
        if number == num_commits:
            raise RuntimeError("killed")

    with (
        after_each_commit(die),
        JobRun.open(config) as run,
        pytest.raises(LedgerError, match="killed"),
    ):
        run.run_shard(0)


def stop_after(config: JobConfig, num_commits: int) -> JobOutcome:
    """Run the first shard of a job, and stop it in order after so many commits."""
    with JobRun.open(config) as run:

        def stop(number: int) -> None:
            if number >= num_commits:
                run.stop.set()

        with after_each_commit(stop):
            summary = run.run_shard(0)
        return run.finish([summary], {})


def run_at_once(config: JobConfig) -> tuple[JobOutcome, list[ShardSummary]]:
    """Run a whole job, as many shards at a time as there are devices."""
    with JobRun.open(config) as run, ThreadPoolExecutor(run.num_slots) as threads:
        summaries = list(threads.map(run.run_shard, run.pending_shards()))
        return run.finish(summaries, {}), summaries
