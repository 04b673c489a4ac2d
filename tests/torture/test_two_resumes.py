"""Two processes go on with one job at once: one works, the other says who does."""

import re
import socket

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
