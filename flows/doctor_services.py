"""Check of the Prefect API: is one configured, does it answer, does its version fit."""

import base64
import json
from collections.abc import Mapping
from http.client import HTTPException
from importlib.metadata import version
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from engine import Finding

_TIMEOUT_SECONDS = 5.0
_CHECK = "prefect api"


def check_prefect_api(environment: Mapping[str, str]) -> Finding:
    """Ask the Prefect API for its version."""
    url = environment.get("PREFECT_API_URL") or _url_of_profile()
    if not url:
        return Finding.ok(
            _CHECK,
            "none is configured: each `tokenmill run` starts a server of its own for its time; set "
            "PREFECT_API_URL for one that stays",
        )
    shown = _without_user(url)
    try:
        found = _ask(url, environment)
    except HTTPError as error:
        if error.code in (401, 403):
            return Finding.error(
                _CHECK,
                f"{shown} refuses this user (HTTP {error.code})",
                "set PREFECT_API_KEY or PREFECT_API_AUTH_STRING",
            )
        return Finding.warning(
            _CHECK,
            f"{shown} answers, but does not say its version (HTTP {error.code})",
            "see that the URL ends in /api",
        )
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return Finding.error(
            _CHECK,
            f"{shown} gives no usable answer: {reason}",
            "start it (`prefect server start`), or unset PREFECT_API_URL for a temporary one",
        )
    own = version("prefect")
    if _minor(found) == _minor(own):
        return Finding.ok(_CHECK, f"{shown}, Prefect {found}")
    return Finding.warning(
        _CHECK,
        f"{shown} is Prefect {found}, and here it is {own}",
        "let the server have the same minor version, or a newer one",
    )


def _url_of_profile() -> str | None:
    # Prefect takes seconds to import; only it knows its profiles and settings files.
    from prefect.settings import PREFECT_API_URL

    url: str | None = PREFECT_API_URL.value()
    return url


def _ask(url: str, environment: Mapping[str, str]) -> str:
    headers = {"Accept": "application/json"}
    if environment.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {environment['PREFECT_API_KEY']}"
    elif environment.get("PREFECT_API_AUTH_STRING"):
        encoded = base64.b64encode(environment["PREFECT_API_AUTH_STRING"].encode()).decode()
        headers["Authorization"] = f"Basic {encoded}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("it is no http or https URL")
    request = Request(f"{url.rstrip('/')}/admin/version", headers=headers)
    with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        found = json.load(answer)
    if not isinstance(found, str):
        raise ValueError("that is no Prefect API")  # noqa: TRY004 - what was answered is the value
    return found


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _minor(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")[:2])
