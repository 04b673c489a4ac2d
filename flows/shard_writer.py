"""Commits a shard's answers from a thread of its own, and keeps its lease alive.

The engine's loop only hands rows over; a commit happens when enough of them are there or when the
oldest has waited long enough. Between commits a heartbeat keeps the lease.
"""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from engine import LedgerError, TokenmillError
from flows.config import JobConfig
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, Lease

_HEARTBEATS_PER_LEASE = 3
# Rows that may wait for their commit before the engine has to wait, in units of commit_rows.
_MAX_WAITING_COMMITS = 8


class ShardWriter:
    """Takes rows from one thread; a context manager that ends with everything committed."""

    def __init__(
        self, ledger: Ledger, lease: Lease, config: JobConfig, *, stream_path: Path | None
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._config = config
        self._stream_path = stream_path
        self._rows: list[CompletionRow] = []
        self._oldest_at = 0.0
        self._condition = threading.Condition()
        self._is_closing = False
        self._error: Exception | None = None
        self.device: str | None = None
        self.commit_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name=f"writer-{lease.shard_index}")

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
        """
        limit = _MAX_WAITING_COMMITS * self._config.commit_rows
        with self._condition:
            self._condition.wait_for(lambda: len(self._rows) < limit or self._error is not None)
            self._raise_error()
            if not self._rows:
                self._oldest_at = time.monotonic()
            self._rows.append(row)
            if len(self._rows) in (1, self._config.commit_rows):
                self._condition.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, TokenmillError):
                raise self._error
            raise LedgerError(f"the ledger cannot be written: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (rows := self._next_rows()) is not None:
                started = time.monotonic()
                if rows:
                    self._ledger.commit(self._lease, rows, device=self.device)
                    self._stream(rows)
                else:
                    self._ledger.renew_lease(self._lease)
                self.commit_seconds += time.monotonic() - started
        except Exception as error:  # noqa: BLE001 - kept for the thread that can act on it
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _next_rows(self) -> list[CompletionRow] | None:
        """Wait for the next commit; an empty list is a heartbeat, None is the end."""
        heartbeat_at = time.monotonic() + self._config.lease_seconds / _HEARTBEATS_PER_LEASE
        with self._condition:
            # A commit is a heartbeat too, so rows that wait do not wait for longer than one.
            while not self._rows or not self._is_due():
                if self._is_closing:
                    return None
                until = heartbeat_at
                if self._rows:
                    until = min(until, self._oldest_at + self._config.commit_seconds)
                wait_seconds = until - time.monotonic()
                if wait_seconds <= 0:
                    break
                self._condition.wait(wait_seconds)
            rows, self._rows = self._rows, []
            self._condition.notify_all()
            return rows

    def _is_due(self) -> bool:
        age_seconds = time.monotonic() - self._oldest_at
        is_full = len(self._rows) >= self._config.commit_rows
        return is_full or self._is_closing or age_seconds >= self._config.commit_seconds

    def _stream(self, rows: Sequence[CompletionRow]) -> None:
        """Append to stream.jsonl, for people who want to look on; the ledger is the truth."""
        if self._stream_path is None:
            return
        lines = [
            json.dumps({"row_id": row.row_id, "text": row.text, "error": row.error_message})
            for row in rows
        ]
        with self._stream_path.open("a", encoding="utf-8") as stream:
            stream.write("".join(f"{line}\n" for line in lines))
