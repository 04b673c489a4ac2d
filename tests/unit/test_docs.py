"""The documents name only files, links and make targets that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"\b(?:configs|deployments|docker|docs|engine|flows|tests)/[\w./-]*\.\w+")
MAKE = re.compile(r"^\s*(?:\$ )?make ([a-z][a-z-]*)|`make ([a-z][a-z-]*)`", re.MULTILINE)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def names_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_readme_exists():
    assert ROOT / "README.md" in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_links_lead_somewhere(document: Path):
    links = LINK.findall(document.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if "://" not in link and link[0] != "#"]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_files_that_are_named_exist(document: Path):
    files = FILE.findall(document.read_text(encoding="utf-8"))
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_make_targets_that_are_named_exist(document: Path):
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {a or b for a, b in MAKE.findall(document.read_text(encoding="utf-8"))}
    assert named - targets == set()
