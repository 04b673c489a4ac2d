"""What Prefect made of jobs elsewhere: parts that were run again, and rows that it was given."""

from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, note_asked, questions, read_rows
from prefect_processes import Prefect

from engine import WorkerError, WorkerFailure
from flows import job_run
from flows.config import JobConfig
from flows.preparation import output_path_of

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("prefect_api")]


def run_flow(config: JobConfig) -> Any:
    from flows.batch_inference import batch_inference

    return batch_inference(config, return_state=True)


def test_a_flow_that_is_run_again_asks_for_the_rows_of_the_shard_that_failed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = note_asked(monkeypatch)
    run_shard = job_run.run_shard
    failures = [1]

    def fail_once(shard_job: Any, shard_index: int, **options: Any) -> Any:
        if shard_index in failures:
            failures.remove(shard_index)
            raise WorkerError("killed", failure=WorkerFailure.DIED)
        return run_shard(shard_job, shard_index, **options)

    monkeypatch.setattr(job_run, "run_shard", fail_once)
    config = make_job(tmp_path, questions(9), shards=3)
    state = run_flow(config)
    assert (state.name, sorted(asked)) == ("Failed", ["q0", "q1", "q2", "q6", "q7", "q8"])
    asked.clear()
    state = run_flow(config)
    assert (state.name, asked) == ("Completed", ["q3", "q4", "q5"])
    assert len(read_rows(output_path_of(config))) == 9


def test_prefect_is_told_of_shards_and_never_of_rows(tmp_path: Path, prefect: Prefect) -> None:
    rows = [{"id": f"Zeile-{i}", "prompt": f"Stecknadel {i}", "note": "Heu"} for i in range(4)]
    config = make_job(tmp_path, rows, shards=2, sampling={"min_tokens": 30, "max_tokens": 30})
    assert run_flow(config).name == "Completed"
    stored = b"".join(path.read_bytes() for path in prefect.home.rglob("*") if path.is_file())
    assert b"shard-0001" in stored
    texts = [line["text"] for line in read_rows(output_path_of(config))]
    for needle in ("Stecknadel", "Heu", *texts):
        assert needle.encode() not in stored
