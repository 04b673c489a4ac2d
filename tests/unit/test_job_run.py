"""JobRun: a job from its configuration to its outputs, and every way to take it up again."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_builders import (
    make_job,
    questions,
    read_rows,
    run_job,
    stored_rows,
    write_rows,
)
from ledger_builders import ELSEWHERE
from sqlalchemy import select

from engine import ConfigError, ExitCode, LedgerError, WorkerError
from flows.config import JobConfig
from flows.experiments import list_experiments
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of
from flows.schema import CompletionTable, JobState


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path / 'ledger.sqlite'}") as opened:
        yield opened


def run_half(config: JobConfig) -> None:
    """Run the first shard and stop."""
    with JobRun.open(config) as run:
        summary = run.run_shard(0)
        run.stop.set()
        run.finish([summary], {})


def output_of(config: JobConfig) -> bytes:
    return output_path_of(config).read_bytes()


def when_committed(ledger: Ledger, job_id: str = "job-1") -> dict[int, tuple[float, int]]:
    query = select(
        CompletionTable.row_index, CompletionTable.committed_at, CompletionTable.attempt
    ).where(CompletionTable.job_key == ledger.get_job(job_id).job_key)
    with ledger.database.read() as connection:
        return {row.row_index: (row.committed_at, row.attempt) for row in connection.execute(query)}


def test_a_job_keeps_the_date_that_its_templates_write_and_takes_no_other(
    ledger: Ledger, tmp_path: Path
) -> None:
    today, another = {"now": "2026-01-31T12:00:00"}, {"now": "2024-07-26"}
    run_half(make_job(tmp_path, questions(4), engine__chat=today))
    with pytest.raises(LedgerError, match=r"engine\.chat\.now was 2026-01-31.* is now 2024-07-26"):
        run_half(make_job(tmp_path, engine__chat=another))
    run_job(make_job(tmp_path))
    assert ledger.get_job("job-1").config["engine"]["chat"]["now"] == today["now"]


class TestRun:
    def test_a_job_that_biases_tokens_and_scores_prompts_is_taken_up_again(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        rows = [*questions(6), {"prompt": "a", "sampling": {"stop_token_ids": [10**6]}}]
        scoring = {"max_tokens": 0, "prompt_logprobs": 0, "logit_bias": {"65": -1.0}}
        config = make_job(tmp_path, rows, sampling=scoring)
        run_half(config)
        outcome, _ = run_job(config)
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.ROWS_FAILED)
        *scored, failed = stored_rows(config)
        assert {(row.finish_reason, row.text) for row in scored} == {("length", "")}
        assert "line 7: sampling parameter stop_token_ids names token" in str(failed.error_message)

    def test_a_whole_job_answers_every_row_in_input_order(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(11), shards=3)
        outcome, summaries = run_job(config)
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.OK)
        assert outcome.message.split(";")[0] == "11 ok, 0 failed"
        assert len(summaries) == 3
        assert outcome.output_path == output_path_of(config)
        rows = read_rows(output_path_of(config))
        assert [row["row_id"] for row in rows] == [f"q{index}" for index in range(11)]
        assert all(row["text"] for row in rows)
        assert ledger.get_job("job-1").state is JobState.FINISHED

    def test_a_run_leaves_a_row_in_the_experiment_log(self, ledger: Ledger, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(5))
        run_job(config)
        (run,) = list_experiments(ledger, job_id="job-1")
        assert (run.num_new_rows, run.device, run.dtype) == (5, "mock", "none")
        assert run.output_tokens_per_second

    def test_a_bad_row_fails_alone_and_says_where_it_stands(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, [*questions(2), '{"id": "broken"', *questions(3)[2:]])
        outcome, _ = run_job(config)
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.ROWS_FAILED)
        assert outcome.message.split(";")[0] == "3 ok, 1 failed"
        failed = read_rows(output_path_of(config))[2]
        assert failed["error"]["code"] == "bad_json"
        assert "rows.jsonl, line 3" in failed["error"]["message"]

    def test_answers_depend_neither_on_shards_nor_on_batches(self, tmp_path: Path) -> None:
        rows = questions(13)
        one = make_job(tmp_path, rows, shards=1, job_dir=str(tmp_path / "one"))
        many = make_job(
            tmp_path, shards=5, job_id="job-2", job_dir=str(tmp_path / "many"),
            engine__scheduler={"max_num_seqs": 1},
        )  # fmt: skip
        run_job(one)
        run_job(many)
        assert output_of(one) == output_of(many)

    def test_what_the_user_must_mend_is_told_before_the_job_exists(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        twins = [*questions(2), {"id": "q0", "prompt": "again"}]
        config = make_job(tmp_path, twins)
        with pytest.raises(
            ConfigError, match=r"two rows have the id 'q0': .* line 1 and .* line 3"
        ):
            run_job(config)
        assert ledger.list_jobs() == []


class TestFailure:
    def test_a_failed_shard_leaves_the_work_of_the_others_and_says_how_to_go_on(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(10), shards=2)
        with JobRun.open(config) as run:
            summary = run.run_shard(1)
            outcome = run.finish([summary], {0: WorkerError("the device fell off")})
        assert (outcome.state, outcome.exit_code) == (JobState.FAILED, ExitCode.INFRASTRUCTURE)
        assert outcome.message == (
            "shard(s) 0 failed: the device fell off\n5 ok, 0 failed, 5 pending; to go on: "
            f"tokenmill resume job-1 --ledger sqlite:///{tmp_path}/ledger.sqlite"
        )
        assert outcome.output_path is None
        assert not output_path_of(config).exists()
        assert ledger.get_job("job-1").state is JobState.FAILED

    @pytest.mark.parametrize(
        ("failures", "exit_code"),
        [
            ([LedgerError("held")], ExitCode.USER_MUST_ACT),
            ([ConfigError("changed"), WorkerError("died")], ExitCode.INFRASTRUCTURE),
            ([RuntimeError("a fault of ours")], ExitCode.INFRASTRUCTURE),
        ],
    )
    def test_the_exit_code_says_who_must_act(
        self, tmp_path: Path, failures: list[BaseException], exit_code: ExitCode
    ) -> None:
        with JobRun.open(make_job(tmp_path, questions(2), shards=2)) as run:
            assert run.finish([], dict(enumerate(failures))).exit_code == exit_code

    def test_a_shard_that_failed_and_was_done_by_another_is_no_failure(
        self, tmp_path: Path
    ) -> None:
        with JobRun.open(make_job(tmp_path, questions(4), shards=1)) as run:
            summary = run.run_shard(0)
            outcome = run.finish([summary], {0: LedgerError("held by another")})
        assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.OK)


class TestResume:
    def test_rows_that_are_done_are_left_as_they_are(self, ledger: Ledger, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(10), shards=2)
        run_half(config)
        before = when_committed(ledger)
        assert len(before) == 5
        assert ledger.get_job("job-1").state is JobState.INTERRUPTED
        outcome, summaries = run_job(config)
        assert outcome.exit_code == ExitCode.OK
        assert [summary.shard_index for summary in summaries] == [1]
        after = when_committed(ledger)
        assert len(after) == 10
        assert {index: after[index] for index in before} == before

    def test_the_output_is_that_of_a_run_that_was_never_stopped(self, tmp_path: Path) -> None:
        undisturbed = make_job(tmp_path, questions(10), job_dir=str(tmp_path / "a"))
        run_job(undisturbed)
        stopped = make_job(tmp_path, job_id="job-2", job_dir=str(tmp_path / "b"))
        run_half(stopped)
        run_job(stopped)
        assert output_of(stopped) == output_of(undisturbed)

    def test_a_seed_that_was_drawn_is_kept_for_the_rest(self, tmp_path: Path) -> None:
        stopped = make_job(tmp_path, questions(10), seed=None)
        run_half(stopped)
        run_job(stopped)
        with Ledger.open(stopped.resolved_ledger_url) as ledger:
            seed = ledger.get_job("job-1").seed
        undisturbed = make_job(tmp_path, job_id="job-2", seed=seed, job_dir=str(tmp_path / "b"))
        run_job(undisturbed)
        assert output_of(stopped) == output_of(undisturbed)

    def test_a_seed_that_is_left_out_is_drawn_for_each_job(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        write_rows(tmp_path / "rows.jsonl", questions(1))
        for job_id in ("job-1", "job-2"):
            with JobRun.open(make_job(tmp_path, job_id=job_id, seed=None)):
                pass
        assert ledger.get_job("job-1").seed != ledger.get_job("job-2").seed

    def test_a_finished_job_writes_its_output_again_and_asks_nothing(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4))
        run_job(config)
        before = output_of(config)
        output_path_of(config).unlink()
        outcome, summaries = run_job(config)
        assert (outcome.exit_code, summaries) == (ExitCode.OK, [])
        assert output_of(config) == before
        assert len(list_experiments(ledger, job_id="job-1")) == 1

    def test_a_bad_row_stays_one_row(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, ["{", *questions(5)])
        run_half(config)
        outcome, _ = run_job(config)
        assert outcome.message.split(";")[0] == "5 ok, 1 failed"
        assert len(stored_rows(config)) == 6

    @pytest.mark.parametrize("shards", [1, 3, 10])
    def test_another_number_of_shards_changes_nothing_that_is_done(
        self, ledger: Ledger, tmp_path: Path, shards: int
    ) -> None:
        undisturbed = make_job(tmp_path, questions(10), job_dir=str(tmp_path / "a"))
        run_job(undisturbed)
        config = make_job(tmp_path, job_id="job-2", shards=2, job_dir=str(tmp_path / "b"))
        run_half(config)
        before = when_committed(ledger, "job-2")
        outcome, summaries = run_job(config.model_copy(update={"shards": shards}))
        assert outcome.exit_code == ExitCode.OK
        assert sum(summary.num_ok for summary in summaries) == 5
        assert when_committed(ledger, "job-2").items() >= before.items()
        assert output_of(config) == output_of(undisturbed)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"sampling__max_tokens": 9}, "sampling"),
            ({"sampling__temperature": 0.5}, "sampling"),
            ({"seed": 8}, "seed"),
            ({"prompt": {"template": "Say {{ prompt }}"}}, "prompt"),
            ({"prompt": {"system": "Be brief"}}, "prompt"),
            ({"too_long": "truncate"}, "too_long"),
            ({"sources": [{"path": "rows.jsonl", "limit": 5}]}, "number of rows"),
            ({"sources": [{"path": "rows.jsonl", "sample_rows": 10}]}, "sources.0.sample_rows"),
            ({"sources": [{"path": "rows.jsonl", "format": "jsonl"}]}, "sources.0.format"),
            (
                {"sources": [{"path": "rows.jsonl", "columns": {"sampling": "options"}}]},
                "sources.0.columns",
            ),
        ],
    )
    def test_a_job_is_not_resumed_with_other_questions(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        changes: dict[str, Any],
        field: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        config = make_job(tmp_path, questions(10))
        run_half(config)
        with pytest.raises(LedgerError, match=rf"(?s)'job-1' cannot be resumed.*\n  {field}: was "):
            run_job(make_job(tmp_path, **changes))
        outcome, _ = run_job(config)  # with the old values it goes on
        assert outcome.exit_code == ExitCode.OK

    def test_a_source_that_changed_is_refused(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(10))
        run_half(config)
        changed = [*questions(9), {"id": "q9", "prompt": "something else"}]
        write_rows(tmp_path / "rows.jsonl", changed)
        with pytest.raises(LedgerError, match=r"(?s)cannot be resumed.*\n  input: was "):
            run_job(config)

    def test_a_refused_run_leaves_the_row_index_of_the_job_alone(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(10))
        run_half(config)
        folder = tmp_path / "runs" / "job-1"
        before = (folder / "rows.sqlite").read_bytes()
        write_rows(tmp_path / "rows.jsonl", questions(12))
        with pytest.raises(LedgerError, match="number of rows: was 10, is now 12"):
            run_job(config)
        assert (folder / "rows.sqlite").read_bytes() == before
        assert [path.name for path in folder.glob("*rows*")] == ["rows.sqlite"]


class TestTwoRuns:
    def test_the_second_is_told_who_drives_the_job_and_changes_nothing(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4), shards=2)
        with JobRun.open(config) as first:
            before = (ledger.get_job("job-1"), (tmp_path / "runs/job-1/rows.sqlite").stat())
            other = config.model_copy(update={"shards": 3})
            for second in (config, other):
                with (
                    pytest.raises(LedgerError, match=f"driven by process {os.getpid()} on host"),
                    JobRun.open(second),
                ):
                    pytest.fail("two runs drive one job")
            after = (ledger.get_job("job-1"), (tmp_path / "runs/job-1/rows.sqlite").stat())
            assert (after[0], after[1].st_ino) == (before[0], before[1].st_ino)
            outcome = first.finish([first.run_shard(index) for index in (0, 1)], {})
        assert outcome.exit_code == ExitCode.OK
        assert len(read_rows(output_path_of(config))) == 4

    def test_a_run_that_was_taken_for_dead_stops_and_leaves_the_job_to_its_heir(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4), lease_seconds=1)
        with JobRun.open(config) as run:
            ledger.database.write(
                lambda connection: connection.exec_driver_sql(
                    "UPDATE jobs SET heartbeat_at = heartbeat_at - 3600"
                )
            )
            ledger.acquire_job(run.job.job_key, owner=ELSEWHERE, lease_seconds=60)
            assert run.stop.wait(30)
            with pytest.raises(LedgerError, match="drives the job no longer"):
                run.finish([run.run_shard(0)], {})
        assert ledger.get_job("job-1").lease_owner == str(ELSEWHERE)
        assert ledger.get_job("job-1").state is JobState.RUNNING

    def test_nobody_cuts_a_job_anew_under_one_who_works_on_a_shard(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(4), shards=2)
        with JobRun.open(config) as run:
            ledger.acquire_shard(run.job.job_key, 1, owner=ELSEWHERE, lease_seconds=60)
        other = config.model_copy(update={"shards": 3})
        with (
            pytest.raises(LedgerError, match="held by process 1 on host elsewhere"),
            JobRun.open(other),
        ):
            pytest.fail("the job was cut anew")
        assert ledger.get_job("job-1").lease_owner is None


def test_the_garbage_collector_looks_rarely_at_rows_that_pass(tmp_path: Path) -> None:
    before = gc.get_threshold()
    try:
        for set_before, wanted in ((700, 20_000), (50_000, 50_000), (0, 0)):
            gc.set_threshold(set_before, *before[1:])
            with JobRun.open(make_job(tmp_path, questions(2))):
                assert gc.get_threshold() == (wanted, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_an_error_from_elsewhere_stops_the_shards_that_run(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="from elsewhere"),
        JobRun.open(make_job(tmp_path, questions(2))) as run,
    ):
        raise RuntimeError("from elsewhere")
    assert run.stop.is_set()
