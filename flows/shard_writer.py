"""Commits a shard's answers from a thread of its own, and keeps its lease alive.

The engine's loop only hands rows over; a commit happens when enough of them are there or when the
oldest has waited long enough. Tokens of unfinished rows follow the answers. Between commits a
heartbeat keeps the lease.
"""

import contextvars
import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine import ExitCode, LedgerError, TokenmillError
from flows.config import JobConfig
from flows.database import LedgerUnreachableError
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, Lease, PartialRow

logger = logging.getLogger(__name__)
STREAM_NAME = "stream.jsonl"
_HEARTBEATS_PER_LEASE = 3
# Rows that may wait for their commit before the engine has to wait, in units of commit_rows.
_MAX_WAITING_COMMITS = 8


class TooManyFailedRowsError(TokenmillError):
    """More rows failed than max_failed_rows allows; what was answered is committed."""

    exit_code = ExitCode.ROWS_FAILED

    def __init__(self, num_failed: int, max_failed: int) -> None:
        super().__init__(
            f"{num_failed} rows failed, more than max_failed_rows allows ({max_failed}); see "
            "errors.jsonl of `tokenmill export`, mend the cause, then go on with `tokenmill resume "
            "JOB --set max_failed_rows=N`"
        )
        self._numbers = (num_failed, max_failed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Come through a pickle: it is raised on other hosts too."""
        return type(self), self._numbers


class AnswersNotStoredError(LedgerUnreachableError):
    """The ledger went away for good; what was answered since the last commit is asked again."""

    def __init__(self, reason: str, num_answers: int) -> None:
        super().__init__(
            f"{reason}; the last {num_answers} answer(s), since the last commit, are not "
            "stored and will be answered again; nothing that was committed is lost"
        )
        self.num_answers = num_answers
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Come through a pickle: it is raised on other hosts too."""
        return type(self), (self._reason, self.num_answers)


def cut_torn_line(path: Path) -> None:
    """Take off what a kill has left of the last line, so that the next one is a line of its own."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the thread does next; nothing at all is a heartbeat."""

    rows: list[CompletionRow]
    partials: list[PartialRow]


class ShardWriter:
    """Takes rows from any thread; a context manager that ends with everything committed."""

    def __init__(
        self,
        ledger: Ledger,
        lease: Lease,
        config: JobConfig,
        *,
        max_failed_rows: int | None = None,
        stream_path: Path | None = None,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._config = config
        self._max_failed_rows = max_failed_rows
        self._stream_path = stream_path
        self._rows: list[CompletionRow] = []
        self._partials: dict[tuple[int, int], list[PartialRow]] = {}
        self._oldest_at = 0.0
        self._num_in_commit = 0
        self._condition = threading.Condition()
        self._is_busy = False
        self._is_flushing = False
        self._is_closing = False
        self._error: Exception | None = None
        self.device: str | None = None
        self.commit_seconds = 0.0
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # its log lines belong to the shard's task
            args=(self._work,),
            name=f"writer-{lease.shard_index}",
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit what is left; its error is raised unless another is on its way already."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        if error is None:
            self._raise_error()

    def put(self, row: CompletionRow) -> None:
        """Hand over a row; waits while too many wait for their commit.

        Raises:
            LedgerError: an earlier commit or heartbeat failed; nothing more will be committed.
            TooManyFailedRowsError: the job has more failed rows than it may have.
        """
        limit = _MAX_WAITING_COMMITS * self._config.commit_rows
        with self._condition:
            self._raise_error()
            if not self._rows:
                self._oldest_at = time.monotonic()
            self._rows.append(row)
            self._partials.pop(row.key, None)
            if len(self._rows) in (1, self._config.commit_rows):
                self._condition.notify_all()
            self._condition.wait_for(lambda: len(self._rows) < limit or self._error is not None)
            self._raise_error()

    def put_partials(self, rows: Iterable[PartialRow]) -> None:
        """Hand over the tokens of samples that go on; they take the place of earlier ones.

        Raises:
            LedgerError: as of `put`.
            TooManyFailedRowsError: as of `put`.
        """
        with self._condition:
            self._raise_error()
            new: dict[tuple[int, int], list[PartialRow]] = {}
            for row in rows:
                new.setdefault((row.row_index, row.sample_index), []).append(row)
            self._partials |= new
            self._condition.notify_all()

    def flush(self) -> None:
        """Wait until everything that was handed over is committed.

        Raises:
            LedgerError: as of `put`.
            TooManyFailedRowsError: as of `put`.
        """
        with self._condition:
            self._is_flushing = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._error is not None or not (self._rows or self._is_busy)
            )
            self._is_flushing = False
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, TokenmillError):
                raise self._error
            raise LedgerError(f"the ledger cannot be written: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                started = time.monotonic()
                self._do(work)
                self.commit_seconds += time.monotonic() - started
                with self._condition:
                    self._is_busy = False
                    self._condition.notify_all()
        except Exception as error:  # noqa: BLE001 - kept for the thread that can act on it
            with self._condition:
                self._error = error
                if isinstance(error, LedgerUnreachableError):
                    num_answers = self._num_in_commit + len(self._rows)
                    self._error = AnswersNotStoredError(str(error), num_answers)
                self._condition.notify_all()

    def _do(self, work: _Work) -> None:
        if work.rows:
            self._num_in_commit = len(work.rows)
            num_failed = self._ledger.commit(self._lease, work.rows, device=self.device)
            self._num_in_commit = 0
            self._stream(work.rows)
            if self._max_failed_rows is not None and num_failed > self._max_failed_rows:
                raise TooManyFailedRowsError(num_failed, self._max_failed_rows)
        if work.partials:
            self._ledger.save_partials(self._lease, work.partials)
        if not work.rows and not work.partials:
            self._ledger.renew_lease(self._lease)

    def _next_work(self) -> _Work | None:
        """Wait for the next commit; no rows at all are a heartbeat, None is the end."""
        heartbeat_at = time.monotonic() + self._config.lease_seconds / _HEARTBEATS_PER_LEASE
        with self._condition:
            # A commit is a heartbeat too, so rows that wait do not wait for longer than one.
            while not self._is_due():
                if self._is_closing:
                    return None
                until = heartbeat_at
                if self._rows:
                    until = min(until, self._oldest_at + self._config.commit_seconds)
                wait_seconds = until - time.monotonic()
                if wait_seconds <= 0:
                    break
                self._condition.wait(wait_seconds)
            work = _Work(self._rows, [row for turns in self._partials.values() for row in turns])
            self._rows, self._partials = [], {}
            self._is_busy = True
            self._condition.notify_all()
            return work

    def _is_due(self) -> bool:
        if self._partials:
            return True
        if not self._rows:
            return False
        age_seconds = time.monotonic() - self._oldest_at
        is_full = len(self._rows) >= self._config.commit_rows
        is_asked_for = self._is_closing or self._is_flushing
        return is_full or is_asked_for or age_seconds >= self._config.commit_seconds

    def _stream(self, rows: Sequence[CompletionRow]) -> None:
        """Append to stream.jsonl, for people who want to look on; the ledger is the truth."""
        if self._stream_path is None:
            return
        lines = [
            json.dumps({"row_id": row.row_id, "text": row.text, "error": row.error_message})
            for row in rows
        ]
        try:
            with self._stream_path.open("a", encoding="utf-8") as stream:
                stream.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            logger.warning("%s is written no longer: %s", self._stream_path, error)
            self._stream_path = None
