"""The database server goes away in the middle of a job, and comes back."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupted_jobs import ONE_BY_ONE, after_each_commit
from job_builders import make_job, questions, run_job
from ledger_builders import acquire, new_job, ok_row
from postgres_server import PostgresServer, running_postgres

from engine import ExitCode
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.schema import JobState
from flows.shard_writer import AnswersNotStoredError
from torture.builders import NUM_ROWS, SLOW, MakeJob
from torture.invariants import read_state
from torture.random_kills import Witness
from torture.trace import values
from torture.victims import Outputs, Victim

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Run a server that nobody else needs."""
    with running_postgres() as started:
        yield started


@pytest.fixture
def ledger_url(server: PostgresServer) -> str:
    return server.create_database()


def num_answered(victim: Victim) -> int:
    return len(values(victim.events(), "answered"))


@pytest.mark.parametrize("immediately", [False, True], ids=["fast", "immediate"])
def test_a_job_waits_for_a_server_that_is_restarted_and_ends_right(
    make_job: MakeJob,
    server: PostgresServer,
    ledger_url: str,
    expected: Outputs,
    immediately: bool,
) -> None:
    # The outage is longer than the lease: as nobody takes the job over, it goes on all the same.
    job = make_job("job", ledger_url, **SLOW, lease_seconds=1)
    witness = Witness(job)
    witness.note_start()
    victim = job.start()
    victim.wait_until(lambda: len(values(victim.events(), "committed")) >= 3)
    server.stop(immediately=immediately)
    num_before = num_answered(victim)
    assert num_before < NUM_ROWS
    victim.wait_until(lambda: "waiting for the ledger, nothing is lost" in victim.said)
    victim.wait_until(lambda: num_answered(victim) >= num_before + 5)  # the engine goes on
    server.start()
    assert victim.wait() == 1, victim.said
    assert "the ledger is back" in victim.said
    assert "Traceback" not in victim.said
    generated = witness.check_the_end()
    assert max(generated.values()) == 1
    assert job.outputs() == expected


def test_a_job_that_is_killed_while_it_waits_goes_on_when_the_server_is_back(
    make_job: MakeJob, server: PostgresServer, ledger_url: str, expected: Outputs
) -> None:
    job = make_job("job", ledger_url, **SLOW)
    witness = Witness(job)
    witness.note_start()
    victim = job.start()
    victim.wait_until(lambda: len(values(victim.events(), "committed")) >= 3)
    server.stop(immediately=True)
    victim.wait_until(lambda: "waiting for the ledger, nothing is lost" in victim.said)
    assert victim.kill()
    refused = job.start()
    assert refused.wait() == 2
    assert "cannot be reached" in refused.said
    assert "see that the server runs, then resume the job" in refused.said
    server.start()
    witness.look()
    witness.note_start()
    witness.note_start()
    last = job.start()
    assert last.wait() == 1, last.said
    witness.check_the_end()
    assert job.outputs() == expected


def test_a_run_whose_time_is_over_while_the_server_is_away_says_what_is_not_stored(
    server: PostgresServer, ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.outages._STOPPING_SECONDS", 0.5)
    config = make_job(tmp_path, questions(12), ledger_url=ledger_url, lease_seconds=1, **ONE_BY_ONE)
    with JobRun.open(config) as run:

        def fall_down(number: int) -> None:
            if number == 5:
                server.stop(immediately=True)
                threading.Timer(0.2, run.stop.set).start()

        with after_each_commit(fall_down), pytest.raises(AnswersNotStoredError) as lost:
            run.run_shard(0)
        outcome = run.finish([], {0: lost.value})
    assert (outcome.state, outcome.exit_code) == (JobState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert "the last 1 answer(s), since the last commit, are not stored" in outcome.message
    assert "to go on: tokenmill resume job-1" in outcome.message

    server.start()
    before = read_state(ledger_url).answers
    assert len(before) == 5
    resumed, _ = run_job(config)
    assert resumed.message.startswith("12 ok, 0 failed")
    after = read_state(ledger_url).answers
    assert len(after) == 12
    assert {key: after[key] for key in before} == before


def test_an_export_that_is_cut_off_goes_on_where_it_was(
    server: PostgresServer, ledger_url: str
) -> None:
    num_rows = 3000
    with Ledger.open(ledger_url) as ledger:
        job = ledger.create_job(new_job(num_rows=num_rows, num_shards=1))
        ledger.commit(acquire(ledger, job), [ok_row(index) for index in range(num_rows)])
        rows = ledger.iter_completions(job.job_key)
        seen = [next(rows).row_index for _ in range(1500)]
        reader = threading.Thread(target=lambda: seen.extend(row.row_index for row in rows))
        server.stop(immediately=True)
        reader.start()
        reader.join(timeout=0.5)
        assert reader.is_alive()  # it waits
        server.start()
        reader.join()
    assert seen == list(range(num_rows))
