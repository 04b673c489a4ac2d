"""Which NPU is which: numbers that a process sees, numbers of the machine, chips, and holders.

No torch. Sources: CANN's reference of environment variables for ASCEND_RT_VISIBLE_DEVICES, the
manual of npu-smi for its tables. Neither was tried on a card.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import DeviceHolder
from engine.backends.cann import read_installation
from engine.errors import ConfigError

_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
_MIB = 1 << 20
_NPU_SMI_SECONDS = 10
# Two chips share a number in the tables of npu-smi.
_CHIPS_OF_TWO = "910C"
# The names that torch_npu gives to chips begin with these.
_SUPPORTED_CHIPS = ("Ascend910B", "Ascend910_93")
_REFUSED_CHIPS = ("Ascend310", "Ascend910A", "Ascend910Pr", "Ascend610", "Ascend710")
# | NPU Chip | Process id | Process name | Process memory(MB) |, and newer ones then have
# Process id in container |. A name may be blank.
_PROCESS_ROW = re.compile(
    r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|[^|]*\|\s*(\d+)\s*\|(?:\s*(\d+)\s*\|)?"
)


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices that ASCEND_RT_VISIBLE_DEVICES leaves to a process; None leaves all."""

    text: str | None
    physical_ids: tuple[int, ...] = ()

    @staticmethod
    def of(environment: Mapping[str, str]) -> "VisibleDevices":
        """Read it as CANN does: up to the first character that is no digit and no comma."""
        text = environment.get(_VARIABLE)
        if not text:
            return VisibleDevices(None)
        ids = re.match(r"(?:\d+(?:,(?=\d))?)*", text)
        assert ids is not None
        return VisibleDevices(text, tuple(int(part) for part in ids[0].split(",") if part))

    def physical_id(self, device_id: int) -> int:
        """Return the machine's number of a device that this process calls device_id."""
        is_renamed = device_id < len(self.physical_ids)
        return self.physical_ids[device_id] if is_renamed else device_id

    def describe(self, device_id: int, chip: str) -> str:
        """Return a bound device in words, with the machine's number where that is another."""
        if self.text is None:
            return f"npu {device_id} ({chip})"
        return (
            f"npu {device_id} ({chip}, npu {self.physical_id(device_id)} of the machine by "
            f"{_VARIABLE}={self.text})"
        )

    def check(self, device_id: int, count: int) -> None:
        """Refuse an id that this process does not have; count is what torch_npu sees.

        Raises:
            ConfigError: with the id and what the variable leaves.
        """
        if device_id < count and (self.text is None or device_id < len(self.physical_ids)):
            return
        if self.text is None:
            raise ConfigError(
                f"engine.device_ids has {device_id}, but this machine has {count} device(s) of "
                "kind npu, counted from 0; change engine.device_ids"
            )
        raise ConfigError(
            f"engine.device_ids has {device_id}, but {_VARIABLE}={self.text} leaves this process "
            f"{min(count, len(self.physical_ids))} device(s), which are counted from 0"
            f"{self._in_words()}; {self._advice(device_id)}"
        )

    def _in_words(self) -> str:
        pairs = ", ".join(f"{place} is npu {npu}" for place, npu in enumerate(self.physical_ids))
        read = ",".join(map(str, self.physical_ids))
        ignored = "" if read == self.text else f" (CANN reads no further than {read!r})"
        return f": {pairs or 'none'}{ignored}"

    def _advice(self, device_id: int) -> str:
        if device_id in self.physical_ids:
            place = self.physical_ids.index(device_id)
            return f"write {place} in engine.device_ids for npu {device_id}"
        return f"change engine.device_ids, or {_VARIABLE}: numbers and commas, rising, no spaces"


def check_chip(name: str) -> str | None:
    """Refuse a chip that lacks the kernels; return a warning about one that nobody has checked.

    Raises:
        ConfigError: the chip is known not to have them.
    """
    if name.startswith(_REFUSED_CHIPS):
        raise ConfigError(
            f"{name} is not supported: tokenmill's kernels are those of Atlas A2 and A3 (Ascend "
            "910B, 910C); an Ascend 310P has other ones, and another layout of the KV cache; set "
            "engine.device to cpu"
        )
    if name.startswith(_SUPPORTED_CHIPS):
        return None
    return f"chip {name} is unknown to tokenmill, whose kernels are documented for Atlas A2 and A3"


def read_holders(physical_id: int) -> tuple[DeviceHolder, ...]:
    """Return the other processes on a device, as far as npu-smi tells; none where there is none.

    In a container npu-smi may tell nothing, or ids of processes outside, which are left out.
    """
    installation = read_installation()
    if installation.npu_smi is None:
        return ()
    try:
        table = subprocess.run(
            [installation.npu_smi, "info"],
            capture_output=True,
            timeout=_NPU_SMI_SECONDS,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    chips_per_npu = 2 if any(chip.name == _CHIPS_OF_TWO for chip in installation.chips) else 1
    holders = parse_holders(table, physical_id, chips_per_npu)
    own = os.getpid()
    return tuple(h for h in holders if h.pid != own and Path("/proc", str(h.pid)).exists())


def parse_holders(table: str, physical_id: int, chips_per_npu: int) -> tuple[DeviceHolder, ...]:
    """Return the processes of one device from the table that `npu-smi info` prints."""
    rows = (_PROCESS_ROW.match(line) for line in table.splitlines())
    return tuple(
        DeviceHolder(pid=int(row[5] or row[3]), used_bytes=int(row[4]) * _MIB)
        for row in rows
        if row is not None and int(row[1]) * chips_per_npu + int(row[2]) == physical_id
    )
