"""Two processes that want one device: one waits and says for whom, and a death frees it at once."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]
PROGRAM = Path(__file__).with_name("device_borrower.py")
ROOT = Path(__file__).parents[2]


class Job:
    """A process of device_borrower.py."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, folder, job_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.pid = self._process.pid
        assert self.hear() == "ready"

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def borrow(self) -> int:
        """Borrow the device and return the pid of the worker."""
        self.tell("borrow")
        return self.hear_of_worker()

    def hear_of_worker(self) -> int:
        word, pid, _ = self.hear().split()
        assert word == "borrowed"
        return int(pid)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


Start = Callable[[str], Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def start_job(job_id: str) -> Job:
        jobs.append(Job(tmp_path, job_id))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_job_waits_says_for_whom_and_goes_on_when_the_idle_engine_of_the_other_is_closed(
    start: Start,
) -> None:
    one, other = start("job-one"), start("job-two")
    worker = one.borrow()
    other.tell("borrow")
    held_by = f"waiting for device mock:0, held by process {one.pid} of job job-one since "
    assert other.hear().startswith(held_by)
    one.tell("return")
    assert one.hear() == "returned"
    assert "another process waits for it" in one.hear()
    other.hear_of_worker()
    assert not is_running(worker)


def test_the_death_of_the_holder_frees_the_device_at_once(start: Start) -> None:
    one, other = start("job-one"), start("job-two")
    worker = one.borrow()
    other.tell("borrow")
    assert "held by" in other.hear()
    one.end()
    killed_at = time.monotonic()
    other.hear_of_worker()
    assert time.monotonic() - killed_at < 10, "the load included, on a busy machine"
    assert not is_running(worker)


def test_the_death_of_one_that_waits_lets_the_next_in_the_line_go_on(start: Start) -> None:
    one, other, third = start("job-one"), start("job-two"), start("job-three")
    one.borrow()
    other.tell("borrow")
    assert "held by" in other.hear()
    third.tell("borrow")
    assert "held by" in third.hear()
    other.end()
    one.end()
    third.hear_of_worker()


def test_the_next_shard_of_the_same_job_takes_the_warm_engine(start: Start) -> None:
    one = start("job-one")
    worker = one.borrow()
    one.tell("return")
    assert one.hear() == "returned"
    asked_at = time.monotonic()
    assert one.borrow() == worker
    assert time.monotonic() - asked_at < 1
