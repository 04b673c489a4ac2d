"""Jobs, rows and leases that the tests of the ledger are made of."""

from sqlalchemy import text

from flows.ledger import CompletionRow, JobRow, Lease, Ledger, NewJob, Owner
from flows.schema import RowState

ELSEWHERE = Owner(host="elsewhere", boot_id="b", pid_namespace="n", pid=1, start_time=1)


def new_job(job_id: str = "job", *, num_rows: int = 10, num_shards: int = 2) -> NewJob:
    return NewJob(
        job_id=job_id,
        config={"name": job_id, "engine": {"dtype": "float32"}},
        seed=2**62,
        fingerprint={"model": "aa11", "dtype": "float32"},
        manifest_hash="f00d",
        num_rows=num_rows,
        num_shards=num_shards,
    )


def ok_row(row_index: int, text: str = "an answer") -> CompletionRow:
    return CompletionRow(
        row_index=row_index,
        row_id=f"row-{row_index}",
        state=RowState.OK,
        finish_reason="stop",
        num_prompt_tokens=7,
        num_cached_tokens=2,
        num_output_tokens=3,
        text=text,
        token_ids=(5, 0, 2**31 - 1),
    )


def error_row(row_index: int, message: str = "prompt has 9 tokens, limit 8") -> CompletionRow:
    return CompletionRow(
        row_index=row_index,
        row_id=f"row-{row_index}",
        state=RowState.ERROR,
        error_code="prompt_too_long",
        error_message=message,
        num_prompt_tokens=9,
    )


def skipped_row(row_index: int) -> CompletionRow:
    return CompletionRow(row_index=row_index, row_id=f"row-{row_index}", state=RowState.SKIPPED)


def acquire(ledger: Ledger, job: JobRow, shard_index: int = 0) -> Lease:
    return ledger.acquire_shard(
        job.job_key, shard_index, owner=Owner.current(), lease_seconds=60, flow_run_id="run-1"
    )


def silence(ledger: Ledger) -> None:
    """Let an hour pass without a heartbeat of anybody."""
    ledger.database.write(
        lambda connection: connection.execute(
            text("UPDATE shards SET heartbeat_at = heartbeat_at - 3600")
        )
    )


def lose(ledger: Ledger, lease: Lease) -> Lease:
    """Let somebody else take the shard over, because the owner of `lease` was silent."""
    silence(ledger)
    return ledger.acquire_shard(lease.job_key, lease.shard_index, owner=ELSEWHERE, lease_seconds=60)


def stored(ledger: Ledger, job: JobRow) -> list[CompletionRow]:
    return list(ledger.iter_completions(job.job_key))


def assert_counters_equal_rows(ledger: Ledger, job_id: str) -> None:
    job = ledger.get_job(job_id)
    rows = stored(ledger, job)
    for counted, of_it in [
        (job, rows),
        *(
            (shard, [row for row in rows if job.shard_of(row.row_index) == shard.shard_index])
            for shard in ledger.list_shards(job.job_key)
        ),
    ]:
        assert counted.num_ok == sum(row.state is RowState.OK for row in of_it)
        assert counted.num_error == sum(row.state is RowState.ERROR for row in of_it)
        assert counted.num_skipped == sum(row.state is RowState.SKIPPED for row in of_it)
        assert counted.num_prompt_tokens == sum(row.num_prompt_tokens for row in of_it)
        assert counted.num_output_tokens == sum(row.num_output_tokens for row in of_it)
        assert counted.num_pending == counted.num_rows - len(of_it)
