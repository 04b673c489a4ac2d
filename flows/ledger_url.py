"""A ledger's URL: which ones are taken, where one may hold a password, what of it is shown."""

import os
import re
from collections.abc import Mapping

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from engine import LedgerError

LEDGER_URL_VARIABLE = "TOKENMILL_LEDGER_URL"
DEFAULT_LEDGER_URL = "sqlite:///runs/ledger.sqlite"
# As SQLAlchemy splits a URL, and libpq's names in a query. Plain enough for a JSON schema.
PASSWORD_PATTERN = r"^[^:/?#]+://[^:/@]*:[^@]+@|[?&][A-Za-z]*password="
PASSWORD_REFUSAL = (
    "the URL holds a password, which Prefect's UI or a list of processes would show; set the "
    f"variable {LEDGER_URL_VARIABLE} to it instead, and leave it out here"
)
_FORMS = "sqlite:///FILE or postgresql://USER@HOST/DATABASE"


def default_ledger_url() -> str:
    """Return the ledger that commands use when nothing names one."""
    return os.environ.get(LEDGER_URL_VARIABLE) or DEFAULT_LEDGER_URL


def holds_password(url: str) -> bool:
    """Tell whether a URL may be seen by nobody else.

    Then it may stand in no job file and on no command line: Prefect keeps and shows the parameters
    of a flow run, and a host the command lines of its processes.
    """
    return re.search(PASSWORD_PATTERN, url) is not None


def parse_ledger_url(url: str) -> URL:
    """Return the parts of a URL. No message shows a URL that cannot be told apart.

    Raises:
        LedgerError: it is no URL of a database that a ledger can be in.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Not from that error, which quotes parts of the URL.
        raise LedgerError(
            f"ledger_url, or {LEDGER_URL_VARIABLE}, is not a database URL; write {_FORMS}"
        ) from None
    if "@" in (parsed.host or ""):
        raise LedgerError(
            f"ledger_url, or {LEDGER_URL_VARIABLE}, has more than one @; write those of the user "
            "and the password as %40"
        )
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        return parsed
    raise LedgerError(f"ledger_url: {parsed.drivername} is not supported; use {_FORMS}")


def shown_url(url: URL) -> str:
    """Return the URL as a message or a terminal may show it."""
    return url.set(query=_masked(url.query)).render_as_string(hide_password=True)


def without_password(url: str) -> str:
    """Return the URL as a message or a terminal may show it, under the name that it was given.

    Raises:
        LedgerError: it is no URL of a database that a ledger can be in.
    """
    parsed = parse_ledger_url(url)
    return shown_url(parsed.set(drivername=make_url(url).drivername))


def _masked(query: Mapping[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    return {name: "..." if "password" in name else value for name, value in query.items()}
