"""Starts jobs as processes, kills them at a moment, and says what they did."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from torture.trace import Event, read_trace, values

Outputs = dict[str, bytes]  # by the names of files
TESTS = Path(__file__).parents[1]
WAIT_SECONDS = 60
_POLL_SECONDS = 0.0005


class Nursery:
    """A process that has imported all that a job needs, and forks jobs; see torture.run_job."""

    def __init__(self, *modules: str) -> None:
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torture.run_job", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        self._statuses: dict[int, int] = {}
        self._rest = b""
        assert self._hear() == ["ready"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it, and with it every job that still runs."""
        self._process.kill()
        self._process.communicate()

    def fork(self, order: dict[str, Any]) -> int:
        """Start a job and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        while (words := self._hear())[0] != "started":
            self._note(words)
        self._statuses.pop(int(words[1]), None)  # the number may have been another's
        return int(words[1])

    def status_of(self, pid: int, timeout_seconds: float) -> int | None:
        """Return the exit code of a job, minus the signal that killed it; None while it runs."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        while pid not in self._statuses:
            waiting = max(0.0, deadline - time.monotonic())
            is_heard = b"\n" in self._rest
            if not is_heard and not select.select([self._process.stdout], [], [], waiting)[0]:
                return None
            self._note(self._hear())
        return self._statuses[pid]

    def _note(self, words: list[str]) -> None:
        assert words[0] == "ended", words
        self._statuses[int(words[1])] = int(words[2])

    def _hear(self) -> list[str]:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            chunk = os.read(self._process.stdout.fileno(), 65536)
            assert chunk, "the program that forks jobs has ended; see stderr"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split()


class Victim:
    """A process that runs a job."""

    def __init__(self, nursery: Nursery, pid: int, trace_path: Path, said_path: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._trace_path = trace_path
        self._said_path = said_path

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number when it was killed; None while it runs."""
        return self._nursery.status_of(self.pid, 0)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        code = self._nursery.status_of(self.pid, WAIT_SECONDS)
        assert code is not None, f"it runs and runs:\n{self.said}"
        return code

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for something; False when the process ended before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if self.exit_code is not None:
                return condition()
            assert time.monotonic() < deadline, f"it did not happen:\n{self.said}"
            time.sleep(_POLL_SECONDS)
        return True

    def is_in(self, phase: str) -> bool:
        """Tell whether the job has begun the phase."""
        end = json.dumps(phase) + "]"
        lines = self._trace_path.read_text().splitlines() if self._trace_path.exists() else []
        return any(line.startswith('["phase"') and line.endswith(end) for line in lines)

    def kill(self, *, whole_group: bool = True) -> bool:
        """Kill the process, with its workers or alone; False when it had ended by itself."""
        send = os.killpg if whole_group else os.kill
        with suppress(ProcessLookupError):
            send(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def wait_for_workers(self) -> None:
        """Wait until no process of the job is left; they end by themselves when it is dead."""
        deadline = time.monotonic() + WAIT_SECONDS
        with suppress(ProcessLookupError):
            while True:
                os.killpg(self.pid, 0)
                assert time.monotonic() < deadline, "a worker has outlived its job"
                time.sleep(_POLL_SECONDS)

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes of the job's engines."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def events(self) -> list[Event]:
        """Return what this process has done so far."""
        return read_trace(self._trace_path)

    @property
    def phase(self) -> str:
        """The phase that the job was in when it was last heard of."""
        return str(values(self.events(), "phase")[-1])

    @property
    def said(self) -> str:
        """What this process has logged."""
        return self._said_path.read_text(encoding="utf-8")


@dataclass
class JobUnderTest:
    """A job's configuration in a folder of its own, and everything that was started on it."""

    folder: Path
    mapping: dict[str, Any]
    nursery: Nursery
    victims: list[Victim] = field(default_factory=list)

    def start(
        self,
        *,
        failpoint: tuple[str, int] | None = None,
        max_file_bytes: int | None = None,
        user: str | None = None,
    ) -> Victim:
        """Start a process that runs the job, or goes on with it."""
        number = len(self.victims)
        config_path = self.folder / "job.yaml"
        if number == 0:
            config_path.write_text(yaml.safe_dump(self.mapping), encoding="utf-8")
        trace_path = self.folder / f"trace-{number:03}.jsonl"
        said_path = self.folder / f"said-{number:03}.txt"
        said_path.touch()
        pid = self.nursery.fork(
            {
                "config_path": str(config_path),
                "trace_path": str(trace_path),
                "said_path": str(said_path),
                "failpoint": failpoint,
                "max_file_bytes": max_file_bytes,
                "user": user,
            }
        )
        victim = Victim(self.nursery, pid, trace_path, said_path)
        self.victims.append(victim)
        return victim

    @property
    def ledger_url(self) -> str:
        """The ledger of the job."""
        return str(self.mapping["ledger_url"])

    @property
    def job_dir(self) -> Path:
        """The folder of row index, logs and outputs."""
        return Path(self.mapping["job_dir"])

    def outputs(self) -> Outputs:
        """Return what the job has left for its user: answers, errors, manifest, and half files."""
        files = [path for path in self.job_dir.iterdir() if path.is_file()]
        return {path.name: path.read_bytes() for path in files if path.name != "rows.sqlite"}
