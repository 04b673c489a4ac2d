"""A shard whose engine fails leaves nothing open behind."""

import gc
from pathlib import Path
from types import GeneratorType

import pytest
from job_builders import make_job, questions

from engine import WorkerError
from flows.job_run import JobRun


def open_row_readers() -> list[GeneratorType]:
    generators = [item for item in gc.get_objects() if isinstance(item, GeneratorType)]
    names = ("_pending", "rows_between")
    return [g for g in generators if g.gi_code.co_name in names and g.gi_frame is not None]


@pytest.mark.multiprocess
def test_rows_are_closed_in_the_thread_that_read_them(tmp_path: Path):
    # SQLite connections refuse another thread, and the error of a shard outlives its thread.
    config = make_job(
        tmp_path,
        questions(40),
        engine__runtime={"mock_step_seconds": 1.0, "watchdog_seconds": 0.05},
    )
    with JobRun.open(config) as run, pytest.raises(WorkerError, match="silent") as caught:
        run.run_shard(0)
    assert open_row_readers() == []
    assert caught.tb is not None  # what holds the frames of the failed shard
