"""Prefect's temporary server, where it does not start; test_kill_and_resume.py sees it end."""

from pathlib import Path

import pytest

from engine import WorkerError
from flows.prefect_server import _start

pytestmark = pytest.mark.e2e


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense")
    with pytest.raises(
        WorkerError, match=r"(?s)did not start; .*server\.log.*Could not parse"
    ) as caught:
        _start(tmp_path / "server.log")
    assert caught.value.exit_code == 3
