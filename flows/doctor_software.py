"""Checks of Python, of the installed packages and of the cores, from metadata alone."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine import Finding

_PACKAGES = ("torch", "transformers", "numba", "prefect")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def check_python() -> Finding:
    """Compare this Python with what tokenmill asks for."""
    wanted = metadata("tokenmill")["Requires-Python"]
    found = platform.python_version()
    if SpecifierSet(wanted).contains(found):
        return Finding.ok("python", found)
    return Finding.error(
        "python", f"{found}, wanted {wanted}", "make the environment with such a Python"
    )


def check_packages() -> list[Finding]:
    """Compare the packages that tokenmill leans on most with what it asks for."""
    wanted = {need.name: need for need in map(Requirement, requires("tokenmill") or ())}
    return [_check_package(wanted[name]) for name in _PACKAGES]


def _check_package(wanted: Requirement) -> Finding:
    remedy = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return Finding.error(wanted.name, "not installed", remedy)
    if wanted.specifier.contains(found, prereleases=True):
        return Finding.ok(wanted.name, found)
    return Finding.error(wanted.name, f"{found}, wanted {wanted.specifier}", remedy)


def check_cores(
    environment: Mapping[str, str], quota_file: Path = _CPU_QUOTA, cores: int | None = None
) -> Finding:
    """Compare the cores of this process with what limits its threads; cores is for tests."""
    found = len(os.sched_getaffinity(0)) if cores is None else cores
    for name in _THREAD_VARIABLES:
        value = environment.get(name, "")
        if value.isdigit() and int(value) < found:
            return Finding.warning(
                "cores",
                f"{found}, but {name} is {value}",
                f"unset {name}, unless it is meant so; engine.runtime.num_threads does the same",
            )
    quota = _read_quota(quota_file)
    if quota is not None and quota < found:
        return Finding.warning(
            "cores",
            f"{found}, but this container may use {quota:g} of them at a time",
            f"set engine.runtime.num_threads to {max(1, int(quota))}, or threads wait for each other",
        )
    return Finding.ok("cores", f"{found}, a thread of torch and of numba for each")


def _read_quota(path: Path) -> float | None:
    """Return the cores' worth of time; None where nothing limits it.

    Source: the kernel's admin-guide/cgroup-v2.rst, cpu.max.
    """
    try:
        limit, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)
