"""How far jobs are, as tables for people and as JSON for machines."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from flows import leases
from flows.cli_options import print_json
from flows.console import print_table
from flows.ledger import Ledger
from flows.ledger_rows import JobRow, ShardRow
from flows.owner import Owner
from flows.schema import JobState, ShardState


def show_jobs(ledger: Ledger, *, is_json: bool) -> None:
    """Show every job, the newest first."""
    jobs, now = ledger.list_jobs(), ledger.database.read_clock()
    if is_json:
        print_json([_facts_of_job(job, now) for job in jobs])
    else:
        _print_jobs(jobs, now)


def show_job(ledger: Ledger, job: JobRow, *, is_json: bool) -> None:
    """Show one job with its shards."""
    shards, now = ledger.list_shards(job.job_key), ledger.database.read_clock()
    if is_json:
        print_json(
            _facts_of_job(job, now) | {"shards": [_facts_of_shard(shard, now) for shard in shards]}
        )
        return
    _print_jobs([job], now)
    print_table(
        "Shards",
        ("shard", "state", "rows", "ok", "failed", "pending", "attempt", "held by", "error"),
        (
            (f"shard-{s.shard_index:04d}", _state_of_shard(s, now).value, s.num_rows, s.num_ok,
             s.num_error, s.num_pending, s.attempt, _holder(s, now), s.error_message)
            for s in shards
        ),
    )  # fmt: skip


def when(seconds: float) -> str:
    """Return a time as tables show it, in this host's zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _print_jobs(jobs: Sequence[JobRow], now: float) -> None:
    print_table(
        "Jobs",
        ("job", "state", "rows", "ok", "failed", "pending", "output tokens", "created",
         "driven by"),
        (
            (job.job_id, _state_of_job(job, now).value, job.num_rows, job.num_ok, job.num_error,
             job.num_pending, job.num_output_tokens, when(job.created_at), _driver(job, now))
            for job in jobs
        ),
    )  # fmt: skip


def _state_of_job(job: JobRow, now: float) -> JobState:
    """Return where the job stands: one whose driver was killed could not say so itself."""
    is_left = job.state is JobState.RUNNING and not leases.is_held(job, now)
    return JobState.INTERRUPTED if is_left else job.state


def _state_of_shard(shard: ShardRow, now: float) -> ShardState:
    is_left = shard.state is ShardState.RUNNING and not leases.is_held(shard, now)
    return ShardState.INTERRUPTED if is_left else shard.state


def _driver(job: JobRow, now: float) -> str:
    if job.state is JobState.RUNNING and not leases.is_held(job, now):
        return f"nobody: {_name_of_gone(job)}"
    return _holder(job, now)


def _holder(leased: JobRow | ShardRow, now: float) -> str:
    if leased.lease_owner is None or not leases.is_held(leased, now):
        return ""
    return leases.name_of(leased.lease_owner)


def _name_of_gone(job: JobRow) -> str:
    if job.lease_owner is None:
        return "no process drives it"
    return f"{leases.name_of(job.lease_owner)} is gone"


def _facts_of_job(job: JobRow, now: float) -> dict[str, Any]:
    is_held = leases.is_held(job, now)
    owner = Owner.parse(job.lease_owner) if job.lease_owner and is_held else None
    is_left = job.state is JobState.RUNNING and not is_held
    return {
        "job_id": job.job_id,
        "state": _state_of_job(job, now).value,
        "reason": _name_of_gone(job) if is_left else None,
        "driver": None if owner is None else {"process": owner.pid, "host": owner.host},
        "num_rows": job.num_rows,
        "num_ok": job.num_ok,
        "num_error": job.num_error,
        "num_skipped": job.num_skipped,
        "num_pending": job.num_pending,
        "num_prompt_tokens": job.num_prompt_tokens,
        "num_output_tokens": job.num_output_tokens,
        "seed": job.seed,
        "forked_from": job.forked_from,
        "created_at": job.created_at,
    }


def _facts_of_shard(shard: ShardRow, now: float) -> dict[str, Any]:
    return {
        "shard_index": shard.shard_index,
        "state": _state_of_shard(shard, now).value,
        "num_rows": shard.num_rows,
        "num_ok": shard.num_ok,
        "num_error": shard.num_error,
        "num_pending": shard.num_pending,
        "attempt": shard.attempt,
        "lease_owner": shard.lease_owner,
        "error": shard.error_message,
    }
