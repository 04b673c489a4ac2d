"""Deployments on a real server and worker: watched, refused, retried, cancelled, killed, told of."""

import json
import re
import runpy
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
import yaml
from job_builders import job_mapping, make_job, questions, read_rows, run_job
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling
from prefect_processes import ROOT, RUN, Prefect, Worker, is_alive, wait_until

from flows.ledger import Ledger
from flows.schema import JobState

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROWS = 96
ADHOC, NIGHTLY = "batch-inference/adhoc", "batch-inference/nightly-eval"
# Two engines at a time, and more seconds of work than a command takes to start.
SLOW: dict[str, Any] = {
    "sampling": {"max_tokens": 16, "temperature": 1.0},
    "shards": 4,
    "commit_rows": 2,
    "commit_seconds": 0.05,
    "engine__log_level": "DEBUG",
    "engine__device_ids": [0, 1],
    "engine__runtime": {"mock_step_seconds": 0.25},
}


AUTOMATIONS = runpy.run_path(str(ROOT / "deployments" / "automations.py"))


@pytest.fixture(scope="module")
def told(prefect: Prefect) -> Iterator[list[str]]:
    """Make the automations, and give the list of what the webhook is told."""
    messages: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            messages.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Hook) as server, pytest.MonkeyPatch.context() as patch:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/secret-path"
        patch.setenv("TOKENMILL_WEBHOOK_URL", url)
        with temporary_settings({PREFECT_API_URL: prefect.api_url}):
            AUTOMATIONS["main"]()
            AUTOMATIONS["main"]()  # again, as after an update
        yield messages
        with prefect.client() as client:
            for automation in client.read_automations():
                client.delete_automation(automation.id)
        server.shutdown()


def wait_for_message(told: list[str], start: str) -> str:
    def find() -> str | None:
        return next((text for text in told if text.startswith(start)), None)

    found: str = wait_until(find, f"the webhook is told: {start}")
    return found


def write_yaml(path: Path, job: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return str(path)


def num_ok(job: dict[str, Any], job_id: str) -> int:
    with Ledger.open(job["ledger_url"]) as ledger:
        row = ledger.find_job(job_id)
        return 0 if row is None else row.num_ok


def committed(job: dict[str, Any], job_id: str) -> dict[str, Any]:
    with Ledger.open(job["ledger_url"]) as ledger:
        rows = ledger.iter_completions(ledger.get_job(job_id).job_key)
        return {row.row_id: row for row in rows}


def shard_lines(prefect: Prefect, run_id: UUID) -> list[dict[str, str]]:
    """Return what the shards of every attempt at a run have logged about their rows."""
    of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id]))
    lines: list[str] = []
    with prefect.client() as client:
        while page := client.read_logs(of_run, offset=len(lines)):
            lines += [log.message for log in page]
    return [dict(re.findall(r"(\w+)=(\w+)", line)) for line in lines if line.startswith("shard=")]


def test_the_commands_of_the_readme_answer_the_rows_of_the_night_once_the_night_before_is_over(
    prefect: Prefect, worker: Worker, tmp_path: Path
) -> None:
    before = make_job(
        tmp_path, questions(16), sampling={"max_tokens": 60, "min_tokens": 60}, shards=1,
        engine__scheduler={"max_num_seqs": 16}, engine__runtime={"mock_step_seconds": 0.1},
    )  # fmt: skip
    before_id = prefect.run_deployment(NIGHTLY, config=before.model_dump(mode="json"))
    night = yaml.safe_load((ROOT / "configs/jobs/nightly.yaml").read_text(encoding="utf-8"))
    folder = tmp_path / "night"
    night |= {"job_dir": str(folder), "ledger_url": f"sqlite:///{tmp_path}/night.sqlite"}
    path = write_yaml(tmp_path / "nightly.yaml", night)
    assert RUN.count("configs/jobs/nightly.yaml") == 1
    watched = prefect.command(RUN.replace("configs/jobs/nightly.yaml", path))
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "Flow run finished successfully in 'Completed'." in watched.stdout
    assert len(read_rows(folder / "output.jsonl")) == 16
    run_id = UUID(re.findall(r"UUID: (\S+)", watched.stdout)[0])
    _check_lines(prefect, run_id)
    _check_artifacts(prefect, run_id)
    with prefect.client() as client:
        assert "AwaitingConcurrencySlot" in [s.name for s in client.read_flow_run_states(run_id)]
        ended, began = (
            client.read_flow_run(before_id).end_time,
            client.read_flow_run(run_id).start_time,
        )
    assert ended is not None
    assert began is not None
    assert ended < began


def _check_lines(prefect: Prefect, run_id: UUID) -> None:
    with prefect.client() as client:
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
        shards = {run.id: run.name for run in client.read_task_runs(flow_run_filter=of_run)}
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id])))
    lines = {
        (shards.get(log.task_run_id), log.name, log.message.partition(" ")[0], log.level)
        for log in logs
    }
    assert (None, "flows.planner", "planned", 20) in lines
    assert ("shard-0000", "engine.offline", "engine", 20) in lines
    assert ("shard-0000", "engine.worker.model_worker", "rank=0", 20) in lines
    for index in range(4):
        assert (f"shard-{index:04d}", "flows.tasks", f"shard={index}", 20) in lines


def _check_artifacts(prefect: Prefect, run_id: UUID) -> None:
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    with prefect.client() as client:
        found = {str(a.key): a for a in client.read_artifacts(artifact_filter=of_run)}
    progress = found["shard-0003"]
    assert progress.data == 100.0
    assert re.search(r"^4/4 rows, 0 failed, \d+ tokens/s, \d+ tokens$", progress.description)
    table = json.loads(found["shards"].data)
    assert [row["shard"] for row in table] == ["0000", "0001", "0002", "0003"]
    figures = {(row["rows"], row["failed"], row["resumed"], row["preemptions"]) for row in table}
    assert figures == {(4, 0, 0, 0)}
    job_id = f"nightly-{str(run_id)[:8]}"
    assert f"tokenmill export {job_id} --output answers.jsonl" in found["summary"].data


def test_a_wrong_value_is_refused_with_its_name_and_no_run_is_made(
    prefect: Prefect, worker: Worker
) -> None:
    job = {"name": "a", "sources": [{"path": "a.jsonl"}], "engine": {"model_path": "m"}}
    with prefect.client() as client:
        known = len(client.read_flow_runs())
        with pytest.raises(PrefectHTTPStatusError) as refused:
            prefect.run_deployment(ADHOC, config=job | {"shards": 0})
        assert "Validation failed for field 'config.shards'" in refused.value.response.text
        assert len(client.read_flow_runs()) == known
        schema = client.read_deployment_by_name(ADHOC).parameter_openapi_schema
    form = schema["definitions"]["JobConfig"]["properties"]
    assert form["shards"]["description"].startswith("Parts that are leased, retried and shown")
    assert "path of its YAML file" in schema["properties"]["config"]["description"]


def test_automations_are_made_once_and_tell_of_a_run_with_too_many_bad_rows(
    prefect: Prefect, worker: Worker, told: list[str], tmp_path: Path
) -> None:
    deployed = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text(encoding="utf-8"))
    beat = float(deployed["definitions"]["environment"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert AUTOMATIONS["SILENCE"].total_seconds() >= 3 * beat
    with prefect.client() as client:
        assert len(client.read_automations()) == 2
    job = make_job(tmp_path, [*questions(2), "{"], job_id=None, max_failed_rows=0)
    run_id = prefect.run_deployment(ADHOC, config=job.model_dump(mode="json"))
    prefect.wait_for_state(run_id, "Failed")
    message = wait_for_message(told, f"Flow run job-{str(run_id)[:8]} is Failed: ")
    assert "max_failed_rows" in message
    assert f"/runs/flow-run/{run_id}" in message


def test_cancelled_runs_are_over_within_seconds_and_their_jobs_can_be_resumed(
    prefect: Prefect, worker: Worker, tmp_path: Path
) -> None:
    folders = [tmp_path / "by-command", tmp_path / "by-api"]
    jobs: list[dict[str, Any]] = []
    for folder in folders:
        folder.mkdir()
        jobs.append(make_job(folder, questions(NUM_ROWS), **SLOW).model_dump(mode="json"))
    runs = [prefect.run_deployment(ADHOC, config=job) for job in jobs]
    for job in jobs:
        wait_until(lambda job=job: num_ok(job, "job-1") >= 2, "some rows are done")
    engines = worker.engines()
    assert len(engines) == 4
    with prefect.client() as client:
        client.set_flow_run_state(runs[1], Cancelling())
    assert prefect.command(f"prefect flow-run cancel {runs[0]}").returncode == 0
    for run_id in runs:
        prefect.wait_for_state(run_id, "Cancelled")
    assert not [process for process in engines if is_alive(process)]
    for run_id, folder in zip(runs, folders, strict=True):
        _check_no_shard_went_on(prefect, run_id, folder)
        _resume(folder)


def _check_no_shard_went_on(prefect: Prefect, run_id: UUID, folder: Path) -> None:
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    with prefect.client() as client:
        shards = client.read_task_runs(flow_run_filter=of_run)
    assert len(shards) == 2  # none was begun after the cancel
    assert {shard.run_count for shard in shards} == {1}
    with Ledger.open(make_job(folder, **SLOW).resolved_ledger_url) as ledger:
        row = ledger.get_job("job-1")
        assert row.state is JobState.INTERRUPTED
        # They stopped in the middle: neither was waited for.
        assert all(shard.num_pending for shard in ledger.list_shards(row.job_key))


def _resume(folder: Path) -> None:
    """Run the rest of the job, and make sure that what was there has stayed as it was."""
    config = make_job(folder, **SLOW | {"engine__runtime": {"inline": True}})
    job = config.model_dump(mode="json")
    before = committed(job, "job-1")
    assert 0 < len(before) < NUM_ROWS
    run_job(config)
    after = committed(job, "job-1")
    assert len(after) == NUM_ROWS
    assert {row_id: after[row_id] for row_id in before} == before


def test_a_killed_worker_and_flow_leave_no_engine_behind_and_retry_goes_on_with_the_job(
    prefect: Prefect, worker: Worker, told: list[str], tmp_path: Path
) -> None:
    with prefect.client() as client:
        AUTOMATIONS["save"](client, AUTOMATIONS["crash_vanished_runs"](timedelta(seconds=10)))
    job = job_mapping(tmp_path, questions(NUM_ROWS), **SLOW | {"job_id": None})
    path = write_yaml(tmp_path / "job.yaml", job)
    run_id = prefect.run_deployment(ADHOC, config=path)
    job_id = f"job-{str(run_id)[:8]}"
    wait_until(lambda: num_ok(job, job_id) >= 2, "some rows are done")
    (flow,) = worker.named("prefect.engine")
    engines = worker.engines()
    assert len(engines) == 2
    worker.process.kill()
    late_id = prefect.run_deployment(NIGHTLY, config=path)
    wait_until(lambda: num_ok(job, job_id) >= 6, "the flow goes on without its worker")
    assert len([process for process in engines if is_alive(process)]) == 2
    flow.kill()
    wait_until(
        lambda: not [p for p in (flow, *engines) if is_alive(p)], "the engines end with their flow"
    )
    wait_for_message(told, f"Flow run {job_id} is Crashed: no heartbeat for 10 s: ")
    with prefect.client() as client:
        name = client.read_flow_run(late_id).name
        wait_for_message(told, f"Flow run {name} is Late: ")
        client.delete_flow_run(late_id)

    before = committed(job, job_id)
    assert 6 <= len(before) < NUM_ROWS
    job["engine"]["runtime"] = {"mock_step_seconds": 0.0}
    write_yaml(tmp_path / "job.yaml", job)
    with prefect.client() as client:  # as the button of the UI does it
        client.set_flow_run_state(run_id, AwaitingRetry())
    worker.start()
    prefect.wait_for_state(run_id, "Completed")
    after = committed(job, job_id)
    assert len(after) == NUM_ROWS
    assert {row_id: after[row_id] for row_id in before} == before
    wait_until(
        lambda: (
            sum(int(n["rows_ok"]) for n in shard_lines(prefect, run_id)) == NUM_ROWS - len(before)
        ),
        "each shard has told of the rows that were left",
    )
