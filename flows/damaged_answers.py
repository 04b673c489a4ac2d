"""Answers that a disk has spoilt are taken back, so that the next run answers those rows again."""

import logging

from sqlalchemy import Connection, delete

from flows import jobs, leases
from flows.ledger import Ledger
from flows.schema import CompletionTable, JobState
from flows.stored_answers import Damage, find_damaged

logger = logging.getLogger(__name__)
_FETCH_ROWS = 64


def retry_damaged(ledger: Ledger, job_id: str) -> list[Damage]:
    """Make answers of a job that cannot be read pending again, and say in the log what they were.

    Every other answer stays, also the samples of the same row that are well.

    Raises:
        LedgerError: no such job, a living process drives it or holds one of its shards, or what is
            damaged is more than the answers.
    """
    job_key = ledger.get_job(job_id).job_key
    # Before the lock: to read every answer takes long, and nobody changes one that is there.
    with ledger.database.read(fetch_rows=_FETCH_ROWS) as connection:
        damages = list(find_damaged(connection, job_key))
    if damages:
        ledger.database.write(lambda connection: _take_back(connection, ledger, job_key, damages))
    for damage in damages:
        logger.warning(
            "asked again: %s was %s with %d output tokens, attempt=%d committed_at=%.0f: %s",
            damage.name, damage.state, damage.num_output_tokens, damage.attempt,
            damage.committed_at, damage.reason,
        )  # fmt: skip
    return damages


def _take_back(connection: Connection, ledger: Ledger, job_key: int, damages: list[Damage]) -> None:
    lease = leases.acquire_all(connection, job_key, now=ledger.database.now())
    for damage in damages:
        connection.execute(
            delete(CompletionTable).where(
                CompletionTable.job_key == job_key,
                CompletionTable.row_index == damage.row_index,
                CompletionTable.sample_index == damage.sample_index,
                CompletionTable.committed_at == damage.committed_at,  # not one that came after it
            )
        )
    jobs.recount(connection, job_key)
    jobs.set_state(connection, job_key, JobState.INTERRUPTED)
    leases.release_job(connection, lease)
