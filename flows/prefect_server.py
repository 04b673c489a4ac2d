"""A Prefect server for a run that is told of none; it lives as long as the run's process.

Prefect would start one by itself, but in the run's own process group: a Ctrl-C ends it while the
run still has to report how it ended, and the run then waits for it for minutes. A run that is
killed would leave it behind.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from engine import WorkerError, WorkerFailure

_HOST = "127.0.0.1"
_API_URL_VARIABLE = "PREFECT_API_URL"
_LOG_TAIL_LINES = 4
_START_SECONDS = 120.0  # the first start makes Prefect's database


def ensure_prefect_server(log_path: Path) -> str:
    """Return the URL of the Prefect API; start a server when the settings of Prefect name none.

    Raises:
        WorkerError: the server could not be started.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    known: str | None = PREFECT_API_URL.value()
    if known:
        return known
    url = _start(log_path)
    os.environ[_API_URL_VARIABLE] = url
    refresh_global_settings_context()
    return url


def _start(log_path: Path) -> str:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with socket.create_server((_HOST, 0)) as listener, log_path.open("ab") as log:
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(listener.fileno(),),
            env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
            start_new_session=True,
        )
    assert server.stdin is not None
    # The end of its stdin ends the server. Registered, so that it comes after Prefect's last words.
    atexit.register(server.stdin.close)
    if not _is_healthy(port):
        server.kill()
        server.wait()
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        raise WorkerError(
            f"Prefect's temporary server did not start; set "
            f"PREFECT_API_URL to a server that runs, or read {log_path}, which ends with:\n{tail}",
            failure=WorkerFailure.START_FAILED,
        )
    return f"http://{_HOST}:{port}/api"


def _is_healthy(port: int) -> bool:
    """Wait for the answer to one question; the socket takes it before the server is there."""
    connection = HTTPConnection(_HOST, port, timeout=_START_SECONDS)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(file_descriptor: int) -> None:
    import uvicorn

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    config = uvicorn.Config(
        "prefect.server.api.server:create_app", factory=True, lifespan="on", log_level="error"
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=file_descriptor)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
