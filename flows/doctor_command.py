"""The command `tokenmill doctor`: can a run begin here, and what to do if not."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine import ExitCode, Finding, FindingStatus
from flows.cli_options import JsonOption, LedgerOption, print_json
from flows.console import talk
from flows.doctor import examine

_COLOURS = {
    FindingStatus.OK: typer.colors.GREEN,
    FindingStatus.WARNING: typer.colors.YELLOW,
    FindingStatus.ERROR: typer.colors.RED,
}
_STATUS_WIDTH = max(len(status) for status in FindingStatus)


def show_health(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A job's YAML file: its device, ledger, folders."),
    ] = None,
    ledger_url: LedgerOption = None,
    device_timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long devices may take to answer.")
    ] = 120.0,
    is_json: JsonOption = False,
) -> None:
    """Check this machine for a run: packages, devices, Prefect, ledger; exit 2 at an error.

    Changes nothing. A line for each check: ok, warning or error, what was found, what to do.
    """
    findings: list[Finding] = []
    for finding in examine(config_path, ledger_url, device_timeout_seconds=device_timeout):
        findings.append(finding)
        if not is_json:
            _print_finding(finding)
    if is_json:
        print_json([asdict(finding) for finding in findings])
    counts = Counter(finding.status for finding in findings)
    num_errors, num_warnings = counts[FindingStatus.ERROR], counts[FindingStatus.WARNING]
    if not is_json:
        talk.print(f"{num_errors} error(s), {num_warnings} warning(s)")
    if num_errors:
        raise typer.Exit(ExitCode.USER_MUST_ACT)


def _print_finding(finding: Finding) -> None:
    status = typer.style(finding.status.ljust(_STATUS_WIDTH), fg=_COLOURS[finding.status])
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    typer.echo(f"{status} {finding.check}: {finding.found}{remedy}")
