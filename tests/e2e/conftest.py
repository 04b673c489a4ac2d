"""One Prefect server for all end-to-end tests, and a home of Prefect that is thrown away."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder where Prefect keeps its database, made anew for this session."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_api(prefect_home: Path) -> Iterator[str]:
    """Run Prefect's test server, used by every flow in this process; give its URL."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    os.environ.setdefault("DO_NOT_TRACK", "1")
    with (
        temporary_settings({PREFECT_HOME: prefect_home}),
        prefect_test_harness(server_startup_timeout=120),
    ):
        yield PREFECT_API_URL.value()
