"""The pictures of a run: what the table of its shards and its summary say."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from job_builders import make_job, questions, run_job

from engine import RunStats
from flows.config import JobConfig
from flows.job_run import JobOutcome, JobRun
from flows.ledger import Ledger
from flows.ledger_rows import ShardRow
from flows.run_artifacts import chart_of_time, describe_outcome, table_of_shards

COLUMNS = [
    *("shard", "state", "device", "rows", "failed", "resumed", "tokens", "tokens/s"),
    *("preemptions", "cached", "wasted"),
]


def run_one_shard(folder: Path) -> tuple[JobOutcome, list[dict[str, Any]]]:
    with JobRun.open(make_job(folder, questions(6))) as run:
        summaries = [run.run_shard(0)]
        run.stop.set()
        outcome = run.finish(summaries, {})
        return outcome, table_of_shards(run.ledger.list_shards(run.job.job_key), summaries)


def test_table_has_every_shard_and_gaps_for_one_that_was_not_run(tmp_path: Path):
    _, (done, waiting) = run_one_shard(tmp_path)
    assert (done["shard"], done["state"], done["rows"], done["pending"]) == ("0000", "done", 3, 0)
    assert (waiting["shard"], waiting["rows"], waiting["pending"]) == ("0001", 3, 3)
    assert (done["device"], waiting["device"]) == ("mock", "")
    assert done["tokens"] > 0
    assert done["tokens/s"] > 0
    assert (done["resumed"], done["preemptions"], done["wasted"]) == (0, 0, 0)
    assert "tokens" not in waiting


def test_table_of_a_run_in_which_all_went_well_is_no_wider_than_the_page(tmp_path: Path):
    config = make_job(tmp_path, questions(6))
    _, summaries = run_job(config)
    shards = shards_of(config)
    assert [list(row) for row in table_of_shards(shards, summaries)] == [COLUMNS] * 2
    one, other = summaries
    rows = table_of_shards(shards, [one, dataclasses.replace(other, num_worker_deaths=1)])
    assert [row["worker deaths"] for row in rows] == [0, 1]


def test_table_tells_how_many_tokens_were_computed_twice(tmp_path: Path):
    config = make_job(
        tmp_path,
        [{"prompt": f"{index} " * 10} for index in range(8)],
        shards=1,
        sampling={"max_tokens": 40, "ignore_eos": True},
        # Too few for two answers, and none that a preempted request could find again.
        engine__cache={"num_blocks": 8, "block_size": 16, "enable_prefix_caching": False},
    )
    _, summaries = run_job(config)
    stats = summaries[0].stats
    (row,) = table_of_shards(shards_of(config), summaries)
    assert row["preemptions"] > 0
    num_needed = stats.num_prompt_tokens + stats.num_output_tokens - 8  # the last of each is not
    assert row["wasted"] == stats.num_computed_tokens - num_needed > 0


def shards_of(config: JobConfig) -> list[ShardRow]:
    with Ledger.open(config.resolved_ledger_url) as ledger:
        assert config.job_id is not None
        return ledger.list_shards(ledger.get_job(config.job_id).job_key)


def test_chart_shows_what_took_the_most_time_first_and_to_scale(tmp_path: Path):
    _, (summary, _) = run_job(make_job(tmp_path, questions(6)))
    seconds = {"load": 1.0, "wait_for_device": 3.0, "commit": 0.01, "idle": 0.0}
    stats = RunStats(bucket_seconds=seconds)
    twice = [dataclasses.replace(summary, stats=stats)] * 2
    assert chart_of_time(twice).splitlines()[3:-1] == [
        f"wait_for_device  {'#' * 30}{' ' * 10}  75% 6.0 s",
        f"load             {'#' * 10}{' ' * 30}  25% 2.0 s",
    ]
    assert chart_of_time([]) == ""


def test_summary_of_an_unfinished_job_says_once_how_to_go_on(tmp_path: Path):
    outcome, _ = run_one_shard(tmp_path)
    config = make_job(tmp_path)
    option = f" --ledger sqlite:///{tmp_path}/ledger.sqlite"
    text = describe_outcome(config, outcome)
    assert text.startswith("## job-1\n\n    interrupted: 3 ok, 0 failed, 3 pending\n\n")
    assert f"```bash\ntokenmill resume job-1{option}\ntokenmill export job-1 " in text
    assert text.count("tokenmill resume") == 1
    assert "Retry of this flow run" in text
    assert "Output:" not in text


def test_summary_of_a_finished_job_says_where_the_output_is(tmp_path: Path):
    outcome, _ = run_job(make_job(tmp_path, questions(6)))
    text = describe_outcome(make_job(tmp_path), outcome)
    assert f"    Output: {outcome.output_path}\n" in text
    assert "tokenmill status job-1" in text
    assert "resume" not in text.partition("```bash")[2]
    assert "Retry" not in text


def test_summary_has_the_figures_of_the_experiment_log(tmp_path: Path):
    outcome, _ = run_job(make_job(tmp_path, questions(6)))
    row = outcome.experiment
    assert row is not None
    text = describe_outcome(make_job(tmp_path), outcome)
    num_tokens = row.num_prompt_tokens + row.num_output_tokens
    assert re.findall(r"^\| (\w.*) \| (\S+) \| (.*) \|$", text, re.MULTILINE) == [
        ("this run", "number", "per busy second"),
        ("rows", "6", f"{6 / row.busy_seconds:.1f}"),
        ("prompt tokens", str(row.num_prompt_tokens), f"{row.input_tokens_per_second:.1f}"),
        ("output tokens", str(row.num_output_tokens), f"{row.output_tokens_per_second:.1f}"),
        ("total tokens", str(num_tokens), f"{row.total_tokens_per_second:.1f}"),
    ]
    seconds = f"It took {row.wall_seconds:.1f} s, {row.busy_seconds:.1f} s of them busy"
    assert f"{seconds}, and loaded 1 engine(s). 0 tokens were wasted" in text


def test_summary_of_a_run_that_began_nothing_has_no_figures(tmp_path: Path):
    config = make_job(tmp_path, questions(6))
    with JobRun.open(config) as run:
        run.stop.set()
        outcome = run.finish([], {})
    assert outcome.experiment is None
    assert "this run" not in describe_outcome(config, outcome)
