"""A Ray cluster of this host, for tests. It listens on every address, but knows the session's token."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_START_SECONDS = 60
_STOP_SECONDS = 20
_ROOT = Path(__file__).parents[1]


class RayNode:
    """A node of its own, with all that it has started."""

    def __init__(self, address: str, folder: Path, process: psutil.Popen) -> None:
        self.address = address
        self.folder = folder
        self._process = process

    def family(self) -> list[psutil.Process]:
        """Return its processes, those of jobs among them."""
        process = self._process
        return [process, *process.children(recursive=True)] if process.is_running() else []

    def kill(self) -> None:
        """End it as a power cut does."""
        family = self.family()
        for each in family:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, _STOP_SECONDS)


@contextmanager
def running_head(*, num_cpus: int, resources: Mapping[str, float]) -> Iterator[RayNode]:
    """Run the head of a cluster until the block ends."""
    address = f"127.0.0.1:{_free_port()}"
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    with _running(address, head, num_cpus, resources) as node:
        yield node


@contextmanager
def running_node(
    address: str, *, num_cpus: int, resources: Mapping[str, float]
) -> Iterator[RayNode]:
    """Run one more node of a cluster until the block ends, as if it were another host."""
    with _running(address, [f"--address={address}"], num_cpus, resources) as node:
        yield node


@contextmanager
def _running(
    address: str, options: list[str], num_cpus: int, resources: Mapping[str, float]
) -> Iterator[RayNode]:
    assert os.environ["RAY_AUTH_MODE"] == "token"  # anybody who reaches it may run code
    # Not pytest's folder: a path to a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tm-ray-"))
    log_path = folder / "node.log"
    with log_path.open("ab") as log:
        process = psutil.Popen(
            [
                sys.executable, "-c", "from ray.scripts.scripts import main; main()",
                "start", "--block", "--node-ip-address=127.0.0.1", *options,
                f"--num-cpus={num_cpus}", f"--resources={json.dumps(resources)}",
                "--object-store-memory=83886080", f"--temp-dir={folder / 'ray'}",
            ],
            # Its nodes run the code that is tested, whatever else is installed.
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    node = RayNode(address, folder, process)
    try:
        _wait_until_it_runs(process, log_path)
        yield node
    finally:
        node.kill()
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
