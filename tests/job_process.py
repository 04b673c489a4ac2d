"""The command `tokenmill` as a process of its own, in a session of its own, as a shell starts it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

WAIT_SECONDS = 90


class JobProcess:
    """A command that runs; what it says is appended to files that outlive it."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str]) -> None:
        self._folder = folder
        with (folder / "out.txt").open("ab") as out, (folder / "err.txt").open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from flows.cli import main; main()", *arguments],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen while the command runs."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self._process.poll() is None, f"it ended too early:\n{self.said}"
            assert time.monotonic() < deadline, f"it did not happen:\n{self.said}"
            time.sleep(0.02)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self._process.wait(WAIT_SECONDS)
        finally:
            self.end()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group, as a terminal does with Ctrl-C."""
        os.killpg(self._process.pid, number)

    def kill_group(self) -> None:
        """Kill the whole process group and wait for its leader."""
        self.signal_group(signal.SIGKILL)
        self._process.wait(WAIT_SECONDS)

    @property
    def session(self) -> int:
        """The session that it leads."""
        return self._process.pid

    def descendants(self) -> list[psutil.Process]:
        """Return every process that it has started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def end(self) -> None:
        """Leave nothing behind, whatever the test has found."""
        if self._process.poll() is None:
            self.kill_group()

    @property
    def said(self) -> str:
        """All that this command and earlier ones in the folder have said on stderr."""
        return (self._folder / "err.txt").read_text(encoding="utf-8")

    @property
    def printed(self) -> str:
        """The same of stdout."""
        return (self._folder / "out.txt").read_text(encoding="utf-8")

    def completed(self) -> Counter[str]:
        """Count how often each row was generated: a log outside of the ledger."""
        return Counter(re.findall(r"completed request_id=(\S+)", self.said))
