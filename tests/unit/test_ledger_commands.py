"""`tokenmill ledger check` and `tokenmill ledger prune`, as a shell sees them."""

import json
import time
from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job
from ledger_builders import ELSEWHERE
from sqlalchemy import text
from terminal import Terminal

from flows.config import JobConfig
from flows.ledger import Ledger


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capfd)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """Give a finished job, in the ledger that commands use."""
    config = make_job(tmp_path, [*questions(9), "{not json"])
    run_job(config)
    monkeypatch.setenv("TOKENMILL_LEDGER_URL", config.resolved_ledger_url)
    return config


def change(job: JobConfig, statement: str) -> None:
    with Ledger.open(job.resolved_ledger_url) as ledger:
        ledger.database.write(lambda connection: connection.execute(text(statement)))


class TestCheck:
    @pytest.mark.parametrize("names", [(), ("job-1",)])
    def test_a_ledger_that_is_well_is_a_line_for_each_check(
        self, terminal: Terminal, job: JobConfig, names: tuple[str, ...]
    ) -> None:
        ended = terminal("ledger", "check", *names)
        assert (ended.code, ended.err) == (0, "")
        lines = ended.out.splitlines()
        assert all(line.startswith("ok    ") for line in lines)
        assert (
            "ok    job-1: the job's counters are true: 10 rows: 9 ok, 1 error, 0 skipped, 0 pending"
        ) in lines
        assert ("ok    ledger: the database is sound" in lines) == (not names)

    def test_what_is_wrong_is_listed_and_the_exit_code_says_so(
        self, terminal: Terminal, job: JobConfig
    ) -> None:
        change(job, "DELETE FROM payloads WHERE row_index > 1")
        ended = terminal("ledger", "check")
        assert ended.code == 1
        lines = ended.out.splitlines()
        start = lines.index("WRONG job-1: every answer can be read")
        assert lines[start + 1] == "        row 'q2' (row 2, sample 0): its text is gone"
        assert lines[start + 6] == "        and 2 more"
        assert sum(line.startswith("WRONG") for line in lines) == 1

    def test_json_is_for_machines(self, terminal: Terminal, job: JobConfig) -> None:
        change(job, "UPDATE jobs SET num_ok = 8")
        ended = terminal("ledger", "check", "job-1", "--json")
        assert ended.code == 1
        wrong = [result for result in json.loads(ended.out) if not result["is_ok"]]
        assert [result["name"] for result in wrong] == ["job_counters"]
        assert wrong[0]["problems"] == ["num_ok is 8, counted 9"]

    def test_a_job_that_is_not_there_is_a_message(self, terminal: Terminal, job: JobConfig) -> None:
        ended = terminal("ledger", "check", "job-2")
        assert (ended.code, ended.out) == (2, "")
        assert "did you mean job-1?" in ended.err


class TestPrune:
    @pytest.fixture(autouse=True)
    def old(self, job: JobConfig) -> None:
        then = time.time() - 40 * 86_400
        change(job, f"UPDATE jobs SET updated_at = {then}, heartbeat_at = {then}")

    def test_what_was_freed_is_said_and_the_output_stays(
        self, terminal: Terminal, job: JobConfig
    ) -> None:
        assert job.job_dir is not None
        answers = (job.job_dir / "output.jsonl").read_bytes()
        would = terminal("ledger", "prune", "--older-than", "30d", "--dry-run")
        assert would.code == 0
        assert "would free: 1 job(s), 10 rows, " in would.err
        assert (job.job_dir / "rows.sqlite").exists()
        ended = terminal("ledger", "prune", "--older-than", "30d")
        assert ended.code == 0
        assert "job-1" in ended.out
        assert "freed: 1 job(s), 10 rows, " in ended.err
        assert " bytes of the ledger" in ended.err
        assert not (job.job_dir / "rows.sqlite").exists()
        assert (job.job_dir / "output.jsonl").read_bytes() == answers
        assert json.loads(terminal("status", "--json").out) == []
        assert len(json.loads(terminal("experiments", "list", "--json").out)) == 1

    def test_what_is_young_or_driven_stays(self, terminal: Terminal, job: JobConfig) -> None:
        ended = terminal("ledger", "prune", "--older-than", "6w", "--json")
        assert json.loads(ended.out)["jobs"] == []
        with Ledger.open(job.resolved_ledger_url) as ledger:
            key = ledger.get_job("job-1").job_key
            ledger.acquire_job(key, owner=ELSEWHERE, lease_seconds=60)
        ended = terminal("ledger", "prune", "--older-than", "0d", "--include-unfinished")
        assert ended.code == 0
        assert "kept: job job-1 is driven by process 1 on host elsewhere" in ended.err
        assert len(json.loads(terminal("status", "--json").out)) == 1

    def test_an_unfinished_job_goes_when_it_is_named(
        self, terminal: Terminal, job: JobConfig
    ) -> None:
        change(job, "UPDATE jobs SET state = 'interrupted'")
        command = ("ledger", "prune", "--older-than", "30d", "--json")
        assert json.loads(terminal(*command).out)["jobs"] == []
        (gone,) = json.loads(terminal(*command, "--include-unfinished").out)["jobs"]
        assert (gone["job_id"], gone["state"], gone["num_rows"]) == ("job-1", "interrupted", 10)

    def test_an_age_that_is_none_is_a_message(self, terminal: Terminal) -> None:
        ended = terminal("ledger", "prune", "--older-than", "30")
        assert (ended.code, ended.out) == (2, "")
        assert "--older-than '30': wanted a whole number and a unit" in ended.err
