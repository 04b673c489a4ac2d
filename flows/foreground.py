"""Runs a job for somebody who waits for it: signals, progress, the result and the exit code."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from engine import ConfigError, ExitCode, TokenmillError
from flows.config import JobConfig
from flows.console import print_facts, rounded, set_up_logging, show_progress, talk
from flows.database import LedgerUnreachableError
from flows.experiments import list_experiments
from flows.ledger import Ledger
from flows.ledger_url import without_password
from flows.prefect_server import ensure_prefect_server
from flows.preparation import (
    check_model_and_sources,
    job_dir_of,
    ledger_option,
    output_path_of,
    resolve,
    resume_command,
)
from flows.schema import JobState

logger = logging.getLogger(__name__)

# What Prefect is told unless the user says otherwise: our log lines go under the right task run,
# its own go to its API alone, for the terminal has our bar, and nothing goes to its makers.
_PREFECT_DEFAULTS = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "engine,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # As often as a run of a deployment; see deployments/automations.py.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
# How Prefect begins to say that the server of its settings does not answer.
_NO_PREFECT = "Failed to reach API"


def run_in_foreground(config: JobConfig) -> ExitCode:
    """Check what is quick to check, run the flow, and print the result.

    Raises:
        TokenmillError: what stopped the job.
    """
    config = resolve(config)
    try:
        with _signals_interrupt(resume_command(config)):
            return _run(config)
    except KeyboardInterrupt:
        talk.print(_describe_interruption(config))
        return ExitCode.INTERRUPTED


def _run(config: JobConfig) -> ExitCode:
    check_model_and_sources(config)
    url = config.resolved_ledger_url
    Ledger.open(url).close()  # a ledger that cannot be had is not worth Prefect's start
    set_up_logging(config.engine.log_level)
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    talk.print(f"job {config.job_id}  ledger {without_password(url)}")
    state = _run_flow(config)
    if state is None:
        _leave(_end_without_prefect(config))
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, TokenmillError):
        raise outcome
    if not hasattr(outcome, "exit_code"):
        if isinstance(outcome, BaseException):
            logger.error("nobody foresaw this", exc_info=outcome)
        talk.print(f"the flow ended as {state.name}: {state.message}")
        return ExitCode.INFRASTRUCTURE
    with suppress(LedgerUnreachableError):  # then the message says so
        _show_result(config)
    talk.print(outcome.message)
    return ExitCode(outcome.exit_code)


def _run_flow(config: JobConfig) -> Any:
    """Return the state of the flow run; None when Prefect could not be told of its end."""
    ensure_prefect_server(job_dir_of(config) / "logs" / "prefect-server.log")
    from httpx import TransportError

    from flows.batch_inference import batch_inference

    assert config.job_id is not None
    try:
        with show_progress(config.resolved_ledger_url, config.job_id):
            return batch_inference(config, return_state=True)
    except TransportError as error:
        logger.warning(
            "Prefect's server does not answer any more (%s): its UI will show this run as one that "
            "goes on; what the ledger says is true", error,
        )  # fmt: skip
        return None
    except RuntimeError as error:
        if _NO_PREFECT not in str(error):
            raise
        raise ConfigError(
            f"Prefect: {error}; start its server there, or unset PREFECT_API_URL to run without one"
        ) from error


def _end_without_prefect(config: JobConfig) -> ExitCode:
    """Say how the job ended as the ledger has it, when the flow could not."""
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.find_job(config.job_id)
    if job is None:
        talk.print("the job is not in the ledger yet; run it again")
        return ExitCode.INFRASTRUCTURE
    _show_result(config)
    if job.state is JobState.FINISHED:
        return ExitCode.ROWS_FAILED if job.num_error else ExitCode.OK
    talk.print(f"to go on: {resume_command(config)}")
    return ExitCode.INFRASTRUCTURE if job.state is JobState.FAILED else ExitCode.INTERRUPTED


def _leave(code: ExitCode) -> NoReturn:
    """End the process at once: Prefect would try for minutes to send what it has not sent yet."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _signals_interrupt(hint: str) -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, and the second Ctrl-C end the process at once.

    That is safe: what is committed stays, and the leases of a process that is gone are free.
    """
    is_stopping = False

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal is_stopping
        if is_stopping and number == signal.SIGINT:
            talk.show_cursor()
            talk.print(f"\nstopped at once; to go on: {hint}")
            os._exit(ExitCode.INTERRUPTED)
        is_stopping = True
        talk.print("stopping after the step in flight; Ctrl-C again stops at once")
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _describe_interruption(config: JobConfig) -> str:
    assert config.job_id is not None
    try:
        with Ledger.open(config.resolved_ledger_url) as ledger:
            job = ledger.find_job(config.job_id)
    except LedgerUnreachableError as error:
        return (
            f"interrupted: {error}; what was committed is kept, to go on when the server runs: "
            f"{resume_command(config)}"
        )
    if job is None:
        return "interrupted before the job was in the ledger; nothing is lost, run it again"
    num_done = job.num_rows - job.num_pending
    return (
        f"interrupted: {num_done} of {job.num_rows} rows done; to go on: {resume_command(config)}"
    )


def _show_result(config: JobConfig) -> None:
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.get_job(config.job_id)
        runs = list_experiments(ledger, job_id=config.job_id)
    latest = runs[0] if runs else None
    option = ledger_option(config)
    commands = [
        f"tokenmill status {job.job_id}{option}",
        f"tokenmill export {job.job_id} --output answers.jsonl{option}",
        f"tokenmill experiments list{option}",
    ]
    if job.num_pending:
        commands[0] = resume_command(config)
    print_facts(
        f"Job {job.job_id}",
        (
            ("state", job.state.value),
            ("rows ok / failed / pending", f"{job.num_ok} / {job.num_error} / {job.num_pending}"),
            ("prompt / output tokens", f"{job.num_prompt_tokens} / {job.num_output_tokens}"),
            ("output tokens per second", latest and rounded(latest.output_tokens_per_second)),
            ("total tokens per second", latest and rounded(latest.total_tokens_per_second)),
            ("wall / busy seconds", latest and f"{latest.wall_seconds:.1f} / {latest.busy_seconds:.1f}"),
            ("output", output_path_of(config) if not job.num_pending else "not yet complete"),
            ("ledger", without_password(config.resolved_ledger_url)),
            ("try next", "\n".join(commands)),
        ),
    )  # fmt: skip
