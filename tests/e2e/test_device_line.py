"""Two flow runs on one machine that want the same device: one waits in line and says for whom."""

from pathlib import Path
from typing import Any

import pytest
from job_builders import questions, write_job
from job_process import JobProcess
from torture.invariants import read_state

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_second_of_two_flow_runs_waits_for_the_device_and_its_log_says_who_has_it(
    prefect_api: str, tmp_path: Path
) -> None:
    runs: dict[str, JobProcess] = {}
    ledgers: dict[str, str] = {}
    for job_id in ("first", "second"):
        folder = tmp_path / job_id
        folder.mkdir()
        ledgers[job_id] = f"sqlite:///{folder / 'ledger.sqlite'}"
        path = write_job(
            folder, questions(30), job_id=job_id, shards=1, commit_rows=2,
            device_lock_dir=str(tmp_path / "locks"),
            engine__runtime={"inline": True, "mock_step_seconds": 0.1},
        )  # fmt: skip
        runs[job_id] = JobProcess(
            folder, "run", str(path), environment={"PREFECT_API_URL": prefect_api}
        )
        if job_id == "first":
            runs[job_id].wait_until(lambda: bool(read_state(ledgers["first"], "first").completions))
    assert [runs[job_id].wait() for job_id in ("first", "second")] == [0, 0]

    pid = runs["first"]._process.pid
    line = f"waiting for device mock:0, held by process {pid} of job first since "
    assert line in runs["second"].said
    assert "waiting for device" not in runs["first"].said
    assert _task_runs_that_said(line, "second") == ["shard-0000"]
    commits = {
        job_id: [row["committed_at"] for row in read_state(url, job_id).completions.values()]
        for job_id, url in ledgers.items()
    }
    assert [len(times) for times in commits.values()] == [30, 30]
    assert max(commits["first"]) < min(commits["second"])


def _task_runs_that_said(line: str, job_id: str) -> list[str]:
    """Return the names of the task runs of a flow run under which Prefect shows the line."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterName,
        LogFilter,
        LogFilterFlowRunId,
    )

    by_name = FlowRunFilter(name=FlowRunFilterName(any_=[job_id]))
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(flow_run_filter=by_name)
        names: dict[Any, str] = {
            run.id: run.name for run in client.read_task_runs(flow_run_filter=by_name)
        }
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
    return [names[log.task_run_id] for log in logs if log.message.startswith(line)]
