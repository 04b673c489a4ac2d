"""Commands that change a job, or look at it twice: retry-failed, run --fork, verify, status."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, read_rows, run_job, stored_rows, write_job, write_rows
from ledger_builders import ELSEWHERE
from sqlalchemy import text
from terminal import Terminal

from engine import ExitCode
from flows import job_changes
from flows.config import JobConfig
from flows.experiments import list_experiments
from flows.job_run import JobRun
from flows.ledger import JobRow, Ledger, Owner
from flows.ledger_check import check_job
from flows.schema import JobState

SLOW = {"id": "slow", "prompt": "slow", "timeout_seconds": 1e-9}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capfd)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    """Note which jobs the command line starts, and run them without Prefect."""
    configs: list[JobConfig] = []

    def run_without_prefect(config: JobConfig) -> ExitCode:
        configs.append(config)
        outcome, _ = run_job(config)
        return outcome.exit_code

    monkeypatch.setattr("flows.cli.run_in_foreground", run_without_prefect)
    return configs


def job_of(config: JobConfig, job_id: str | None = None) -> JobRow:
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.get_job(job_id or str(config.job_id))
        assert [result for result in check_job(ledger, job.job_id) if not result.is_ok] == []
        return job


class TestRetryFailed:
    def test_failed_rows_are_run_again_and_no_other(
        self, terminal: Terminal, started: list[JobConfig], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [*questions(3), SLOW, "{not json"])
        run_job(config)
        output = tmp_path / "runs" / "job-1" / "output.jsonl"
        before = output.read_bytes()
        ended = terminal("retry-failed", "job-1", "--ledger", config.resolved_ledger_url)
        assert ended.code == ExitCode.ROWS_FAILED
        assert ended.err.splitlines()[0] == (
            "1 failed answers are asked again (timeout 1); 1 bad rows of the input stay as they "
            "are, for the plan would find them again: mend the input and run the job with --fork"
        )
        assert len(started) == 1
        with Ledger.open(config.resolved_ledger_url) as ledger:
            newest, _ = list_experiments(ledger)
        assert newest.num_new_rows == 1
        job = job_of(config)
        assert (job.state, job.num_ok, job.num_error) == (JobState.FINISHED, 3, 2)
        assert output.read_bytes() == before

    def test_where_nothing_can_be_asked_again_nothing_is_started(
        self, terminal: Terminal, started: list[JobConfig], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(2))
        run_job(config)
        ended = terminal("retry-failed", "job-1", "--ledger", config.resolved_ledger_url)
        assert (ended.code, ended.err) == (0, "no failed answer can be asked again\n")
        assert started == []
        assert job_of(config).state is JobState.FINISHED

    def test_codes_are_chosen_and_a_misspelt_one_is_refused(
        self, terminal: Terminal, started: list[JobConfig], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [*questions(2), SLOW])
        run_job(config)
        command = ("retry-failed", "job-1", "--ledger", config.resolved_ledger_url, "--code")
        ended = terminal(*command, "timeot")
        assert ended.code == 2
        assert "has no failed row with the code timeot; its failed rows have: timeout" in ended.err
        assert started == []
        terminal(*command, "timeout")
        assert len(started) == 1

    def test_a_job_that_is_driven_is_refused_by_name(
        self, terminal: Terminal, started: list[JobConfig], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [*questions(2), SLOW])
        run_job(config)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            key = ledger.get_job("job-1").job_key
            ledger.acquire_job(key, owner=ELSEWHERE, lease_seconds=60)
        ended = terminal("retry-failed", "job-1", "--ledger", config.resolved_ledger_url)
        assert ended.code == 2
        assert "job 'job-1' is driven by process 1 on host elsewhere" in ended.err
        assert started == []


class TestFork:
    @pytest.fixture
    def parent(self, tmp_path: Path) -> JobConfig:
        """Give a finished job of five sampled rows, whose seed was drawn."""
        config = make_job(tmp_path, [*questions(4), SLOW], seed=None)
        run_job(config)
        return config

    def change(self, tmp_path: Path, parent: JobConfig) -> None:
        """Mend a row, add one, leave one out, and move the others."""
        rows = [{"id": "new", "prompt": "new"}, {"id": "q0", "prompt": "mended"}, *questions(4)[2:]]
        write_rows(tmp_path / "rows.jsonl", [*rows, {"id": "slow", "prompt": "slow"}])

    def test_what_still_holds_is_not_asked_again(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path
    ) -> None:
        self.change(tmp_path, parent)
        write_job(tmp_path, seed=None, job_id=None, job_dir=None, shards=3)
        ended = terminal("run", str(tmp_path / "job.yaml"), "--fork", "job-1")
        assert ended.code == 0
        (config,) = started
        assert (config.forked_from, config.job_id) == ("job-1", None)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            newest, _ = list_experiments(ledger)
            old, new = ledger.get_job("job-1"), ledger.get_job(newest.job_id)
        assert newest.num_new_rows == 3  # new, mended, and the one that failed
        assert (new.forked_from, new.seed, new.num_ok) == ("job-1", old.seed, 5)
        answers = {
            row.row_id: row for row in stored_rows(config.model_copy(update={"job_id": new.job_id}))
        }
        for row in stored_rows(parent):
            if row.row_id in ("q2", "q3"):
                assert answers[row.row_id].text == row.text
                assert answers[row.row_id].token_ids == row.token_ids
        assert job_of(parent) == old
        assert job_of(config, new.job_id).num_pending == 0

    def test_its_output_is_that_of_a_job_that_was_asked_everything(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path
    ) -> None:
        self.change(tmp_path, parent)
        write_job(tmp_path, seed=None, job_id="fork", job_dir=str(tmp_path / "fork"))
        terminal("run", str(tmp_path / "job.yaml"), "--fork", "job-1")
        undisturbed = make_job(
            tmp_path, seed=job_of(parent).seed, job_id="whole", job_dir=str(tmp_path / "whole")
        )
        run_job(undisturbed)
        forked, whole = (read_rows(tmp_path / name / "output.jsonl") for name in ("fork", "whole"))
        assert forked == whole

    @pytest.fixture
    def interrupted(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> JobConfig:  # fmt: skip
        """Give a fork that was interrupted when it had taken two rows over."""
        stored: list[None] = []
        store = job_changes._store

        def store_two(*arguments: Any) -> None:
            if len(stored) == 2:
                raise KeyboardInterrupt
            stored.append(store(*arguments))

        config_path = write_job(tmp_path, seed=None, job_id="fork", job_dir=str(tmp_path / "fork"))
        with monkeypatch.context() as patched:
            patched.setattr(job_changes, "_BATCH_ROWS", 1)
            patched.setattr(job_changes, "_store", store_two)
            terminal("run", str(config_path), "--fork", "job-1")
        config = make_job(tmp_path, seed=None, job_id="fork")
        assert job_of(config).num_ok == 2
        return config

    def num_new_rows(self, config: JobConfig) -> int:
        with Ledger.open(config.resolved_ledger_url) as ledger:
            return list_experiments(ledger, job_id="fork")[0].num_new_rows

    def test_a_fork_that_was_interrupted_takes_over_the_rest_when_it_is_resumed(
        self, terminal: Terminal, interrupted: JobConfig
    ) -> None:
        terminal("resume", "fork", "--ledger", interrupted.resolved_ledger_url)
        assert self.num_new_rows(interrupted) == 1  # the row that failed in the other job
        assert job_of(interrupted).num_ok == 4

    def test_a_fork_goes_on_by_itself_when_the_other_job_is_gone(
        self, terminal: Terminal, interrupted: JobConfig
    ) -> None:
        url = interrupted.resolved_ledger_url
        terminal("ledger", "prune", "--older-than", "0d", "--ledger", url)
        terminal("resume", "fork", "--ledger", url)
        assert self.num_new_rows(interrupted) == 3
        assert job_of(interrupted).num_ok == 4

    def test_the_id_of_the_other_job_is_not_taken(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path
    ) -> None:
        write_job(tmp_path, seed=None, job_dir=None, engine__log_dir=str(tmp_path / "logs"))
        assert terminal("run", str(tmp_path / "job.yaml"), "--fork", "job-1").code == 1
        with Ledger.open(parent.resolved_ledger_url) as ledger:
            assert len(ledger.list_jobs()) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"job_id": "x"}, "is the folder of job 'job-1'; name another, or leave it out"),
            ({"job_id": "other", "job_dir": None}, "'other' exists and is no fork of 'job-1'"),
            (
                {"job_id": "x", "job_dir": None, "engine__max_model_len": 77},
                "none of its answers would hold\n  max_model_len: was",
            ),
        ],
    )
    def test_what_makes_no_sense_is_refused_before_anything_starts(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path,
        changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        run_job(make_job(tmp_path, job_id="other", job_dir=str(tmp_path / "other")))
        write_job(tmp_path, seed=None, **changes)
        ended = terminal("run", "job.yaml", "--fork", "job-1")
        assert ended.code == 2
        assert message in ended.err
        with Ledger.open(parent.resolved_ledger_url) as ledger:
            assert {job.job_id for job in ledger.list_jobs()} == {"job-1", "other"}

    def test_a_job_to_fork_that_is_not_there_is_a_message(
        self, terminal: Terminal, parent: JobConfig, tmp_path: Path
    ) -> None:
        write_job(tmp_path, job_id=None, job_dir=None)
        ended = terminal("run", str(tmp_path / "job.yaml"), "--fork", "job-2")
        assert ended.code == 2
        assert "the ledger has no job 'job-2'; did you mean job-1?" in ended.err

    def test_a_refused_resume_says_how_to_fork(
        self, terminal: Terminal, started: list[JobConfig], parent: JobConfig, tmp_path: Path
    ) -> None:
        self.change(tmp_path, parent)
        ended = terminal("resume", "job-1", "--ledger", parent.resolved_ledger_url)
        assert ended.code == 2
        assert "`tokenmill run CONFIG --fork job-1` takes over the answers" in ended.err
        assert job_of(parent).state is JobState.FINISHED


class TestVerify:
    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flows.cli.set_up_logging", lambda level: None)

    def test_a_difference_is_a_line_and_an_exit_code(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [{"id": "[bold]a", "prompt": "a"}, *questions(3)])
        run_job(config)
        command = ("verify", "job-1", "--sample", "100%", "--ledger", config.resolved_ledger_url)
        ended = terminal(*command)
        assert (ended.code, ended.out) == (0, "")
        assert ended.err.splitlines()[-1] == (
            "passed: 4 of 4 ok rows were run again (seed 0), 0 differ (0.00%, tolerated 5.00%), "
            "0 could not be verified"
        )
        with Ledger.open(config.resolved_ledger_url) as ledger:
            sql = text("UPDATE payloads SET text = 'x' WHERE row_index = 0")
            ledger.database.write(lambda connection: connection.execute(sql))
        ended = terminal(*command)
        assert ended.code == 1
        assert "[bold]a" in ended.out
        assert "text, though its tokens are the same" in ended.out
        assert "failed: 4 of 4 ok rows were run again (seed 0), 1 differ (25.00%" in ended.err
        assert terminal(*command, "--tolerance", "0.25").code == 0
        shown = json.loads(terminal(*command, "--json").out)
        assert (shown["num_verified"], shown["num_differing"], shown["has_passed"]) == (4, 1, False)
        assert shown["differences"][0]["row_id"] == "[bold]a"

    def test_rows_that_cannot_be_verified_are_named(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(2))
        run_job(config)
        write_rows(
            tmp_path / "rows.jsonl", [{"id": "q0", "prompt": "Question 0"}, *questions(2)[1:]]
        )
        ended = terminal("verify", "job-1", "--sample", "2", "--ledger", config.resolved_ledger_url)
        assert ended.code == 0
        assert "not verified: q0: the input does not have the row" in ended.err

    def test_a_size_that_is_none_is_a_message(self, terminal: Terminal, tmp_path: Path) -> None:
        ended = terminal("verify", "job-1", "--sample", "many")
        assert ended.code == 2
        assert "--sample 'many': wanted a share of the rows" in ended.err


class TestStatus:
    @pytest.fixture
    def left(self, tmp_path: Path) -> JobConfig:
        """Give a job whose driver was killed in its first shard."""
        config = make_job(tmp_path, questions(4))
        with JobRun.open(config) as run:
            run.run_shard(0)
        gone = replace(Owner.current(), start_time=1, pid=77)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            key = ledger.get_job("job-1").job_key
            ledger.acquire_job(key, owner=gone, lease_seconds=60)
            ledger.set_job_state(key, JobState.RUNNING)
            ledger.acquire_shard(key, 1, owner=gone, lease_seconds=60)
        return config

    def test_a_job_whose_driver_is_gone_is_interrupted_and_says_why(
        self, terminal: Terminal, left: JobConfig
    ) -> None:
        host = Owner.current().host
        for command in (("status",), ("status", "job-1")):
            ended = terminal(*command, "--ledger", left.resolved_ledger_url)
            assert "interrupted" in ended.out
            assert "running" not in ended.out
            assert f"nobody: process 77 on host {host} is gone" in ended.out
        shown = json.loads(
            terminal("status", "job-1", "--json", "--ledger", left.resolved_ledger_url).out
        )
        assert (shown["state"], shown["driver"]) == ("interrupted", None)
        assert shown["reason"] == f"process 77 on host {host} is gone"
        assert [shard["state"] for shard in shown["shards"]] == ["done", "interrupted"]

    def test_a_job_that_is_driven_names_process_and_host(
        self, terminal: Terminal, left: JobConfig
    ) -> None:
        with Ledger.open(left.resolved_ledger_url) as ledger:
            key = ledger.get_job("job-1").job_key
            ledger.acquire_job(key, owner=ELSEWHERE, lease_seconds=60)
        command = ("status", "--ledger", left.resolved_ledger_url)
        assert "process 1 on host elsewhere" in terminal(*command).out
        (shown,) = json.loads(terminal(*command, "--json").out)
        assert (shown["state"], shown["reason"]) == ("running", None)
        assert shown["driver"] == {"process": 1, "host": "elsewhere"}


@pytest.mark.usefixtures("started")
class TestSet:
    def test_failed_rows_are_asked_again_with_another_setting_which_stays(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4), row_timeout_seconds=1e-9)
        assert run_job(config)[0].message.startswith("0 ok, 4 failed")
        url = config.resolved_ledger_url
        ended = terminal(
            "retry-failed", "job-1", "--set", "row_timeout_seconds=600", "--ledger", url
        )
        assert (ended.code, len(stored_rows(config))) == (0, 4)
        assert all(row.error_code is None for row in stored_rows(config))
        with Ledger.open(url) as ledger:
            assert ledger.get_job("job-1").config["row_timeout_seconds"] == 600
            assert list_experiments(ledger)[0].config["row_timeout_seconds"] == 600

    def test_what_would_change_the_answers_is_refused_and_changes_nothing(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4))
        run_job(config)
        url = config.resolved_ledger_url
        ended = terminal("resume", "job-1", "--set", "sampling.max_tokens=9", "--ledger", url)
        assert ended.code == 2
        assert "sampling: was" in ended.err
        ended = terminal("resume", "job-1", "--set", "max_token=9", "--ledger", url)
        assert ended.code == 2
        assert "max_token" in ended.err
        with Ledger.open(url) as ledger:
            assert ledger.get_job("job-1").config["sampling"]["max_tokens"] == 8
