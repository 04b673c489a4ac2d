"""Libraries that a linker takes for CANN's.

They are our simulated ACL, and for the rest functions that do nothing and return 0. Which ones are
wanted is read in the torch_npu wheel itself.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

_COMBINED = "libcann_simulated.so"
_SYSTEM = ("libc.so.6", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1")
_IS_SYSTEM = re.compile(r"(lib(pthread|stdc\+\+|m|gcc_s|c|dl|rt)|ld-linux.*)\.so")
_IS_DATA = re.compile(r"_ZT[VISTC]")
_IS_PYTHON = re.compile(r"_?Py")


def build_libraries(*, wheel: Path, sources: Path, target: Path) -> None:
    print(f"linking the simulated ACL into {target}", flush=True)
    importing = [
        *sorted((wheel / "lib").glob("*.so")),
        *sorted(wheel.glob("_C*.so")),
        *sorted((wheel / "dynamo" / "torchair" / "core").glob("*.so")),
    ]
    present = [*importing, *_torch_libraries()]
    wanted = set[str]().union(*map(_undefined, importing))
    wanted -= set[str]().union(*map(_defined, [*present, *map(_system_library, _SYSTEM)]))
    objects = _compile(sources, wheel / "include", target)
    wanted -= set[str]().union(*map(_defined_here, objects))
    wanted = {symbol for symbol in wanted if not _IS_PYTHON.match(symbol)}
    stubs = target / "stubs.c"
    stubs.write_text(_stub_source(wanted))
    combined = target / _COMBINED
    _link(combined, str(stubs), *map(str, objects), "-lpthread")
    needed = set[str]().union(*map(_needed, importing)) - {library.name for library in present}
    for name in needed:
        if not _IS_SYSTEM.match(name):
            _link(target / name, str(combined), "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")


def _stub_source(symbols: set[str]) -> str:
    """Return C that defines the symbols; a compiler knows every processor, an assembler one."""
    lines = []
    for number, symbol in enumerate(sorted(symbols)):
        if _IS_DATA.match(symbol):
            lines.append(f'char data_{number}[256] __asm__("{symbol}");')
        else:
            lines.append(f'unsigned __int128 stub_{number}(void) __asm__("{symbol}");')
            lines.append(f"unsigned __int128 stub_{number}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _compile(sources: Path, include: Path, target: Path) -> list[Path]:
    objects = []
    for source in sorted(sources.glob("*.c")):
        objects.append(target / f"{source.stem}.o")
        flags = ["-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I", str(include)]
        _run("gcc", *flags, "-c", str(source), "-o", str(objects[-1]))
    return objects


def _link(library: Path, *inputs: str) -> None:
    name = f"-Wl,-soname,{library.name}"
    _run("gcc", "-shared", "-fPIC", "-w", name, "-Wl,--no-as-needed", *inputs, "-o", str(library))


def _torch_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return sorted(Path(spec.submodule_search_locations[0], "lib").glob("*.so*"))


def _system_library(name: str) -> Path:
    return Path(_run("gcc", f"-print-file-name={name}").strip())


def _undefined(library: Path) -> set[str]:
    return _symbols(library, "-D", "--undefined-only")


def _defined(library: Path) -> set[str]:
    return _symbols(library, "-D", "--defined-only")


def _defined_here(library: Path) -> set[str]:
    return _symbols(library, "--defined-only", "--extern-only")


def _symbols(library: Path, *options: str) -> set[str]:
    """Return the names, less those that a system library promises by version."""
    lines = _run("nm", *options, str(library)).splitlines()
    names = (line.split() for line in lines)
    wanted = {words[-1] for words in names if len(words) > 1 and words[-2] not in "wv"}
    if "--undefined-only" in options:
        return {name for name in wanted if "@" not in name}
    return {name.split("@")[0] for name in wanted}


def _needed(library: Path) -> set[str]:
    return set(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(library))))


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout
