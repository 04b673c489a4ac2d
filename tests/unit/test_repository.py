"""House rules that no linter knows: sizes, names, and what an import costs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
# Names that say nothing, and so collect anything.
BANNED_NAMES = {"utils.py", "helpers.py", "common.py", "types.py"}
LIGHT_MODULES = [
    "engine",
    "engine.config",
    "engine.messages",
    "engine.request",
    "engine.scheduler",
    "flows",
    "flows.config",
    "flows.demo",
]


def python_files() -> list[Path]:
    """Files that git knows or would add, so that a scratch folder is not judged."""
    listing = ["ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.py"]
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *listing]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_git_lists_the_code_that_is_judged_here():
    assert Path(__file__) in python_files()
    assert ROOT / "engine" / "errors.py" in python_files()


def test_no_file_is_too_long_to_read():
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in python_files()}
    assert {str(p): n for p, n in lengths.items() if n > MAX_LINES} == {}


def test_no_file_has_a_name_that_collects_anything():
    assert [str(p) for p in python_files() if p.name in BANNED_NAMES] == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_stays_light(module: str):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    code = (
        f"import sys, {module}\n"
        "print(*[m for m in ('torch', 'transformers', 'prefect') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.split() == []
