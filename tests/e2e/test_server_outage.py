"""A Prefect server that goes away: shards go on, the ledger is right, and so is the UI afterwards."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, read_rows, write_job
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect_processes import ROOT, Prefect, free_port, running_server, wait_until
from torture.invariants import LedgerState, check_state, read_state

from flows.preparation import output_path_of, resolve

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = "prefect server start --host 127.0.0.1"
OUTAGE_SECONDS = 15.0
# Two engines, and shards that are short enough to begin and to end while the server is away.
JOB: dict[str, Any] = {
    "shards": 8,
    "sampling": {"max_tokens": 40, "temperature": 1.0},
    "commit_rows": 2,
    "commit_seconds": 0.1,
    "engine__device_ids": [0, 1],
    "engine__runtime": {"inline": True, "mock_step_seconds": 0.07},
}


class Server:
    """A server that can be stopped, and started again on its port and its database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._exits = ExitStack()

    def start(self) -> Prefect:
        return self._exits.enter_context(running_server(self._folder, SERVER, self._port))

    def stop(self) -> None:
        self._exits.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


class Job:
    """`tokenmill run` as a process of its own."""

    def __init__(
        self, prefect: Prefect, folder: Path, job_id: str, num_rows: int, **settings: str
    ) -> None:
        changes = JOB | {"job_id": job_id}
        self.config = make_job(folder, questions(num_rows), **changes)
        self.job_id = job_id
        self._log_path = folder / "said.txt"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from flows.cli import main; main()", "run",
                 str(write_job(folder, **changes))],
                cwd=ROOT, env=prefect.environment | settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    @property
    def state(self) -> LedgerState:
        return read_state(self.config.resolved_ledger_url, self.job_id)

    @property
    def num_done(self) -> int:
        return len(self.state.completions)

    @property
    def num_answers(self) -> int:
        path = output_path_of(resolve(self.config))
        return len(read_rows(path)) if path.is_file() else 0

    def longest_pause(self, since: float, until: float) -> float:
        """Return the longest time without a commit between two moments of the clock."""
        commits = sorted(row["committed_at"] for row in self.state.completions.values())
        within = [since, *(at for at in commits if since < at < until), until]
        return max(later - earlier for earlier, later in pairwise(within))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Give a list of jobs that are ended with the test."""
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


def test_shards_go_on_and_begin_while_the_server_is_down_and_the_run_is_shown_right_afterwards(
    server: Server, jobs: list[Job], tmp_path: Path
) -> None:
    prefect = server.start()
    job = Job(prefect, tmp_path, "down", num_rows=176)
    jobs.append(job)
    wait_until(lambda: job.num_done >= 4, "both shards answer")
    stopped_at = time.time()
    server.stop()
    time.sleep(OUTAGE_SECONDS)
    up_again_at = time.time()
    server.start()
    assert job.process.wait(90) == 0, job.said
    assert job.longest_pause(stopped_at, up_again_at) < 3
    shards = job.state.shards
    assert any(stopped_at < shard["started_at"] < up_again_at for shard in shards)
    assert {shard["attempt"] for shard in shards} == {1}  # no lease was lost
    check_state(job.state, 176)
    assert job.num_answers == 176
    _check_what_is_shown(prefect, job)


def _check_what_is_shown(prefect: Prefect, job: Job) -> None:
    by_name = FlowRunFilter(name=FlowRunFilterName(any_=[job.job_id]))
    with prefect.client() as client:
        (flow_run,) = client.read_flow_runs(flow_run_filter=by_name)
        task_runs = client.read_task_runs(flow_run_filter=by_name)
        artifacts = {str(a.key) for a in client.read_artifacts(flow_run_filter=by_name)}
    assert flow_run.state_name == "Completed"
    assert {run.name: run.state_name for run in task_runs} == {
        f"shard-{index:04d}": "Completed" for index in range(8)
    }
    assert {"shards", "summary"} <= artifacts


def test_a_job_ends_with_every_row_and_its_output_when_the_server_is_gone_for_good(
    server: Server, jobs: list[Job], tmp_path: Path
) -> None:
    # As many tries as by default take Prefect more than two minutes.
    impatient = {"PREFECT_CLIENT_MAX_RETRIES": "1"}
    job = Job(server.start(), tmp_path, "gone", num_rows=40, **impatient)
    jobs.append(job)
    wait_until(lambda: job.num_done >= 4, "both shards answer")
    server.stop()
    wait_until(lambda: job.num_answers == 40, "the output is written")
    state = job.state
    assert state.job is not None
    assert state.job["state"] == "finished"
    check_state(state, 40)
    assert job.process.wait(90) == 0, job.said
    assert "Prefect's server does not answer any more" in job.said
    assert "Traceback" not in job.said
