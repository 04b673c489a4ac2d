"""A Prefect server that goes away: shards go on, the ledger is right, and so is the UI afterwards."""

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from job_builders import make_job, questions, read_rows, write_job
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect_processes import ROOT, Prefect, Worker, wait_until
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
    assert longest_pause(state, stopped_at, up_again_at) < 3
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
    prefect: Prefect, worker: Worker, tmp_path: Path
) -> None:
    config = make_job(tmp_path, questions(40), **JOB)
    # As many tries as by default take Prefect more than two minutes.
    environment = prefect.environment | {"PREFECT_CLIENT_MAX_RETRIES": "0"}
    log_path = tmp_path / "said.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from flows.cli import main; main()", "run",
             str(write_job(tmp_path, **JOB))],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    worker.stop()  # one that has missed its server asks again late
    try:
        wait_until(lambda: len(state_of(config).completions) >= 4, "both shards answer")
        prefect.stop()
        wait_until(lambda: num_answers(config) == 40, "the output is written")
        state = state_of(config)
        assert state.job is not None
        assert state.job["state"] == "finished"
        check_state(state, 40)
        assert process.wait(90) == 0, log_path.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()
        prefect.stop()
        prefect.start()
        worker.start()
    said = log_path.read_text(encoding="utf-8")
    assert "Prefect's server does not answer any more" in said
    assert "Traceback" not in said
