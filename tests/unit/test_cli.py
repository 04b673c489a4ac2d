"""The command line: data on stdout, talk on stderr, one message and an exit code for each fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_builders import make_job, questions, read_rows, run_job, write_job
from ledger_builders import new_job
from terminal import Terminal

from flows.job_run import JobRun
from flows.ledger import Ledger


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capfd)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a job that is done: four rows are well, one is not."""
    folder = tmp_path_factory.mktemp("finished")
    run_job(make_job(folder, [*questions(4), "{not json"]))
    return folder


@pytest.fixture
def ledger(finished: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the ledger of that job the one that commands use."""
    url = f"sqlite:///{finished / 'ledger.sqlite'}"
    monkeypatch.setenv("TOKENMILL_LEDGER_URL", url)
    return url


class TestStatus:
    def test_all_jobs_are_listed(self, terminal: Terminal, ledger: str) -> None:
        ended = terminal("status")
        assert ended.code == 0
        assert "job-1" in ended.out
        assert "finished" in ended.out
        assert ended.err == ""

    def test_one_job_is_shown_with_its_shards(self, terminal: Terminal, ledger: str) -> None:
        ended = terminal("status", "job-1")
        assert ended.code == 0
        assert "shard-0000" in ended.out
        assert "shard-0001" in ended.out

    def test_json_is_for_machines(self, terminal: Terminal, ledger: str) -> None:
        (job,) = json.loads(terminal("status", "--json").out)
        assert (job["job_id"], job["state"], job["num_pending"]) == ("job-1", "finished", 0)
        shown = json.loads(terminal("status", "job-1", "--json").out)
        assert (shown["num_ok"], shown["num_error"]) == (4, 1)
        assert [shard["num_ok"] for shard in shown["shards"]] == [3, 1]

    def test_an_id_is_never_cut_in_a_pipe(self, terminal: Terminal, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        long_id = "a-long-name-" * 8 + "end"
        with Ledger.open(url) as opened:
            opened.create_job(new_job(long_id))
        assert long_id in terminal("status", "--ledger", url).out

    def test_a_job_that_is_not_there_is_a_message_with_those_alike(
        self, terminal: Terminal, ledger: str
    ) -> None:
        ended = terminal("status", "job-2")
        assert ended.code == 2
        assert ended.out == ""
        assert ended.err == "LedgerError\nthe ledger has no job 'job-2'; did you mean job-1?\n"

    @pytest.mark.parametrize("command", [["status"], ["export", "x"], ["experiments", "list"]])
    def test_looking_on_in_the_wrong_folder_leaves_no_empty_ledger(
        self,
        terminal: Terminal,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        command: list[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("TOKENMILL_LEDGER_URL", raising=False)
        ended = terminal(*command)
        assert ended.code == 2
        assert "there is no ledger runs/ledger.sqlite; go to the folder where" in ended.err
        assert list(tmp_path.iterdir()) == []

    def test_a_ledger_that_is_no_database_is_a_message(self, terminal: Terminal) -> None:
        ended = terminal("status", "--ledger", "nonsense")
        assert ended.code == 2
        assert "is not a database URL; write sqlite:///FILE or" in ended.err
        assert "Traceback" not in ended.err


class TestExport:
    def test_answers_go_where_one_wants_them(
        self, terminal: Terminal, ledger: str, tmp_path: Path
    ) -> None:
        output = tmp_path / "answers.jsonl"
        ended = terminal("export", "job-1", "--output", str(output))
        assert ended.code == 0
        assert ended.out == f"{output}\n"
        assert ended.err == (
            "4 ok, 1 failed; 3 cut at max_tokens\n"
            f"failed rows: {tmp_path / 'answers_errors.jsonl'}\n"
        )
        assert [row["row_id"] for row in read_rows(output)] == ["q0", "q1", "q2", "q3", "rows:5"]

    def test_the_place_of_the_job_is_the_default(
        self, terminal: Terminal, ledger: str, finished: Path
    ) -> None:
        output = finished / "runs" / "job-1" / "output.jsonl"
        before = output.read_bytes()
        output.unlink()
        assert terminal("export", "job-1").out == f"{output}\n"
        assert output.read_bytes() == before

    def test_a_job_that_is_under_way_gives_what_it_has(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4), shards=2)
        with JobRun.open(config) as run:
            run.run_shard(0)
        output = tmp_path / "answers.jsonl"
        url = config.resolved_ledger_url
        ended = terminal("export", "job-1", "--output", str(output), "--ledger", url)
        assert ended.code == 0
        assert ended.err == "2 ok, 0 failed, 2 pending; 2 cut at max_tokens\n"
        assert len(read_rows(output)) == 2

    def test_a_source_that_is_gone_is_a_message(self, terminal: Terminal, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(2))
        run_job(config)
        (tmp_path / "rows.jsonl").unlink()
        ended = terminal("export", "job-1", "--ledger", config.resolved_ledger_url)
        assert ended.code == 2
        assert f"{tmp_path / 'rows.jsonl'}: no such file" in ended.err


class TestExperiments:
    def test_runs_are_listed(self, terminal: Terminal, ledger: str) -> None:
        ended = terminal("experiments", "list")
        assert ended.code == 0
        assert "job-1/1" in ended.out

    def test_json_holds_every_column(self, terminal: Terminal, ledger: str) -> None:
        (run,) = json.loads(terminal("experiments", "list", "--job", "job-1", "--json").out)
        assert run["experiment_id"] == "job-1/1"
        assert run["num_new_rows"] == 4
        assert run["config"]["engine.scheduler.max_num_seqs"] == 4

    def test_no_run_is_an_empty_list(self, terminal: Terminal, ledger: str) -> None:
        assert json.loads(terminal("experiments", "list", "--job", "x", "--json").out) == []


class TestFaultsBeforeAnythingStarts:
    """Each is one message that names the place and the remedy, before Prefect or a worker."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        write_job(tmp_path, questions(2))
        return tmp_path

    @pytest.mark.parametrize(
        ("override", "found", "remedy"),
        [
            ("sampling.max_new_tokens=3", "job.yaml", "did you mean max_tokens?"),
            ("engine.device=cpu", "engine.model_path", "config.json"),
            ("sources.0.path=row.jsonl", "row.jsonl: no such file", "did you mean rows.jsonl?"),
            ("prompt.template=Say {{", "prompt.template", "Jinja"),
            ("ledger_url=mysql://host/x", "ledger_url: mysql is not supported", "sqlite:///FILE"),
            ("output.path=rows.jsonl", "rows.jsonl", "output"),
        ],
    )
    def test_a_fault_is_one_message(
        self, terminal: Terminal, folder: Path, override: str, found: str, remedy: str
    ) -> None:
        ended = terminal("run", "job.yaml", "--set", override)
        assert ended.code == 2
        assert found in ended.err
        assert remedy in ended.err
        assert "Traceback" not in ended.err
        assert len(ended.err.splitlines()) <= 6
        assert ended.out == ""
        assert list(folder.rglob("worker-*.log")) == []
        assert not (folder / "runs").exists()

    def test_a_job_file_that_is_not_there(self, terminal: Terminal) -> None:
        ended = terminal("run", "jobs.yaml")
        assert ended.code == 2
        assert "jobs.yaml: cannot read the job configuration: No such file" in ended.err

    def test_a_job_to_resume_that_is_not_there(self, terminal: Terminal, ledger: str) -> None:
        ended = terminal("resume", "job-7")
        assert ended.code == 2
        assert "the ledger has no job 'job-7'; did you mean job-1?" in ended.err

    def test_an_unknown_option_is_a_usage_error(self, terminal: Terminal) -> None:
        ended = terminal("run", "job.yaml", "--sett", "x=y")
        assert ended.code == 2
        assert "--set" in ended.err


@pytest.mark.integration
def test_the_installed_command_starts_without_prefect_and_says_the_same(tmp_path: Path) -> None:
    """One real process: the entry point, the exit code, and no import that makes `status` slow."""
    config = make_job(tmp_path, questions(2))
    run_job(config)
    code = "import sys; from flows.cli import main\ntry: main()\nfinally: assert 'prefect' not in sys.modules"
    ended = subprocess.run(
        [sys.executable, "-c", code, "status", "job-7"],
        env={**os.environ, "TOKENMILL_LEDGER_URL": config.resolved_ledger_url},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stderr == "LedgerError\nthe ledger has no job 'job-7'; did you mean job-1?\n"
    assert (ended.returncode, ended.stdout) == (2, "")
