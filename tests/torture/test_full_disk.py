"""The disk is full, or a folder may not be written: a clear error, and nothing is lost."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_builders import write_rows

from torture.builders import NUM_ROWS, NUM_SAMPLES, ROWS, SLOW, MakeJob, make_mapping
from torture.invariants import read_state
from torture.random_kills import Witness
from torture.trace import values
from torture.victims import JobUnderTest, Nursery, Outputs

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]
IS_ROOT = os.geteuid() == 0


def assert_that_it_goes_on(job: JobUnderTest, witness: Witness, expected: Outputs) -> None:
    witness.look()
    witness.note_start()
    last = job.start()
    assert last.wait() == 1, last.said
    witness.check_the_end()
    assert job.outputs() == expected


def test_a_disk_that_fills_up_under_the_ledger_stops_the_job_and_loses_nothing(
    make_job: MakeJob, expected: Outputs
) -> None:
    job = make_job("job")
    witness = Witness(job)
    witness.note_start()
    stopped = job.start(failpoint=("disk_is_full", 3))
    assert stopped.wait() == 2, stopped.said
    assert f"ledger sqlite:///{job.folder}/ledger.sqlite: disk I/O error" in stopped.said
    assert "nothing of this transaction was kept; mend the cause, then resume" in stopped.said
    assert "Traceback" not in stopped.said
    num_done = len(witness.look().completions)
    assert 3 < num_done < NUM_ROWS
    assert_that_it_goes_on(job, witness, expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of its own that holds four megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not IS_ROOT or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk; the tests with a limit of file sizes ran")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_that_is_full_says_so_and_loses_nothing(
    make_job: MakeJob, expected: Outputs, small_disk: Path
) -> None:
    ledger_url = f"sqlite:///{small_disk / 'ledger.sqlite'}"
    job = make_job("job", ledger_url, **SLOW)
    witness = Witness(job)
    witness.note_start()
    victim = job.start()
    victim.wait_until(lambda: len(values(victim.events(), "committed")) >= 3)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(b"x" * 2**23)
    assert victim.wait() == 2, victim.said
    assert "database or disk is full" in victim.said
    assert "Traceback" not in victim.said
    ballast.unlink()
    assert_that_it_goes_on(job, witness, expected)


def test_a_disk_too_small_for_the_row_index_is_named_before_anything_runs(
    make_job: MakeJob, tmp_path: Path
) -> None:
    long_ids = [{"id": f"{index}" * 2000, "prompt": "x"} for index in range(100, 200)]
    job = make_job("job", sources=[{"path": str(write_rows(tmp_path / "long.jsonl", long_ids))}])
    stopped = job.start(max_file_bytes=300_000)
    assert stopped.wait() == 2
    assert "the row index cannot be written: " in stopped.said
    assert str(job.job_dir) in stopped.said
    assert "Traceback" not in stopped.said
    assert [path.name for path in job.job_dir.iterdir()] == []
    goes_on = job.start()
    assert goes_on.wait() == 0, goes_on.said


def test_a_disk_too_small_for_the_output_leaves_the_old_one_and_every_answer(
    make_job: MakeJob, tmp_path: Path
) -> None:
    wide = [{"id": str(index), "prompt": "x", "pad": "x" * 100_000} for index in range(30)]
    job = make_job(
        "job",
        sources=[{"path": str(write_rows(tmp_path / "wide.jsonl", wide))}],
        partial_seconds=60,
    )
    output_path = job.job_dir / "output.jsonl"
    output_path.parent.mkdir(parents=True)
    output_path.write_bytes(b"of the year before\n")
    witness = Witness(job, len(wide))
    witness.note_start()
    stopped = job.start(max_file_bytes=1_500_000)
    assert stopped.wait() == 2, stopped.said
    assert f"{output_path}: the output cannot be written: " in stopped.said
    assert "File too large" in stopped.said
    assert "Traceback" not in stopped.said
    assert job.outputs() == {"output.jsonl": b"of the year before\n"}
    witness.check_the_end()
    witness.note_start()
    exported = job.start()
    assert exported.wait() == 0, exported.said
    assert len(output_path.read_bytes().splitlines()) == len(wide)
    witness.check_the_end()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that every user may enter; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


@pytest.mark.parametrize("place", ["ledger", "job_dir", "output"])
def test_a_folder_that_may_not_be_written_is_named(
    nursery: Nursery, open_folder: Path, place: str
) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o555)
    places = {
        name: closed if name == place else open_folder for name in ("ledger", "job_dir", "output")
    }
    mapping = make_mapping(
        open_folder,
        write_rows(open_folder / "rows.jsonl", ROWS),
        ledger_url=f"sqlite:///{places['ledger']}/ledger.sqlite",
        job_dir=str(places["job_dir"] / "runs"),
        output__path=str(places["output"] / "answers.jsonl"),
    )
    job = JobUnderTest(open_folder, mapping, nursery)
    user = "nobody" if IS_ROOT else None  # root may write everywhere
    refused = job.start(user=user)
    assert refused.wait() == 2, refused.said
    assert re.search(rf"^(Config|Ledger)Error: .*{closed}/", refused.said, re.MULTILINE)
    assert "Traceback" not in refused.said
    num_done = len(read_state(job.ledger_url).completions) if place != "ledger" else 0
    assert num_done == (NUM_SAMPLES if place == "output" else 0)

    closed.chmod(0o777)
    goes_on = job.start(user=user)
    assert goes_on.wait() == 1, goes_on.said
    assert (places["output"] / "answers.jsonl").read_bytes().count(b"\n") == NUM_SAMPLES
