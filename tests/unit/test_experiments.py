"""The experiment log, on SQLite and on PostgreSQL."""

from dataclasses import replace

import pytest

from engine import RunStats
from flows.experiments import (
    ExperimentRun,
    Percentiles,
    collect_versions,
    experiments_frame,
    flatten_config,
    list_experiments,
    percentiles_of,
    record_experiment,
)
from flows.ledger import CompletionRow, JobRow, Ledger, NewJob, Owner
from flows.schema import RowState, ShardState

CONFIG = {
    "name": "demo",
    "sources": [{"path": "a.jsonl", "limit": None}, {"path": "b.jsonl", "limit": 3}],
    "engine": {"scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 2048}, "tools": []},
}
RUN = ExperimentRun(
    name="demo",
    model="models/tiny",
    device="cpu",
    dtype="float32",
    prompt_tokens=Percentiles(p50=10, p95=20, max=21),
    num_new_rows=100,
    wall_seconds=8.0,
    busy_seconds=4.0,
    stats=RunStats(num_steps=9, num_prompt_tokens=1000, num_output_tokens=5000),
)


def run_job(ledger: Ledger, job_id: str, output_lengths: range) -> JobRow:
    num_rows = len(output_lengths) + 1
    job = ledger.create_job(
        NewJob(
            job_id=job_id,
            config=CONFIG,
            seed=1,
            fingerprint={},
            manifest_hash="h",
            num_rows=num_rows,
            num_shards=1,
        )
    )
    lease = ledger.acquire_shard(job.job_key, 0, owner=Owner.current(), lease_seconds=60)
    rows = [
        CompletionRow(
            row_index=index,
            row_id=str(index),
            state=RowState.OK,
            num_prompt_tokens=10,
            num_output_tokens=length,
        )
        for index, length in enumerate(output_lengths)
    ]
    bad = CompletionRow(row_index=num_rows - 1, row_id="bad", state=RowState.ERROR)
    ledger.commit(lease, [*rows, bad])
    ledger.release_shard(lease, ShardState.DONE)
    return ledger.get_job(job_id)


def test_a_run_is_recorded_with_counts_lengths_and_rates(ledger: Ledger) -> None:
    job = run_job(ledger, "job", range(1, 101))
    returned = record_experiment(ledger, job.job_key, RUN)
    (row,) = list_experiments(ledger)
    assert returned.experiment_id == row.experiment_id == "job/1"
    assert (row.job_key, row.job_id, row.name, row.attempt) == (job.job_key, "job", "demo", 1)
    assert (row.num_rows, row.num_ok, row.num_error, row.num_skipped) == (101, 100, 1, 0)
    assert (row.prompt_tokens_p50, row.prompt_tokens_p95, row.prompt_tokens_max) == (10, 20, 21)
    assert (row.output_tokens_p50, row.output_tokens_p95, row.output_tokens_max) == (50, 95, 100)
    assert (row.num_prompt_tokens, row.num_output_tokens) == (1000, 5050)
    assert row.input_tokens_per_second == 250
    assert row.output_tokens_per_second == 1250
    assert row.total_tokens_per_second == 1500
    assert (row.max_num_seqs, row.max_num_batched_tokens, row.num_shards) == (64, 2048, 1)
    assert row.config["sources.1.limit"] == 3
    assert row.stats["num_steps"] == 9
    assert row.versions["python"].startswith("3.")


def test_a_resumed_job_is_described_as_a_whole_and_its_runs_apart(ledger: Ledger) -> None:
    job = run_job(ledger, "job", range(1, 101))
    record_experiment(ledger, job.job_key, replace(RUN, num_new_rows=90))
    lease = ledger.acquire_shard(job.job_key, 0, owner=Owner.current(), lease_seconds=60)
    ledger.release_shard(lease, ShardState.DONE)
    last_stats = RunStats(num_prompt_tokens=100, num_output_tokens=40)
    record_experiment(ledger, job.job_key, replace(RUN, num_new_rows=10, stats=last_stats))
    last, first = list_experiments(ledger, job_id="job")
    assert (first.experiment_id, last.experiment_id) == ("job/1", "job/2")
    assert (first.attempt, last.attempt) == (1, 2)
    assert (first.num_ok, last.num_ok) == (100, 100)
    assert (first.num_new_rows, last.num_new_rows) == (90, 10)
    assert (last.num_output_tokens, last.num_new_output_tokens) == (5050, 40)


def test_a_run_that_did_nothing_has_no_rates_and_no_lengths(ledger: Ledger) -> None:
    job = run_job(ledger, "job", range(0))
    idle = replace(
        RUN,
        prompt_tokens=Percentiles(p50=None, p95=None, max=None),
        busy_seconds=0.0,
        stats=RunStats(busy_seconds=float("nan")),
    )
    record_experiment(ledger, job.job_key, idle)
    (row,) = list_experiments(ledger)
    assert (row.output_tokens_p50, row.output_tokens_max) == (None, None)
    assert row.output_tokens_per_second is None
    assert row.stats["busy_seconds"] is None


def test_runs_of_other_jobs_are_left_out_when_one_is_asked_for(ledger: Ledger) -> None:
    for name in ("one", "two"):
        record_experiment(ledger, run_job(ledger, name, range(2)).job_key, RUN)
    assert [row.job_id for row in list_experiments(ledger)] == ["two", "one"]
    assert [row.job_id for row in list_experiments(ledger, job_id="one")] == ["one"]


def test_the_frame_has_a_row_for_each_run_and_a_column_for_each_setting(ledger: Ledger) -> None:
    assert experiments_frame(ledger).empty
    assert "output_tokens_per_second" in experiments_frame(ledger).columns
    for name in ("one", "two"):
        record_experiment(ledger, run_job(ledger, name, range(2)).job_key, RUN)
    frame = experiments_frame(ledger)
    assert list(frame["job_id"]) == ["two", "one"]
    assert list(frame["config.engine.scheduler.max_num_seqs"]) == [64, 64]
    assert frame["output_tokens_per_second"].mean() == 1250


def test_config_is_flattened_to_dotted_keys() -> None:
    assert flatten_config(CONFIG) == {
        "name": "demo",
        "sources.0.path": "a.jsonl",
        "sources.0.limit": None,
        "sources.1.path": "b.jsonl",
        "sources.1.limit": 3,
        "engine.scheduler.max_num_seqs": 64,
        "engine.scheduler.max_num_batched_tokens": 2048,
        "engine.tools": [],
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5], (5, 5, 5)),
        ([1, 2], (1, 2, 2)),
        ([1, 2, 3], (2, 3, 3)),
        (list(range(1, 21)), (10, 19, 20)),
        ([7] * 99 + [1000], (7, 7, 1000)),
    ],
)
def test_percentiles_are_values_that_occur(
    values: list[int], expected: tuple[int, int, int]
) -> None:
    histogram = {value: values.count(value) for value in values}
    p50, p95, largest = expected
    assert percentiles_of(histogram) == Percentiles(p50=p50, p95=p95, max=largest)


def test_versions_name_what_made_the_answers() -> None:
    versions = collect_versions()
    assert set(versions) == {"python", "tokenmill", "torch", "transformers", "prefect"}
