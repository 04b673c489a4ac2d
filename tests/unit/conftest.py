"""Fixtures of unit tests that more than one file uses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from export_builders import ExportedJob


@pytest.fixture
def make_exported_job(tmp_path: Path) -> "Iterator[Callable[..., ExportedJob]]":
    """Plan jobs; each has a folder of its own, and its ledger is closed at the end."""
    # Here: tests of the engine alone do not load flows.
    from export_builders import ExportedJob

    jobs: list[ExportedJob] = []

    def make(content: bytes | str, **config: Any) -> ExportedJob:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        encoded = content.encode("utf-8") if isinstance(content, str) else content
        jobs.append(ExportedJob(folder, encoded, **config))
        return jobs[-1]

    yield make
    for job in jobs:
        job.ledger.close()
