"""Counts that did not add up, and answers that came to the wrong row; each with its neighbours."""

import json
from pathlib import Path

import pytest
from interrupted_jobs import ONE_BY_ONE, stop_after
from job_builders import Row, make_job, questions, read_rows, run_job, stored_rows

from engine import ConfigError, ExitCode
from flows.config import JobConfig
from flows.experiments import list_experiments
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.preparation import output_path_of
from flows.schema import ExperimentRow, JobState


def job_of(config: JobConfig) -> JobRow:
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        return ledger.get_job(config.job_id)


def attempts_of(config: JobConfig) -> list[ExperimentRow]:
    """Return the experiment rows of a job, oldest first."""
    with Ledger.open(config.resolved_ledger_url) as ledger:
        return list_experiments(ledger, job_id=config.job_id)[::-1]


class TestMetricsOfAResumedJob:
    """Numbers over the rows of the last attempt alone look like those of the job."""

    def test_they_are_of_all_rows_and_each_attempt_has_its_share(self, tmp_path: Path) -> None:
        rows: list[Row] = [*questions(9)]
        rows.append({"id": "long", "prompt": "x", "sampling": {"min_tokens": 40, "max_tokens": 40}})
        slow = {"inline": True, "mock_step_seconds": 0.005}
        config = make_job(
            tmp_path, rows, sampling__max_tokens=2, engine__runtime=slow, **ONE_BY_ONE
        )
        outcome = stop_after(config, 9)
        assert outcome.state is JobState.INTERRUPTED
        outcome, _ = run_job(config)
        assert outcome.message.startswith("10 ok, 0 failed")
        first, second = attempts_of(config)
        assert (first.num_new_rows, first.num_ok, first.job_state) == (9, 9, JobState.INTERRUPTED)
        assert (second.num_new_rows, second.num_ok) == (1, 10)
        assert (first.attempt, second.attempt) == (1, 2)
        tokens = sum(row.num_output_tokens for row in stored_rows(config))
        assert second.num_output_tokens == tokens == job_of(config).num_output_tokens
        # The tokens of the row that was under way are kept, and made once.
        assert first.num_new_output_tokens + second.num_new_output_tokens == tokens
        manifest = json.loads((tmp_path / "runs/job-1/output.jsonl.manifest.json").read_bytes())
        assert manifest["counts"]["num_ok"] == 10

    def test_the_summary_counts_what_max_tokens_cut_in_every_attempt(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(6), sampling__max_tokens=1, **ONE_BY_ONE)
        stop_after(config, 3)
        outcome, _ = run_job(config)
        assert outcome.message == "6 ok, 0 failed; 6 cut at max_tokens"

    def test_an_output_that_cannot_be_written_does_not_take_the_attempt_along(
        self, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(3))
        output_path = tmp_path / "runs" / "job-1" / "output.jsonl"
        output_path.mkdir(parents=True)
        with pytest.raises(ConfigError, match="cannot be written"):
            run_job(config)
        assert [attempt.num_new_rows for attempt in attempts_of(config)] == [3]
        output_path.rmdir()
        outcome, summaries = run_job(config)
        assert (outcome.exit_code, summaries) == (ExitCode.OK, [])
        assert [attempt.num_new_rows for attempt in attempts_of(config)] == [3]


class TestNothingIsDropped:
    """60 rows went in, 52 came out: a last batch of another size was left behind."""

    @pytest.mark.parametrize(
        ("num_rows", "batch"), [(60, 17), (60, 50), (60, 60), (17, 17), (18, 17), (1, 17), (60, 1)]
    )
    def test_rows_in_are_ok_and_failed_and_skipped_whatever_the_batch(
        self, tmp_path: Path, num_rows: int, batch: int
    ) -> None:
        rows: list[Row | str] = [*questions(num_rows)]
        for index in range(num_rows):
            if index % 7 == 3:
                rows[index] = "null"
            if index % 11 == 5:
                rows[index] = {"id": f"q{index}", "prompt": "x" * 200}
        config = make_job(
            tmp_path,
            rows,
            shards=1,
            too_long="skip",
            commit_rows=batch,
            engine__max_model_len=100,
            engine__scheduler={"max_num_seqs": batch},
        )
        outcome, _ = run_job(config)
        job = job_of(config)
        num_skipped = len(range(5, num_rows, 11))
        num_failed = len([i for i in range(3, num_rows, 7) if i % 11 != 5])
        assert (job.num_ok, job.num_error, job.num_skipped) == (
            num_rows - num_failed - num_skipped,
            num_failed,
            num_skipped,
        )
        assert outcome.exit_code == (ExitCode.ROWS_FAILED if num_failed else ExitCode.OK)
        assert [row.row_index for row in stored_rows(config)] == list(range(num_rows))
        lines = read_rows(output_path_of(config))
        expected = [
            f"rows:{index + 1}" if row == "null" else f"q{index}" for index, row in enumerate(rows)
        ]
        assert [line["row_id"] for line in lines] == expected

    def test_a_job_with_rows_left_is_never_told_as_well(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(6), shards=3)
        with JobRun.open(config) as run:
            outcome = run.finish([run.run_shard(0), run.run_shard(2)], {})
        assert outcome.exit_code == ExitCode.INTERRUPTED
        assert "4 ok, 0 failed, 2 pending" in outcome.message
        assert outcome.output_path is None


class TestJoin:
    """A batch that fails must not shift the answers of those that come after it."""

    def test_a_step_that_fails_in_the_middle_moves_no_answer(self, tmp_path: Path) -> None:
        rows = [{"id": f"q{index}", "prompt": "x" * (1 + index % 5 * 9)} for index in range(40)]
        whole = make_job(tmp_path, rows, job_id="whole", job_dir=str(tmp_path / "whole"))
        run_job(whole)
        config = make_job(
            tmp_path,
            engine__runtime={"inline": True, "mock_max_step_tokens": 64},
            engine__scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 512},
        )
        _, summaries = run_job(config)
        assert sum(summary.stats.num_failed_steps for summary in summaries) >= 1
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()
