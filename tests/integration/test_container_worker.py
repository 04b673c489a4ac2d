"""A container that is stopped: the runs of its worker end in order, before the worker kills them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]
SCRIPT = Path(__file__).parents[2] / "deployments" / "worker.py"
# As Prefect's worker: it has a run, and kills it when it is told to stop.
WORKER = """
import signal, subprocess, sys
run = subprocess.Popen([sys.executable, "run.py"])
def stop(number, frame):
    run.kill()
    sys.exit(len(sys.argv))
signal.signal(signal.SIGTERM, stop)
run.wait()
while True:
    signal.pause()
"""
RUN = """
import pathlib, signal, sys, time
def end(number, frame):
    time.sleep(0.2)  # a step
    pathlib.Path("in-order").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
while True:
    signal.pause()
"""


def test_runs_end_in_order_before_the_worker_stops(tmp_path: Path):
    (tmp_path / "prefect.py").write_text(WORKER)
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(SCRIPT), "--pool", "tokenmill"]
    process = subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(timeout=30) == 5  # prefect worker start --pool tokenmill
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "in-order").exists()
