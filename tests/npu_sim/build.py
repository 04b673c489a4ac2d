"""`python build.py FOLDER [PIP OPTIONS]`: put together what the simulated NPU needs.

FOLDER/site is the torch_npu wheel, unpacked, and FOLDER/lib has libraries in the place of CANN's.
Nothing is done when both are there and nothing has changed.
"""

import hashlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from stubs import build_libraries

_HERE = Path(__file__).parent
_PROJECT = _HERE.parents[1] / "pyproject.toml"
_TOOLS = ("gcc", "nm", "readelf")


def build(folder: Path, pip_options: list[str]) -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"the simulated NPU needs {', '.join(_TOOLS)}, and {', '.join(missing)} cannot be "
            "found; on Debian and Ubuntu: apt install gcc binutils"
        )
    requirement = _requirement()
    _refresh(
        folder / "site",
        f"{requirement} {sys.version_info[:2]}",
        lambda target: _unpack(requirement, target, pip_options),
    )
    sources = sorted([*(_HERE / "acl").iterdir(), _HERE / "stubs.py"])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    _refresh(
        folder / "lib",
        f"{requirement} {sys.version_info[:2]} {digest}",
        lambda target: build_libraries(
            wheel=folder / "site" / "torch_npu", sources=_HERE / "acl", target=target
        ),
    )


def _requirement() -> str:
    """Return the torch_npu that this version of the project goes with."""
    with _PROJECT.open("rb") as file:
        [requirement] = tomllib.load(file)["project"]["optional-dependencies"]["npu"]
    return str(requirement)


def _refresh(target: Path, wanted: str, make: Callable[[Path], None]) -> None:
    """Make the folder anew unless its stamp says that it is what is wanted."""
    stamp = target.with_suffix(".stamp")
    if target.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    make(target)
    stamp.write_text(wanted)


def _unpack(requirement: str, target: Path, pip_options: list[str]) -> None:
    print(f"unpacking {requirement} into {target}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile"]
    result = subprocess.run([*command, "--target", str(target), *pip_options, requirement])
    if result.returncode != 0:
        sys.exit(
            f"pip cannot install {requirement}; for an index of your own: "
            'make npu-sim PIP_FLAGS="--index-url URL"'
        )


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), sys.argv[2:])
