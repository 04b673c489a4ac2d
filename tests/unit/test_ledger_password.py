"""A ledger's password in the environment goes nowhere else: Prefect keeps the flow's parameters."""

from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job

from flows.cli_options import config_of
from flows.config import LEDGER_URL_VARIABLE, JobConfig
from flows.ledger import Ledger


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    config = make_job(tmp_path, questions(2), shards=1)
    run_job(config)
    return config


def resumed(job: JobConfig, url: str) -> JobConfig:
    with Ledger.open(job.resolved_ledger_url) as ledger:
        return config_of(ledger.get_job("job-1"), url)


def test_resume_leaves_the_url_in_the_environment(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    url = "postgresql://me:secret@host/database"
    monkeypatch.setenv(LEDGER_URL_VARIABLE, url)
    config = resumed(job, url)
    assert "secret" not in config.model_dump_json()
    assert config.resolved_ledger_url == url


def test_resume_on_another_ledger_names_it(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LEDGER_URL_VARIABLE, "sqlite:///elsewhere.sqlite")
    config = resumed(job, job.resolved_ledger_url)
    assert config.resolved_ledger_url == job.resolved_ledger_url
