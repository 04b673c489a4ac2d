"""What rows, models and paths bring into messages is shown, and not obeyed."""

import io
import logging
from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job
from terminal import Terminal

from engine import ExitCode
from flows import console
from flows.config import JobConfig
from flows.job_run import JobOutcome
from flows.ledger_check import CheckResult
from flows.ledger_commands import _print_check
from flows.run_artifacts import describe_outcome
from flows.schema import JobState

# Clears a screen, rewrites the line, sets a title, turns the letters round; and is markup of rich.
HOSTILE = "\x1b[2J\rgone\x1b]0;title\x07\u202e\x9b1m [/] [red]a[/red] :red_car: \x00"
SHOWN = r"\x1b[2J\x0dgone\x1b]0;title\x07\x202e\x9b1m [/] [red]a[/red] :red_car: \x00"


@pytest.fixture(params=[False, True])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Give what a file would get of both streams, and what a terminal would."""
    screen = io.StringIO()
    for name in ("talk", "data"):
        stream = type(console.talk)(
            file=screen, width=1000, force_terminal=request.param, color_system=None
        )
        monkeypatch.setattr(console, name, stream)
    return screen


def test_messages_and_tables_are_text(screen: io.StringIO):
    console.talk.print(HOSTILE)
    console.print_table(HOSTILE, (HOSTILE,), [(HOSTILE,)])
    console.print_facts("facts", [(HOSTILE, HOSTILE)])
    assert screen.getvalue().count(SHOWN) == 6
    assert "\x1b" not in screen.getvalue()


@pytest.mark.usefixtures("log_settings_as_before")
def test_lines_of_the_log_are_text(screen: io.StringIO, capsys: pytest.CaptureFixture[str]):
    console.set_up_logging("INFO")
    logging.getLogger("flows").warning("bad row: %s", HOSTILE)
    lines = screen.getvalue() + capsys.readouterr().err
    assert SHOWN in lines
    assert "\x1b[2J" not in lines


def test_a_problem_of_the_ledger_is_text(capsys: pytest.CaptureFixture[str]):
    result = CheckResult(job_id="job-1", name="rows", claim="a claim", problems=(HOSTILE,))
    _print_check(result)
    assert SHOWN in capsys.readouterr().out


def test_a_path_that_is_markup_is_shown_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    folder = tmp_path / "a[" / "b]"
    folder.mkdir(parents=True)
    config = make_job(folder, questions(2))
    run_job(config)
    ended = Terminal(monkeypatch, capfd)("export", "job-1", "--ledger", config.resolved_ledger_url)
    assert (ended.code, "Traceback" in ended.err) == (ExitCode.OK, False)
    assert str(folder / "runs" / "job-1" / "output.jsonl") in ended.out


def summary_of(config: JobConfig, message: str) -> str:
    outcome = JobOutcome(
        job_id="job-1",
        state=JobState.FAILED,
        exit_code=ExitCode.INFRASTRUCTURE,
        message=message,
        output_path=None,
    )
    return describe_outcome(config, outcome)


def test_prefects_ui_gets_a_message_as_an_indented_block_alone(tmp_path: Path):
    config = make_job(tmp_path, questions(1))
    message = "its log ends with:\n```\n<img src=http://host/a>\n\n# title\n![a](http://host/b)"
    ours = summary_of(config, "x").splitlines()
    theirs = [line for line in summary_of(config, message).splitlines() if line not in ours]
    assert len(theirs) == 6
    assert [line for line in theirs if not line.startswith("    ")] == []
