"""Which versions of driver, firmware, CANN, torch_npu and torch were published as a set.

Facts only: a version that no list names is unknown, not wrong. Sources: the release notes of CANN
8.5.0 and 9.2.0 (which driver, that is which Ascend HDK) and of TorchNPU 26.2.0 (which CANN). None of
the sets has run here.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from engine.backends.cann import Driver

Series = tuple[int, int]

_ALL_DRIVERS: tuple[Series, ...] = (
    (25, 0), (25, 2), (25, 3), (25, 5), (25, 7), (26, 0), (26, 1), (26, 2),
)  # fmt: skip
# The drivers of each CANN; each list ends where the newest release note ends.
_DRIVERS_OF: dict[Series, tuple[Series, ...]] = {
    (8, 5): _ALL_DRIVERS,
    (9, 0): _ALL_DRIVERS,
    (9, 1): _ALL_DRIVERS[1:],
    (9, 2): _ALL_DRIVERS[2:],
}
# Every torch_npu for torch 2.6 to 2.14 is listed with every CANN from 8.5 to 9.2.
_TORCH_NPU: tuple[Series, Series] = ((2, 6), (2, 14))
_CANN: tuple[Series, ...] = ((8, 5), (9, 0), (9, 1), (9, 2))


class Fit(StrEnum):
    """Whether two versions belong together."""

    GOOD = "good"
    UNKNOWN = "unknown"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An answer about two versions, in words for the user."""

    fit: Fit
    note: str


def driver_and_cann(driver: str, cann: str) -> Match:
    """Compare a driver with the ones that CANN's release notes name for this CANN."""
    series, listed = series_of(driver), _DRIVERS_OF.get(series_of(cann) or (0, 0))
    if series is None or listed is None:
        return Match(fit=Fit.UNKNOWN, note=f"no list of drivers for CANN {cann} is known here")
    if series in listed:
        return Match(fit=Fit.GOOD, note=f"driver {driver} is listed for CANN {cann}")
    wanted = f"CANN {cann} wants driver {dotted(listed[0])} or newer"
    # 25.1 is not an older 25.2: it is a line of drivers of its own, for other boards.
    is_older = series < _ALL_DRIVERS[0] or (series in _ALL_DRIVERS and series < listed[0])
    if is_older:
        return Match(fit=Fit.BAD, note=f"driver {driver} is too old: {wanted}")
    return Match(fit=Fit.UNKNOWN, note=f"driver {driver} is in no list known here; {wanted}")


def driver_and_firmware(driver: Driver, firmware: str) -> Match:
    """Compare a firmware with the ranges that the driver's own file names."""
    number = _numbers(firmware)[:3]
    if not driver.firmware_ranges or not number:
        return Match(fit=Fit.UNKNOWN, note=f"driver {driver.version} names no firmware")
    ranges = [(_numbers(first), _numbers(last)) for first, last in driver.firmware_ranges]
    if any(first <= number <= last for first, last in ranges):
        return Match(fit=Fit.GOOD, note=f"firmware {firmware} fits driver {driver.version}")
    wanted = ", ".join(f"{first} to {last}" for first, last in driver.firmware_ranges)
    return Match(
        fit=Fit.BAD,
        note=f"firmware {firmware} does not fit driver {driver.version}, which wants {wanted}",
    )


def torch_npu_and_torch(torch_npu: str, torch: str) -> Match:
    """Compare the minor versions: torch_npu is compiled against one of torch."""
    if series_of(torch_npu) == series_of(torch):
        return Match(fit=Fit.GOOD, note=f"torch_npu {torch_npu} fits torch {torch}")
    return Match(
        fit=Fit.BAD,
        note=f"torch_npu {torch_npu} is made for another torch than {torch}",
    )


def torch_npu_and_cann(torch_npu: str, cann: str) -> Match:
    """Compare a CANN with the ones that are listed for this torch_npu; the rest is unknown."""
    series = series_of(torch_npu)
    if series is None or not _TORCH_NPU[0] <= series <= _TORCH_NPU[1]:
        note = f"no list of CANN versions for torch_npu {torch_npu} is known here"
        return Match(fit=Fit.UNKNOWN, note=note)
    if series_of(cann) in _CANN:
        return Match(fit=Fit.GOOD, note=f"CANN {cann} is listed for torch_npu {torch_npu}")
    return Match(
        fit=Fit.UNKNOWN,
        note=f"torch_npu {torch_npu} is listed with CANN {dotted(_CANN[0])} to "
        f"{dotted(_CANN[-1])}, not with {cann}",
    )


def series_of(version: str) -> Series | None:
    """Return the first two numbers: (8, 3) of 8.3.RC1; None when there are no two."""
    numbers = _numbers(version)
    return (numbers[0], numbers[1]) if len(numbers) > 1 else None


def dotted(series: Series) -> str:
    """Return a series as it is written: 25.3."""
    return f"{series[0]}.{series[1]}"


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
