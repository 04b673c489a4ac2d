"""What stands between this machine and a run on its NPUs, without torch_npu being loaded.

None of it has run on a machine with an Ascend card.
"""

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from engine.backends.cann import (
    CannInstallation,
    missing_environment_sentence,
    read_installation,
)
from engine.backends.cann_versions import (
    Fit,
    Match,
    driver_and_cann,
    driver_and_firmware,
    torch_npu_and_cann,
    torch_npu_and_torch,
)
from engine.backends.finding import Finding

_SUPPORTED = "Atlas A2 and A3 (910B, 910C)"
_INSTALLERS = "https://www.hiascend.com/cann/download"
_EXPANSION_MODES = ("AI_CPU", "AIV", "HOST", "HOST_TS")
_DETERMINISTIC = ("true", "false", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    installation: CannInstallation
    environment: Mapping[str, str]
    packages: Mapping[str, str]


def check_ascend(
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
    packages: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Check cards, driver, CANN, torch_npu and HCCL, each in a line; one line where there is none.

    packages are the versions of torch and torch_npu; those that are installed when left out.
    """
    machine = _Machine(
        installation=read_installation(root, environment),
        environment=os.environ if environment is None else environment,
        packages=_installed("torch", "torch_npu") if packages is None else packages,
    )
    found = machine.installation
    if not (found.device_files or found.chips or found.driver):
        return [_without_cards(machine)]
    checks: tuple[Callable[[_Machine], Finding | None], ...] = (
        _check_cards, _check_driver, _check_toolkit, _check_operators, _check_driver_and_toolkit,
        _check_environment, _check_atb, _check_torch_npu, _check_hccl,
    )  # fmt: skip
    return [finding for check in checks if (finding := check(machine)) is not None]


def _without_cards(machine: _Machine) -> Finding:
    toolkit, torch_npu = machine.installation.toolkit, machine.packages.get("torch_npu")
    software = [f"CANN in {toolkit.home}"] if toolkit is not None else []
    software += [f"torch_npu {torch_npu}"] if torch_npu is not None else []
    if not software:
        return Finding.ok("npu", "no Ascend card, driver, toolkit or torch_npu on this machine")
    return Finding.warning(
        "npu",
        f"no card and no driver, but {' and '.join(software)}",
        "engine.device npu cannot run here, auto takes another device; in a container give it the "
        "cards (--device /dev/davinci0 ...) and mount /usr/local/Ascend/driver",
    )


def _installed(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _check_cards(machine: _Machine) -> Finding:
    found = machine.installation
    names = sorted({chip.name for chip in found.chips})
    unsupported = sorted({chip.name for chip in found.chips if not chip.is_supported})
    kinds = f" ({', '.join(names)})" if names else ""
    if unsupported and len(unsupported) == len(names):
        return Finding.error(
            "npu cards",
            f"this machine has Ascend {', '.join(unsupported)}, which tokenmill does not support",
            f"use {_SUPPORTED}, or engine.device: cpu",
        )
    if not found.device_files:
        return Finding.error(
            "npu cards",
            f"the machine has a driver or cards{kinds}, but this process sees no /dev/davinci*",
            "start the container with --device /dev/davinci0 and so on; on the host, see what "
            "`npu-smi info` says",
        )
    if found.missing_control_files:
        return Finding.error(
            "npu cards",
            f"{len(found.device_files)} card(s){kinds}, but no "
            f"{', '.join(found.missing_control_files)}",
            "start the container with these files as --device too",
        )
    note = "" if found.npu_smi else "; no npu-smi, which only tells more"
    return Finding.ok("npu cards", f"{len(found.device_files)} card(s){kinds}{note}")


def _check_driver(machine: _Machine) -> Finding:
    found = machine.installation
    if found.driver is None:
        return Finding.error(
            "npu driver",
            "there are cards, but no /usr/local/Ascend/driver/version.info",
            "install driver and firmware (Ascend HDK); in a container mount "
            "/usr/local/Ascend/driver, read-only, from the host",
        )
    if found.firmware_version is None:
        return Finding.ok("npu driver", f"{found.driver.version}; firmware not seen from here")
    match = driver_and_firmware(found.driver, found.firmware_version)
    remedy = "install the firmware of the driver's own release, then restart the machine"
    return _finding("npu driver", match, remedy)


def _check_toolkit(machine: _Machine) -> Finding:
    toolkit = machine.installation.toolkit
    if toolkit is None:
        return Finding.error(
            "cann toolkit",
            "none in ASCEND_HOME_PATH, /usr/local/Ascend or ~/Ascend",
            f"install CANN ({_INSTALLERS}), or name its folder in ASCEND_HOME_PATH",
        )
    if toolkit.version is None:
        return Finding.warning(
            "cann toolkit",
            f"{toolkit.home}, but no file there says which version",
            "check that its installation was completed",
        )
    return Finding.ok("cann toolkit", f"{toolkit.version} in {toolkit.home}")


def _check_operators(machine: _Machine) -> Finding | None:
    found = machine.installation
    if found.toolkit is None:
        return None
    lacking = sorted(
        {chip.name for chip in found.chips if chip.kernels not in found.toolkit.kernels}
    )
    if lacking or not found.toolkit.kernels:
        chip = lacking[0] if lacking else "910b"
        return Finding.warning(
            "cann operators",
            f"none for {', '.join(lacking) or 'any chip'} in {found.toolkit.home}/opp",
            f"install Ascend-cann-{chip.lower()}-ops of the toolkit's version "
            "(Ascend-cann-kernels before CANN 8.5)",
        )
    return Finding.ok("cann operators", f"for {', '.join(found.toolkit.kernels)}")


def _check_driver_and_toolkit(machine: _Machine) -> Finding | None:
    found = machine.installation
    if found.driver is None or found.toolkit is None or found.toolkit.version is None:
        return None
    match = driver_and_cann(found.driver.version, found.toolkit.version)
    return _finding(
        "cann and driver", match, "see the release notes of this CANN for the drivers it works with"
    )


def _check_environment(machine: _Machine) -> Finding | None:
    found = machine.installation
    if found.toolkit is None:
        return None
    sentence = missing_environment_sentence(found)
    if sentence is None:
        return Finding.ok("cann environment", "loaded")
    gaps, _, remedy = sentence.partition(": ")
    return Finding.error("cann environment", gaps, remedy)


def _check_atb(machine: _Machine) -> Finding | None:
    found = machine.installation
    if found.toolkit is None:
        return None
    if found.nnal is None:
        return Finding.warning(
            "cann nnal",
            "not installed; torch_npu takes some operators from it (libatb.so)",
            "install Ascend-cann-nnal of the toolkit's version",
        )
    name = f"ATB {found.nnal.version or 'of unknown version'}"
    if not found.nnal.is_loaded:
        return Finding.warning(
            "cann nnal",
            f"{name} is installed, but its environment is not loaded",
            f"source {found.nnal.set_env or 'nnal/atb/set_env.sh'} after that of the toolkit",
        )
    return Finding.ok("cann nnal", name)


def _check_torch_npu(machine: _Machine) -> Finding:
    torch_npu, torch = (machine.packages.get(name) for name in ("torch_npu", "torch"))
    if torch_npu is None:
        return Finding.error(
            "torch_npu",
            "not installed, and without it the NPUs of this machine are not used",
            "pip install 'tokenmill[npu]'",
        )
    if torch is not None:
        match = torch_npu_and_torch(torch_npu, torch)
        if match.fit is not Fit.GOOD:
            return _finding("torch_npu", match, "pip install 'tokenmill[npu]', which has the pair")
    toolkit = machine.installation.toolkit
    if toolkit is None or toolkit.version is None:
        return Finding.ok("torch_npu", f"{torch_npu}, made for torch {torch}")
    return _finding(
        "torch_npu",
        torch_npu_and_cann(torch_npu, toolkit.version),
        "prefer a pair that is listed: COMPATIBILITY.md of gitcode.com/Ascend/pytorch",
    )


def _check_hccl(machine: _Machine) -> Finding | None:
    """Check what joins several cards; one card does without."""
    if not machine.installation.device_files:
        return None
    names = ("HCCL_IF_IP", "HCCL_BUFFSIZE", "HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC")
    given = {name: machine.environment[name] for name in names if machine.environment.get(name)}
    problems = {
        name: problem for name, value in given.items() if (problem := _hccl_problem(name, value))
    }
    if problems:
        # Of these a newer CANN may know more values, and one that it does not know it passes over.
        is_harmless = problems.keys() <= {"HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC"}
        make = Finding.warning if is_harmless else Finding.error
        return make("hccl environment", "; ".join(problems.values()), "correct or unset them")
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    return Finding.ok("hccl environment", shown or "nothing is set, HCCL takes its own defaults")


def _hccl_problem(name: str, value: str) -> str | None:
    """Return what is wrong with a value. Source: environment variables of CANN 8.5."""
    wanted = {
        "HCCL_IF_IP": (_is_own_address(value), "an address of this host"),
        "HCCL_BUFFSIZE": (value.isdigit() and int(value) >= 1, "a number of MB, 1 or more"),
        "HCCL_OP_EXPANSION_MODE": (value in _EXPANSION_MODES, " or ".join(_EXPANSION_MODES)),
        "HCCL_DETERMINISTIC": (value.lower() in _DETERMINISTIC, " or ".join(_DETERMINISTIC)),
    }
    is_right, description = wanted[name]
    return None if is_right else f"{name} is {value!r}, wanted {description}"


def _is_own_address(value: str) -> bool:
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    own = (
        entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each
    )
    return str(address) in own


def _finding(check: str, match: Match, remedy: str) -> Finding:
    make = {Fit.BAD: Finding.error, Fit.UNKNOWN: Finding.warning}.get(match.fit)
    return Finding.ok(check, match.note) if make is None else make(check, match.note, remedy)
