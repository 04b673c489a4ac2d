"""A job that is killed at any moment is resumed at once; no row is lost, none is answered twice."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_builders import make_job, questions, run_job, write_job
from job_process import WAIT_SECONDS, JobProcess
from sqlalchemy import select

from flows.ledger import Ledger
from flows.preparation import output_path_of
from flows.schema import CompletionTable, JobState, PayloadTable, ShardState

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROWS = 48
# Two engines at a time, each with a worker of its own; some seconds of work.
SETTINGS: dict[str, Any] = {
    "shards": 4,
    "commit_rows": 2,
    "commit_seconds": 0.05,
    "sampling": {"max_tokens": 16, "temperature": 1.0},
    "engine__log_level": "DEBUG",
    "engine__device_ids": [0, 1],
    "engine__runtime": {"mock_step_seconds": 0.03},
}

Start = Callable[..., JobProcess]


@pytest.fixture
def start(prefect_home: Path, tmp_path: Path, ledger_url: str) -> Iterator[Start]:
    """Give a function that starts a command in tmp_path, on the ledger of this test."""
    started: list[JobProcess] = []
    environment = {"PREFECT_HOME": str(prefect_home), "TOKENMILL_LEDGER_URL": ledger_url}

    def start_command(*arguments: str, **more: str) -> JobProcess:
        started.append(JobProcess(tmp_path, *arguments, environment=environment | more))
        return started[-1]

    yield start_command
    for process in started:
        process.end()


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with Ledger.open(ledger_url) as opened:
        yield opened


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(tmp_path, questions(NUM_ROWS), ledger_url=None, **SETTINGS)


def num_committed(ledger: Ledger) -> int:
    job = ledger.find_job("job-1")
    return 0 if job is None else job.num_ok


def committed_rows(ledger: Ledger) -> dict[str, tuple[Any, ...]]:
    """Return all that the ledger holds of each answer, the time and the attempt included."""
    query = (
        select(CompletionTable, PayloadTable.text, PayloadTable.token_ids)
        .join(
            PayloadTable,
            (PayloadTable.job_key == CompletionTable.job_key)
            & (PayloadTable.row_index == CompletionTable.row_index),
        )
        .where(CompletionTable.job_key == ledger.get_job("job-1").job_key)
    )
    with ledger.database.read() as connection:
        rows = connection.execute(query).mappings()
        return {row["row_id"]: tuple(str(value) for value in row.values()) for row in rows}


def undisturbed_output(folder: Path) -> bytes:
    """Answer the same questions without a disturbance, a kill, Prefect or a worker process."""
    folder.mkdir()
    quick = SETTINGS | {"engine__runtime": {"inline": True}, "engine__device_ids": [0]}
    config = make_job(folder, questions(NUM_ROWS), **quick)
    run_job(config)
    return output_path_of(config).read_bytes()


def output(folder: Path) -> bytes:
    return (folder / "runs" / "job-1" / "output.jsonl").read_bytes()


def test_a_job_that_was_killed_goes_on_at_once_and_repeats_nothing(
    start: Start,
    ledger: Ledger,
    job_file: Path,
    tmp_path: Path,
    ledger_url: str,
    prefect_api: str,
) -> None:
    server: dict[str, str] = {}
    if ledger_url.startswith("postgresql"):  # once with Prefect's temporary server, once without
        server["PREFECT_API_URL"] = prefect_api
    killed = start("run", str(job_file), **server)
    killed.wait_until(lambda: num_committed(ledger) >= 6)
    descendants = killed.descendants()
    names = {process.pid: " ".join(process.cmdline()) for process in descendants}
    assert len([name for name in names.values() if "engine.worker" in name]) == 2
    servers = [pid for pid, name in names.items() if "prefect_server" in name]
    assert len(servers) == (not server)
    assert killed.session not in {os.getsid(pid) for pid in servers}  # no Ctrl-C reaches it
    killed.kill_group()
    before = committed_rows(ledger)
    assert 6 <= len(before) < NUM_ROWS
    assert {shard.state for shard in ledger.list_shards(ledger.get_job("job-1").job_key)} >= {
        ShardState.RUNNING  # nobody has tidied up
    }

    resumed = start("resume", "job-1", PREFECT_API_URL=prefect_api)
    _, alive = psutil.wait_procs(descendants, WAIT_SECONDS)
    assert alive == []
    assert resumed.wait() == 0, resumed.said

    after = committed_rows(ledger)
    assert len(after) == NUM_ROWS
    assert {row_id: after[row_id] for row_id in before} == before
    times = resumed.completed()
    assert {row_id: times[row_id] for row_id in before} == dict.fromkeys(before, 1)
    assert min(times[f"q{index}"] for index in range(NUM_ROWS)) == 1
    assert output(tmp_path) == undisturbed_output(tmp_path / "undisturbed")
    assert ledger.get_job("job-1").state is JobState.FINISHED


@pytest.mark.parametrize("ledger_url", ["sqlite"], indirect=True)
def test_an_interrupted_job_commits_what_is_finished_and_says_how_to_go_on(
    start: Start, ledger: Ledger, job_file: Path, tmp_path: Path, prefect_api: str
) -> None:
    # A Ctrl-C reaches all that the run has started, so that its server is one of its own.
    before = interrupt(start("run", str(job_file)), signal.SIGINT, ledger, at_least=6)
    resumed = start("resume", "job-1", PREFECT_API_URL=prefect_api)
    later = interrupt(resumed, signal.SIGTERM, ledger, at_least=len(before) + 6)
    assert {row_id: later[row_id] for row_id in before} == before

    resumed = start("resume", "job-1", PREFECT_API_URL=prefect_api)
    assert resumed.wait() == 0, resumed.said
    after = committed_rows(ledger)
    assert {row_id: after[row_id] for row_id in later} == later
    assert resumed.completed() == {f"q{index}": 1 for index in range(NUM_ROWS)}
    assert output(tmp_path) == undisturbed_output(tmp_path / "undisturbed")


def interrupt(
    process: JobProcess, number: signal.Signals, ledger: Ledger, *, at_least: int
) -> dict[str, tuple[Any, ...]]:
    """End a process in the middle of its job, see it out, and return what is committed."""
    process.wait_until(lambda: num_committed(ledger) >= at_least)
    descendants = process.descendants()
    process.signal_group(number)
    assert process.wait() == 130, process.said
    _, alive = psutil.wait_procs(descendants, WAIT_SECONDS)
    assert alive == []
    said = process.said
    assert "Traceback" not in said
    committed = committed_rows(ledger)
    assert at_least <= len(committed) < NUM_ROWS
    assert said.endswith(
        f"interrupted: {len(committed)} of 48 rows done; to go on: tokenmill resume job-1\n"
    )
    assert process.completed() == dict.fromkeys(committed, 1)  # nothing finished is lost
    job = ledger.get_job("job-1")
    assert job.state is JobState.INTERRUPTED
    assert {shard.lease_owner for shard in ledger.list_shards(job.job_key)} == {None}
    return committed


@pytest.mark.parametrize("ledger_url", ["sqlite"], indirect=True)
def test_an_interruption_before_there_is_a_job_leaves_none(
    start: Start, ledger: Ledger, job_file: Path
) -> None:
    interrupted = start("run", str(job_file))
    interrupted.wait_until(lambda: "job job-1" in interrupted.said)
    interrupted.signal_group(signal.SIGINT)
    assert interrupted.wait() == 130, interrupted.said
    assert "interrupted before the job was in the ledger; nothing is lost" in interrupted.said
    assert "Traceback" not in interrupted.said
    assert ledger.list_jobs() == []
