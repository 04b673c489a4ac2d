"""The commands `tokenmill devices` and `setup-devices`: what the jobs of a host share it with."""

import stat
from pathlib import Path
from typing import Annotated

import typer

from engine import ConfigError, FindingStatus, probe_devices
from flows.cli_options import JsonOption, print_json
from flows.console import print_table, talk
from flows.device_locks import DEFAULT_LOCK_DIR, Claim, DeviceLocks
from flows.job_status import when

LockDirOption = Annotated[Path, typer.Option(help="The jobs' device_lock_dir.")]
_PROBE_SECONDS = 120.0


def set_up_devices(
    num_devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Accelerators of this host; found as `doctor` finds them when left out."
        ),
    ] = None,
    lock_dir: LockDirOption = DEFAULT_LOCK_DIR,
) -> None:
    """Let the jobs of this host share its devices: a folder for locks, and a limit in Prefect's UI.

    The limit counts devices in use. Lower it there to leave some to others, or switch it off. A
    limit that is there is left as it is, unless --num-devices says how many there are.
    """
    from flows.device_limit import set_up_limit  # Prefect takes seconds to import

    DeviceLocks(lock_dir, job_id="").make_folder()
    limit = set_up_limit(num_devices or _count_devices(), may_change=num_devices is not None)
    mode = stat.S_IMODE(lock_dir.stat().st_mode)
    for line in (f"locks: {lock_dir}, mode {mode:o}", f"limit: {limit}"):
        talk.print(line)


def _count_devices() -> int:
    """Return how many accelerators this host has; jobs share its cores.

    Raises:
        ConfigError: it has none, or they do not answer.
    """
    findings = probe_devices(timeout_seconds=_PROBE_SECONDS)
    errors = [finding.found for finding in findings if finding.status is FindingStatus.ERROR]
    num_devices = sum(not finding.found.startswith("cpu") for finding in findings)
    if errors or not num_devices:
        raise ConfigError(
            "the accelerators of this host cannot be counted: "
            f"{'; '.join(errors) or 'none is found'}; say how many there are with --num-devices"
        )
    return num_devices


def show_devices(lock_dir: LockDirOption = DEFAULT_LOCK_DIR, is_json: JsonOption = False) -> None:
    """Show who has the devices of this host, and who waits for them, in the order of the line."""
    locks = DeviceLocks(lock_dir, job_id="")
    claims = [("held", claim) for claim in locks.owners()]
    claims += [("waiting", claim) for claim in locks.waiting()]
    if is_json:
        print_json([_facts(state, claim) for state, claim in claims])
    elif claims:
        print_table(
            f"Devices in {lock_dir}",
            ("devices", "state", "job", "process", "since"),
            (
                (" ".join(claim.devices), state, claim.job_id, claim.pid, when(claim.since))
                for state, claim in claims
            ),
        )
    else:
        talk.print(f"no device is locked in {lock_dir}")


def _facts(state: str, claim: Claim) -> dict[str, object]:
    return {
        "state": state,
        "devices": list(claim.devices),
        "job_id": claim.job_id,
        "pid": claim.pid,
        "since": claim.since,
    }
