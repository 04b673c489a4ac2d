"""A Ray cluster of one node, for tests. It listens on every address, but knows the session's token."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_START_SECONDS = 60
_STOP_SECONDS = 20
_ROOT = Path(__file__).parents[1]


@contextmanager
def running_ray(*, num_cpus: int, resources: str = "{}") -> Iterator[str]:
    """Run a head until the block ends, with all that it has started; give its address."""
    assert os.environ["RAY_AUTH_MODE"] == "token"  # anybody who reaches it may run code
    # Not pytest's folder: a path to a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tm-ray-"))
    port = _free_port()
    log_path = folder / "head.log"
    with log_path.open("ab") as log:
        process = psutil.Popen(
            [
                sys.executable, "-c", "from ray.scripts.scripts import main; main()",
                "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
                f"--num-cpus={num_cpus}", f"--resources={resources}",
                "--object-store-memory=83886080", "--include-dashboard=false",
                f"--temp-dir={folder / 'ray'}",
            ],
            # Its nodes run the code that is tested, whatever else is installed.
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_it_runs(process, log_path)
        yield f"127.0.0.1:{port}"
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_it_runs(process: psutil.Popen, log_path: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while "Ray runtime started" not in log_path.read_text(encoding="utf-8"):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"Ray did not start:\n{log_path.read_text(encoding='utf-8')}")
        time.sleep(0.1)


def _end(process: psutil.Popen) -> None:
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    for each in family:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, _STOP_SECONDS)
