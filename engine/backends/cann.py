"""What is installed of Ascend's software, read from its files and from the environment.

No torch and no library of CANN: this must work where they do not. Nothing is changed and nothing
is run. Every path is taken beneath a root, so that a folder can stand for a machine. None of it
has been read on a machine with an Ascend card; the layouts are those that CANN's own installation
guides and published listings of installed machines show.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ASCEND = "usr/local/Ascend"
_HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_KERNELS = "opp/built-in/op_impl/ai_core/tbe/kernel"
# What a toolkit without the package of operators has of its own in a chip's folder.
_NOT_OPERATORS = frozenset({"ops_oam"})
_CONTROL_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_NPU_SMI = ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi", "usr/bin/npu-smi")
_HUAWEI = "0x19e5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of NPU; `kernels` is the folder of its operators in a toolkit."""

    name: str
    kernels: str
    is_supported: bool


# Source: the log collector of Ascend's driver, which looks for these numbers on the PCI bus.
_CHIPS = {
    "0xd100": Chip(name="310", kernels="ascend310", is_supported=False),
    "0xd500": Chip(name="310P", kernels="ascend310p", is_supported=False),
    "0xd801": Chip(name="910", kernels="ascend910", is_supported=False),
    "0xd802": Chip(name="910B", kernels="ascend910b", is_supported=True),
    "0xd803": Chip(name="910C", kernels="ascend910_93", is_supported=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver, and the versions of the firmware that it says it works with, both ends in."""

    version: str
    firmware_ranges: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """One installed CANN; version is None where no file says it."""

    home: Path
    version: str | None
    set_env: Path | None
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nnal:
    """The acceleration library (ATB), which torch_npu loads for some of its operators."""

    version: str | None
    set_env: Path | None
    is_loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CannInstallation:
    """What a machine has for NPUs. Paths are those that its own processes would use."""

    driver: Driver | None
    firmware_version: str | None
    toolkit: Toolkit | None
    nnal: Nnal | None
    device_files: tuple[str, ...]
    missing_control_files: tuple[str, ...]
    chips: tuple[Chip, ...]
    npu_smi: Path | None
    environment_gaps: tuple[str, ...]


def read_installation(
    root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> CannInstallation:
    """Read what is installed beneath root, and what of it the environment names."""
    variables = os.environ if environment is None else environment
    toolkit = _read_toolkit(root, variables)
    devices = sorted(_matching(root, "dev/davinci[0-9]*"), key=lambda path: (len(path.name), path))
    return CannInstallation(
        driver=_read_driver(root),
        firmware_version=_fields(root / _ASCEND / "firmware/version.info").get("version"),
        toolkit=toolkit,
        nnal=_read_nnal(root, variables),
        device_files=tuple(str(_seen_from(root, path)) for path in devices),
        missing_control_files=tuple(
            f"/dev/{name}" for name in _CONTROL_FILES if not (root / "dev" / name).exists()
        ),
        chips=tuple(_read_chips(root)),
        npu_smi=next((Path("/") / name for name in _NPU_SMI if (root / name).is_file()), None),
        environment_gaps=tuple(_environment_gaps(root, variables, toolkit)),
    )


def missing_environment_sentence(installation: CannInstallation | None = None) -> str | None:
    """Return which set_env.sh this process lacks, None when it lacks none or none is installed.

    What a login shell loads is not there under cron, systemd or a Prefect worker.
    """
    found = read_installation() if installation is None else installation
    if found.toolkit is None or not found.environment_gaps:
        return None
    return (
        f"the environment of CANN is not loaded in this process "
        f"({'; '.join(found.environment_gaps)}): {_what_to_source(found)} first; cron, systemd "
        "and a Prefect worker do not read ~/.bashrc, so write it into what starts them"
    )


def _what_to_source(found: CannInstallation) -> str:
    assert found.toolkit is not None
    scripts = [found.toolkit.set_env]
    if found.nnal is not None and not found.nnal.is_loaded:
        scripts.append(found.nnal.set_env)
    known = [f"source {script}" for script in scripts if script is not None]
    return "run `" + (" && ".join(known) or f"source set_env.sh of {found.toolkit.home}") + "`"


def _read_driver(root: Path) -> Driver | None:
    fields = _fields(root / _ASCEND / "driver/version.info")
    # The two agree, but for some versions only the first has been written.
    version = fields.get("package_version") or fields.get("version")
    if version is None:
        return None
    ranges = re.findall(r"\[([\d.]+),([\d.]+)\]", fields.get("compatible_version_fw", ""))
    return Driver(version=version, firmware_ranges=tuple(ranges))


def _read_toolkit(root: Path, environment: Mapping[str, str]) -> Toolkit | None:
    home = next((path for path in _toolkit_homes(root, environment) if path.is_dir()), None)
    if home is None:
        return None
    scripts = (home / "set_env.sh", home.parent / "set_env.sh")
    set_env = next((path for path in scripts if path.is_file()), None)
    return Toolkit(
        home=_seen_from(root, home),
        version=_toolkit_version(home),
        set_env=None if set_env is None else _seen_from(root, set_env),
        kernels=tuple(_read_kernels(home)),
    )


def _toolkit_homes(root: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield where a toolkit may be: what is loaded, then the newer layout, then the older one."""
    for name in _HOME_VARIABLES:
        if environment.get(name):
            yield _beneath(root, environment[name])
    bases = [root / _ASCEND]
    if environment.get("HOME"):
        bases.append(_beneath(root, environment["HOME"]) / "Ascend")
    for base in bases:
        yield base / "cann"
        yield base / "ascend-toolkit/latest"
        yield from sorted(base.glob("cann-*"), reverse=True)
        yield base / "nnae/latest"


def _toolkit_version(home: Path) -> str | None:
    for folder in _architecture_folders(home):
        for name in ("ascend_toolkit_install.info", "ascend_nnae_install.info"):
            version = _fields(folder / name).get("version")
            if version:
                return version
    # [7.6.0.1.220:8.0.0]: the number of the package, then that of CANN.
    running = _fields(home / "version.cfg").get("toolkit_running_version", "")
    match = re.search(r":([^\]]+)\]", running)
    if match:
        return match[1].removeprefix("CANN-")
    for package in ("toolkit", "compiler", "runtime", "opp"):
        fields = _fields(home / package / "version.info")
        if fields.get("version_dir") or fields.get("version"):
            return fields.get("version_dir") or fields.get("version")
    return None


def _architecture_folders(home: Path) -> list[Path]:
    """Return where the files of an architecture are, this machine's own first."""
    own = f"{platform.machine()}-linux"
    return [*sorted(home.glob("*-linux"), key=lambda path: path.name != own), home]


def _read_kernels(home: Path) -> list[str]:
    """Return the chips that operators are installed for, by the names of their folders."""
    return sorted(
        folder.name
        for folder in (home / _KERNELS).glob("ascend*")
        if any(entry.name not in _NOT_OPERATORS for entry in _entries(folder))
    )


def _read_nnal(root: Path, environment: Mapping[str, str]) -> Nnal | None:
    folder = root / _ASCEND / "nnal/atb"
    loaded = environment.get("ATB_HOME_PATH", "")
    is_loaded = bool(loaded) and _beneath(root, loaded).is_dir()
    if not folder.is_dir() and not is_loaded:
        return None
    script = folder / "set_env.sh"
    fields = _fields(folder / "latest/version.info", separator=":")
    return Nnal(
        version=fields.get("ascend-cann-atb"),
        set_env=_seen_from(root, script) if script.is_file() else None,
        is_loaded=is_loaded,
    )


def _read_chips(root: Path) -> Iterator[Chip]:
    for device in _matching(root, "sys/bus/pci/devices/*"):
        if _text(device / "vendor").strip() == _HUAWEI:
            chip = _CHIPS.get(_text(device / "device").strip())
            if chip is not None:
                yield chip


def _environment_gaps(
    root: Path, environment: Mapping[str, str], toolkit: Toolkit | None
) -> Iterator[str]:
    """Yield what torch_npu will not find. Source: torch_npu 2.13.0, its check of the packages."""
    if toolkit is None:
        return
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        value = environment.get(name)
        if not value:
            yield f"{name} is not set"
        elif not _beneath(root, value).is_dir():
            yield f"{name} is {value}, which is no folder"
    home = _beneath(root, str(toolkit.home)).resolve()
    searched = (part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part)
    libraries = {_beneath(root, part).resolve() for part in searched}
    if not any(path.is_relative_to(home) and path.name == "lib64" for path in libraries):
        yield f"LD_LIBRARY_PATH does not name {toolkit.home}/lib64"


def _fields(path: Path, separator: str = "=") -> dict[str, str]:
    """Read lines of KEY=VALUE; keys in lower case. A file that cannot be read has none."""
    pairs = (line.partition(separator) for line in _text(path).splitlines())
    return {key.strip().lower(): value.strip().strip('"') for key, found, value in pairs if found}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _matching(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def _beneath(root: Path, path: str) -> Path:
    """Return a path of the machine as it is found from here."""
    return root / path.lstrip("/")


def _seen_from(root: Path, path: Path) -> Path:
    return Path("/") / path.relative_to(root)
