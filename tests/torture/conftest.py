"""The processes that fork jobs, and jobs for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_builders import write_rows

from torture.builders import ROWS, MakeJob, make_mapping
from torture.victims import JobUnderTest, Nursery, Outputs


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture(scope="session")
def rows_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the input of all jobs of this folder."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture
def make_job(tmp_path: Path, rows_path: Path, nursery: Nursery) -> MakeJob:
    """Give a function that makes a job on the mock device."""

    def make(name: str, ledger_url: str | None = None, **changes: Any) -> JobUnderTest:
        folder = tmp_path / name
        folder.mkdir()
        mapping = make_mapping(folder, rows_path, **changes)
        mapping["ledger_url"] = ledger_url or mapping["ledger_url"]
        return JobUnderTest(folder, mapping, nursery)

    return make


@pytest.fixture(scope="session")
def expected(
    tmp_path_factory: pytest.TempPathFactory, rows_path: Path, nursery: Nursery
) -> Outputs:
    """Return the outputs of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = JobUnderTest(folder, make_mapping(folder, rows_path), nursery)
    assert job.start().wait() == 1  # some rows of the input are bad
    return job.outputs()
