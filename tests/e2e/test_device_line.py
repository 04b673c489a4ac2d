"""Two flow runs on one machine that want the same device: one waits in line and says for whom.

The machine's limit on Prefect's server counts the device as long as somebody has it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_builders import questions, write_job
from job_process import JobProcess
from torture.invariants import read_state

from engine import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def limit_name(prefect_api: str, tmp_path: Path) -> Iterator[str]:
    """Set up this machine's limit, of one device, and give its name."""
    from prefect.client.orchestration import get_client

    done = subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()", "setup-devices",
         "--num-devices", "1", "--lock-dir", str(tmp_path / "locks")],
        env={**os.environ, "PREFECT_API_URL": prefect_api}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = done.stderr.partition("limit: ")[2].split()[0]
    yield name
    with get_client(sync_client=True) as client:
        client.delete_global_concurrency_limit_by_name(name)


def test_the_second_of_two_flow_runs_waits_for_the_device_and_its_log_says_who_has_it(
    prefect_api: str, limit_name: str, tmp_path: Path
) -> None:
    assert _slots(limit_name) == (0, 1)
    runs: dict[str, JobProcess] = {}
    ledgers: dict[str, str] = {}
    for job_id, num_rows in (("first", 600), ("second", 6)):
        folder = tmp_path / job_id
        folder.mkdir()
        ledgers[job_id] = f"sqlite:///{folder / 'ledger.sqlite'}"
        path = write_job(
            folder, questions(num_rows), job_id=job_id, shards=1, commit_rows=2,
            device_lock_dir=str(tmp_path / "locks"),
            engine__runtime={"inline": True, "mock_step_seconds": 0.1},
        )  # fmt: skip
        runs[job_id] = JobProcess(
            folder, "run", str(path), environment={"PREFECT_API_URL": prefect_api}
        )
        runs[job_id].wait_until(lambda: bool(read_state(ledgers["first"], "first").completions))
    line = f"waiting for device mock:0, held by process {runs['first']._process.pid} of job first "
    runs["second"].wait_until(lambda: line in runs["second"].said)
    assert _slots(limit_name) == (1, 1)
    runs["first"].signal_group(signal.SIGTERM)
    assert runs["first"].wait() == ExitCode.INTERRUPTED
    assert runs["second"].wait() == 0
    assert _slots(limit_name) == (0, 1)

    assert "waiting for device" not in runs["first"].said
    assert _task_runs_that_said(line, "second") == ["shard-0000"]
    commits = {
        job_id: [row["committed_at"] for row in read_state(url, job_id).completions.values()]
        for job_id, url in ledgers.items()
    }
    assert len(commits["second"]) == 6
    assert max(commits["first"]) < min(commits["second"])


def _slots(name: str) -> tuple[int, int]:
    """Return how many slots of a limit are in use, and how many there are."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        limit = client.read_global_concurrency_limit_by_name(name)
    return limit.active_slots, limit.limit


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
