"""A flow run that stops by itself while shards have not begun yet."""

from pathlib import Path

import pytest
from job_builders import make_job, questions

from engine import ExitCode
from flows.schema import JobState

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("prefect_api")]


def test_a_run_whose_time_is_over_leaves_the_other_shards_for_the_resume(tmp_path: Path) -> None:
    from flows.batch_inference import batch_inference

    config = make_job(
        tmp_path,
        questions(60),
        shards=20,
        max_runtime_seconds=2,
        engine__runtime={"inline": True, "mock_step_seconds": 0.2},
    )
    state = batch_inference(config, return_state=True)
    outcome = state.result(raise_on_failure=False)
    assert (outcome.state, outcome.exit_code) == (JobState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert "to go on: tokenmill resume job-1" in outcome.message
