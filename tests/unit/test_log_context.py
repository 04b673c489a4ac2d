"""Threads of a run log in the context of their caller: Prefect finds the task run in there."""

import ast
import logging
import re
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions

from flows.job_run import JobRun
from flows.ledger import Ledger

WHO: ContextVar[str] = ContextVar("who", default="nobody")
ROOT = Path(__file__).parents[2]
MAKERS = {"Thread", "Timer", "ThreadPoolExecutor"}
IN_A_CONTEXT = re.compile(r"copy_context\(\)|context\.copy\(\)\.run")
WITHOUT_CONTEXT = {
    "engine/outbox.py": "runs each piece of work in the context of the session that waits for it",
    "engine/worker/model_worker.py": "is in a process of its own",
    "engine/worker/process.py": "starts processes and logs nothing",
    "flows/console.py": "belongs to the terminal, outside of any run",
    "flows/doctor.py": "belongs to a command, outside of any run",
    "flows/prefect_server.py": "is in a process of its own",
    "flows/time_limit.py": "looks at the clock and logs nothing",
    "flows/ray_node.py": "is on another host, where there is no run",
}


def makers_of_threads(path: Path) -> list[ast.FunctionDef]:
    """Return the functions of a file that start threads."""
    return [
        function
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] in MAKERS
            for call in ast.walk(function)
        )
    ]


def note_callers(monkeypatch: pytest.MonkeyPatch, method: str) -> list[tuple[str, str]]:
    """Note for each call of a method of the ledger its thread and the context's value.

    What other tests have left running may go on to call it.
    """
    strangers = set(threading.enumerate()) - {threading.current_thread()}
    noted: list[tuple[str, str]] = []
    original = getattr(Ledger, method)

    def noting(self: Ledger, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() not in strangers:
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


def test_every_thread_runs_in_a_context_or_has_a_reason_not_to():
    without = set()
    for path in [*ROOT.glob("engine/**/*.py"), *ROOT.glob("flows/**/*.py")]:
        makers = makers_of_threads(path)
        if not all(IN_A_CONTEXT.search(ast.unparse(maker)) for maker in makers):
            without.add(path.relative_to(ROOT).as_posix())
    assert without == set(WITHOUT_CONTEXT)


def test_every_line_about_a_row_belongs_to_its_shard_also_when_the_engine_was_warm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    who: dict[str, set[str]] = {}

    def note(record: logging.LogRecord) -> bool:
        name = getattr(threading.current_thread(), "name", "")
        who.setdefault(name, set()).add(f"{WHO.get()}: {record.getMessage()}")
        return True

    caplog.handler.addFilter(note)
    token = WHO.set("the flow")
    try:
        config = make_job(tmp_path, questions(4), engine__log_level="DEBUG")
        with (
            caplog.at_level(logging.DEBUG, logger="engine"),
            JobRun.open(config) as run,
        ):
            for shard_index in range(2):
                WHO.set(f"shard {shard_index}")
                run.run_shard(shard_index)
    finally:
        WHO.reset(token)
    told = sorted(line.split(" sample_index")[0] for line in who["tokenmill-outbox"])
    assert told == [f"shard {row // 2}: completed request_id=q{row}" for row in range(4)]
