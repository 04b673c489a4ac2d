"""Named points of a job's way where its process kills itself, or where a call of it fails.

The product knows nothing of them: the functions of the product are wrapped in the process that
is to die. Each point is passed many times in a job; `nth` says at which pass it strikes.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

import flows.connections
import flows.job_run
import flows.outages
from flows import completions, jobs, leases, unfinished
from flows.database import Database
from flows.ledger import Ledger
from flows.schema import JobState
from torture.trace import TraceWriter

_STOP_SECONDS = 0.5


class Fuse:
    """Counts how often a point is passed, and strikes at the nth time."""

    def __init__(self, name: str, nth: int, trace: TraceWriter) -> None:
        self._name = name
        self._remaining = nth
        self._trace = trace
        self._lock = threading.Lock()

    def blow(self) -> None:
        """Pass the point; the process ends here when it is the nth time."""
        if self.is_due():
            os.kill(os.getpid(), signal.SIGKILL)

    def is_due(self) -> bool:
        """Pass the point, and tell whether it is the nth time."""
        with self._lock:
            self._remaining -= 1
            is_due = self._remaining == 0
        if is_due:
            self._trace.note("point", self._name)
        return is_due


Condition = Callable[..., bool]


def arm(name: str, nth: int, trace: TraceWriter) -> None:
    """Let this process end, or a call of it fail, at the nth pass of a named point.

    Raises:
        KeyError: no such point.
    """
    FAILPOINTS[name](Fuse(name, nth, trace))


def _after(owner: Any, function: str, *, when: Condition | None = None) -> Callable[[Fuse], None]:
    """Return a point right behind a function, passed when its result and arguments fit."""

    def plant(fuse: Fuse) -> None:
        original = getattr(owner, function)

        @wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            if when is None or when(result, *arguments, **options):
                fuse.blow()
            return result

        setattr(owner, function, wrapped)

    return plant


def _at_rename(target_name: str, *, is_before: bool) -> Callable[[Fuse], None]:
    """Return a point beside the rename that gives a file its name."""

    def plant(fuse: Fuse) -> None:
        original = os.replace

        def replace(source: Any, target: Any, **options: Any) -> None:
            is_it = Path(target).name == target_name
            if is_it and is_before:
                fuse.blow()
            original(source, target, **options)
            if is_it and not is_before:
                fuse.blow()

        os.replace = replace

    return plant


def _before_commit(fuse: Fuse) -> None:
    """Strike when all statements of a commit of answers are done, at its COMMIT."""
    store = completions.store
    transaction = threading.local()

    def noted_store(connection: Any, origin: Any, rows: Any) -> Any:
        counts = store(connection, origin, rows)
        transaction.has_answers = origin.attempt > 0
        return counts

    def on_commit(connection: Any) -> None:
        if getattr(transaction, "has_answers", False):
            transaction.has_answers = False
            fuse.blow()

    completions.store = noted_store
    event.listen(Engine, "commit", on_commit)


def _commit_raises(fuse: Fuse) -> None:
    """Let a commit raise what nobody foresaw, in the writer's thread."""
    commit = Ledger.commit

    def failing_commit(*arguments: Any, **options: Any) -> None:
        if fuse.is_due():
            raise RuntimeError("nobody foresaw this")
        commit(*arguments, **options)

    Ledger.commit = failing_commit  # type: ignore[method-assign]


def _fill_disk(fuse: Fuse) -> None:
    """Let no file grow beyond the size that the ledger's log has, as if the disk was full."""
    commit = Ledger.commit

    def commit_on_full_disk(self: Ledger, *arguments: Any, **options: Any) -> None:
        if fuse.is_due():
            url = self.database._engine.url
            limit = Path(f"{url.database}-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        commit(self, *arguments, **options)

    Ledger.commit = commit_on_full_disk  # type: ignore[method-assign]


def _lose_acknowledgement(fuse: Fuse) -> None:
    """Let a commit reach the database, and its acknowledgement be lost on the way back."""
    write_once = Database._write_once

    def write_and_hear_nothing(*arguments: Any) -> Any:
        result = write_once(*arguments)
        if fuse.is_due():
            gone = psycopg.OperationalError("the connection is lost")
            raise OperationalError("COMMIT", {}, gone)
        return result

    flows.outages._PAUSE_SECONDS = 0.001
    Database._write_once = write_and_hear_nothing  # type: ignore[method-assign]


def _freeze(owner: Any, function: str, *, when: Condition | None = None) -> Callable[[Fuse], None]:
    """Return a point behind a function where the process stands still until it gets SIGCONT.

    Of its transaction, if it is in one, PostgreSQL loses patience soon.
    """

    def plant(fuse: Fuse) -> None:
        flows.connections._IDLE_MILLISECONDS = 500
        original = getattr(owner, function)

        @wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            if (when is None or when(result, *arguments, **options)) and fuse.is_due():
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(_STOP_SECONDS)  # another thread may get the signal, a little later
            return result

        setattr(owner, function, wrapped)

    return plant


def _is_take_over(lease: Any, *_arguments: Any, **_options: Any) -> bool:
    return bool(lease.epoch > 1)


def _are_answers(_counts: Any, _connection: Any, origin: Any, *_more: Any) -> bool:
    return bool(origin.attempt > 0)


def _are_bad_rows(_counts: Any, _connection: Any, origin: Any, *_more: Any) -> bool:
    return bool(origin.attempt == 0)


def _is_finish(_result: Any, _connection: Any, _job_key: Any, state: Any) -> bool:
    return bool(state is JobState.FINISHED)


# Points named `in_` are inside a transaction that has not been committed yet.
FAILPOINTS: dict[str, Callable[[Fuse], None]] = {
    "in_upgrade": _after(Database, "_upgrade"),
    "after_write": _after(Database, "_write_once"),
    "in_create_job": _after(jobs, "create"),
    "before_index_rename": _at_rename("rows.sqlite", is_before=True),
    "after_index_rename": _at_rename("rows.sqlite", is_before=False),
    "in_commit_bad_rows": _after(completions, "store", when=_are_bad_rows),
    "in_take_over_of_job": _after(leases, "acquire_job", when=_is_take_over),
    "after_take_over_of_job": _after(Ledger, "acquire_job", when=_is_take_over),
    "in_take_over_of_shard": _after(leases, "acquire", when=_is_take_over),
    "after_take_over_of_shard": _after(Ledger, "acquire_shard", when=_is_take_over),
    "after_insert": _after(completions, "store", when=_are_answers),
    "before_commit": _before_commit,
    "after_commit": _after(Ledger, "commit"),
    "in_save_partials": _after(unfinished, "save_partials"),
    "after_save_partials": _after(Ledger, "save_partials"),
    "before_output_rename": _at_rename("output.jsonl", is_before=True),
    "after_output_rename": _at_rename("output.jsonl", is_before=False),
    "after_errors_rename": _at_rename("errors.jsonl", is_before=False),
    "after_manifest_rename": _at_rename("output.jsonl.manifest.json", is_before=False),
    "in_finish": _after(jobs, "set_state", when=_is_finish),
    "after_experiment": _after(flows.job_run, "record_experiment"),
    "freeze_in_commit": _freeze(completions, "store", when=_are_answers),
    "freeze_after_commit": _freeze(Ledger, "commit"),
    "commit_raises": _commit_raises,
    "disk_is_full": _fill_disk,
    "lose_acknowledgement": _lose_acknowledgement,
}
