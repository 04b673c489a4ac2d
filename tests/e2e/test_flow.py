"""The flow as Prefect shows it: names, states, messages, progress; and the command around it."""

import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
from job_builders import make_job, questions, read_rows, run_job, write_job
from ledger_builders import ELSEWHERE

from engine import ConfigError, ExitCode, WorkerError, WorkerFailure
from flows.cli import main
from flows.config import JobConfig
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("prefect_api")]


def run_flow(config: JobConfig | str) -> Any:
    from flows.batch_inference import batch_inference

    return batch_inference(config, return_state=True)


def flow_run_id_of(state: Any) -> UUID:
    flow_run_id: UUID = state.state_details.flow_run_id
    return flow_run_id


def task_runs_of(state: Any) -> dict[str, str]:
    """Return the name of each task run and the name of its state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    of_this_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id_of(state)]))
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=of_this_run)
    return {run.name: run.state_name or "" for run in runs}


def artifacts_of(state: Any) -> dict[str, Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        ArtifactFilter,
        ArtifactFilterFlowRunId,
    )

    of_this_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id_of(state)]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=of_this_run)
    return {str(artifact.key): artifact for artifact in found}


class TestFlow:
    def test_a_job_is_a_flow_run_of_its_name_with_a_task_for_each_shard(
        self, tmp_path: Path
    ) -> None:
        from prefect.client.orchestration import get_client

        config = make_job(tmp_path, questions(9), shards=3)
        state = run_flow(config)
        assert (state.name, state.message.split(";")[0]) == ("Completed", "9 ok, 0 failed")
        assert task_runs_of(state) == {
            "shard-0000": "Completed", "shard-0001": "Completed", "shard-0002": "Completed",
        }  # fmt: skip
        with get_client(sync_client=True) as client:
            assert client.read_flow_run(flow_run_id_of(state)).name == "job-1"
        assert len(read_rows(output_path_of(config))) == 9

    def test_progress_is_shown_for_each_shard_and_a_summary_at_the_end(
        self, tmp_path: Path
    ) -> None:
        state = run_flow(make_job(tmp_path, questions(4), shards=2))
        artifacts = artifacts_of(state)
        assert set(artifacts) == {"shard-0000", "shard-0001", "shards", "summary"}
        progress = artifacts["shard-0001"]
        assert (progress.type, progress.data) == ("progress", 100.0)
        assert progress.description.startswith("2/2 rows, 0 failed, ")
        assert progress.task_run_id is not None  # it is shown with its shard
        assert "finished: 4 ok, 0 failed" in artifacts["summary"].data

    def test_failed_rows_do_not_fail_the_flow(self, tmp_path: Path) -> None:
        state = run_flow(make_job(tmp_path, [*questions(2), "{"]))
        assert (state.name, state.message.split(";")[0]) == ("Completed", "2 ok, 1 failed")

    def test_a_failed_shard_leaves_the_others_their_work_and_says_how_to_go_on(
        self, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(9), shards=3)
        with JobRun.open(config) as run:
            run.ledger.acquire_shard(run.job.job_key, 1, owner=ELSEWHERE, lease_seconds=60)
        state = run_flow(config)
        assert state.name == "Failed"
        assert "shard(s) 1 failed: job 'job-1': shard 1 is held by process 1" in state.message
        assert "6 ok, 0 failed, 3 pending; to go on: tokenmill resume job-1" in state.message
        assert task_runs_of(state) == {
            "shard-0000": "Completed", "shard-0001": "Failed", "shard-0002": "Completed",
        }  # fmt: skip
        with Ledger.open(config.resolved_ledger_url) as ledger:
            assert ledger.get_job("job-1").num_ok == 6

    def test_a_run_that_loses_its_concurrency_slot_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from prefect._internal.concurrency.cancellation import WatcherThreadCancelScope

        from flows import tasks

        as_completed = tasks.as_completed
        with WatcherThreadCancelScope() as scope:  # as Prefect holds a slot for a flow run

            def lose_the_slot(futures: Any) -> Any:
                if not scope.cancelled():
                    thread = Thread(target=scope.cancel)
                    thread.start()
                    thread.join()
                return as_completed(futures)

            monkeypatch.setattr(tasks, "as_completed", lose_the_slot)
            state = run_flow(make_job(tmp_path, questions(9), shards=3))
        assert scope.cancelled()
        assert (state.name, state.message.split(";")[0]) == ("Completed", "9 ok, 0 failed")

    def test_a_fault_of_the_configuration_is_the_message_of_the_flow(self, tmp_path: Path) -> None:
        state = run_flow(make_job(tmp_path, [*questions(1), *questions(1)]))
        assert state.name == "Failed"
        assert state.message.startswith("ConfigError: two rows have the id 'q0'")
        assert isinstance(state.result(raise_on_failure=False), ConfigError)
        assert task_runs_of(state) == {}

    def test_a_job_without_an_id_is_named_by_its_flow_run_so_that_retry_finds_it(
        self, tmp_path: Path
    ) -> None:
        state = run_flow(make_job(tmp_path, questions(1), job_id=None))
        assert state.result().job_id == f"job-{str(flow_run_id_of(state))[:8]}"

    def test_a_job_may_be_given_as_the_path_of_its_file(self, tmp_path: Path) -> None:
        from prefect.client.orchestration import get_client

        state = run_flow(str(write_job(tmp_path, questions(1), job_id=None)))
        with get_client(sync_client=True) as client:
            name = client.read_flow_run(flow_run_id_of(state)).name
        assert state.result().job_id == name == f"job-{str(flow_run_id_of(state))[:8]}"

    def test_a_wrong_line_of_a_file_is_the_message_of_the_flow(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, questions(1), shard=2)
        state = run_flow(str(path))
        assert state.name == "Failed"
        assert f"ConfigError: {path}: 1 wrong field(s)" in state.message
        assert "shard: no such key; did you mean shards?" in state.message
        assert task_runs_of(state) == {}

    def test_a_job_is_resumed_through_the_same_flow(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(4), shards=2)
        with JobRun.open(config) as run:
            run.run_shard(0)
        state = run_flow(config)
        assert state.message.split(";")[0] == "4 ok, 0 failed"
        assert list(task_runs_of(state)) == ["shard-0001"]


class TestRetries:
    @pytest.mark.parametrize(
        ("error", "is_retried"),
        [
            (WorkerError("no device", failure=WorkerFailure.START_FAILED), True),
            (WorkerError("killed", failure=WorkerFailure.DIED), False),
            (ConfigError("wrong"), False),
            (RuntimeError("a fault of ours"), False),
        ],
    )
    def test_prefect_retries_only_an_engine_that_could_not_start(
        self, error: Exception, is_retried: bool
    ) -> None:
        from prefect.states import Failed

        from flows.tasks import is_start_failure, run_shard_task

        assert is_start_failure(None, None, Failed(data=error)) is is_retried
        assert run_shard_task.retry_condition_fn is is_start_failure


@pytest.mark.usefixtures("prefect_api", "log_settings_as_before")
class TestCommand:
    @pytest.fixture
    def run_command(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> Any:
        def run(path: Path) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["tokenmill", "run", str(path)])
            with pytest.raises(SystemExit) as caught:
                main()
            return (int(caught.value.code or 0), *capfd.readouterr())

        return run

    def test_a_run_ends_with_a_table_and_what_to_do_next(
        self, run_command: Any, tmp_path: Path
    ) -> None:
        code, out, err = run_command(write_job(tmp_path, questions(4)))
        assert code == ExitCode.OK
        assert "4 / 0 / 0" in out
        assert "tokenmill export job-1" in out
        assert str(tmp_path / "runs" / "job-1" / "output.jsonl") in out
        assert err.splitlines()[-1].startswith("4 ok, 0 failed")
        assert "progress job=job-1 rows=4/4" in err

    def test_a_bad_line_is_named_before_an_engine_starts_and_the_exit_code_says_it(
        self, run_command: Any, tmp_path: Path
    ) -> None:
        code, out, err = run_command(write_job(tmp_path, [*questions(2), '{"id": "x", "prompt":']))
        assert code == ExitCode.ROWS_FAILED
        assert "2 / 1 / 0" in out
        assert "Traceback" not in err
        named = err.index(f"bad row: bad_json: {tmp_path}/rows.jsonl, line 3: not valid JSON")
        assert "write one JSON object on each line" in err
        assert named < err.index("engine ready")

    def test_two_rows_of_one_id_are_one_message_before_an_engine_starts(
        self, run_command: Any, tmp_path: Path
    ) -> None:
        code, out, err = run_command(write_job(tmp_path, [*questions(2), *questions(1)]))
        assert (code, out) == (ExitCode.USER_MUST_ACT, "")
        rows = tmp_path / "rows.jsonl"
        assert f"ConfigError\ntwo rows have the id 'q0': {rows}, line 1 and {rows}, line 3;" in err
        assert "columns.id: null" in err
        assert err.count("two rows have the id") == 1
        assert "Traceback" not in err
        assert "engine ready" not in err

    def test_a_shard_that_failed_is_told_with_the_way_to_go_on(
        self, run_command: Any, tmp_path: Path
    ) -> None:
        path = write_job(tmp_path, questions(4))
        with JobRun.open(make_job(tmp_path)) as run:
            run.ledger.acquire_shard(run.job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
        code, out, err = run_command(path)
        assert code == ExitCode.USER_MUST_ACT
        assert "2 / 0 / 2" in out
        assert "tokenmill resume job-1" in out
        assert "shard 0 is held by process 1 on host elsewhere" in err

    def test_a_command_gives_the_signals_back(self, run_command: Any, tmp_path: Path) -> None:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        run_command(write_job(tmp_path, questions(1)))
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_without_prefect_and_one_with_it_write_the_same(tmp_path: Path) -> None:
    rows = questions(6)
    with_it = make_job(tmp_path, rows, job_dir=str(tmp_path / "a"))
    without = make_job(tmp_path, rows, job_id="job-2", job_dir=str(tmp_path / "b"))
    run_flow(with_it)
    run_job(without)
    assert output_path_of(with_it).read_bytes() == output_path_of(without).read_bytes()
