"""The command `tokenmill`. Prefect is imported only by commands that run something."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from engine import ExitCode, TokenmillError
from flows.config import JobConfig, default_ledger_url, load_job_config, validate_job_config
from flows.console import data, print_facts, print_table, set_up_logging, show_progress, talk
from flows.experiments import list_experiments
from flows.exporter import export_job
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.preparation import check_model_and_sources, output_path_of, resolve
from flows.records import RecordReader

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline LLM batch inference as a job that cannot lose a row.",
)
experiments_app = typer.Typer(no_args_is_help=True, help="The experiment log.")
app.add_typer(experiments_app, name="experiments")

# What Prefect needs of us, unless the user says otherwise: time to start its temporary server on
# a slow machine, and our log lines under the right task run.
_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "engine,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}

LedgerOption = Annotated[
    str | None,
    typer.Option("--ledger", help="SQLAlchemy URL; TOKENMILL_LEDGER_URL when left out."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JobArgument = Annotated[str, typer.Argument(help="The job's id.")]


def main() -> None:
    """Run the command line; every deliberate error is one message and an exit code."""
    try:
        app()
    except TokenmillError as error:
        talk.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        talk.print(str(error), markup=False, highlight=False)
        sys.exit(error.exit_code)


@app.command()
def run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A job's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a field of the file."),
    ] = None,
) -> None:
    """Run a job; a job_id in the file that exists is resumed."""
    _run_job(load_job_config(config_path, tuple(overrides or ())))


@app.command()
def resume(job_id: JobArgument, ledger_url: LedgerOption = None) -> None:
    """Go on with a job where it stopped; rows that are done are not repeated."""
    url = ledger_url or default_ledger_url()
    with Ledger.open(url) as ledger:
        config = _config_of(ledger.get_job(job_id), url)
    _run_job(config)


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(help="A job's id; all jobs when left out.")
    ] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show how far jobs are."""
    with Ledger.open(ledger_url or default_ledger_url()) as ledger:
        if job_id is None:
            _show_jobs(ledger.list_jobs(), is_json=is_json)
        else:
            _show_job(ledger, ledger.get_job(job_id), is_json=is_json)


@app.command()
def export(
    job_id: JobArgument,
    output: Annotated[Path | None, typer.Option(help="Where to; the job's own path.")] = None,
    ledger_url: LedgerOption = None,
) -> None:
    """Write the finished rows of a job as JSONL, in input order."""
    url = ledger_url or default_ledger_url()
    with Ledger.open(url) as ledger:
        job = ledger.get_job(job_id)
        config = _config_of(job, url)
        with RecordReader(config.sources, config.prompt) as reader:
            summary = export_job(config, job, ledger, reader, output or output_path_of(config))
    talk.print(
        f"{summary.num_ok} ok, {summary.num_error} failed, {summary.num_pending} pending",
        highlight=False,
    )
    data.print(str(summary.output_path), markup=False, highlight=False)


@experiments_app.command("list")
def experiments_list(
    job_id: Annotated[str | None, typer.Option("--job", help="Only this job's runs.")] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """List runs with their throughput, newest first."""
    with Ledger.open(ledger_url or default_ledger_url()) as ledger:
        rows = list_experiments(ledger, job_id=job_id)
    if is_json:
        columns = [column.key for column in rows[0].__table__.columns] if rows else []
        _print_json([{name: getattr(row, name) for name in columns} for row in rows])
        return
    print_table(
        "Experiments",
        ("experiment", "model", "dtype", "rows", "failed", "out tok/s", "busy s"),
        (
            (row.experiment_id, row.model, row.dtype, row.num_new_rows, row.num_error,
             _rounded(row.output_tokens_per_second), _rounded(row.busy_seconds))
            for row in rows
        ),
    )  # fmt: skip


def _run_job(config: JobConfig) -> None:
    """Check what is quick to check, run the flow, print the result, exit with its code."""
    config = resolve(config)
    check_model_and_sources(config)
    set_up_logging(config.engine.log_level)
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from flows.batch_inference import batch_inference

    assert config.job_id is not None
    url = config.resolved_ledger_url
    talk.print(f"job {config.job_id}  ledger {_without_password(url)}", highlight=False)
    try:
        with show_progress(url, config.job_id):
            state: Any = batch_inference(config, return_state=True)
    except KeyboardInterrupt:
        talk.print(f"interrupted; to go on: tokenmill resume {config.job_id}", highlight=False)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, TokenmillError):
        raise outcome
    if not hasattr(outcome, "exit_code"):
        talk.print(f"the flow ended as {state.name}: {state.message}", markup=False)
        raise typer.Exit(ExitCode.INFRASTRUCTURE)
    _show_result(config, url)
    talk.print(outcome.message, markup=False, highlight=False)
    raise typer.Exit(outcome.exit_code)


def _show_result(config: JobConfig, url: str) -> None:
    assert config.job_id is not None
    with Ledger.open(url) as ledger:
        job = ledger.get_job(config.job_id)
        runs = list_experiments(ledger, job_id=config.job_id)
    latest = runs[0] if runs else None
    commands = [
        f"tokenmill status {job.job_id}",
        f"tokenmill export {job.job_id} --output answers.jsonl",
        "tokenmill experiments list",
    ]
    if job.num_pending:
        commands[0] = f"tokenmill resume {job.job_id}"
    print_facts(
        f"Job {job.job_id}",
        (
            ("state", job.state.value),
            ("rows ok / failed / pending", f"{job.num_ok} / {job.num_error} / {job.num_pending}"),
            ("prompt / output tokens", f"{job.num_prompt_tokens} / {job.num_output_tokens}"),
            ("output tokens per second", latest and _rounded(latest.output_tokens_per_second)),
            ("total tokens per second", latest and _rounded(latest.total_tokens_per_second)),
            ("wall / busy seconds", latest and f"{latest.wall_seconds:.1f} / {latest.busy_seconds:.1f}"),
            ("output", output_path_of(config) if not job.num_pending else "not yet complete"),
            ("ledger", _without_password(url)),
            ("try next", "\n".join(commands)),
        ),
    )  # fmt: skip


def _show_jobs(jobs: list[JobRow], *, is_json: bool) -> None:
    if is_json:
        _print_json([_job_facts(job) for job in jobs])
        return
    print_table(
        "Jobs",
        ("job", "state", "rows", "ok", "failed", "pending", "output tokens", "created"),
        (
            (job.job_id, job.state.value, job.num_rows, job.num_ok, job.num_error,
             job.num_pending, job.num_output_tokens, _when(job.created_at))
            for job in jobs
        ),
    )  # fmt: skip


def _show_job(ledger: Ledger, job: JobRow, *, is_json: bool) -> None:
    shards = ledger.list_shards(job.job_key)
    if is_json:
        listed = [
            {"shard_index": s.shard_index, "state": s.state.value, "num_rows": s.num_rows,
             "num_ok": s.num_ok, "num_error": s.num_error, "num_pending": s.num_pending,
             "attempt": s.attempt, "lease_owner": s.lease_owner, "error": s.error_message}
            for s in shards
        ]  # fmt: skip
        _print_json(_job_facts(job) | {"shards": listed})
        return
    _show_jobs([job], is_json=False)
    print_table(
        "Shards",
        ("shard", "state", "rows", "ok", "failed", "pending", "attempt", "held by", "error"),
        (
            (f"shard-{s.shard_index:04d}", s.state.value, s.num_rows, s.num_ok, s.num_error,
             s.num_pending, s.attempt, s.lease_owner, s.error_message)
            for s in shards
        ),
    )  # fmt: skip


def _job_facts(job: JobRow) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "state": job.state.value,
        "num_rows": job.num_rows,
        "num_ok": job.num_ok,
        "num_error": job.num_error,
        "num_skipped": job.num_skipped,
        "num_pending": job.num_pending,
        "num_prompt_tokens": job.num_prompt_tokens,
        "num_output_tokens": job.num_output_tokens,
        "seed": job.seed,
        "created_at": job.created_at,
    }


def _config_of(job: JobRow, ledger_url: str) -> JobConfig:
    """Return the configuration that the job was started with, on this ledger."""
    stored = {**job.config, "ledger_url": ledger_url}
    return validate_job_config(stored, origin=f"the configuration of job {job.job_id}")


def _without_password(url: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
