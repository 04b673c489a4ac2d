"""A password is given in the environment alone, and stays there: no file, list or message has it."""

from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job, write_job
from terminal import Terminal

from engine import ConfigError, LedgerError
from flows.cli_options import config_of
from flows.config import JobConfig
from flows.database import Database
from flows.doctor import list_checks, run_checks
from flows.job_file import load_job_config, validate_job_config
from flows.ledger import Ledger
from flows.ledger_url import LEDGER_URL_VARIABLE, holds_password, without_password

WITH_PASSWORD = (
    "postgresql://me:hidden@host/database",
    "postgresql+psycopg://me:hidden@host/database",
    "postgresql://me:hid/den#hidden@host/database",
    "postgresql://:hidden@/database?host=/run/postgresql",
    "postgresql://me@host/database?password=hidden",
    "postgresql://me@host/database?sslmode=require&sslpassword=hidden",
)
# All that the parts of a URL are told apart by is wrong or stands twice.
BROKEN = (
    "postgresql//me:hidden@host/database",
    "postgresql://me:hidden@host:port/database",
    "postgresql://host:hidden/database",
    "postgresql://me:p@hidden@host/database",
    "host=host user=me password=hidden",
    "mysql://me:hidden@host/database",
)


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    config = make_job(tmp_path, questions(2), shards=1)
    run_job(config)
    return config


def resumed(job: JobConfig, url: str) -> JobConfig:
    with Ledger.open(job.resolved_ledger_url) as ledger:
        return config_of(ledger.get_job("job-1"), url)


def test_resume_leaves_the_url_in_the_environment(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    url = "postgresql://me:hidden@host/database"
    monkeypatch.setenv(LEDGER_URL_VARIABLE, url)
    config = resumed(job, url)
    assert "hidden" not in config.model_dump_json()
    assert config.resolved_ledger_url == url


def test_resume_on_another_ledger_names_it(job: JobConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LEDGER_URL_VARIABLE, "sqlite:///elsewhere.sqlite")
    config = resumed(job, job.resolved_ledger_url)
    assert config.resolved_ledger_url == job.resolved_ledger_url


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_job_file_may_not_hold_it_and_the_refusal_does_not_repeat_it(tmp_path: Path, url: str):
    for changes, overrides in (({"ledger_url": url}, ()), ({}, (f"ledger_url={url}",))):
        path = write_job(tmp_path, questions(1), **changes)
        with pytest.raises(ConfigError, match=f"ledger_url: .*{LEDGER_URL_VARIABLE}") as refused:
            load_job_config(path, overrides)
        assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("command", ["status", "resume job-1", "export job-1", "doctor"])
def test_a_command_line_may_not_hold_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    ended = Terminal(monkeypatch, capfd)(*command.split(), "--ledger", WITH_PASSWORD[0])
    assert ended.code == 2
    assert f"set the variable {LEDGER_URL_VARIABLE}" in ended.err
    assert "hidden" not in ended.out + ended.err


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////data/a:b@c.sqlite",
        "postgresql://me@host:5432/database",
        "postgresql:///database?host=/run/postgresql&passfile=/run/secrets/pgpass",
    ],
)
def test_a_url_without_one_is_taken(url: str):
    assert not holds_password(url)
    assert without_password(url).startswith(url.partition(":")[0])


@pytest.mark.parametrize("url", [*WITH_PASSWORD, *BROKEN])
def test_what_is_shown_of_a_url_has_none(url: str):
    try:
        shown = without_password(url)
    except LedgerError as error:
        shown = str(error)
    assert "hidden" not in shown


@pytest.mark.parametrize("url", [*WITH_PASSWORD, *BROKEN])
def test_no_error_of_a_ledger_has_it(url: str):
    here = url.replace("@host/", "@127.0.0.1:1/").replace("/run/postgresql", "/nowhere")
    with pytest.raises(LedgerError) as failed:
        Database.open(here)
    assert "hidden" not in str(failed.value)


@pytest.mark.parametrize("url", BROKEN)
def test_the_doctor_does_not_tell_it(url: str):
    checks = list_checks(None, url, {}, device_timeout_seconds=1)
    findings = list(run_checks([check for check in checks if check.name in ("ledger", "clock")]))
    assert len(findings) == 2
    assert "hidden" not in repr(findings)


@pytest.mark.parametrize(
    "path", ["s3://key:hidden@bucket/rows.jsonl", "simplecache::ftp://me:hidden@host/rows.jsonl"]
)
def test_the_url_of_a_source_may_not_hold_one(path: str):
    mapping = {"name": "a", "sources": [{"path": path}], "engine": {"model_path": "m"}}
    with pytest.raises(ConfigError, match="1 wrong field.*\n.*sources.0.path: .*fsspec") as refused:
        validate_job_config(mapping, origin="test")
    assert "hidden" not in str(refused.value)


def test_a_colon_and_an_at_sign_make_no_password():
    path = "https://host:8080/me@home.jsonl"
    mapping = {"name": "a", "sources": [{"path": path}], "engine": {"model_path": "m"}}
    assert validate_job_config(mapping, origin="test").sources[0].path == path
