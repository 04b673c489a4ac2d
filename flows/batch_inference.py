"""The flow `batch-inference`: plan, shards as tasks, outputs. Thin: the work is in job_run."""

import logging
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from engine import ExitCode, TokenmillError
from flows.config import JobConfig
from flows.device_limit import PrefectDeviceLimit
from flows.job_form import JobParameter, read_job
from flows.job_run import JobOutcome, JobRun
from flows.run_artifacts import publish_run
from flows.tasks import run_all_shards

logger = logging.getLogger(__name__)


def _flow_run_name() -> str:
    """Name a flow run as its job; one that cannot be read as its file."""
    parameter: Any = runtime.flow_run.parameters["config"]
    try:
        config = _read_job(parameter)
    except TokenmillError:
        return str(parameter.get("name") if isinstance(parameter, dict) else parameter)[:120]
    assert config.job_id is not None
    return config.job_id


@flow(name="batch-inference", flow_run_name=_flow_run_name, persist_result=False)
def batch_inference(config: JobParameter) -> State[Any]:
    """Answer every row of the sources exactly once; the same job_id resumes.

    Args:
        config: A job, or the path of its YAML file where the worker runs. Without a job_id, the
            job is named by this flow run: Retry goes on with it, and the next run is a new job.
    """
    try:
        job_config = _read_job(config)
        _let_lines_through(job_config.engine.log_level)
        flow_run_id = str(runtime.flow_run.id)
        limit = PrefectDeviceLimit()
        with JobRun.open(job_config, flow_run_id=flow_run_id, device_limit=limit) as run:
            summaries, failures = run_all_shards(run)
            outcome = run.finish(summaries, failures)
            shards = run.ledger.list_shards(run.job.job_key)
        # A server that is away is asked for minutes: by now the devices are free.
        publish_run(run.config, outcome, shards, summaries)
    except TokenmillError as error:
        return Failed(message=f"{type(error).__name__}: {error}", data=error)
    logger.info("job=%s state=%s: %s", outcome.job_id, outcome.state.value, outcome.message)
    return _state_of(outcome)


def _read_job(parameter: JobParameter) -> JobConfig:
    """Return the job with its id: its own, else one that is the flow run's at every Retry."""
    config = read_job(parameter)
    if config.job_id is not None:
        return config
    flow_run_id = str(runtime.flow_run.id)
    return config.model_copy(update={"job_id": f"{config.name}-{flow_run_id[:8]}"})


def _let_lines_through(level: str) -> None:
    """Give our loggers a level where nobody has: Prefect adds a handler to them, but no level."""
    for name in ("engine", "flows"):
        package = logging.getLogger(name)
        if package.level == logging.NOTSET:
            package.setLevel(level)


def _state_of(outcome: JobOutcome) -> State[Any]:
    is_completed = outcome.exit_code in (ExitCode.OK, ExitCode.ROWS_FAILED)
    state = Completed if is_completed and not outcome.has_too_many_failed else Failed
    return state(message=outcome.message, data=outcome)
