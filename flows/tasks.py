"""Prefect's side of a shard: a named task, its retry rule, and a picture of its progress.

No call to Prefect may stall or fail a shard: progress goes out from a thread of its own, and an
API that does not answer is only logged.
"""

import contextvars
import logging
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed

from engine import TokenmillError, WorkerError, WorkerFailure
from flows.job_run import JobRun
from flows.shard_runner import ShardSummary
from flows.shard_writer import TooManyFailedRowsError

logger = logging.getLogger(__name__)
_PROGRESS_SECONDS = 5.0
_JOIN_SECONDS = 1.0


def is_start_failure(_task: Any, _task_run: Any, state: Any) -> bool:
    """Return True when an engine could not be started: the one thing that Prefect retries."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, WorkerError) and error.failure is WorkerFailure.START_FAILED


@task(
    name="shard",
    task_run_name="shard-{shard_index:04d}",
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=is_start_failure,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def run_shard_task(run: JobRun, shard_index: int) -> ShardSummary:
    """Answer the pending rows of one shard."""
    with _progress(run, shard_index):
        summary = run.run_shard(shard_index)
    logger.info(
        "shard=%d state=%s rows_resumed=%d rows_ok=%d rows_failed=%d output_tokens=%d",
        shard_index,
        summary.state.value,
        summary.num_resumed,
        summary.num_ok,
        summary.num_error,
        summary.stats.num_output_tokens,
    )
    return summary


def run_all_shards(run: JobRun) -> tuple[list[ShardSummary], dict[int, BaseException]]:
    """Run every pending shard, as many at a time as there are slots, and wait for all of them.

    Returns the summaries, and the errors by shard. When this is interrupted (Ctrl-C, cancel), the
    shards finish their step and commit before the interruption goes on.
    """
    waiting = run.pending_shards()[::-1]
    active: dict[PrefectFuture[ShardSummary], int] = {}
    summaries: list[ShardSummary] = []
    failures: dict[int, BaseException] = {}
    try:
        while True:
            while waiting and len(active) < run.num_slots and not run.stop.is_set():
                shard_index = waiting.pop()
                active[run_shard_task.submit(run, shard_index)] = shard_index
            if not active:  # also when the run was stopped, or no good device is left
                break
            future = _next_done(list(active))
            shard_index = active.pop(future)
            _collect(future, shard_index, summaries, failures)
            if isinstance(failures.get(shard_index), TooManyFailedRowsError):
                run.stop.set()
    except BaseException:
        run.stop.set()
        for future, shard_index in active.items():
            future.wait()
            _collect(future, shard_index, summaries, failures)
        run.finish(summaries, failures)
        raise
    return summaries, failures


def _next_done(futures: list[PrefectFuture[ShardSummary]]) -> PrefectFuture[ShardSummary]:
    """Wait until a shard has ended.

    Prefect interrupts a flow run that could not renew its slot of a concurrency limit: the server
    was away for minutes, or was started again without its leases. Rows need no slot.
    """
    while True:
        try:
            return next(as_completed(futures))
        except CancelledError:
            logger.warning("Prefect's server has let go of this run's concurrency slot; it goes on")


def _collect(
    future: PrefectFuture[ShardSummary],
    shard_index: int,
    summaries: list[ShardSummary],
    failures: dict[int, BaseException],
) -> None:
    result: Any = future.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        failures[shard_index] = result
        is_foreseen = isinstance(result, TokenmillError)
        logger.error(
            "shard-%04d failed: %s", shard_index, result, exc_info=None if is_foreseen else result
        )
    else:
        summaries.append(result)


@contextmanager
def _progress(run: JobRun, shard_index: int) -> Iterator[None]:
    """Show the shard's progress in the UI while the block runs."""
    done = threading.Event()
    context = contextvars.copy_context()  # the artifact belongs to this task run
    thread = threading.Thread(
        target=context.run,
        args=(_report_progress, run, shard_index, done),
        name=f"progress-{shard_index}",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_JOIN_SECONDS)


def _report_progress(run: JobRun, shard_index: int, done: threading.Event) -> None:
    artifact_id: Any = None
    is_last = False
    speed = _Speed()
    while not is_last:
        is_last = done.wait(_PROGRESS_SECONDS if artifact_id else 0.0)
        try:
            percent, description = _describe_progress(run, shard_index, speed)
            if artifact_id is None:
                artifact_id = create_progress_artifact(
                    progress=percent, key=f"shard-{shard_index:04d}", description=description
                )
            else:
                update_progress_artifact(artifact_id, progress=percent, description=description)
        except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the shard
            logger.debug("no progress artifact for shard %d: %s", shard_index, error)
            done.wait(_PROGRESS_SECONDS)


class _Speed:
    """Tokens per second from the first look at a shard to the latest."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def update(self, num_tokens: int) -> float:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, num_tokens)
        started, num_before = self._first
        return (num_tokens - num_before) / max(now - started, 1.0)


def _describe_progress(run: JobRun, shard_index: int, speed: _Speed) -> tuple[float, str]:
    shard = run.ledger.get_shard(run.job.job_key, shard_index)
    num_done = shard.num_rows - shard.num_pending
    percent = 100.0 * num_done / max(shard.num_rows, 1)
    # The UI's cards show some 45 characters of it, and the shard's name above.
    return percent, (
        f"{num_done}/{shard.num_rows} rows, {shard.num_error} failed, "
        f"{speed.update(shard.num_output_tokens):.0f} tokens/s, {shard.num_output_tokens} tokens"
    )
