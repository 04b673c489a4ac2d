"""What only PostgreSQL does. What both databases do is tested once for each in the other files."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from ledger_builders import ELSEWHERE, acquire, new_job, ok_row

from engine import LedgerError
from flows.ledger import JobRow, Lease, Ledger

pytestmark = pytest.mark.integration


@pytest.fixture
def shared(postgres_database_url: str) -> Iterator[Ledger]:
    with Ledger.open(postgres_database_url) as ledger:
        yield ledger


@pytest.fixture
def job(shared: Ledger) -> JobRow:
    return shared.create_job(new_job(num_rows=4, num_shards=1))


class Attempt(threading.Thread):
    """Commits in a thread and remembers what became of it."""

    def __init__(self, ledger: Ledger, lease: Lease) -> None:
        super().__init__()
        self.ledger, self.lease = ledger, lease
        self.refusal: LedgerError | None = None

    def run(self) -> None:
        try:
            self.ledger.commit(self.lease, [ok_row(0)])
        except LedgerError as error:
            self.refusal = error


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_usual_way_to_write_the_url_is_understood(
    postgres_database_url: str, scheme: str
) -> None:
    url = postgres_database_url.replace("postgresql", scheme, 1)
    with Ledger.open(url) as ledger:
        assert ledger.list_jobs() == []


def test_a_network_that_swallows_everything_is_noticed_and_the_url_may_say_when(
    shared: Ledger, postgres_database_url: str
) -> None:
    def milliseconds_of(ledger: Ledger) -> str:
        with ledger.database.read() as connection:
            driver_connection: Any = connection.connection.dbapi_connection
            return str(driver_connection.info.get_parameters()["tcp_user_timeout"])

    assert milliseconds_of(shared) == "15000"
    with Ledger.open(f"{postgres_database_url}&tcp_user_timeout=99000") as patient:
        assert milliseconds_of(patient) == "99000"


def test_clocks_of_hosts_may_differ(
    shared: Ledger, job: JobRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
    hour_ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: hour_ahead)
    with pytest.raises(LedgerError, match=r"on host elsewhere .* last heartbeat [0-9] s ago"):
        acquire(shared, job)


def test_a_take_over_that_is_under_way_fences_a_commit_that_came_later(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    attempt = Attempt(shared, acquire(shared, job))
    with psycopg.connect(postgres_database_url) as other:
        other.execute("UPDATE shards SET lease_epoch = lease_epoch + 1")
        attempt.start()
        attempt.join(timeout=0.5)
        assert attempt.is_alive()  # it waits for the take-over to be decided
    attempt.join(timeout=10)
    assert "held epoch 1, now" in str(attempt.refusal)
    assert list(shared.iter_completions(job.job_key)) == []
    assert shared.get_job("job").num_ok == 0


def test_a_take_over_that_was_given_up_lets_the_commit_through(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    attempt = Attempt(shared, acquire(shared, job))
    with psycopg.connect(postgres_database_url) as other:
        other.execute("UPDATE shards SET lease_epoch = lease_epoch + 1")
        attempt.start()
        other.rollback()
    attempt.join(timeout=10)
    assert attempt.refusal is None
    assert shared.get_job("job").num_ok == 1


def test_of_two_that_want_a_shard_at_the_same_moment_one_is_refused(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    refusals: list[LedgerError] = []

    def try_to_acquire() -> None:
        try:
            acquire(shared, job)
        except LedgerError as error:
            refusals.append(error)

    thread = threading.Thread(target=try_to_acquire)
    with psycopg.connect(postgres_database_url) as other:
        other.execute(
            "UPDATE shards SET lease_owner = %s, lease_epoch = 1, lease_seconds = 60, "
            "heartbeat_at = extract(epoch FROM now()), started_at = extract(epoch FROM now())",
            [str(ELSEWHERE)],
        )
        thread.start()
        thread.join(timeout=0.5)
        assert thread.is_alive()
    thread.join(timeout=10)
    assert [str(error) for error in refusals if "on host elsewhere" in str(error)]


def test_whoever_waits_for_a_lock_that_nobody_gives_back_is_told_so(
    job: JobRow, postgres_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.connections._LOCK_MILLISECONDS", 50)
    monkeypatch.setattr("flows.database._RETRY_PAUSES_SECONDS", (0.01,))
    with Ledger.open(postgres_database_url) as impatient:
        lease = acquire(impatient, job)
        with psycopg.connect(postgres_database_url) as other:
            other.execute("UPDATE shards SET heartbeat_at = 0")
            with pytest.raises(LedgerError, match="another process has held it for long"):
                impatient.commit(lease, [ok_row(0)])
        impatient.commit(lease, [ok_row(0)])


def test_a_reader_that_was_idle_for_too_long_goes_on_where_it_was(
    shared: Ledger, postgres_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shared.create_job(new_job("long", num_rows=400, num_shards=1))
    shared.commit(acquire(shared, job), [ok_row(index) for index in range(400)])
    monkeypatch.setattr("flows.connections._IDLE_MILLISECONDS", 50)
    monkeypatch.setattr("flows.outages._PAUSE_SECONDS", 0.01)
    with Ledger.open(postgres_database_url) as impatient:
        rows = impatient.iter_completions(job.job_key)
        seen = [next(rows).row_index]
        time.sleep(0.3)
        seen += [row.row_index for row in rows]
    assert seen == list(range(400))


def test_the_loser_of_a_deadlock_tries_again(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    attempt = Attempt(shared, acquire(shared, job))
    with psycopg.connect(postgres_database_url) as other:
        other.execute("UPDATE jobs SET updated_at = 0")
        attempt.start()
        attempt.join(timeout=0.5)
        assert attempt.is_alive()  # it holds the shard and waits for the job
        other.execute("UPDATE shards SET heartbeat_at = 0")
    attempt.join(timeout=20)
    assert attempt.refusal is None
    assert [row.row_index for row in shared.iter_completions(job.job_key)] == [0]
    assert shared.get_job("job").num_ok == 1


def test_a_server_that_was_restarted_is_found_again(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    lease = acquire(shared, job)
    with psycopg.connect(postgres_database_url, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tokenmill'"
        )
    shared.commit(lease, [ok_row(1)])
    assert shared.get_job("job").num_ok == 1


def test_a_commit_whose_connection_breaks_is_made_again_and_is_there_once(
    shared: Ledger, job: JobRow, postgres_database_url: str
) -> None:
    attempt = Attempt(shared, acquire(shared, job))
    with psycopg.connect(postgres_database_url) as other:
        other.execute("UPDATE jobs SET updated_at = 0")
        attempt.start()
        attempt.join(timeout=0.5)
        broken = other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tokenmill' AND wait_event_type = 'Lock'"
        ).fetchall()
        assert broken == [(True,)]
    attempt.join(timeout=20)
    assert attempt.refusal is None
    assert [row.row_index for row in shared.iter_completions(job.job_key)] == [0]
    assert shared.get_job("job").num_ok == 1
