"""Which GPUs a process sees, and who else is on them: facts of environment and nvidia-smi, no torch.

Source: CUDA programming guide, CUDA_VISIBLE_DEVICES; nvidia-smi --help-query-compute-apps. The
texts that are read here were not taken from a machine with a GPU.
"""

import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path

from engine.backends.base import DeviceHolder

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SMI = (
    "nvidia-smi",
    "--query-compute-apps=pid,gpu_uuid,used_memory",
    "--format=csv,noheader,nounits",
)
_SMI_SECONDS = 20
_MIB = 1 << 20


def explain_no_devices(environment: Mapping[str, str], cuda_version: str | None) -> str:
    """Say why torch sees no GPU, and what to do; cuda_version is what torch was built for."""
    if cuda_version is None:
        return (
            "engine.device is cuda, but this torch was built for the CPU; install the build for "
            "your CUDA version, see https://pytorch.org/get-started/locally"
        )
    visible = environment.get(_VISIBLE)
    if visible is not None and not visible.strip():
        return f"engine.device is cuda, but {_VISIBLE} is empty, which hides every GPU; unset it"
    hidden = f" {_VISIBLE} is {visible!r};" if visible is not None else ""
    return (
        f"engine.device is cuda, but torch (built for CUDA {cuda_version}) sees no GPU;{hidden} "
        "compare with `nvidia-smi`: no device there means no driver, or a container that was "
        "started without --gpus"
    )


def describe_device(
    device_id: int, name: str, total_bytes: int, environment: Mapping[str, str]
) -> str:
    """Return a bound GPU in words, and which one CUDA_VISIBLE_DEVICES makes it."""
    words = f"{name}, {total_bytes / (1 << 30):.1f} GiB"
    if visible := environment.get(_VISIBLE):
        places = [place.strip() for place in visible.split(",")]
        place = places[device_id] if device_id < len(places) else "unknown"
        words += f", number {device_id} of {_VISIBLE}={visible}: {place}"
    return f"cuda:{device_id} ({words})"


def read_holders(uuid: str) -> tuple[DeviceHolder, ...]:
    """Ask nvidia-smi for the processes on a GPU; nobody, where it is not there."""
    try:
        done = subprocess.run(
            _SMI, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("cuda: nvidia-smi does not say who else is on the GPU: %s", error)
        return ()
    # In a container these may be processes of the host, of which nobody here can know or end one.
    return tuple(h for h in parse_holders(done.stdout, uuid) if Path(f"/proc/{h.pid}").exists())


def parse_holders(text: str, uuid: str) -> list[DeviceHolder]:
    """Return the holders of one GPU from lines of pid, uuid, MiB.

    The uuid may come with nvidia-smi's GPU- before it or without, as torch gives it.
    """
    holders = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdigit() or _bare(fields[1]) != _bare(uuid):
            continue
        mib = int(fields[2]) if fields[2].isdigit() else 0  # [N/A] without permission
        holders.append(DeviceHolder(pid=int(fields[0]), used_bytes=mib * _MIB))
    return holders


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")
