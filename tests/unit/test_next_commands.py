"""The commands that a run ends with can be typed as they stand."""

import shlex
from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job
from typer.testing import CliRunner

from flows import foreground
from flows.cli import app
from flows.ledger_url import LEDGER_URL_VARIABLE
from flows.preparation import resolve


def test_next_commands_find_a_ledger_that_is_not_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(LEDGER_URL_VARIABLE, raising=False)
    config = make_job(tmp_path, questions(2))
    run_job(config)
    foreground._show_result(resolve(config))
    lines = [line.strip(" │").rpartition("│")[2] for line in capsys.readouterr().out.splitlines()]
    commands = [shlex.split(line) for line in lines if line.strip().startswith("tokenmill ")]
    assert [words[1] for words in commands] == ["status", "export", "experiments"]
    for _, *words in commands:
        assert CliRunner().invoke(app, words).exit_code == 0
