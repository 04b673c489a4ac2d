"""The memory of the host that this process may use: all of it, or what its container is given.

A process that goes beyond the limit of its control group (cgroup) is killed, however much memory
the machine has left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class HostMemory(NamedTuple):
    """Bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The files of one version of control groups.

    Source: the kernel's admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst.
    """

    limit: str
    usage: str
    reclaimable: tuple[str, str]  # keys of memory.stat: cached files, which the kernel may drop


_V1 = _Names(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable=("total_active_file", "total_inactive_file"),
)
_V2 = _Names(
    limit="memory.max", usage="memory.current", reclaimable=("active_file", "inactive_file")
)


def host_memory(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> HostMemory:
    """Return what is free and what there is, on the host and in each group around this process."""
    host = psutil.virtual_memory()
    free_bytes, total_bytes = host.available, host.total
    for folder, names in _groups(cgroups, membership):
        room = _room(folder, names)
        if room is not None:
            free_bytes = min(free_bytes, room.free_bytes)
            total_bytes = min(total_bytes, room.total_bytes)
    return HostMemory(free_bytes, total_bytes)


def _groups(cgroups: Path, membership: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the memory groups of this process, with those that they are in.

    Inside a container a path may be that of the host; then the root is the container's group.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        relative = Path(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            yield root / folder, names


def _room(folder: Path, names: _Names) -> HostMemory | None:
    """Return what a group leaves; None when it sets no limit or is not to be seen from here."""
    try:
        limit = int((folder / names.limit).read_text(encoding="ascii"))
        usage = int((folder / names.usage).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # "max" is no number
        return None
    stat = dict(line.split(" ", 1) for line in lines)
    reclaimable = sum(int(stat.get(key, 0)) for key in names.reclaimable)
    return HostMemory(max(0, limit - max(0, usage - reclaimable)), limit)
