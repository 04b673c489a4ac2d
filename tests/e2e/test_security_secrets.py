"""The password of a ledger is in nothing that a run leaves behind, and in nothing that it says."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from job_builders import questions, write_job
from terminal import Terminal

from engine import ExitCode
from flows.ledger_url import LEDGER_URL_VARIABLE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.integration,
    pytest.mark.usefixtures("prefect_api", "log_settings_as_before"),
]
PASSWORD = "Xq7-hidden"


def texts_of_prefect() -> Iterator[str]:
    """Yield what the test server's database holds: parameters, states, artifacts, events, logs."""
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    path = str(PREFECT_API_DATABASE_CONNECTION_URL.value()).rpartition("sqlite+aiosqlite:///")[2]
    with closing(sqlite3.connect(path)) as connection:
        yield from connection.iterdump()


def texts_of_ledger(url: str) -> Iterator[str]:
    """Yield every row of every table."""
    tables = (
        "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
    )
    with psycopg.connect(url) as connection:
        for (table,) in connection.execute(tables).fetchall():
            yield from (str(row) for row in connection.execute(f"SELECT t FROM {table} t"))


def test_a_run_tells_nobody_the_password(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    postgres_database_url: str,
):
    # The test server trusts everybody, so any password will do.
    url = postgres_database_url.replace("postgres@", f"postgres:{PASSWORD}@")
    assert PASSWORD in url
    monkeypatch.setenv(LEDGER_URL_VARIABLE, url)
    caplog.set_level(logging.DEBUG)
    path = write_job(
        tmp_path,
        [*questions(4), "{not a row"],
        ledger_url=None,
        engine__runtime={"inline": False},
        engine__log_level="DEBUG",
    )
    terminal = Terminal(monkeypatch, capfd)
    said = [terminal("run", str(path)), terminal("resume", "job-1")]
    assert [ended.code for ended in said] == [ExitCode.ROWS_FAILED] * 2
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"output.jsonl", "rows.sqlite", "errors.jsonl"} <= {file.name for file in files}
    prefect, ledger = list(texts_of_prefect()), list(texts_of_ledger(url))
    assert any("batch-inference" in text and "job-1" in text for text in prefect)
    assert any("job-1" in text for text in ledger)
    texts = {
        "terminal": [ended.out + ended.err for ended in said],
        "log": [caplog.text],
        "files": [file.read_bytes().decode("latin-1") for file in files],
        "prefect": prefect,
        "ledger": ledger,
    }
    found = [name for name, these in texts.items() if any(PASSWORD in text for text in these)]
    assert found == []
