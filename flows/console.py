"""What a person sees in the terminal: progress while a job runs, tables when it is done.

Progress is read from the ledger, so it is the same whoever does the work. Data goes to stdout,
talk to stderr.
"""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from flows.ledger import Ledger
from flows.ledger_rows import JobRow

logger = logging.getLogger(__name__)
# What a terminal obeys, and what turns the order of letters round.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# A pipe has no width, and an id that is cut is of no use to a script.
_PIPE_WIDTH = 240
_POLL_SECONDS = 0.5
_LINE_SECONDS = 5.0
_JOIN_SECONDS = 2.0


def visible(text: str) -> str:
    """Return the text with its control characters, but for line ends and tabs, written as escapes.

    Rows, models and paths bring them into messages; a terminal would obey them.
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class _Terminal(Console):
    """A console to which text is text: no markup, no names of emoji, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a piece of text into what is shown; tables too come through here."""
        return super().render_str(visible(text), **options)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


# Soft wrap: a command that a person is to copy must not be cut in two.
talk = _Terminal(stderr=True, soft_wrap=True)
data = _Terminal(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def set_up_logging(level: str) -> None:
    """Send the lines of engine and flows to the terminal, at this level."""
    handler: logging.Handler
    if talk.is_terminal:
        handler = RichHandler(console=talk, show_path=False, omit_repeated_times=False)
        handler.setFormatter(_Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("engine", "flows"):
        package = logging.getLogger(name)
        package.setLevel(level)
        package.addHandler(handler)
        package.propagate = False


@contextmanager
def show_progress(ledger_url: str, job_id: str) -> Iterator[None]:
    """Show how far the job is while the block runs: a bar, or a line every few seconds."""
    done = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(ledger_url, job_id, done), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_JOIN_SECONDS)


class Speed:
    """Rows and tokens of this run alone: what was there at the start does not count.

    The clock runs from the first shard that this run starts, so that neither planning nor
    Prefect's start makes the engine look slow.
    """

    def __init__(self, before: JobRow | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_resumed = 0 if before is None else before.num_rows - before.num_pending
        self._clock = clock
        self._started: float | None = None
        self._first_rows = self._first_tokens = 0

    @property
    def is_started(self) -> bool:
        """Whether the clock runs."""
        return self._started is not None

    def start(self, job: JobRow) -> None:
        """Let the clock run; what the job has now is not this run's."""
        self._started = self._clock()
        self._first_rows = job.num_rows - job.num_pending
        self._first_tokens = job.num_output_tokens

    def tokens_per_second(self, job: JobRow) -> float:
        """Return the output tokens per second of this run."""
        if self._started is None:
            return 0.0
        seconds = self._clock() - self._started
        return (job.num_output_tokens - self._first_tokens) / max(seconds, 1e-9)

    def eta_seconds(self, job: JobRow) -> float | None:
        """Return how long the rest takes at this run's speed; None before the first row."""
        num_new = job.num_rows - job.num_pending - self._first_rows
        if self._started is None or num_new <= 0:
            return None
        return (self._clock() - self._started) / num_new * job.num_pending


class _Watcher:
    """Looks at one job again and again, and starts its clock."""

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self._ledger = ledger
        self._job_id = job_id
        self._job = ledger.find_job(job_id)
        self._last_start = self._newest_start()
        self.speed = Speed(self._job)

    def look(self) -> JobRow | None:
        """Return the job as it stands; None while it is planned."""
        self._job = self._ledger.find_job(self._job_id)
        if self._job and not self.speed.is_started and self._newest_start() > self._last_start:
            self.speed.start(self._job)
        return self._job

    def _newest_start(self) -> float:
        if self._job is None:
            return 0.0
        shards = self._ledger.list_shards(self._job.job_key)
        return max((shard.started_at or 0.0 for shard in shards), default=0.0)


def _watch(ledger_url: str, job_id: str, done: threading.Event) -> None:
    show = _show_bar if talk.is_terminal else _show_lines
    try:
        with Ledger.open(ledger_url) as ledger:
            show(_Watcher(ledger, job_id), done)
    except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the job
        logger.debug("no progress: %s", error)


def _show_bar(watcher: _Watcher, done: threading.Event) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=talk, expand=True) as progress:
        bar = progress.add_task("rows", total=None, note="planning")
        is_last = False
        while not is_last:
            is_last = done.wait(_POLL_SECONDS)
            job = watcher.look()
            if job is not None:
                num_done = job.num_rows - job.num_pending
                note = _note(job, watcher.speed)
                progress.update(bar, total=job.num_rows, completed=num_done, note=note)


def _note(job: JobRow, speed: Speed) -> str:
    """Return what stands behind the bar; resumed and failed rows only when there are any."""
    parts = []
    if speed.num_resumed:
        parts.append(f"{speed.num_resumed} resumed")
    if job.num_error:
        parts.append(f"{job.num_error} failed")
    parts.append(f"{speed.tokens_per_second(job):.0f} tok/s" if speed.is_started else "starting")
    eta = speed.eta_seconds(job)
    if job.num_pending:
        parts.append(f"ETA {'-:--:--' if eta is None else timedelta(seconds=round(eta))}")
    return "  ".join(parts)


def _show_lines(watcher: _Watcher, done: threading.Event) -> None:
    shown: JobRow | None = None
    next_line_at = time.monotonic() + _LINE_SECONDS
    is_last = False
    while not is_last:
        is_last = done.wait(_POLL_SECONDS)
        job = watcher.look()
        if job is None or job == shown or not (is_last or time.monotonic() >= next_line_at):
            continue
        shown, next_line_at = job, time.monotonic() + _LINE_SECONDS
        eta = watcher.speed.eta_seconds(job)
        logger.info(
            "progress job=%s rows=%d/%d resumed=%d failed=%d tokens_per_second=%.0f eta_seconds=%s",
            job.job_id,
            job.num_rows - job.num_pending,
            job.num_rows,
            watcher.speed.num_resumed,
            job.num_error,
            watcher.speed.tokens_per_second(job),
            "unknown" if eta is None else f"{eta:.0f}",
        )


def print_table(title: str, headers: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table to stdout."""
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(headers):
        table.add_column(header, no_wrap=number == 0)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    data.print(table)


def print_facts(title: str, facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values to stdout, a line each."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, "" if value is None else str(value))
    data.print(table)


def rounded(value: float | None) -> str | None:
    """Return a number as tables show it."""
    return None if value is None else f"{value:.1f}"
