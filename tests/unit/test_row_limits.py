"""What a job allows one row: a time in which it must be answered."""

from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, read_rows, run_job, stored_rows

from engine import ConfigError, ExitCode, SamplingParams
from flows.preparation import output_path_of
from flows.records import RecordReader

# Answers take at least eight steps, each of them longer than the shorter time limits below.
SLOW: dict[str, Any] = {
    "shards": 1,
    "sampling": {"max_tokens": 8, "min_tokens": 8},
    "engine__runtime": {"inline": True, "mock_step_seconds": 0.02},
}
TOO_SHORT_SECONDS = 0.001


def test_a_late_row_becomes_an_error_row_and_the_others_go_on(tmp_path: Path) -> None:
    late = {"id": "late", "prompt": "x", "timeout_seconds": TOO_SHORT_SECONDS}
    config = make_job(tmp_path, [*questions(2), late], **SLOW)
    outcome, _ = run_job(config)
    assert outcome.exit_code is ExitCode.ROWS_FAILED
    *fine, failed = stored_rows(config)
    assert all(row.finish_reason == "length" for row in fine)
    assert (failed.error_code, failed.finish_reason, failed.text) == ("timeout", "timeout", None)
    assert read_rows(output_path_of(config))[2]["error"]["code"] == "timeout"


def test_the_limit_of_the_job_holds_for_rows_without_their_own(tmp_path: Path) -> None:
    patient = {"id": "patient", "prompt": "x", "timeout_seconds": 3600}
    config = make_job(
        tmp_path, [*questions(2), patient], row_timeout_seconds=TOO_SHORT_SECONDS, **SLOW
    )
    run_job(config)
    assert [row.error_code for row in stored_rows(config)] == ["timeout", "timeout", None]


def test_a_late_row_is_done_and_not_tried_again(tmp_path: Path) -> None:
    config = make_job(tmp_path, questions(2), row_timeout_seconds=TOO_SHORT_SECONDS, **SLOW)
    run_job(config)
    before = stored_rows(config)
    outcome, summaries = run_job(make_job(tmp_path, **SLOW))
    assert (outcome.exit_code, summaries) == (ExitCode.ROWS_FAILED, [])
    assert stored_rows(config) == before


@pytest.mark.parametrize(
    "value", ["soon", True, 0, -1, [], float("nan"), float("inf"), 10**400], ids=repr
)
def test_a_row_whose_limit_is_no_time_is_a_bad_row(tmp_path: Path, value: Any) -> None:
    config = make_job(tmp_path, [{"prompt": "x", "timeout_seconds": value}, *questions(1)])
    with RecordReader(config.sources, config.prompt) as reader:
        bad, good = reader.read_all()
    assert "wanted seconds above 0" in bad.error.message
    assert "columns.timeout_seconds" in bad.error.message
    request = good.to_request(SamplingParams(), default_timeout_seconds=5.0)
    assert request.timeout_seconds == 5.0


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "soon"])
def test_a_job_whose_limit_is_no_time_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="row_timeout_seconds"):
        make_job(tmp_path, questions(1), row_timeout_seconds=value)
