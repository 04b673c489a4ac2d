"""Threads of a run log in the context of their caller: Prefect finds the task run in there."""

import logging
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions

from flows.job_run import JobRun
from flows.ledger import Ledger

WHO: ContextVar[str] = ContextVar("who", default="nobody")


def note_callers(monkeypatch: pytest.MonkeyPatch, method: str) -> list[tuple[str, str]]:
    """Note for each call of a method of the ledger its thread and the context's value."""
    noted: list[tuple[str, str]] = []
    original = getattr(Ledger, method)

    def noting(self: Ledger, *arguments: Any, **options: Any) -> Any:
        noted.append((threading.current_thread().name, WHO.get()))
        return original(self, *arguments, **options)

    monkeypatch.setattr(Ledger, method, noting)
    return noted


def test_writer_and_heartbeat_belong_to_whoever_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commits = note_callers(monkeypatch, "commit")
    heartbeats = note_callers(monkeypatch, "renew_job")
    token = WHO.set("the flow")
    steps = {"inline": True, "mock_step_seconds": 0.15}
    config = make_job(tmp_path, questions(4), lease_seconds=1, engine__runtime=steps)
    try:
        with JobRun.open(config) as run:
            WHO.set("shard 1")
            run.run_shard(1)
    finally:
        WHO.reset(token)
    assert set(commits) == {("writer-1", "shard 1")}
    assert set(heartbeats) == {("job-heartbeat", "the flow")}


def test_the_end_of_max_runtime_is_told_to_the_flow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    told: list[str] = []
    caplog.handler.addFilter(
        lambda record: told.append(WHO.get()) or True if "max_runtime" in record.msg else True
    )
    token = WHO.set("the flow")
    try:
        with (
            caplog.at_level(logging.WARNING, logger="flows"),
            JobRun.open(make_job(tmp_path, questions(1), max_runtime_seconds=0.01)) as run,
        ):
            assert run.stop.wait(10)
    finally:
        WHO.reset(token)
    assert told == ["the flow"]
