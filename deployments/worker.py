"""Runs a Prefect worker whose runs end in order with it: for containers and services.

Told to stop, a worker of Prefect kills its runs, which then show Running in the UI. Here they are
told first: they finish their step, commit, and can be resumed. The arguments are those of
`prefect worker start`.
"""

import signal
import subprocess
import sys
from contextlib import suppress

import psutil


def main(arguments: list[str]) -> int:
    """Run the worker to its end and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)  # which raises KeyboardInterrupt
    worker = subprocess.Popen([sys.executable, "-m", "prefect", "worker", "start", *arguments])
    try:
        return worker.wait()
    except KeyboardInterrupt:
        try:
            _end_runs(worker.pid)
        finally:
            worker.terminate()
        return worker.wait()


def _end_runs(worker_pid: int) -> None:
    """Tell the runs to end and wait until they have, also those that the worker begins meanwhile."""
    with suppress(psutil.NoSuchProcess):
        while runs := psutil.Process(worker_pid).children():
            for run in runs:
                run.terminate()
            psutil.wait_procs(runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
