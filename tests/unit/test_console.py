"""What a person sees while a job runs: this run's speed, and lines where there is no terminal."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_builders import acquire, new_job, ok_row

from flows import console
from flows.console import Speed, show_progress
from flows.ledger import JobRow, Ledger


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger.open(url) as opened:
        yield opened


@pytest.fixture
def job(ledger: Ledger) -> JobRow:
    return ledger.create_job(new_job(num_rows=10, num_shards=1))


def commit(ledger: Ledger, job: JobRow, *row_indexes: int) -> JobRow:
    """Answer rows, 3 output tokens each, in an attempt of its own."""
    lease = acquire(ledger, job)
    ledger.commit(lease, [ok_row(index) for index in row_indexes])
    ledger.database.write(
        lambda connection: connection.exec_driver_sql("UPDATE shards SET lease_owner = NULL")
    )
    return ledger.get_job(job.job_id)


def test_speed_is_that_of_this_run_alone(ledger: Ledger, job: JobRow) -> None:
    before = commit(ledger, job, 0, 1, 2, 3)
    clock = Clock()
    speed = Speed(before, clock)
    assert speed.num_resumed == 4
    clock.now += 100  # planning takes its time
    speed.start(before)
    assert (speed.tokens_per_second(before), speed.eta_seconds(before)) == (0.0, None)
    clock.now += 6
    after = commit(ledger, job, 4, 5)
    assert speed.tokens_per_second(after) == 6 / 6
    assert speed.eta_seconds(after) == 12  # 2 rows took 6 s, 4 are left


def test_a_new_job_has_resumed_nothing(job: JobRow) -> None:
    speed = Speed(None)
    assert (speed.num_resumed, speed.is_started) == (0, False)
    assert (speed.tokens_per_second(job), speed.eta_seconds(job)) == (0.0, None)


def test_without_a_terminal_progress_is_a_line_with_the_rows_of_the_whole_job(
    ledger: Ledger,
    job: JobRow,
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit(ledger, job, 0, 1, 2)
    looked = threading.Event()
    find_job = Ledger.find_job

    def find_and_tell(self: Ledger, job_id: str) -> JobRow | None:
        looked.set()
        return find_job(self, job_id)

    monkeypatch.setattr(Ledger, "find_job", find_and_tell)
    caplog.set_level(logging.INFO, "flows.console")
    with show_progress(url, "job"):
        assert looked.wait(30)
        commit(ledger, job, 3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("progress job=job rows=4/10 resumed=3 failed=0 ")


def test_a_picture_that_fails_does_not_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flows.console")
    with show_progress("nonsense", "job"):
        pass
    assert "no progress: " in caplog.text


def test_behind_the_bar_stand_only_numbers_that_matter(ledger: Ledger, job: JobRow) -> None:
    clock = Clock()
    fresh = Speed(None, clock)
    assert console._note(job, fresh) == "starting  ETA -:--:--"
    fresh.start(job)
    clock.now += 4
    half = commit(ledger, job, 0, 1, 2, 3)
    assert console._note(half, fresh) == "3 tok/s  ETA 0:00:06"
    resumed = Speed(half, clock)
    resumed.start(half)
    clock.now += 6
    done = commit(ledger, job, 4, 5, 6, 7, 8, 9)
    assert console._note(done, resumed) == "4 resumed  3 tok/s"
