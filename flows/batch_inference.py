"""The flow `batch-inference`: plan, shards as tasks, outputs. Thin: the work is in job_run."""

import logging
from typing import Any

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from engine import ExitCode, TokenmillError
from flows.config import JobConfig
from flows.job_run import JobOutcome, JobRun
from flows.tasks import run_all_shards

logger = logging.getLogger(__name__)


def _flow_run_name() -> str:
    config: Any = runtime.flow_run.parameters["config"]
    values = config if isinstance(config, dict) else config.model_dump()
    return str(values.get("job_id") or values["name"])


@flow(name="batch-inference", flow_run_name=_flow_run_name, persist_result=False)
def batch_inference(config: JobConfig) -> State[Any]:
    """Answer every row of the sources exactly once; the same job_id resumes."""
    flow_run_id = str(runtime.flow_run.id)
    if config.job_id is None:
        # From the flow run, so that the UI's Retry goes on with this job.
        config = config.model_copy(update={"job_id": f"{config.name}-{flow_run_id[:8]}"})
    try:
        with JobRun.open(config, flow_run_id=flow_run_id) as run:
            summaries, failures = run_all_shards(run)
            outcome = run.finish(summaries, failures)
    except TokenmillError as error:
        return Failed(message=f"{type(error).__name__}: {error}", data=error)
    _publish(outcome)
    is_completed = outcome.exit_code in (ExitCode.OK, ExitCode.ROWS_FAILED)
    state = Completed if is_completed and not outcome.has_too_many_failed else Failed
    return state(message=outcome.message, data=outcome)


def _publish(outcome: JobOutcome) -> None:
    logger.info("job=%s state=%s: %s", outcome.job_id, outcome.state.value, outcome.message)
    try:
        create_markdown_artifact(
            key="summary",
            description=outcome.job_id,
            markdown=f"## {outcome.job_id}\n\n{outcome.state.value}: {outcome.message}\n\n"
            f"Output: `{outcome.output_path}`",
        )
    except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the job
        logger.warning("no summary artifact: %s", error)
