"""The experiment log: one row for each run of a job, to compare runs by.

It reads the ledger's counters, so that a resumed job is described as a whole, and it never reads
the rows one by one.
"""

import math
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, func, select
from sqlalchemy.orm import Session

from engine import RunStats
from flows import jobs
from flows.ledger import JobRow, Ledger
from flows.schema import CompletionTable, ExperimentRow, RowState, ShardTable

if TYPE_CHECKING:
    import pandas as pd

_PACKAGES = ("tokenmill", "torch", "transformers", "prefect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Nearest-rank percentiles of a count of tokens; None when nothing was counted."""

    p50: int | None
    p95: int | None
    max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRun:
    """What only the run itself knows. Seconds, rows and stats are of this run alone.

    busy_seconds is the time with at least one step in flight on any engine, so it never exceeds
    wall_seconds, however many shards ran at a time. job_stats are counts that the engine does not
    know of; the row keeps them among the stats.
    """

    name: str
    model: str
    device: str
    dtype: str
    prompt_tokens: Percentiles
    num_new_rows: int
    wall_seconds: float
    busy_seconds: float
    stats: RunStats
    job_stats: dict[str, int] = field(default_factory=dict)


def record_experiment(ledger: Ledger, job_key: int, run: ExperimentRun) -> ExperimentRow:
    """Add the row of a run that has just ended, finished or not; its id is `JOB_ID/NUMBER`."""

    def work(connection: Connection) -> ExperimentRow:
        job = jobs.read(connection, job_key, is_locked=True)
        output_tokens = output_token_percentiles(connection, job_key)
        values: dict[str, Any] = {
            **_identity(connection, job, run),
            **_counts(job, run),
            **_lengths(run.prompt_tokens, output_tokens),
            **_rates(run),
            "config": flatten_config(job.config),
            "stats": msgspec.to_builtins(run.stats) | run.job_stats,
            "versions": collect_versions(),
        }
        row = ExperimentRow(**values)
        # Kept as it is after the commit: whoever asked for it reads it without a connection.
        with Session(bind=connection, expire_on_commit=False) as session:
            session.add(row)
            session.flush()
            session.expunge(row)
        return row

    return ledger.database.write(work)


def list_experiments(ledger: Ledger, *, job_id: str | None = None) -> list[ExperimentRow]:
    """Return the runs of all jobs or of one, newest first."""
    query = select(ExperimentRow).order_by(
        ExperimentRow.created_at.desc(), ExperimentRow.experiment_id.desc()
    )
    if job_id is not None:
        query = query.where(ExperimentRow.job_id == job_id)
    with ledger.database.read() as connection, Session(bind=connection) as session:
        return list(session.scalars(query))


def experiments_frame(ledger: Ledger, *, job_id: str | None = None) -> "pd.DataFrame":
    """Return the runs as a DataFrame, newest first: the columns, then `config.*` flattened."""
    # pandas takes longer to import than everything else here, and only this needs it.
    import pandas as pd

    columns = [column.key for column in ExperimentRow.__table__.columns]
    records = []
    for row in list_experiments(ledger, job_id=job_id):
        record = {name: getattr(row, name) for name in columns if name != "config"}
        records.append(record | {f"config.{key}": value for key, value in row.config.items()})
    frame = pd.DataFrame.from_records(records)
    return frame if records else pd.DataFrame(columns=columns)


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested mappings and lists into one level with dotted keys: `sources.0.path`.

    Empty mappings and lists stay as they are: that they are empty is a setting too.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping) and inner:
            named = {str(inner_key): item for inner_key, item in inner.items()}
            flat |= {f"{key}.{path}": item for path, item in flatten_config(named).items()}
        else:
            flat[str(key)] = value
    return flat


def output_token_percentiles(connection: Connection, job_key: int) -> Percentiles:
    """Return how long the answers are, over rows that are ok.

    The database counts how many answers have each length, so what is held in memory is bounded
    by the longest answer and not by the number of rows.
    """
    histogram = connection.execute(
        select(CompletionTable.num_output_tokens, func.count())
        .where(CompletionTable.job_key == job_key, CompletionTable.state == RowState.OK)
        .group_by(CompletionTable.num_output_tokens)
        .order_by(CompletionTable.num_output_tokens)
    )
    return percentiles_of({row[0]: row[1] for row in histogram})


def percentiles_of(histogram: Mapping[int, int]) -> Percentiles:
    """Return nearest-rank percentiles of values that are given as value -> how often."""
    if not histogram:
        return Percentiles(p50=None, p95=None, max=None)
    total = sum(histogram.values())
    return Percentiles(
        p50=_at_rank(histogram, math.ceil(0.5 * total)),
        p95=_at_rank(histogram, math.ceil(0.95 * total)),
        max=max(histogram),
    )


def collect_versions() -> dict[str, str]:
    """Return the versions of what made the answers, without importing any of it."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _identity(connection: Connection, job: JobRow, run: ExperimentRun) -> dict[str, Any]:
    mine = ExperimentRow.job_key == job.job_key
    number = 1 + connection.execute(select(func.count()).where(mine)).scalar_one()
    attempts = select(func.max(ShardTable.attempt)).where(ShardTable.job_key == job.job_key)
    scheduler = job.config.get("engine", {}).get("scheduler", {})
    return {
        "experiment_id": f"{job.job_id}/{number}",
        "job_key": job.job_key,
        "job_id": job.job_id,
        "name": run.name,
        "attempt": connection.execute(attempts).scalar() or 0,
        "created_at": time.time(),
        "job_state": job.state,
        "host": socket.gethostname(),
        "model": run.model,
        "device": run.device,
        "dtype": run.dtype,
        "num_shards": job.num_shards,
        "max_num_seqs": scheduler.get("max_num_seqs"),
        "max_num_batched_tokens": scheduler.get("max_num_batched_tokens"),
    }


def _counts(job: JobRow, run: ExperimentRun) -> dict[str, int]:
    return {
        "num_rows": job.num_rows,
        "num_ok": job.num_ok,
        "num_error": job.num_error,
        "num_skipped": job.num_skipped,
        "num_prompt_tokens": job.num_prompt_tokens,
        "num_output_tokens": job.num_output_tokens,
        "num_new_rows": run.num_new_rows,
        "num_new_prompt_tokens": run.stats.num_prompt_tokens,
        "num_new_output_tokens": run.stats.num_output_tokens,
    }


def _lengths(prompt: Percentiles, output: Percentiles) -> dict[str, int | None]:
    return {
        "prompt_tokens_p50": prompt.p50,
        "prompt_tokens_p95": prompt.p95,
        "prompt_tokens_max": prompt.max,
        "output_tokens_p50": output.p50,
        "output_tokens_p95": output.p95,
        "output_tokens_max": output.max,
    }


def _rates(run: ExperimentRun) -> dict[str, float | None]:
    num_input, num_output = run.stats.num_prompt_tokens, run.stats.num_output_tokens
    return {
        "wall_seconds": run.wall_seconds,
        "busy_seconds": run.busy_seconds,
        "input_tokens_per_second": _per_second(num_input, run.busy_seconds),
        "output_tokens_per_second": _per_second(num_output, run.busy_seconds),
        "total_tokens_per_second": _per_second(num_input + num_output, run.busy_seconds),
    }


def _per_second(number: int, seconds: float) -> float | None:
    return number / seconds if seconds > 0 else None


def _at_rank(histogram: Mapping[int, int], rank: int) -> int:
    seen = 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= rank:
            return value
    raise ValueError(f"rank {rank} is above the {seen} values that there are")
