"""The command `tokenmill`. Prefect is imported only by commands that run something."""

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from engine import TokenmillError
from flows.config import JobConfig, default_ledger_url
from flows.console import data, print_table, rounded, talk
from flows.experiments import list_experiments
from flows.exporter import export_job
from flows.foreground import run_in_foreground
from flows.job_file import load_job_config, validate_job_config
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.preparation import output_path_of
from flows.records import RecordReader

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline LLM batch inference as a job that cannot lose a row.",
)
experiments_app = typer.Typer(no_args_is_help=True, help="The experiment log.")
app.add_typer(experiments_app, name="experiments")

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
    raise typer.Exit(run_in_foreground(load_job_config(config_path, tuple(overrides or ()))))


@app.command()
def resume(job_id: JobArgument, ledger_url: LedgerOption = None) -> None:
    """Go on with a job where it stopped; rows that are done are not repeated."""
    url = ledger_url or default_ledger_url()
    with Ledger.open(url, must_exist=True) as ledger:
        config = _config_of(ledger.get_job(job_id), url)
    raise typer.Exit(run_in_foreground(config))


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(help="A job's id; all jobs when left out.")
    ] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show how far jobs are."""
    with Ledger.open(ledger_url or default_ledger_url(), must_exist=True) as ledger:
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
    """Write the finished rows of a job in input order, the failed ones too, and a manifest.

    The suffix of --output chooses between JSONL, CSV and Parquet.
    """
    url = ledger_url or default_ledger_url()
    with Ledger.open(url, must_exist=True) as ledger:
        job = ledger.get_job(job_id)
        config = _config_of(job, url)
        with RecordReader(config.sources, config.prompt) as reader:
            summary = export_job(config, job, ledger, reader, output or output_path_of(config))
    talk.print(summary.describe(), highlight=False)
    if summary.errors_path is not None:
        talk.print(f"failed rows: {summary.errors_path}", markup=False, highlight=False)
    data.print(str(summary.output_path), markup=False, highlight=False)


@experiments_app.command("list")
def experiments_list(
    job_id: Annotated[str | None, typer.Option("--job", help="Only this job's runs.")] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """List runs with their throughput, newest first."""
    with Ledger.open(ledger_url or default_ledger_url(), must_exist=True) as ledger:
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
             rounded(row.output_tokens_per_second), rounded(row.busy_seconds))
            for row in rows
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
    # What the environment names stays there: it may hold a password, and Prefect keeps parameters.
    is_default = ledger_url == default_ledger_url()
    stored = {**job.config, "ledger_url": None if is_default else ledger_url}
    return validate_job_config(stored, origin=f"the configuration of job {job.job_id}")


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
