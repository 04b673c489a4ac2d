"""The command `tokenmill`. Prefect is imported only by commands that run something."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine import ConfigError, ExitCode, TokenmillError
from flows.cli_options import (
    JobArgument,
    JsonOption,
    LedgerOption,
    SetOption,
    config_of,
    open_ledger,
    print_json,
)
from flows.console import data, print_table, rounded, set_up_logging, talk
from flows.damaged_answers import retry_damaged
from flows.device_commands import set_up_devices, show_devices
from flows.doctor_command import show_health
from flows.experiments import list_experiments
from flows.exporter import export_job
from flows.foreground import run_in_foreground
from flows.job_changes import fork_config, retry_failed
from flows.job_file import load_job_config
from flows.job_status import show_job, show_jobs
from flows.ledger import Ledger
from flows.ledger_commands import ledger_app
from flows.preparation import output_path_of
from flows.records import RecordReader
from flows.row_choice import SampleSize
from flows.verify import verify_job
from flows.verify_report import show_report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline LLM batch inference as a job that cannot lose a row.",
)
experiments_app = typer.Typer(no_args_is_help=True, help="The experiment log.")
app.add_typer(experiments_app, name="experiments")
app.add_typer(ledger_app, name="ledger")
app.command("devices")(show_devices)
app.command("setup-devices")(set_up_devices)
app.command("doctor")(show_health)


def main() -> None:
    """Run the command line; every deliberate error is one message and an exit code."""
    try:
        app()
    except TokenmillError as error:
        talk.print(type(error).__name__, style="bold red")
        talk.print(str(error))
        sys.exit(error.exit_code)


@app.command()
def run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A job's YAML file.")],
    overrides: SetOption = None,
    fork: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="A new job that takes over the answers that hold."),
    ] = None,
) -> None:
    """Run a job; a job_id in the file that exists is resumed."""
    config = load_job_config(config_path, tuple(overrides or ()))
    if fork is not None:
        with Ledger.open(config.resolved_ledger_url, must_exist=True) as ledger:
            config = fork_config(config, ledger, fork)
    raise typer.Exit(run_in_foreground(config))


@app.command()
def resume(
    job_id: JobArgument, overrides: SetOption = None, ledger_url: LedgerOption = None
) -> None:
    """Go on with a job where it stopped; rows that are done are not repeated."""
    with open_ledger(ledger_url) as ledger:
        config = config_of(ledger.get_job(job_id), ledger_url, overrides)
    raise typer.Exit(run_in_foreground(config))


@app.command("retry-failed")
def retry_failed_rows(
    job_id: JobArgument,
    codes: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="CODE", help="Only rows with this error code; repeatable."),
    ] = None,
    is_damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Instead, answers that the ledger cannot read any more."),
    ] = False,
    overrides: SetOption = None,
    ledger_url: LedgerOption = None,
) -> None:
    """Ask rows again that failed, and go on with the job."""
    if is_damaged and codes:
        raise ConfigError("--damaged and --code: damaged answers have no code; give one of the two")
    with open_ledger(ledger_url) as ledger:
        config = config_of(ledger.get_job(job_id), ledger_url, overrides)
        if is_damaged:
            num_again = len(retry_damaged(ledger, job_id))
            said = f"{num_again} damaged answer(s) are asked again"
        else:
            summary = retry_failed(ledger, job_id, tuple(codes or ()))
            num_again, said = summary.num_samples, str(summary)
    talk.print(said)
    if num_again:
        raise typer.Exit(run_in_foreground(config))


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(help="A job's id; all jobs when left out.")
    ] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show how far jobs are, and who drives them."""
    with open_ledger(ledger_url) as ledger:
        if job_id is None:
            show_jobs(ledger, is_json=is_json)
        else:
            show_job(ledger, ledger.get_job(job_id), is_json=is_json)


@app.command()
def export(
    job_id: JobArgument,
    output: Annotated[Path | None, typer.Option(help="Where to; the job's own path.")] = None,
    ledger_url: LedgerOption = None,
) -> None:
    """Write the finished rows of a job in input order, the failed ones too, and a manifest.

    The suffix of --output chooses between JSONL, CSV and Parquet.
    """
    with open_ledger(ledger_url) as ledger:
        job = ledger.get_job(job_id)
        config = config_of(job, ledger_url)
        with RecordReader(config.sources, config.prompt) as reader:
            summary = export_job(config, job, ledger, reader, output or output_path_of(config))
    talk.print(summary.describe())
    if summary.errors_path is not None:
        talk.print(f"failed rows: {summary.errors_path}")
    data.print(str(summary.output_path))


@app.command()
def verify(
    job_id: JobArgument,
    sample: Annotated[
        str, typer.Option(metavar="SIZE", help="How many rows: 1%, 0.01 or 50.")
    ] = "1%",
    seed: Annotated[int, typer.Option(min=0, help="Chooses the rows.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of rows that may differ; 0 for a deterministic job, else 0.05.",
        ),
    ] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Run rows again and compare; exit 1 when more differ than may."""
    size = SampleSize.parse(sample)
    with open_ledger(ledger_url) as ledger:
        job = ledger.get_job(job_id)
        config = config_of(job, ledger_url)
        set_up_logging(config.engine.log_level)
        report = verify_job(config, job, ledger, size=size, seed=seed, tolerance=tolerance)
    show_report(report, is_json=is_json)
    if not report.has_passed:
        raise typer.Exit(ExitCode.ROWS_FAILED)


@experiments_app.command("list")
def experiments_list(
    job_id: Annotated[str | None, typer.Option("--job", help="Only this job's runs.")] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """List runs with their throughput, newest first."""
    with open_ledger(ledger_url) as ledger:
        rows = list_experiments(ledger, job_id=job_id)
    if is_json:
        columns = [column.key for column in rows[0].__table__.columns] if rows else []
        print_json([{name: getattr(row, name) for name in columns} for row in rows])
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
