"""The command `tokenmill devices`: who has the devices of this host, and who waits for them."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_options import JsonOption, print_json
from flows.console import print_table, talk
from flows.device_locks import DEFAULT_LOCK_DIR, Claim, DeviceLocks
from flows.job_status import when


def show_devices(
    lock_dir: Annotated[Path, typer.Option(help="The jobs' device_lock_dir.")] = DEFAULT_LOCK_DIR,
    is_json: JsonOption = False,
) -> None:
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
        talk.print(f"no device is locked in {lock_dir}", markup=False, highlight=False)


def _facts(state: str, claim: Claim) -> dict[str, object]:
    return {
        "state": state,
        "devices": list(claim.devices),
        "job_id": claim.job_id,
        "pid": claim.pid,
        "since": claim.since,
    }
