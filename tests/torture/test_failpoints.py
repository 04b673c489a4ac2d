"""A job dies at a named point of its way; the next one goes on, and nothing is lost or repeated."""

import signal

import pytest

from torture.builders import NUM_ROWS, MakeJob
from torture.random_kills import Witness
from torture.trace import values
from torture.victims import JobUnderTest, Outputs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

# The point, the pass of it at which the process dies, and how many deaths come before.
DEATHS = [
    ("in_upgrade", 1, 0),
    ("in_create_job", 1, 0),
    ("in_commit_bad_rows", 1, 0),
    ("in_take_over_of_job", 1, 1),
    ("after_take_over_of_job", 1, 1),
    ("in_take_over_of_shard", 1, 1),
    ("after_take_over_of_shard", 1, 1),
    ("after_insert", 4, 0),
    ("before_commit", 4, 0),
    ("after_commit", 4, 0),
    ("in_save_partials", 2, 0),
    ("after_save_partials", 2, 0),
    ("in_finish", 1, 0),
]
# Where one database is as good as the other.
DEATHS_ON_SQLITE = [
    "before_index_rename",
    "after_index_rename",
    "after_insert",
    "before_commit",
    "after_commit",
    "before_output_rename",
    "after_output_rename",
    "after_errors_rename",
    "after_manifest_rename",
    "after_experiment",
]

FEW_WRITES = {"commit_rows": 16, "commit_seconds": 60, "partial_seconds": 60}


def die(job: JobUnderTest, witness: Witness, point: str, nth: int) -> None:
    """Let the job die at a point, and look at what is left."""
    witness.note_start()
    victim = job.start(failpoint=(point, nth))
    assert victim.wait() == -signal.SIGKILL, victim.said
    assert values(victim.events(), "point") == [point]
    witness.look()


@pytest.mark.parametrize(("point", "nth", "num_before"), DEATHS)
def test_a_job_that_died_at_a_point_goes_on_and_loses_nothing(
    make_job: MakeJob, ledger_url: str, expected: Outputs, point: str, nth: int, num_before: int
) -> None:
    job = make_job("killed", ledger_url)
    witness = Witness(job)
    for _ in range(num_before):
        die(job, witness, "after_commit", 2)
    die(job, witness, point, nth)
    assert_that_it_ends_right(job, witness, expected)


@pytest.mark.parametrize("point", DEATHS_ON_SQLITE)
def test_a_job_that_died_at_its_first_pass_goes_on_and_loses_nothing(
    make_job: MakeJob, expected: Outputs, point: str
) -> None:
    job = make_job("killed")
    witness = Witness(job)
    die(job, witness, point, 1)
    assert_that_it_ends_right(job, witness, expected)


def test_a_job_and_its_heir_may_die_after_any_of_their_transactions(
    make_job: MakeJob, expected: Outputs
) -> None:
    nth, codes = 0, [-signal.SIGKILL]
    while -signal.SIGKILL in codes:
        nth += 1
        job = make_job(f"killed-{nth}", **FEW_WRITES)
        witness = Witness(job)
        codes = []
        for _ in range(2):
            witness.note_start()
            codes.append(job.start(failpoint=("after_write", nth)).wait())
            witness.look()
        assert_that_it_ends_right(job, witness, expected)
    assert codes == [1, 1]
    assert nth > 12


@pytest.mark.parametrize("point", ["after_insert", "before_commit", "after_commit"])
def test_a_job_that_dies_at_every_second_commit_still_comes_to_its_end(
    make_job: MakeJob, expected: Outputs, point: str
) -> None:
    job = make_job("killed", commit_rows=5, commit_seconds=10)
    witness = Witness(job)
    victim = None
    while victim is None or victim.wait() == -signal.SIGKILL:
        witness.note_start()
        victim = job.start(failpoint=(point, 2))
        num_done = len(witness.kept)
        victim.wait()
        assert len(witness.look().completions) > num_done or victim.wait() == 1
    assert len(job.victims) > 5
    generated = witness.check_the_end()
    assert job.outputs() == expected
    if point == "after_commit":  # what a kill costs is what was generated and not yet committed
        assert sum(generated.values()) < 3 * NUM_ROWS


def assert_that_it_ends_right(job: JobUnderTest, witness: Witness, expected: Outputs) -> None:
    witness.note_start()
    last = job.start()
    assert last.wait() == 1, last.said  # some rows of the input are bad
    witness.check_the_end()
    assert job.outputs() == expected


def test_a_writer_that_fails_takes_its_shard_down_aloud(
    make_job: MakeJob, expected: Outputs
) -> None:
    job = make_job("failing")
    witness = Witness(job)
    witness.note_start()
    failed = job.start(failpoint=("commit_raises", 3))
    assert failed.wait() == 2, failed.said
    assert "shard(s) 0 failed: the ledger cannot be written: nobody foresaw this" in failed.said
    state = witness.look()
    assert state.shards[0]["state"] == "failed"
    assert "nobody foresaw this" in state.shards[0]["error_message"]
    assert state.shards[1]["state"] == "done"  # one shard's failure is its own
    assert state.job is not None
    assert (state.job["state"], state.job["lease_owner"]) == ("failed", None)
    assert_that_it_ends_right(job, witness, expected)


@pytest.mark.parametrize("point", ["before_output_rename", "after_output_rename"])
def test_an_export_that_is_killed_leaves_a_whole_output(
    make_job: MakeJob, expected: Outputs, point: str
) -> None:
    job = make_job("exported")
    witness = Witness(job)
    output_path = job.job_dir / "output.jsonl"
    output_path.parent.mkdir(parents=True)
    output_path.write_bytes(b"of the year before\n")
    die(job, witness, point, 1)
    is_before = point == "before_output_rename"
    whole = b"of the year before\n" if is_before else expected["output.jsonl"]
    assert output_path.read_bytes() == whole
    assert_that_it_ends_right(job, witness, expected)


def test_a_commit_that_came_through_without_an_answer_is_not_taken_for_lost(
    make_job: MakeJob, expected: Outputs
) -> None:
    """One write after the other is made a second time, as the answer to the first never came."""
    is_reached, nth = True, 0
    while is_reached:
        nth += 1
        job = make_job(f"unheard-{nth}", **FEW_WRITES)
        witness = Witness(job)
        witness.note_start()
        victim = job.start(failpoint=("lose_acknowledgement", nth))
        assert (nth, victim.wait()) == (nth, 1), victim.said
        assert "failed:" not in victim.said
        witness.check_the_end()
        assert job.outputs() == expected
        is_reached = "waiting for the ledger" in victim.said
    assert nth > 10
