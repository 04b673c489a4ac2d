"""A run that is told to stop while the ledger's server is away ends in time, and loses nothing."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_builders import questions, write_job
from job_process import JobProcess
from postgres_server import PostgresServer, running_postgres

from flows.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
NUM_ROWS = 120
# What Prefect leaves to a run that it cancels, before it kills it.
GRACE_SECONDS = 30


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with running_postgres() as started:
        yield started


def test_a_run_that_is_to_stop_does_not_wait_for_a_server_that_went_away(
    prefect_home: Path, prefect_api: str, server: PostgresServer, tmp_path: Path
) -> None:
    job_file = write_job(
        tmp_path,
        questions(NUM_ROWS),
        ledger_url=None,
        commit_rows=NUM_ROWS,  # so that the engine has never to wait
        commit_seconds=0.05,
        engine__log_level="DEBUG",
        engine__runtime={"mock_step_seconds": 0.02},
    )
    environment = {
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_API_URL": prefect_api,
        "TOKENMILL_LEDGER_URL": server.url,
    }
    with Ledger.open(server.url) as ledger:
        run = JobProcess(tmp_path, "run", str(job_file), environment=environment)
        try:
            run.wait_until(lambda: any(job.num_ok >= 8 for job in ledger.list_jobs()))
            server.stop(immediately=True)
            run.wait_until(lambda: "waiting for the ledger, nothing is lost" in run.said)
            num_before = run.completed().total()
            run.wait_until(lambda: run.completed().total() >= num_before + 3)  # it goes on
            run.signal_group(signal.SIGTERM)
            stopped_at = time.monotonic()
            assert run.wait() == 130, run.said
        finally:
            run.end()
        seconds = time.monotonic() - stopped_at
        assert seconds < GRACE_SECONDS, run.said
        said = run.said
        assert "Traceback" not in said
        found = re.search(
            r"stopped: .* the last (\d+) answer\(s\), since the last commit, are", said
        )
        assert found is not None, said
        assert re.search(r"interrupted: .* cannot be reached.* tokenmill resume job-1\n", said)

        server.start()
        num_stored = ledger.get_job("job-1").num_ok
        # A commit whose acknowledgement was lost counts as not stored.
        assert run.completed().total() <= num_stored + int(found[1])
        resumed = JobProcess(tmp_path, "resume", "job-1", environment=environment)
        assert resumed.wait() == 0, resumed.said
        assert ledger.get_job("job-1").num_ok == NUM_ROWS
        assert NUM_ROWS < resumed.completed().total() <= NUM_ROWS + int(found[1])
    lines = (tmp_path / "runs" / "job-1" / "output.jsonl").read_bytes().splitlines()
    assert len(lines) == NUM_ROWS
