"""One Prefect server for all end-to-end tests, with a worker for those that want one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect_processes import DEPLOY, Prefect, Worker


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the home of Prefect for processes that start a server of their own."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """Run a server as the README of the deployments starts it."""
    server = Prefect(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def worker(prefect: Prefect, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Run a worker, with the repository's deployments, as that README does it."""
    worker = Worker(prefect, tmp_path_factory.mktemp("worker"))
    worker.start()
    deployed = prefect.command(DEPLOY)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def prefect_api(prefect: Prefect) -> Iterator[str]:
    """Let every flow in this process use the server; give its URL."""
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        temporary_settings,
    )

    settings = {
        PREFECT_HOME: prefect.home,
        PREFECT_API_URL: prefect.api_url,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,  # their end takes each run a second
    }
    with temporary_settings(settings):
        yield prefect.api_url
        APILogHandler().flush()  # while the server is there
