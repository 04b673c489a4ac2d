"""What several commands share: options, the ledger's jobs as configurations, JSON on stdout."""

import json
from typing import Annotated

import typer

from engine import ConfigError
from flows.config import JobConfig
from flows.job_file import validate_job_config
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.ledger_url import PASSWORD_REFUSAL, default_ledger_url, holds_password


def _refuse_password(ledger_url: str | None) -> str | None:
    if ledger_url is not None and holds_password(ledger_url):
        raise ConfigError(f"--ledger: {PASSWORD_REFUSAL}")
    return ledger_url


LedgerOption = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="SQLAlchemy URL; TOKENMILL_LEDGER_URL when left out.",
        callback=_refuse_password,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a field; repeatable."),
]
JobArgument = Annotated[str, typer.Argument(help="The job's id.")]


def open_ledger(ledger_url: str | None) -> Ledger:
    """Open a ledger that must be there, the default one when none is named.

    Raises:
        LedgerError: there is none, or it cannot be used.
    """
    return Ledger.open(ledger_url or default_ledger_url(), must_exist=True)


def config_of(job: JobRow, ledger_url: str | None, overrides: list[str] | None = None) -> JobConfig:
    """Return the configuration of the job's last run, on this ledger, with overrides over it.

    Raises:
        ConfigError: an override is wrong.
    """
    # What the environment names stays there: it may hold a password, and Prefect keeps parameters.
    is_default = ledger_url in (None, default_ledger_url())
    stored = {**job.config, "ledger_url": None if is_default else ledger_url}
    origin = f"the configuration of job {job.job_id}"
    return validate_job_config(stored, tuple(overrides or ()), origin=origin)


def print_json(value: object) -> None:
    """Print a value to stdout, for machines."""
    typer.echo(json.dumps(value, indent=2, default=str))
