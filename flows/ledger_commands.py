"""The commands `tokenmill ledger ...`: is it well, and does it grow for ever."""

from dataclasses import asdict
from typing import Annotated

import typer

from engine import ExitCode
from flows.cli_options import JsonOption, LedgerOption, open_ledger, print_json
from flows.console import print_table, talk, visible
from flows.job_status import when
from flows.ledger_check import CheckResult, check_job, check_whole_ledger
from flows.ledger_prune import PruneSummary, parse_age, prune

ledger_app = typer.Typer(no_args_is_help=True, help="The ledger: check it, and prune old jobs.")


@ledger_app.command("check")
def ledger_check(
    job_id: Annotated[
        str | None, typer.Argument(help="A job's id; all jobs when left out.")
    ] = None,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Prove from the rows themselves what the ledger claims; exit 1 when something is wrong."""
    results: list[CheckResult] = []
    with open_ledger(ledger_url) as ledger:
        if job_id is None:
            results = check_whole_ledger(ledger)
        job_ids = [job.job_id for job in ledger.list_jobs()] if job_id is None else [job_id]
        for name in job_ids:
            results += check_job(ledger, name)
    if is_json:
        print_json([asdict(result) | {"is_ok": result.is_ok} for result in results])
    else:
        for result in results:
            _print_check(result)
    if not all(result.is_ok for result in results):
        raise typer.Exit(ExitCode.ROWS_FAILED)


@ledger_app.command("prune")
def ledger_prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Time since the job last changed: 12h, 30d, 8w.")
    ],
    include_unfinished: Annotated[
        bool, typer.Option("--include-unfinished", help="Also jobs that could be resumed.")
    ] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    ledger_url: LedgerOption = None,
    is_json: JsonOption = False,
) -> None:
    """Take old finished jobs out, with their answers, row indexes and logs; outputs stay."""
    seconds = parse_age(older_than)
    with open_ledger(ledger_url) as ledger:
        summary = prune(
            ledger,
            older_than_seconds=seconds,
            include_unfinished=include_unfinished,
            is_dry_run=is_dry_run,
        )
    if is_json:
        print_json(asdict(summary) | {"is_dry_run": is_dry_run})
        return
    _print_pruned(summary, is_dry_run=is_dry_run)


def _print_check(result: CheckResult) -> None:
    where = "ledger" if result.job_id is None else result.job_id
    note = f": {result.note}" if result.note else ""
    typer.echo(visible(f"{'ok   ' if result.is_ok else 'WRONG'} {where}: {result.claim}{note}"))
    for problem in result.problems:
        typer.echo(visible(f"        {problem}"))
    if result.num_problems > len(result.problems):
        typer.echo(f"        and {result.num_problems - len(result.problems)} more")


def _print_pruned(summary: PruneSummary, *, is_dry_run: bool) -> None:
    if summary.jobs:
        print_table(
            "Would be pruned" if is_dry_run else "Pruned",
            ("job", "state", "rows", "last changed", "files", "bytes of files"),
            (
                (job.job_id, job.state.value, job.num_rows, when(job.updated_at), job.num_files,
                 job.num_bytes)
                for job in summary.jobs
            ),
        )  # fmt: skip
    for reason in summary.kept:
        talk.print(f"kept: {reason}")
    freed = f"{len(summary.jobs)} job(s), {summary.num_rows} rows, {summary.num_file_bytes} bytes of files"
    if is_dry_run:
        talk.print(f"would free: {freed}")
        return
    talk.print(f"freed: {freed}, {summary.num_ledger_bytes} bytes of the ledger")
    if summary.not_shrunk is not None:
        talk.print(
            f"the ledger keeps its size for now, new rows fill the space: {summary.not_shrunk}",
        )
