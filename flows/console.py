"""What a person sees in the terminal: progress while a job runs, tables when it is done.

Progress is read from the ledger, so it is the same whoever does the work. Data goes to stdout,
talk to stderr.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flows.ledger import Ledger
from flows.ledger_rows import JobRow

logger = logging.getLogger(__name__)
talk = Console(stderr=True)
# A pipe has no width, and an id that is cut is of no use to a script.
_PIPE_WIDTH = 240
data = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
_POLL_SECONDS = 0.5
_LINE_SECONDS = 5.0


def set_up_logging(level: str) -> None:
    """Send the lines of engine and flows to the terminal, at this level."""
    handler: logging.Handler
    if talk.is_terminal:
        handler = RichHandler(console=talk, show_path=False, omit_repeated_times=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("engine", "flows"):
        package = logging.getLogger(name)
        package.setLevel(level)
        package.addHandler(handler)
        package.propagate = False


@contextmanager
def show_progress(ledger_url: str, job_id: str) -> Iterator[None]:
    """Show how far the job is while the block runs: a bar, or a line every few seconds."""
    done = threading.Event()
    show = _show_bar if talk.is_terminal else _show_lines
    thread = threading.Thread(
        target=_watch, args=(ledger_url, job_id, show, done), name="progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(2 * _POLL_SECONDS)


class Speed:
    """Rows and tokens of this run alone: what was there at the start does not count."""

    def __init__(self, first: JobRow) -> None:
        self.num_resumed = first.num_rows - first.num_pending
        self._first_tokens = first.num_output_tokens
        self._started = time.monotonic()

    def tokens_per_second(self, job: JobRow) -> float:
        """Return the output tokens per second since the start of this run."""
        seconds = time.monotonic() - self._started
        return (job.num_output_tokens - self._first_tokens) / max(seconds, 1e-9)

    def eta_seconds(self, job: JobRow) -> float | None:
        """Return how long the rest takes at this run's speed; None before the first row."""
        num_new = job.num_rows - job.num_pending - self.num_resumed
        if num_new <= 0:
            return None
        return (time.monotonic() - self._started) / num_new * job.num_pending


def _watch(ledger_url: str, job_id: str, show: Any, done: threading.Event) -> None:
    try:
        with Ledger.open(ledger_url) as ledger:
            job = None
            while (job := ledger.find_job(job_id)) is None and not done.wait(_POLL_SECONDS):
                pass
            if job is not None:
                show(ledger, job, Speed(job), done)
    except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the job
        logger.debug("no progress: %s", error)


def _show_bar(ledger: Ledger, job: JobRow, speed: Speed, done: threading.Event) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=talk) as progress:
        bar = progress.add_task(job.job_id, total=job.num_rows, speed="")
        is_last = False
        while not is_last:
            is_last = done.wait(_POLL_SECONDS)
            job = ledger.get_job(job.job_id)
            text = f"{speed.num_resumed} resumed  {job.num_error} failed  "
            text += f"{speed.tokens_per_second(job):.0f} tok/s"
            progress.update(bar, completed=job.num_rows - job.num_pending, speed=text)


def _show_lines(ledger: Ledger, job: JobRow, speed: Speed, done: threading.Event) -> None:
    is_last = False
    while not is_last:
        is_last = done.wait(_LINE_SECONDS)
        job = ledger.get_job(job.job_id)
        eta = speed.eta_seconds(job)
        logger.info(
            "progress rows=%d/%d resumed=%d failed=%d tokens_per_second=%.0f eta_seconds=%s",
            job.num_rows - job.num_pending,
            job.num_rows,
            speed.num_resumed,
            job.num_error,
            speed.tokens_per_second(job),
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
