"""A job from its configuration to its outputs, Prefect left out.

`JobRun.open` plans before any weights load and finds the job in the ledger or creates it,
`run_shard` answers one shard, `finish` writes outputs and the experiment row.
"""

import contextvars
import gc
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine import ExitCode
from flows.config import JobConfig
from flows.database import LedgerUnreachableError
from flows.device_queue import DeviceLimit
from flows.experiments import ExperimentRun, Percentiles, record_experiment
from flows.exporter import ExportSummary, export_job
from flows.job_driver import JobDriver
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.planner import Plan
from flows.preparation import (
    check_model_and_sources,
    output_path_of,
    prepare,
    resolve,
    resume_command,
)
from flows.records import RecordReader
from flows.schema import ExperimentRow, JobState
from flows.shard_cluster import ShardCluster, cluster_of
from flows.shard_runner import ShardJob, ShardSummary, run_shard, sum_stats
from flows.shard_writer import AnswersNotStoredError, TooManyFailedRowsError
from flows.spare_slots import SpareSlots
from flows.stacks import StackPool

logger = logging.getLogger(__name__)
# Rows hold no cycles. Python would search the thousands of them that are on their way for some
# whenever 700 more objects are there, and spend a fifth of the job's CPU on it.
_GC_THRESHOLD = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a run of a job ended, in words that a log and a terminal can show.

    has_too_many_failed tells that max_failed_rows was passed: also a job whose every row has its
    result counts as failed then. experiment holds the figures; a run that began no shard has none.
    """

    job_id: str
    state: JobState
    exit_code: ExitCode
    message: str
    output_path: Path | None
    has_too_many_failed: bool = False
    experiment: ExperimentRow | None = None


class JobRun:
    """One run of one job; use `JobRun.open`."""

    def __init__(
        self,
        shard_job: ShardJob,
        plan: Plan,
        driver: JobDriver,
        stacks: StackPool,
        *,
        stop: threading.Event,
        cluster: ShardCluster | None,
    ) -> None:
        self.config = shard_job.config
        self.job = shard_job.job
        self.ledger = driver.ledger
        self.stop = stop
        self._driver = driver
        self._shard_job = shard_job
        self._plan = plan
        self._stacks = stacks
        self._started = time.monotonic()
        self._spare = SpareSlots(
            self._stacks,
            self.pending_shards(),
            # Whoever runs elsewhere cannot be helped from here.
            min_rows=None if cluster else self.config.engine.scheduler.max_num_seqs,
        )
        self._cluster = cluster
        if cluster is not None:
            cluster.expect(self.pending_shards())

    @classmethod
    @contextmanager
    def open(
        cls,
        config: JobConfig,
        *,
        flow_run_id: str | None = None,
        device_limit: DeviceLimit | None = None,
    ) -> Iterator["JobRun"]:
        """Plan the job, create it or take it up again; close engines and ledger at the end.

        Devices of this host wait for slots of `device_limit` too, where one is given.

        Raises:
            ConfigError: something that only the user can mend, found before weights are loaded.
            LedgerError: the ledger refuses this job, or another process drives it.
            TooManyFailedRowsError: more rows of the input are bad than may fail.
        """
        _collect_garbage_rarely()
        config = resolve(config)
        check_model_and_sources(config)
        stop = threading.Event()
        with (
            _stopped_after(config.max_runtime_seconds, stop),
            Ledger.open(config.resolved_ledger_url, stop=stop) as ledger,
            JobDriver(ledger, lease_seconds=config.lease_seconds, lost=stop) as driver,
            cluster_of(config) as cluster,
        ):
            shard_job, plan = prepare(config, ledger, driver)
            shard_job = replace(shard_job, flow_run_id=flow_run_id)
            stacks = StackPool.of_job(shard_job.config, device_limit)
            run = cls(shard_job, plan, driver, stacks, stop=stop, cluster=cluster)
            try:
                yield run
            finally:
                stop.set()  # for a shard that still runs because an error came from elsewhere
                run.close()

    def close(self) -> None:
        """Close the engines, once their shards have ended."""
        self._spare.close()
        self._stacks.close()

    @property
    def num_slots(self) -> int:
        """Shards that can run at a time."""
        return self._stacks.num_slots if self._cluster is None else self._cluster.num_slots

    def pending_shards(self) -> list[int]:
        """Return the shards that still have rows without a result."""
        shards = self.ledger.list_shards(self.job.job_key)
        return [shard.shard_index for shard in shards if shard.num_pending]

    def run_shard(self, shard_index: int) -> ShardSummary:
        """Answer the pending rows of one shard; see shard_runner.run_shard for what it raises."""
        if self._cluster is not None:
            return self._cluster.run_shard(
                self._shard_job, shard_index, ledger=self.ledger, stop=self.stop
            )
        self._spare.begin(shard_index)
        try:
            return run_shard(
                self._shard_job,
                shard_index,
                ledger=self.ledger,
                stacks=self._stacks,
                stop=self.stop,
                spare=self._spare,
            )
        finally:
            self._spare.look()

    def finish(
        self, summaries: Sequence[ShardSummary], failures: dict[int, BaseException]
    ) -> JobOutcome:
        """Write the experiment row in any case, and the output when every row has its result.

        Raises:
            LedgerUnreachableError: the ledger's server went away, and nobody asked the run to stop.
        """
        try:
            return self._finish(summaries, failures)
        except LedgerUnreachableError as error:
            if not self.stop.is_set():
                raise
            outcome = self._stopped_without_ledger(failures, error)
            logger.error("job=%s: %s", outcome.job_id, outcome.message)  # noqa: TRY400 - it says all
            return outcome

    def _finish(
        self, summaries: Sequence[ShardSummary], failures: dict[int, BaseException]
    ) -> JobOutcome:
        job = self.ledger.get_job(self.job.job_id)
        state = _job_state(job, self.stop.is_set(), failures)
        self._driver.finish(state)
        job = self.ledger.get_job(job.job_id)
        # Before the output, which a full disk or a kill may keep from being written.
        attempts = [summary for summary in summaries if summary.device is not None]
        experiment = self._record(attempts) if attempts else None
        summary = self._export(job) if state is JobState.FINISHED else None
        return JobOutcome(
            job_id=job.job_id,
            state=state,
            exit_code=_exit_code(job, state, failures),
            message=_message(job, failures, summary, resume_command(self.config)),
            output_path=None if summary is None else summary.output_path,
            has_too_many_failed=_has_too_many_failed(failures),
            experiment=experiment,
        )

    def _stopped_without_ledger(
        self, failures: dict[int, BaseException], error: LedgerUnreachableError
    ) -> JobOutcome:
        num_answers = sum(
            failure.num_answers
            for failure in failures.values()
            if isinstance(failure, AnswersNotStoredError)
        )
        unstored = AnswersNotStoredError(str(error), num_answers)
        return JobOutcome(
            job_id=self.job.job_id,
            state=JobState.INTERRUPTED,
            exit_code=ExitCode.INTERRUPTED,
            message=f"stopped: {unstored}; to go on: {resume_command(self.config)}",
            output_path=None,
        )

    def _export(self, job: JobRow) -> ExportSummary:
        with RecordReader(self.config.sources, self.config.prompt) as reader:
            return export_job(self.config, job, self.ledger, reader, output_path_of(self.config))

    def _record(self, summaries: Sequence[ShardSummary]) -> ExperimentRow:
        total = sum_stats(summary.stats for summary in summaries)
        busy_by_slot: defaultdict[int, float] = defaultdict(float)
        for summary in summaries:
            for slot, busy_seconds in summary.busy_seconds_by_slot.items():
                busy_by_slot[slot] += busy_seconds
        plan = self._plan
        return record_experiment(
            self.ledger,
            self.job.job_key,
            ExperimentRun(
                name=self.config.name,
                model=Path(self.config.engine.model_path).name,
                device=summaries[0].device or "none",
                dtype=summaries[0].dtype or "none",
                prompt_tokens=Percentiles(
                    p50=plan.prompt_tokens_p50,
                    p95=plan.prompt_tokens_p95,
                    max=plan.prompt_tokens_max,
                ),
                num_new_rows=sum(s.num_ok + s.num_error for s in summaries),
                wall_seconds=time.monotonic() - self._started,
                busy_seconds=max(busy_by_slot.values()),
                stats=total,
                job_stats={
                    "num_deduplicated_rows": sum(s.num_deduplicated for s in summaries),
                    "num_saved_tokens": sum(s.num_saved_tokens for s in summaries),
                    "num_length": sum(s.num_length for s in summaries),
                    "num_worker_deaths": sum(s.num_worker_deaths for s in summaries),
                    "num_loads": (self._cluster or self._stacks).num_loads,
                },
            ),
        )


def _collect_garbage_rarely() -> None:
    """Raise the collector's threshold, for good: the process is there for its jobs."""
    youngest, *older = gc.get_threshold()
    if 0 < youngest < _GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD, *older)


@contextmanager
def _stopped_after(seconds: float | None, stop: threading.Event) -> Iterator[None]:
    """Set `stop` when the block lasts longer."""
    if seconds is None:
        yield
        return

    def stop_now() -> None:
        logger.warning("max_runtime_seconds=%g are over, stopping; the job can be resumed", seconds)
        stop.set()

    timer = threading.Timer(seconds, contextvars.copy_context().run, (stop_now,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _job_state(job: JobRow, is_stopped: bool, failures: dict[int, BaseException]) -> JobState:  # noqa: FBT001
    if job.num_pending == 0:
        return JobState.FINISHED
    if _has_too_many_failed(failures):
        return JobState.FAILED
    return JobState.FAILED if failures and not is_stopped else JobState.INTERRUPTED


def _has_too_many_failed(failures: dict[int, BaseException]) -> bool:
    return any(isinstance(error, TooManyFailedRowsError) for error in failures.values())


def _exit_code(job: JobRow, state: JobState, failures: dict[int, BaseException]) -> ExitCode:
    if state is JobState.INTERRUPTED:
        return ExitCode.INTERRUPTED
    if state is JobState.FAILED:
        codes = [
            getattr(error, "exit_code", ExitCode.INFRASTRUCTURE) for error in failures.values()
        ]
        return max(codes)
    return ExitCode.ROWS_FAILED if job.num_error else ExitCode.OK


def _message(
    job: JobRow, failures: dict[int, BaseException], summary: ExportSummary | None, hint: str
) -> str:
    lines = []
    if failures:
        shards = ", ".join(str(index) for index in sorted(failures))
        lines.append(f"shard(s) {shards} failed: {failures[min(failures)]}")
    if summary is not None:
        lines.append(summary.describe())
    else:
        skipped = f", {job.num_skipped} skipped" if job.num_skipped else ""
        counts = f"{job.num_ok} ok, {job.num_error} failed{skipped}, {job.num_pending} pending"
        lines.append(f"{counts}; to go on: {hint}")
    return "\n".join(lines)
