"""A Prefect server that goes away: shards go on, the ledger is right, and so is the UI afterwards."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from job_builders import make_job, questions, read_rows, write_job
from job_process import JobProcess
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect_processes import Prefect, Worker, wait_until
from torture.invariants import LedgerState, check_state, read_state

from flows.config import JobConfig
from flows.preparation import output_path_of, resolve

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

# With the seconds that a server takes to start it is away for some fifteen.
OUTAGE_SECONDS = 9.0
# Two engines, and shards that are short enough to begin and to end while the server is away.
JOB: dict[str, Any] = {
    "shards": 8,
    "sampling": {"max_tokens": 40, "temperature": 1.0},
    "commit_rows": 2,
    "commit_seconds": 0.1,
    "engine__device_ids": [0, 1],
    "engine__runtime": {"inline": True, "mock_step_seconds": 0.07},
}


def state_of(config: JobConfig) -> LedgerState:
    assert config.job_id is not None
    return read_state(config.resolved_ledger_url, config.job_id)


def num_answers(config: JobConfig) -> int:
    path = output_path_of(resolve(config))
    return len(read_rows(path)) if path.is_file() else 0


def longest_pause(state: LedgerState, since: float, until: float) -> float:
    """Return the longest time without a commit between two moments of the clock."""
    commits = sorted(row["committed_at"] for row in state.completions.values())
    within = [since, *(at for at in commits if since < at < until), until]
    return max(later - earlier for earlier, later in pairwise(within))


def test_shards_go_on_and_begin_while_the_server_is_down_and_the_run_is_shown_right_afterwards(
    prefect: Prefect, worker: Worker, tmp_path: Path
) -> None:
    config = make_job(tmp_path, questions(72), **JOB)
    run_id = prefect.run_deployment("batch-inference/adhoc", config=config.model_dump(mode="json"))
    wait_until(lambda: len(state_of(config).completions) >= 4, "both shards answer")
    stopped_at = time.time()
    prefect.stop()
    time.sleep(OUTAGE_SECONDS)
    prefect.start()
    up_again_at = time.time()
    prefect.wait_for_state(run_id, "Completed")
    state = state_of(config)
    assert longest_pause(state, stopped_at, up_again_at) < OUTAGE_SECONDS
    assert any(stopped_at < shard["started_at"] < up_again_at for shard in state.shards)
    assert {shard["attempt"] for shard in state.shards} == {1}  # no lease was lost
    check_state(state, 72)
    assert num_answers(config) == 72
    _check_what_is_shown(prefect, run_id)


def _check_what_is_shown(prefect: Prefect, run_id: UUID) -> None:
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    with prefect.client() as client:
        task_runs = client.read_task_runs(flow_run_filter=of_run)
        artifacts = {str(a.key) for a in client.read_artifacts(flow_run_filter=of_run)}
    assert {run.name: run.state_name for run in task_runs} == {
        f"shard-{index:04d}": "Completed" for index in range(8)
    }
    assert {"shards", "summary"} <= artifacts


def test_a_job_ends_with_every_row_and_its_output_when_the_server_is_gone_for_good(
    prefect_home: Path, tmp_path: Path
) -> None:
    config = make_job(tmp_path, questions(24), **JOB)
    job = JobProcess(
        tmp_path, "run", str(write_job(tmp_path, **JOB)),
        # As many tries as by default take Prefect more than two minutes.
        environment={"PREFECT_HOME": str(prefect_home), "PREFECT_CLIENT_MAX_RETRIES": "0"},
    )  # fmt: skip
    job.wait_until(lambda: len(state_of(config).completions) >= 4)
    (server,) = [p for p in job.descendants() if "prefect_server" in " ".join(p.cmdline())]
    server.kill()
    assert job.wait() == 0, job.said
    state = state_of(config)
    assert state.job is not None
    assert state.job["state"] == "finished"
    check_state(state, 24)
    assert num_answers(config) == 24
    assert "Prefect's server does not answer any more" in job.said
    assert "Traceback" not in job.said
