"""Rows that jobs elsewhere lost, repeated or asked again; each case with its neighbours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from interrupted_jobs import ONE_BY_ONE, die_after
from job_builders import Row, make_job, note_asked, questions, read_rows, run_job, stored_rows

from engine import ExitCode
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of
from flows.schema import JobState, RowState

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
DRAWN: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_asked(monkeypatch)


class TestEqualRows:
    """A resume that tells rows apart by their text loses one of two equal ones."""

    ROWS: Sequence[Row] = [
        {"prompt": "a"},
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "a"}]},
        {"id": "named", "prompt": "a"},
        {"prompt": "a", "note": "the same but for a column"},
    ]

    @pytest.mark.parametrize(
        ("sampling", "deduplicate", "num_commits"),
        [(GREEDY, True, 1), (GREEDY, True, 3), (GREEDY, False, 1), (DRAWN, True, 1)],
        ids=["folded", "half of those that are folded", "greedy", "drawn"],
    )
    def test_a_kill_leaves_as_many_rows_as_there_were(
        self, tmp_path: Path, sampling: dict[str, Any], deduplicate: bool, num_commits: int
    ) -> None:
        changes = ONE_BY_ONE | {"sampling": sampling, "deduplicate": deduplicate}
        whole = make_job(
            tmp_path, self.ROWS, job_id="whole", job_dir=str(tmp_path / "whole"), **changes
        )
        run_job(whole)
        config = make_job(tmp_path, **changes)
        die_after(config, num_commits)
        before = stored_rows(config)
        assert len(before) == num_commits
        outcome, _ = run_job(config)
        assert (outcome.exit_code, len(stored_rows(config))) == (ExitCode.OK, 5)
        assert stored_rows(config)[:num_commits] == before
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()
        texts = {row.text for row in stored_rows(config)}
        assert len(texts) == (5 if sampling is DRAWN else 1)

    def test_the_answer_of_a_row_that_was_killed_off_is_taken_from_its_twin(
        self, asked: list[str], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, self.ROWS, sampling=GREEDY, **ONE_BY_ONE)
        die_after(config, 1)
        assert asked == ["rows:1"]
        run_job(config)
        assert asked == ["rows:1"]


class TestTombstones:
    """A row that ended without an answer has ended; asking it at each resume costs each time."""

    ENDED: Sequence[Row | str] = [
        {"id": "skipped", "prompt": "x" * 300},
        "{ broken",
        {"id": "too big for the cache", "prompt": "x" * 70},
        {"id": "late", "prompt": "x", "timeout_seconds": 1e-9},
        {"id": "empty", "prompt": "x", "sampling": {"stop": list("abcdefghijklmnopqrstuvwxyz .")}},
        {"id": "wrong", "prompt": "x", "sampling": {"stop_token_ids": [10**6]}},
    ]

    def test_two_resumes_ask_none_of_them_again(self, asked: list[str], tmp_path: Path) -> None:
        config = make_job(
            tmp_path,
            [*self.ENDED, *questions(6)],
            too_long="skip",
            engine__max_model_len=200,
            engine__cache={"num_blocks": 5, "block_size": 16},
        )
        with JobRun.open(config) as run:
            run.stop.set()
            run.finish([], {})
        assert asked == []
        with JobRun.open(config) as run:
            run.run_shard(0)
        ended = stored_rows(config)
        assert {row.row_id: row.error_code or row.state for row in ended} == {
            "skipped": "prompt_too_long",
            "rows:2": "bad_json",
            "too big for the cache": "kv_capacity",
            "late": "timeout",
            "empty": "ok",
            "wrong": "invalid_sampling_params",
        }
        assert ended[0].state is RowState.SKIPPED
        assert ended[4].text == ""

        asked.clear()
        outcome, _ = run_job(config)
        assert outcome.message.startswith("7 ok, 4 failed, 1 skipped")
        assert sorted(asked) == [f"q{index}" for index in range(6)]
        written = output_path_of(config).read_bytes()

        asked.clear()
        for _ in range(2):
            outcome, summaries = run_job(config)
            assert (outcome.state, outcome.exit_code) == (JobState.FINISHED, ExitCode.ROWS_FAILED)
            assert summaries == []
        assert asked == []
        assert stored_rows(config)[:6] == ended
        assert output_path_of(config).read_bytes() == written

    def test_a_shard_of_tombstones_alone_loads_no_engine(
        self, asked: list[str], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [*["{"] * 4, *questions(4)], shards=2)
        with JobRun.open(config) as run:
            assert run.pending_shards() == [1]
        assert asked == []

    def test_an_error_keeps_its_code_and_message_past_a_resume(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, self.ENDED[1:], **ONE_BY_ONE)
        whole = make_job(tmp_path, job_id="whole", job_dir=str(tmp_path / "whole"), **ONE_BY_ONE)
        run_job(whole)
        die_after(config, 2)
        run_job(config)
        errors = [
            job_dir / "errors.jsonl" for job_dir in (tmp_path / "runs/job-1", tmp_path / "whole")
        ]
        assert errors[0].read_bytes() == errors[1].read_bytes()
        assert len(read_rows(errors[0])) == 3


class TestMarksOfDone:
    """Files that a killed run has left say nothing; only the ledger does."""

    def test_neither_logs_nor_outputs_nor_their_absence_make_a_row_done(
        self, asked: list[str], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(6), stream_output=True, **ONE_BY_ONE)
        die_after(config, 2)
        folder = tmp_path / "runs" / "job-1"
        (folder / "output.jsonl").write_text('{"row_id": "q2", "text": "of another year"}\n')
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "q3.log").touch()
        (folder / "rows.sqlite").unlink()
        asked.clear()
        outcome, _ = run_job(config)
        assert outcome.message.startswith("6 ok, 0 failed")
        assert asked == ["q2", "q3", "q4", "q5"]
        assert [row["row_id"] for row in read_rows(folder / "output.jsonl")] == [
            f"q{index}" for index in range(6)
        ]


class TestRetries:
    """A retry of the whole runs the parts again that were done."""

    def test_a_shard_that_failed_once_is_all_that_is_asked_again(
        self, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_job(tmp_path, questions(12), shards=3)
        ids = [[f"q{index}" for index in range(first, first + 4)] for first in (0, 4, 8)]
        with JobRun.open(config) as run:
            summaries = [run.run_shard(0), run.run_shard(2)]
            with monkeypatch.context() as patch:
                patch.setattr(Ledger, "done_samples", _fail)
                with pytest.raises(RuntimeError, match="once") as caught:
                    run.run_shard(1)
            outcome = run.finish(summaries, {1: caught.value})
        assert outcome.state is JobState.FAILED
        assert asked == ids[0] + ids[2]
        asked.clear()
        outcome, summaries = run_job(config)
        assert outcome.message.startswith("12 ok, 0 failed")
        assert asked == ids[1]
        assert [summary.shard_index for summary in summaries] == [1]

    def test_a_shard_that_failed_half_way_is_asked_for_its_other_half(
        self, asked: list[str], tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, questions(6), **ONE_BY_ONE)
        die_after(config, 3)
        asked.clear()
        run_job(config)
        assert asked == ["q3", "q4", "q5"]


def _fail(*_arguments: object, **_options: object) -> None:
    raise RuntimeError("failed once")
