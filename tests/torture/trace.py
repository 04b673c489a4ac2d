"""What a job did, written outside of its ledger: one file for each attempt, append only.

A line is in the file before what it tells of can have an effect, and a kill leaves it there.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flows.job_run
from engine import OfflineInference
from flows.ledger import Ledger

# In the order in which an undisturbed job goes through them.
PHASES = ("starting", "planning", "loading", "generating", "exporting", "done")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a job did. name is `phase`, `asked`, `answered`, `committed` or `point`."""

    name: str
    seconds: float  # time.monotonic, which all processes of a host share
    value: Any


class TraceWriter:
    """Appends events to a file; may be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, name: str, value: Any) -> None:
        """Write one event; it is with the kernel when this returns."""
        line = json.dumps([name, time.monotonic(), value]) + "\n"
        os.write(self._descriptor, line.encode())

    def phase(self, name: str) -> None:
        """Note that a phase begins."""
        assert name in PHASES
        self.note("phase", name)


def read_trace(path: Path) -> list[Event]:
    """Return what was written; a last line that the kill has torn is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [Event(*json.loads(line)) for line in lines]


def values(events: list[Event], name: str) -> list[Any]:
    """Return the values of all events of one name."""
    return [event.value for event in events if event.name == name]


def watch(trace: TraceWriter) -> None:
    """Make this process note its phases, each row that it generates, and each commit."""
    _note_phases(trace)
    generate, commit = OfflineInference.run, Ledger.commit

    def noted_run(self: Any, requests: Any, **options: Any) -> Iterator[Any]:
        def asked() -> Iterator[Any]:
            for request in requests:
                indices = request.sample_indices or range(request.sampling_params.n)
                trace.note("asked", [[request.request_id, index] for index in indices])
                yield request

        completions = generate(self, asked(), **options)
        try:
            for completion in completions:
                trace.note("answered", [completion.request_id, completion.sample_index])
                yield completion
        finally:
            completions.close()

    def noted_commit(self: Any, lease: Any, rows: Any, **options: Any) -> None:
        commit(self, lease, rows, **options)
        trace.note("committed", [[row.row_index, row.sample_index] for row in rows])

    OfflineInference.run = noted_run  # type: ignore[method-assign]
    Ledger.commit = noted_commit  # type: ignore[method-assign]


def _note_phases(trace: TraceWriter) -> None:
    start = OfflineInference.start
    prepare, export = flows.job_run.prepare, flows.job_run.export_job

    def noted_prepare(*arguments: Any, **options: Any) -> Any:
        trace.phase("planning")
        return prepare(*arguments, **options)

    def noted_start(self: OfflineInference) -> None:
        trace.phase("loading")
        start(self)
        trace.phase("generating")

    def noted_export(*arguments: Any, **options: Any) -> Any:
        trace.phase("exporting")
        summary = export(*arguments, **options)
        trace.phase("done")
        return summary

    flows.job_run.prepare = noted_prepare
    flows.job_run.export_job = noted_export
    OfflineInference.start = noted_start  # type: ignore[method-assign]
