"""The documents say what is there: files, links, make targets, commands, job files, Python."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import engine
from engine import ExitCode
from flows.cli import app
from flows.job_file import validate_job_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "deployments/*.md")
    for path in sorted(ROOT.glob(pattern))
]
README = ROOT / "README.md"
TRANSLATIONS = sorted(ROOT.glob("README.*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"\b(?:configs|deployments|docker|docs|engine|flows|tests)/[\w./-]*\.\w+")
FOLDER = re.compile(r"`((?:configs|deployments|docker|docs|engine|flows|tests)/(?:[\w-]+/)*)`")
MAKE = re.compile(r"^\s*(?:\$ )?make ([a-z][a-z-]*)|`make ([a-z][a-z-]*)`", re.MULTILINE)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
# A line of a shell, or a cell of a table that a command has printed.
COMMAND = re.compile(r"^(?:.*│ |\$ )?(tokenmill\b[^│\n]*)", re.MULTILINE)
# What a block leaves out when it shows only a part of a job.
REST_OF_A_JOB = {
    "name": "a",
    "sources": [{"path": "rows.jsonl"}],
    "engine": {"model_path": "models/a"},
}


def names_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(text: str, language: str) -> list[str]:
    return [block for name, block in FENCE.findall(text) if name == language]


def commands_of(text: str) -> list[list[str]]:
    """Return every `tokenmill` command of code blocks and code spans, in words."""
    inline = INLINE.findall(FENCE.sub("", text))
    code = [block for _, block in FENCE.findall(text)] + inline
    lines = [line for piece in code for line in COMMAND.findall(piece)]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def check_command(words: list[str]) -> None:
    """Parse the words as the command line would, without running anything."""
    command: Any = get_command(app)
    path = ["tokenmill"]
    while words and hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"{' '.join(path)} has no command {name}"
        command = command.commands[name]
        path.append(name)
    if not hasattr(command, "commands"):
        command.make_context(" ".join(path), words)


def leaf_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaf_commands(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield path


def overlaid(data: Any, over: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(over, dict):
        return over
    return data | {key: overlaid(data.get(key), value) for key, value in over.items()}


def check_job(block: str) -> None:
    data = yaml.safe_load(block)
    is_whole = {"name", "engine"} <= data.keys()
    validate_job_config(data if is_whole else overlaid(REST_OF_A_JOB, data), origin=block)


def check_imports(code: str) -> None:
    """Make sure that Python code compiles and imports only what is there and public."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            assert [a.name for a in node.names if find_spec(a.name) is None] == []
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {alias.name for alias in node.names}
            module = import_module(node.module)
            public = {name for name in dir(module) if not name.startswith("_")}
            if node.module.partition(".")[0] == "engine":
                public = set(engine.__all__) if module is engine else set()
            assert names - public == set()


def test_readme_exists_in_two_languages():
    assert README in DOCUMENTS
    assert ROOT / "README.zh.md" in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_links_lead_somewhere(document: Path):
    links = LINK.findall(document.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if "://" not in link and link[0] != "#"]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_files_and_folders_that_are_named_exist(document: Path):
    text = document.read_text(encoding="utf-8")
    names = FILE.findall(text) + FOLDER.findall(text)
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_make_targets_that_are_named_exist(document: Path):
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {a or b for a, b in MAKE.findall(document.read_text(encoding="utf-8"))}
    assert named - targets == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_commands_that_are_shown_can_be_typed(document: Path):
    for words in commands_of(document.read_text(encoding="utf-8")):
        check_command(words)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("`tokenmill ran job.yaml`", "no command ran"),
        ("`tokenmill experiments show`", "no command show"),
        ("`tokenmill resume`", "Missing"),
        ("```bash\ntokenmill run job.yaml --sett a=1  # why\n```", "No such option"),
        ("```\n│ try next │ tokenmill status a b │\n```", "unexpected extra argument"),
    ],
)
def test_command_that_cannot_be_typed_is_found(line: str, problem: str):
    (words,) = commands_of(line)
    with pytest.raises(Exception, match=problem):
        check_command(words)


def test_readme_shows_every_command_and_every_exit_code():
    text = README.read_text(encoding="utf-8")
    shown = commands_of(text)
    for path in leaf_commands(get_command(app)):
        assert [words for words in shown if tuple(words[: len(path)]) == path], path
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(int(code)) for code in ExitCode]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_yaml_that_is_shown_is_a_job_or_a_part_of_one(document: Path):
    for block in blocks_of(document.read_text(encoding="utf-8"), "yaml"):
        check_job(block)


def test_yaml_with_a_key_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="did you mean max_tokens"):
        check_job("sampling: {max_new_tokens: 1}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of)
def test_python_that_is_shown_imports_only_public_names(document: Path):
    for block in blocks_of(document.read_text(encoding="utf-8"), "python"):
        check_imports(block)


@pytest.mark.parametrize(
    "code",
    [
        "from engine import Scheduler",
        "from engine.offline import OfflineInference",
        "from flows.ledger import _FETCH_ROWS",
        "from flows.ledger import Ledgers",
        "import no_such_package",
    ],
)
def test_python_that_imports_something_else_is_found(code: str):
    with pytest.raises(AssertionError):
        check_imports(code)


@pytest.mark.multiprocess
def test_engine_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = [
        block
        for block in blocks_of(README.read_text(encoding="utf-8"), "python")
        if "OfflineInference" in block
    ]
    on_mock, num_changes = re.subn(
        r'model_path="[^"]+"', 'model_path="none", device="mock"', example
    )
    assert num_changes == 1
    exec(compile(on_mock, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=names_of)
def test_translation_shows_what_the_original_shows(translation: Path):
    original, translated = (p.read_text(encoding="utf-8") for p in (README, translation))
    assert HEADING.findall(translated) == HEADING.findall(original)
    assert commands_of(translated) == commands_of(original)
    for language in ("python", "json"):
        assert blocks_of(translated, language) == blocks_of(original, language)
    jobs, translated_jobs = (
        [yaml.safe_load(block) for block in blocks_of(text, "yaml")]
        for text in (original, translated)
    )
    assert translated_jobs == jobs


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=names_of)
def test_original_and_translation_link_to_each_other(translation: Path):
    assert translation.name in LINK.findall(README.read_text(encoding="utf-8"))
    assert README.name in LINK.findall(translation.read_text(encoding="utf-8"))
