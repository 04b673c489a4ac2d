"""The pictures of a run: what the table of its shards and its summary say."""

import dataclasses
from pathlib import Path
from typing import Any

from job_builders import make_job, questions

from engine import RunStats
from flows.job_run import JobOutcome, JobRun
from flows.run_artifacts import chart_of_time, describe_outcome, table_of_shards


def run_one_shard(folder: Path) -> tuple[JobOutcome, list[dict[str, Any]]]:
    with JobRun.open(make_job(folder, questions(6))) as run:
        summaries = [run.run_shard(0)]
        run.stop.set()
        outcome = run.finish(summaries, {})
        return outcome, table_of_shards(run.ledger.list_shards(run.job.job_key), summaries)


def test_table_has_every_shard_and_gaps_for_one_that_was_not_run(tmp_path: Path):
    _, (done, waiting) = run_one_shard(tmp_path)
    assert (done["shard"], done["state"], done["ok"], done["pending"]) == ("0000", "done", 3, 0)
    assert (waiting["shard"], waiting["ok"], waiting["pending"]) == ("0001", 0, 3)
    assert done["output tokens"] > 0
    assert done["tokens/s"] > 0
    assert done["prompt tokens"] > 0
    assert (done["resumed"], done["deduplicated"], done["preemptions"]) == (0, 0, 0)
    assert "output tokens" not in waiting


def test_chart_shows_what_took_the_most_time_first_and_to_scale(tmp_path: Path):
    with JobRun.open(make_job(tmp_path, questions(6))) as run:
        summary = run.run_shard(0)
        run.stop.set()
        run.finish([summary], {})
    stats = RunStats(bucket_seconds={"load": 1.0, "wait_for_device": 3.0, "idle": 0.0})
    twice = [dataclasses.replace(summary, stats=stats)] * 2
    assert chart_of_time(twice).splitlines()[3:-1] == [
        f"wait_for_device  {'#' * 30}{' ' * 10}  75% 6.0 s",
        f"load             {'#' * 10}{' ' * 30}  25% 2.0 s",
        f"idle             {' ' * 40}   0% 0.0 s",
    ]
    assert chart_of_time([]) == ""


def test_summary_of_an_unfinished_job_says_how_to_go_on(tmp_path: Path):
    outcome, _ = run_one_shard(tmp_path)
    config = make_job(tmp_path)
    option = f" --ledger sqlite:///{tmp_path}/ledger.sqlite"
    text = describe_outcome(config, outcome)
    assert text.startswith("## job-1\n\ninterrupted: 3 ok, 0 failed, 3 pending")
    assert f"```bash\ntokenmill resume job-1{option}\ntokenmill export job-1 " in text
    assert "Retry of this flow run" in text
    assert "Output:" not in text


def test_summary_of_a_finished_job_says_where_the_output_is(tmp_path: Path):
    outcome, _ = run_one_shard(tmp_path)
    finished = dataclasses.replace(outcome, output_path=tmp_path / "answers.jsonl")
    text = describe_outcome(make_job(tmp_path), finished)
    assert f"Output: `{tmp_path}/answers.jsonl`" in text
    assert "tokenmill status job-1" in text
    assert "resume" not in text.partition("```bash")[2]
    assert "Retry" not in text
