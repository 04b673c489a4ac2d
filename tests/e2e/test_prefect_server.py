"""Prefect's temporary server lives as long as the process that started it, however that ends."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine import WorkerError
from flows.prefect_server import _start

pytestmark = pytest.mark.e2e

STARTER = """
import sys
from pathlib import Path
from urllib.request import urlopen
from flows.prefect_server import ensure_prefect_server
url = ensure_prefect_server(Path("server.log"))
assert urlopen(url + "/health").status == 200
print(url, flush=True)
sys.stdin.read()
"""
WAIT_SECONDS = 60


def test_a_server_ends_with_a_process_that_is_killed(prefect_home: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(prefect_home)}
    environment.pop("PREFECT_API_URL", None)
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as starter:  # fmt: skip
        assert starter.stdout is not None
        assert starter.stdout.readline().startswith("http://127.0.0.1:")
        (server,) = psutil.Process(starter.pid).children()
        assert os.getsid(server.pid) != os.getsid(starter.pid)  # no Ctrl-C reaches it
        starter.kill()
    assert psutil.wait_procs([server], WAIT_SECONDS)[1] == []


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense")
    with pytest.raises(
        WorkerError, match=r"(?s)did not start; .*server\.log.*Could not parse"
    ) as caught:
        _start(tmp_path / "server.log")
    assert caught.value.exit_code == 3
