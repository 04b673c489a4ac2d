"""Asks everything that a run depends on, all at a time, and hands out what was found, in order.

A check never ends the report: what it raises is its finding. Nothing is changed.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine import Finding, TokenmillError, check_ascend, probe_devices
from flows.config import JobConfig
from flows.doctor_services import check_prefect_api
from flows.doctor_software import check_cores, check_packages, check_python
from flows.doctor_storage import check_clock, check_folders, check_ledger
from flows.job_file import load_job_config
from flows.ledger_url import default_ledger_url

Answer = Finding | list[Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something to ask; the name is for when it fails itself."""

    name: str
    ask: Callable[[], Answer]


def examine(
    config_path: Path | None, ledger_url: str | None, *, device_timeout_seconds: float
) -> Iterator[Finding]:
    """Yield a finding for each thing that a run depends on, that of config_path when it is given.

    The ledger is ledger_url, else that of the job file, else the default one.
    """
    config = None
    if config_path is not None:
        try:
            config = load_job_config(config_path)
        except TokenmillError as error:
            yield Finding.error("job file", str(error))
        else:
            yield Finding.ok("job file", f"{config_path} is valid")
    configured = default_ledger_url() if config is None else config.resolved_ledger_url
    checks = list_checks(
        config, ledger_url or configured, os.environ, device_timeout_seconds=device_timeout_seconds
    )
    yield from run_checks(checks)


def list_checks(
    config: JobConfig | None,
    ledger_url: str,
    environment: Mapping[str, str],
    *,
    device_timeout_seconds: float,
) -> list[Check]:
    """Return the checks in the order of the report."""
    device = None if config is None else config.engine.device
    # Where the device is cpu, or the mock, no other is missed.
    wanted = device if device in ("cuda", "npu") else None
    return [
        Check(name="python", ask=check_python),
        Check(name="packages", ask=check_packages),
        Check(name="cores", ask=partial(check_cores, environment)),
        Check(name="npu", ask=partial(check_ascend, environment=environment)),
        Check(
            name="devices",
            ask=partial(probe_devices, wanted=wanted, timeout_seconds=device_timeout_seconds),
        ),
        Check(name="prefect api", ask=partial(check_prefect_api, environment)),
        Check(name="ledger", ask=partial(check_ledger, ledger_url)),
        Check(name="folders", ask=partial(check_folders, config)),
        Check(name="clock", ask=partial(check_clock, ledger_url)),
    ]


def run_checks(checks: list[Check]) -> Iterator[Finding]:
    """Ask all at a time; yield the answers in the order of the checks, as they come."""
    with ThreadPoolExecutor(max_workers=max(1, len(checks))) as pool:
        for answer in [pool.submit(_ask, check) for check in checks]:
            yield from answer.result()


def _ask(check: Check) -> list[Finding]:
    try:
        answer = check.ask()
    except TokenmillError as error:
        return [Finding.error(check.name, str(error))]
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what the user asked for
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return [Finding.error(check.name, " ".join(found.split()))]
    return [answer] if isinstance(answer, Finding) else answer
