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
_URL, _KEY, _LOGIN = "PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"


def check_prefect_api(environment: Mapping[str, str]) -> Finding:
    """Ask the Prefect API for its version."""
    is_in_environment = bool(environment.get(_URL))
    settings = environment if is_in_environment else {**_profile_settings(), **environment}
    url = settings.get(_URL)
    if not url:
        return Finding.ok(
            _CHECK,
            "none is configured: each `tokenmill run` starts a server of its own for its time; set "
            f"{_URL} for one that stays",
        )
    shown = _without_user(url)
    try:
        found = _ask(url, settings)
    except HTTPError as error:
        return _refusal(shown, error.code, has_key=bool(settings.get(_KEY) or settings.get(_LOGIN)))
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


def _refusal(shown: str, code: int, *, has_key: bool) -> Finding:
    if code not in (401, 403):
        return Finding.warning(
            _CHECK,
            f"{shown} answers, but does not say its version (HTTP {code})",
            "see that the URL ends in /api",
        )
    if has_key:
        return Finding.error(
            _CHECK, f"{shown} refuses this user (HTTP {code})", f"correct {_KEY} or {_LOGIN}"
        )
    return Finding.warning(
        _CHECK,
        f"{shown} wants to know who asks (HTTP {code})",
        f"set {_KEY} or {_LOGIN}; those of a Prefect profile were not tried",
    )


def _profile_settings() -> dict[str, str]:
    """Return what Prefect's profiles and settings files say; only it knows where they are."""
    # Prefect takes seconds to import.
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL

    named = {_URL: PREFECT_API_URL, _KEY: PREFECT_API_KEY, _LOGIN: PREFECT_API_AUTH_STRING}
    values = {name: setting.value() for name, setting in named.items()}
    return {name: str(value) for name, value in values.items() if value}


def _ask(url: str, settings: Mapping[str, str]) -> str:
    headers = {"Accept": "application/json"}
    if settings.get(_KEY):
        headers["Authorization"] = f"Bearer {settings[_KEY]}"
    elif settings.get(_LOGIN):
        encoded = base64.b64encode(settings[_LOGIN].encode()).decode()
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
