"""Two processes go on with one job at once: one works, the other says who does."""

import re
import socket
import time

import psutil
import pytest

from torture.builders import SLOW, MakeJob
from torture.random_kills import Witness
from torture.trace import values
from torture.victims import Outputs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("is_new", [True, False], ids=["two runs", "two resumes"])
def test_of_two_processes_one_works_and_the_other_says_who_does(
    make_job: MakeJob, ledger_url: str, expected: Outputs, is_new: bool
) -> None:
    job = make_job("job", ledger_url, **SLOW)
    witness = Witness(job)
    if not is_new:
        witness.note_start()
        killed = job.start(failpoint=("after_commit", 3))
        assert killed.wait() < 0
        witness.look()
    witness.note_start()
    witness.note_start()
    both = [job.start(), job.start()]
    assert sorted(victim.wait() for victim in both) == [1, 2], "".join(v.said for v in both)
    winner, loser = sorted(both, key=lambda victim: victim.wait())
    held = rf"LedgerError: job 'job-1' is driven by process {winner.pid} on host {re.escape(socket.gethostname())}"
    exists = r"LedgerError: job 'job-1' exists already"
    assert re.search(rf"^{held}|{exists}" if is_new else rf"^{held}", loser.said, re.MULTILINE), (
        loser.said
    )
    assert values(loser.events(), "asked") == []
    witness.check_the_end()
    assert job.outputs() == expected


def test_a_job_is_free_again_as_soon_as_its_driver_is_killed(
    make_job: MakeJob, ledger_url: str, expected: Outputs
) -> None:
    job = make_job("job", ledger_url, **SLOW, lease_seconds=3600)
    witness = Witness(job)
    witness.note_start()
    driver = job.start()
    driver.wait_until(lambda: len(values(driver.events(), "committed")) >= 2)
    witness.note_start()
    refused = job.start()
    assert refused.wait() == 2
    assert f"is driven by process {driver.pid} on" in refused.said
    assert driver.exit_code is None  # and is not disturbed
    assert driver.kill()
    witness.look()
    witness.note_start()
    heir = job.start()
    assert heir.wait() == 1, heir.said
    witness.check_the_end()
    assert job.outputs() == expected


@pytest.mark.parametrize(
    ("ledger_url", "point"),
    [
        ("sqlite", "freeze_after_commit"),
        ("postgresql", "freeze_after_commit"),
        # The locks of its transaction must not outlive its lease for long. Those of a file do: the
        # process lives, and nobody but the system may take them from it.
        ("postgresql", "freeze_in_commit"),
    ],
    indirect=["ledger_url"],
)
def test_one_that_stood_still_for_longer_than_its_lease_changes_nothing_any_more(
    make_job: MakeJob, ledger_url: str, expected: Outputs, point: str
) -> None:
    job = make_job("job", ledger_url, **SLOW, lease_seconds=1)
    witness = Witness(job)
    witness.note_start()
    frozen = job.start(failpoint=(point, 3))
    process = psutil.Process(frozen.pid)
    frozen.wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    witness.look()
    time.sleep(1.5)
    witness.note_start()
    heir = job.start()
    assert heir.wait() == 1, heir.said
    process.resume()
    assert frozen.wait() == 2, frozen.said
    assert re.search("the job no longer: nobody does|lease of shard . was lost", frozen.said)
    assert "Traceback" not in frozen.said
    witness.check_the_end()
    assert job.outputs() == expected


def test_many_at_once_leave_one_whole_job(
    make_job: MakeJob, ledger_url: str, expected: Outputs
) -> None:
    job = make_job("job", ledger_url)
    witness = Witness(job)
    crowd = []
    for _ in range(6):
        witness.note_start()
        crowd.append(job.start())
    codes = [victim.wait() for victim in crowd]
    assert set(codes) <= {1, 2}
    assert 1 in codes
    for victim in crowd:
        assert "Traceback" not in victim.said
    witness.check_the_end()
    assert job.outputs() == expected
