"""A Prefect server and a worker as processes of their own, and what a person does with them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 90.0
COMMANDS = re.search(
    r"```bash\n(.*?)```",
    (ROOT / "deployments" / "README.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
assert COMMANDS is not None
# What the README of the deployments has a newcomer type.
SERVER, _, WORKER, DEPLOY, RUN = COMMANDS[1].splitlines()


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition gives something true, and return it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.05)
    return result


def is_alive(process: psutil.Process) -> bool:
    """Return False for a zombie too, which only waits for somebody to read its exit code."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Prefect:
    """A server that can be stopped and started again; its commands and its client."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "prefect"
        port = _free_port()
        self.api_url = f"http://127.0.0.1:{port}/api"
        self.environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
            },
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # What happens after half a minute and more happens after seconds.
            "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
            "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "8",
            "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
            "DO_NOT_TRACK": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }
        self._command = f"{SERVER} --port {port}"
        self._log_path = folder / "server.txt"
        self._exits = ExitStack()

    def start(self) -> None:
        """Start the server on its port and its database, and wait until it answers."""
        self._exits.enter_context(_running(self._command, self._log_path, self))
        with self.client() as client:
            wait_until(lambda: client.api_healthcheck() is None, f"server at {self.api_url}")

    def stop(self) -> None:
        self._exits.close()

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(api=self.api_url)

    def command(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of the shell in the root of the repository."""
        return subprocess.run(
            line, shell=True, executable="/bin/bash", cwd=ROOT, env=self.environment,
            capture_output=True, text=True, timeout=WAIT_SECONDS,
        )  # fmt: skip

    def run_deployment(self, name: str, **parameters: Any) -> UUID:
        """Ask for a run, and return its id."""
        with self.client() as client:
            deployment = client.read_deployment_by_name(name)
            run_id: UUID = client.create_flow_run_from_deployment(
                deployment.id, parameters=parameters
            ).id
        return run_id

    def wait_for_state(self, run_id: UUID, name: str) -> None:
        """Wait until the run is in this state; another final state is told with its message."""

        def has_reached() -> bool:
            with self.client() as client:
                state = client.read_flow_run(run_id).state
            assert state is not None
            is_reached = state.name == name
            assert is_reached or not state.is_final(), f"{state.name}: {state.message}"
            return is_reached

        wait_until(has_reached, f"run {run_id} is {name}")


class Worker:
    """A process worker that can be started again; its flow processes, and their engines, below."""

    def __init__(self, prefect: Prefect, folder: Path) -> None:
        self._prefect = prefect
        self._folder = folder
        self._num_starts = 0
        self._exits = ExitStack()

    def start(self) -> None:
        """Start it, and wait until it has told the server that it is there."""
        self._num_starts += 1
        name = f"worker-{self._num_starts}"
        log_path = self._folder / f"{name}.txt"
        process = self._exits.enter_context(
            _running(f"{WORKER} --name {name}", log_path, self._prefect)
        )
        self.process = psutil.Process(process.pid)
        wait_until(lambda: "started!" in log_path.read_text(encoding="utf-8"), name)

    def stop(self) -> None:
        self._exits.close()

    def named(self, part: str) -> list[psutil.Process]:
        """Return the living processes below the worker whose command line has this part."""
        found = []
        for process in self.process.children(recursive=True):
            try:
                if is_alive(process) and part in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def engines(self) -> list[psutil.Process]:
        return self.named("engine.worker")


def _free_port() -> int:
    """Return a port of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def _running(command: str, log_path: Path, prefect: Prefect) -> Iterator[subprocess.Popen[bytes]]:
    """Run a line of the shell until the block ends; whatever it has started ends with it."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", f"exec env {command}"], cwd=ROOT, env=prefect.environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        below = []
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for child in below:
            if is_alive(child):
                child.kill()
