"""Several answers of a row, rows that ask the same, unfinished answers, rows that may not fail."""

import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from interrupted_jobs import after_each_commit
from job_builders import make_job, note_asked, questions, read_rows, run_job, stored_rows

from engine import ExitCode, LedgerError
from flows.config import JobConfig
from flows.experiments import list_experiments
from flows.job_run import JobOutcome, JobRun
from flows.ledger import CompletionRow, Ledger, PartialRow
from flows.preparation import output_path_of
from flows.schema import JobState
from flows.shard_writer import TooManyFailedRowsError

GREEDY = {"max_tokens": 8, "temperature": 0.0}
SLOW = {"inline": True, "mock_step_seconds": 0.01}


def same_questions(count: int, kinds: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"question {i % kinds}"} for i in range(count)]


def stats_of(config: JobConfig) -> dict[str, Any]:
    with Ledger.open(config.resolved_ledger_url) as ledger:
        return list_experiments(ledger)[0].stats


def run_until(config: JobConfig, stop_after_rows: int) -> JobOutcome:
    """Run a job's first shard and stop it, in order, once so many rows are committed."""
    with JobRun.open(config) as run:

        def stop_it() -> None:
            while True:
                job = run.ledger.get_job(run.job.job_id)
                if job.num_rows - job.num_pending >= stop_after_rows:
                    run.stop.set()
                    return
                time.sleep(0.005)

        thread = threading.Thread(target=stop_it)
        thread.start()
        summary = run.run_shard(0)
        thread.join()
        return run.finish([summary], {})


class TestSamples:
    def test_each_sample_is_stored_and_exported_and_the_row_counts_once(
        self, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(5), sampling__n=3)
        outcome, summaries = run_job(config)
        assert (outcome.state, outcome.message.split(";")[0]) == (
            JobState.FINISHED,
            "5 ok, 0 failed",
        )
        assert sum(summary.num_ok for summary in summaries) == 5
        keys = [(row.row_id, row.sample_index, row.num_samples) for row in stored_rows(config)]
        assert keys == [(f"q{i}", sample, 3) for i in range(5) for sample in range(3)]
        lines = read_rows(output_path_of(config))
        assert [(line["row_id"], line["sample_index"]) for line in lines] == [
            (f"q{i}", sample) for i in range(5) for sample in range(3)
        ]
        assert len({line["text"] for line in lines}) == 15

    def test_a_row_may_bring_its_own_number_of_samples(self, tmp_path: Path) -> None:
        rows = [*questions(2), {"id": "many", "prompt": "again", "sampling": {"n": 4}}]
        outcome, _ = run_job(make_job(tmp_path, rows))
        assert outcome.message.split(";")[0] == "3 ok, 0 failed"

    def test_only_missing_samples_are_asked_again(self, tmp_path: Path) -> None:
        whole = make_job(tmp_path / "whole", questions(30), sampling__n=4, shards=1)
        run_job(whole)
        config = make_job(
            tmp_path / "cut", questions(30), sampling__n=4, shards=1, commit_rows=1,
            engine__runtime=SLOW,
        )  # fmt: skip
        run_until(config, 3)
        before = {row.key: row for row in stored_rows(config)}
        outcome, _ = run_job(config)
        assert outcome.exit_code == ExitCode.OK
        after = {row.key: row for row in stored_rows(config)}
        assert {key: after[key] for key in before} == before
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path: Path) -> None:
        for name in ("whole", "cut"):
            (tmp_path / name).mkdir()


class TestDuplicates:
    def test_rows_that_ask_the_same_are_asked_once_and_answered_alike(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, same_questions(30, kinds=3), sampling=GREEDY, shards=1)
        outcome, (summary,) = run_job(config)
        assert outcome.message.split(";")[0] == "30 ok, 0 failed"
        assert (summary.num_ok, summary.num_deduplicated) == (30, 27)
        assert summary.stats.num_prompt_tokens == sum(
            row.num_prompt_tokens for row in stored_rows(config)[:3]
        )
        texts = [line["text"] for line in read_rows(output_path_of(config))]
        assert texts == texts[:3] * 10
        assert len(set(texts)) == 3
        stats = stats_of(config)
        assert stats["num_deduplicated_rows"] == 27
        assert stats["num_saved_tokens"] == sum(
            row.num_prompt_tokens + row.num_output_tokens for row in stored_rows(config)[3:]
        )

    @pytest.mark.parametrize("shards", [1, 2, 7])
    def test_the_output_is_that_of_a_job_that_folds_nothing(
        self, tmp_path: Path, shards: int
    ) -> None:
        config = make_job(tmp_path, same_questions(40, kinds=6), sampling=GREEDY, shards=shards)
        _, summaries = run_job(config)
        plain = make_job(
            tmp_path, job_id="plain", job_dir=str(tmp_path / "plain"), sampling=GREEDY,
            deduplicate=False,
        )  # fmt: skip
        _, unfolded = run_job(plain)
        assert output_path_of(config).read_bytes() == output_path_of(plain).read_bytes()
        assert sum(s.num_deduplicated for s in unfolded) == 0
        assert sum(s.num_deduplicated for s in summaries) == 34  # one shard after the other

    def test_answers_that_another_shard_has_are_fetched_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[int] = []
        read_rows_of_ledger = Ledger.read_rows

        def noted(self: Ledger, job_key: int, row_indices: Collection[int]) -> list[CompletionRow]:
            fetched.append(len(row_indices))
            return read_rows_of_ledger(self, job_key, row_indices)

        monkeypatch.setattr(Ledger, "read_rows", noted)
        config = make_job(tmp_path, same_questions(60, kinds=30), sampling=GREEDY, shards=2)
        _, summaries = run_job(config)
        assert [summary.num_deduplicated for summary in summaries] == [0, 30]
        assert len(fetched) == 1  # not once for each of the 30

    def test_a_shard_whose_first_of_a_kind_was_answered_before_a_kill_asks_nothing_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = note_asked(monkeypatch)
        config = make_job(tmp_path, same_questions(8, kinds=1), sampling=GREEDY, shards=2)

        def die(_number: int) -> None:
            raise RuntimeError("killed")

        with (
            after_each_commit(die),
            JobRun.open(config) as run,
            pytest.raises(LedgerError, match="killed"),
        ):
            run.run_shard(1)
        assert asked == ["q4"]  # for the job's first of the kind, q0, has no answer yet
        with JobRun.open(config) as run:
            assert run.run_shard(1).num_deduplicated == 3
        assert asked == ["q4"]

    def test_rows_that_sample_are_never_folded(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, same_questions(10, kinds=1))
        _, summaries = run_job(config)
        assert sum(summary.num_deduplicated for summary in summaries) == 0
        assert len({row.text for row in stored_rows(config)}) == 10

    def test_a_job_that_is_stopped_and_cut_anew_answers_the_rest(self, tmp_path: Path) -> None:
        rows = same_questions(60, kinds=20)
        config = make_job(
            tmp_path, rows, sampling=GREEDY, shards=1, commit_rows=1, engine__runtime=SLOW
        )
        outcome = run_until(config, 5)
        assert outcome.state is JobState.INTERRUPTED
        outcome, _ = run_job(config.model_copy(update={"shards": 5}))
        assert outcome.message.split(";")[0] == "60 ok, 0 failed"
        texts = [line["text"] for line in read_rows(output_path_of(config))]
        assert texts == texts[:20] * 3


class TestUnfinishedAnswers:
    LONG: dict[str, Any] = {"max_tokens": 40, "min_tokens": 40, "temperature": 1.0}

    def test_a_stopped_job_goes_on_with_the_tokens_that_were_there(self, tmp_path: Path) -> None:
        rows = questions(6)
        changes: dict[str, Any] = {"sampling": self.LONG, "shards": 1, "commit_rows": 1}
        whole = make_job(tmp_path, rows, job_id="whole", job_dir=str(tmp_path / "w"), **changes)
        _, (undisturbed,) = run_job(whole)
        config = make_job(tmp_path, rows, engine__runtime=SLOW, **changes)
        with JobRun.open(config) as run:
            timer = threading.Timer(0.25, run.stop.set)
            timer.start()
            stopped = run.run_shard(0)
            assert run.finish([stopped], {}).state is JobState.INTERRUPTED
        partials = self._partials(config)
        assert partials
        outcome, (rest,) = run_job(config)
        assert outcome.exit_code == ExitCode.OK
        generated = [s.stats.num_output_tokens for s in (stopped, rest, undisturbed)]
        assert generated[0] + generated[1] == generated[2]  # none was generated twice
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()
        assert self._partials(config) == []

    def test_tokens_are_stored_while_the_job_runs(self, tmp_path: Path) -> None:
        config = make_job(
            tmp_path, questions(2), sampling=self.LONG, shards=1, partial_seconds=0.05,
            engine__runtime={"inline": True, "mock_step_seconds": 0.03},
        )  # fmt: skip
        seen: list[int] = []
        with JobRun.open(config) as run:
            thread = threading.Thread(target=run.run_shard, args=(0,))
            thread.start()
            while thread.is_alive():
                seen += [len(p.token_ids) for p in self._partials(config)]
                time.sleep(0.02)
            run.finish([], {})
        assert len(set(seen)) > 3
        assert max(seen) < 40

    def _partials(self, config: JobConfig) -> list[PartialRow]:
        assert config.job_id is not None
        with Ledger.open(config.resolved_ledger_url) as ledger:
            return ledger.partials_of(ledger.get_job(config.job_id).job_key, 0, 10_000)


class TestMaxFailedRows:
    def test_bad_rows_beyond_the_limit_stop_the_job_before_a_model_loads(
        self, tmp_path: Path
    ) -> None:
        rows = [*questions(8), "no json", "nor this"]
        config = make_job(tmp_path, rows, max_failed_rows=1)
        with (
            pytest.raises(TooManyFailedRowsError, match="2 rows failed, more than max_failed_rows"),
            JobRun.open(config),
        ):
            pytest.fail("it went on")
        outcome, _ = run_job(config.model_copy(update={"max_failed_rows": "20%"}))
        assert outcome.message.split(";")[0] == "8 ok, 2 failed"

    def test_rows_that_fail_on_the_way_end_the_job_as_failed_and_resumable(
        self, tmp_path: Path
    ) -> None:
        rows = [{**row, "timeout_seconds": 1e-9} for row in questions(30)]
        config = make_job(tmp_path, rows, shards=1, max_failed_rows="10%", commit_rows=2)
        with JobRun.open(config) as run:
            with pytest.raises(TooManyFailedRowsError) as caught:
                run.run_shard(0)
            outcome = run.finish([], {0: caught.value})
        assert (outcome.state, outcome.exit_code) == (JobState.FAILED, ExitCode.ROWS_FAILED)
        assert outcome.has_too_many_failed
        num_failed = len(stored_rows(config))
        assert 3 < num_failed < 30
        outcome, _ = run_job(config.model_copy(update={"max_failed_rows": None}))
        assert outcome.message.split(";")[0] == "0 ok, 30 failed"


def test_max_runtime_ends_a_run_in_order_and_the_next_goes_on(tmp_path: Path) -> None:
    config = make_job(
        tmp_path, questions(60), shards=1, max_runtime_seconds=2,
        engine__runtime={"inline": True, "mock_step_seconds": 0.1},
    )  # fmt: skip
    outcome, _ = run_job(config)
    assert (outcome.state, outcome.exit_code) == (JobState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert 0 < len(stored_rows(config)) < 60
    config = make_job(tmp_path, shards=1, engine__runtime={"inline": True})
    outcome, _ = run_job(config)
    assert outcome.message.split(";")[0] == "60 ok, 0 failed"


@pytest.mark.multiprocess
class TestPoison:
    def test_rows_that_kill_workers_get_engine_crash_and_every_other_its_answer(
        self, tmp_path: Path
    ) -> None:
        rows = questions(24)
        sampling = {"max_tokens": 4, "temperature": 1.0}
        whole = make_job(
            tmp_path, rows, sampling=sampling, job_id="whole", job_dir=str(tmp_path / "whole")
        )
        run_job(whole)
        expected = {row.row_id: row.text for row in stored_rows(whole)}
        for index in (5, 17):
            rows[index] = {"id": f"q{index}", "prompt": "this is poison"}
        config = make_job(
            tmp_path, rows, shards=1, sampling=sampling,
            engine__runtime={"inline": False, "mock_crash_text": "poison"},
        )  # fmt: skip
        outcome, (summary,) = run_job(config)
        assert (outcome.state, outcome.message.split(";")[0]) == (
            JobState.FINISHED,
            "22 ok, 2 failed",
        )
        failed = {row.row_id: row.error_code for row in stored_rows(config) if row.error_code}
        assert failed == {"q5": "engine_crash", "q17": "engine_crash"}
        answers = {row.row_id: row.text for row in stored_rows(config)}
        assert answers == expected | dict.fromkeys(failed)
        assert 4 <= summary.num_worker_deaths <= 10
        assert stats_of(config)["num_worker_deaths"] == summary.num_worker_deaths

    def test_a_job_whose_every_device_is_lost_again_ends_as_failed(self, tmp_path: Path) -> None:
        config = make_job(
            tmp_path, questions(8), shards=1,
            engine__runtime={"inline": True, "mock_device_lost_after_steps": 0},
        )  # fmt: skip
        with JobRun.open(config) as run:
            with pytest.raises(Exception, match="no good device is left") as caught:
                run.run_shard(0)
            assert run.num_slots == 0
            outcome = run.finish([], {0: caught.value})
        assert (outcome.state, outcome.exit_code) == (JobState.FAILED, ExitCode.INFRASTRUCTURE)
