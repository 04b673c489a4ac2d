"""A job on a Ray cluster: every row once, whoever dies, and no waiting for what will never come."""

import logging
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from interrupted_jobs import run_at_once
from job_builders import make_job, questions, read_rows, write_job
from job_process import WAIT_SECONDS, JobProcess
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.states import Cancelling
from prefect_processes import Prefect, Worker
from ray_head import RayNode, running_head, running_node

from engine import ConfigError, ExitCode, WorkerError
from flows import ray_runner
from flows.config import JobConfig
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.ledger_check import check_job
from flows.ledger_rows import CompletionRow
from flows.owner import Owner
from flows.schema import JobState, ShardState

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROWS = 48
PASSWORD = "not-to-be-seen"
SETTINGS: dict[str, Any] = {
    "runner": "ray",
    "shards": 4,
    "commit_rows": 2,
    "commit_seconds": 0.05,
    "sampling": {"max_tokens": 16, "temperature": 1.0},
    "engine__log_level": "DEBUG",
    "ray__resources": {"card": 1},
}
QUICK = SETTINGS | {"engine__runtime": {"inline": True}}
SLOW = SETTINGS | {
    "engine__runtime": {"mock_step_seconds": 0.03},
    "engine__scheduler": {"max_num_seqs": 2},
}


@pytest.fixture(scope="module")
def head() -> Iterator[RayNode]:
    with (
        running_head(num_cpus=4, resources={"card": 2}) as head,
        pytest.MonkeyPatch.context() as p,
    ):
        p.setenv("TOKENMILL_RAY_ADDRESS", head.address)
        yield head


@pytest.fixture
def ledger_url(head: RayNode, postgres_database_url: str) -> str:
    return postgres_database_url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with Ledger.open(ledger_url) as opened:
        yield opened


@pytest.fixture
def job(tmp_path: Path, ledger_url: str) -> JobConfig:
    return make_job(tmp_path, questions(NUM_ROWS), ledger_url=ledger_url, **QUICK)


@pytest.fixture
def command(
    tmp_path: Path, ledger_url: str, prefect_api: str
) -> Iterator[Callable[..., JobProcess]]:
    started: list[JobProcess] = []
    with_password = ledger_url.replace("postgres@", f"postgres:{PASSWORD}@")
    environment = {"TOKENMILL_LEDGER_URL": with_password, "PREFECT_API_URL": prefect_api}

    def start(*arguments: str) -> JobProcess:
        started.append(JobProcess(tmp_path, *arguments, environment=environment))
        return started[-1]

    yield start
    for process in started:
        process.end()


def asked(folder: Path) -> Counter[str]:
    """Count how often each row was generated, by the logs of the nodes."""
    logs = "".join(
        path.read_text(encoding="utf-8") for path in folder.glob("runs/job-1/logs/*/node-*.log")
    )
    return Counter(re.findall(r"completed request_id=(\S+)", logs))


def committed(ledger: Ledger) -> dict[int, CompletionRow]:
    job = ledger.find_job("job-1")
    return {} if job is None else {r.row_index: r for r in ledger.iter_completions(job.job_key)}


def num_committed(ledger: Ledger) -> int:
    job = ledger.find_job("job-1")
    return 0 if job is None else job.num_ok


def node_processes(ledger: Ledger) -> list[psutil.Process]:
    """Return the processes that hold shards of the job."""
    shards = ledger.list_shards(ledger.get_job("job-1").job_key)
    owners = [Owner.parse(shard.lease_owner) for shard in shards if shard.lease_owner]
    return [psutil.Process(owner.pid) for owner in owners if not owner.is_gone()]


def are_both_at_work(ledger: Ledger, num_rows: int) -> bool:
    """Tell whether two places hold shards, and so many rows are committed."""
    return num_committed(ledger) >= num_rows and len(node_processes(ledger)) == 2


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def assert_each_row_has_one_result(ledger: Ledger, folder: Path) -> None:
    assert ledger.get_job("job-1").state is JobState.FINISHED
    assert [result for result in check_job(ledger, "job-1") if not result.is_ok] == []
    rows = read_rows(folder / "runs" / "job-1" / "output.jsonl")
    assert [row["id"] for row in rows] == [f"q{index}" for index in range(NUM_ROWS)]


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread while the block runs."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_job_runs_on_the_cluster_and_loads_an_engine_for_each_place_not_each_shard(
    command: Callable[..., JobProcess], ledger: Ledger, tmp_path: Path, head: RayNode
) -> None:
    path = write_job(tmp_path, questions(NUM_ROWS), ledger_url=None, **SETTINGS)
    run = command("run", str(path))
    assert run.wait() == 0, run.said
    assert_each_row_has_one_result(ledger, tmp_path)
    assert asked(tmp_path) == Counter(f"q{index}" for index in range(NUM_ROWS))
    assert run.completed() == Counter()  # nothing was generated where the job was driven
    hosts = re.findall(r"shard=(\d) runs on host=\S+ place=(\d)", run.said)
    assert {place for _, place in hosts} == {"0", "1"}
    assert len(hosts) == 2
    shards = ledger.list_shards(ledger.get_job("job-1").job_key)
    assert [shard.attempt for shard in shards] == [1, 1, 1, 1]
    files = [path for folder in (head.folder, tmp_path) for path in folder.rglob("*.*")]
    written = {path for path in files if path.is_file()}
    assert any(path.name.startswith("gcs_server") for path in written)
    assert [path for path in written if PASSWORD.encode() in path.read_bytes()] == []


def test_a_node_that_joins_is_used_and_one_that_dies_costs_nothing_that_was_committed(
    tmp_path: Path, head: RayNode, ledger_url: str, ledger: Ledger
) -> None:
    inline = SLOW | {"engine__runtime": {"mock_step_seconds": 0.03, "inline": True}}
    job = make_job(tmp_path, questions(NUM_ROWS), ledger_url=ledger_url, **inline)
    before: dict[int, CompletionRow] = {}

    def kill(node: RayNode) -> None:
        """Kill the node with what runs on it, then a process on the other node."""
        wait_until(lambda: not set(node.family()).isdisjoint(node_processes(ledger)))
        wait_until(lambda: num_committed(ledger) >= 6)
        node.kill()
        wait_until(lambda: num_committed(ledger) >= 12)
        node_processes(ledger)[0].kill()
        before.update(committed(ledger))

    with JobRun.open(job) as run:
        assert run.num_slots == 2
        with running_node(head.address, num_cpus=1, resources={"card": 1}) as node:
            assert run.num_slots == 3
            with meanwhile(lambda: kill(node)), ThreadPoolExecutor(3) as threads:
                summaries = list(threads.map(run.run_shard, run.pending_shards()))
            outcome = run.finish(summaries, {})
    assert outcome.exit_code == 0, outcome.message
    assert_each_row_has_one_result(ledger, tmp_path)
    shards = ledger.list_shards(ledger.get_job("job-1").job_key)
    assert sum(shard.attempt for shard in shards) == len(shards) + 2
    assert len(before) >= 12
    after = committed(ledger)
    assert {index: after[index] for index in before} == before


def test_a_job_is_cancelled_then_killed_and_resumed_with_each_row_once(
    prefect: Prefect,
    worker: Worker,
    command: Callable[..., JobProcess],
    head: RayNode,
    ledger_url: str,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    at_address = SLOW | {"ray__address": head.address}  # which the worker has not been told
    config = make_job(tmp_path, questions(NUM_ROWS), ledger_url=ledger_url, **at_address)
    _cancel_in_the_middle(prefect, worker, config, ledger)

    num_before = num_committed(ledger)
    path = write_job(tmp_path, ledger_url=None, **SLOW)
    killed = command("run", str(path))
    killed.wait_until(lambda: are_both_at_work(ledger, num_before + 4))
    nodes = node_processes(ledger)
    workers = [child for node in nodes for child in node.children(recursive=True)]
    assert len(workers) == 2
    killed.kill_group()
    _, alive = psutil.wait_procs([*nodes, *workers], 30)
    assert alive == []
    before = committed(ledger)
    assert num_before + 4 <= len(before) < NUM_ROWS

    outcome, _ = run_at_once(make_job(tmp_path, ledger_url=ledger_url, **QUICK))
    assert outcome.exit_code == 0, outcome.message
    assert_each_row_has_one_result(ledger, tmp_path)
    after = committed(ledger)
    assert {index: after[index] for index in before} == before
    times = asked(tmp_path)
    assert {times[row.row_id] for row in before.values()} == {1}


def _cancel_in_the_middle(
    prefect: Prefect, worker: Worker, config: JobConfig, ledger: Ledger
) -> None:
    """Run the deployment, cancel it, and check that it was stopped in order and not retried."""
    run_id = prefect.run_deployment("batch-inference/adhoc", config=config.model_dump(mode="json"))
    wait_until(lambda: are_both_at_work(ledger, 4))
    nodes = node_processes(ledger)
    (flow,) = worker.named("prefect.engine")
    with prefect.client() as client:
        client.set_flow_run_state(run_id, Cancelling())
        _, alive = psutil.wait_procs([flow, *nodes], 30)
        assert alive == []
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
        shards = client.read_task_runs(flow_run_filter=of_run)
    assert [shard.run_count for shard in shards] == [1, 1]  # none retried, and none begun since
    job = ledger.get_job("job-1")
    assert job.state is JobState.INTERRUPTED
    assert 4 <= job.num_ok < NUM_ROWS
    states = {shard.state for shard in ledger.list_shards(job.job_key)}
    assert states == {ShardState.INTERRUPTED, ShardState.PENDING}  # none ran on to its end


def test_a_cluster_that_lacks_the_resource_is_refused_before_anything_begins(
    tmp_path: Path, ledger_url: str, ledger: Ledger
) -> None:
    npu = QUICK | {"ray__resources": {"card": 1, "gold": 2}}
    config = make_job(tmp_path, questions(4), ledger_url=ledger_url, **npu)
    wanted = r"its one node offers CPU 4, card 2, gold 0; a shard takes CPU 1, card 1, gold 2"
    with pytest.raises(ConfigError, match=wanted), JobRun.open(config):
        pass
    assert ledger.find_job("job-1") is None
    assert not ray.is_initialized()


def test_a_shard_says_that_it_waits_for_what_others_use_and_stops_waiting_when_told(
    job: JobConfig,
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING, "flows")
    monkeypatch.setattr(ray_runner, "_SAY_AFTER_SECONDS", 0.5)

    def waits() -> bool:
        return (
            "shard=0 waits for CPU 1, card 1: the Ray cluster has CPU 4, card 0 free" in caplog.text
        )

    handler = signal.getsignal(signal.SIGTERM)
    with JobRun.open(job) as run:
        assert signal.getsignal(signal.SIGTERM) is handler  # Ray's own would end the process

        class Holder:
            def hold(self) -> None: ...

        holder = ray.remote(num_cpus=0, resources={"card": 2})(Holder).remote()
        ray.get(holder.hold.remote())

        def stop_when_it_waits() -> None:
            wait_until(waits)
            run.stop.set()

        with meanwhile(stop_when_it_waits):
            assert run.run_shard(0).state is ShardState.INTERRUPTED
        ray.kill(holder)
    assert num_committed(ledger) == 0


def test_a_path_that_a_node_does_not_have_is_named_with_the_node(
    job: JobConfig, ledger: Ledger
) -> None:
    with JobRun.open(job) as run:
        (Path(job.job_dir or "") / "rows.sqlite").unlink()
        with pytest.raises(ConfigError, match=r"host \S+ of the Ray cluster has no .*rows.sqlite"):
            run.run_shard(0)


def test_a_job_without_a_good_device_left_fails_and_can_be_resumed(
    tmp_path: Path, ledger_url: str, ledger: Ledger
) -> None:
    lost = QUICK | {"engine__runtime": {"inline": True, "mock_device_lost_after_steps": 1}}
    config = make_job(tmp_path, questions(NUM_ROWS), ledger_url=ledger_url, **lost)
    with JobRun.open(config) as run:
        with pytest.raises(
            WorkerError, match=r"no good place .* and 2 device\(s\) failed"
        ) as caught:
            run.run_shard(0)
        assert run.num_slots == 0
        outcome = run.finish([], {0: caught.value})
    assert (outcome.state, outcome.exit_code) == (JobState.FAILED, ExitCode.INFRASTRUCTURE)
    outcome, _ = run_at_once(make_job(tmp_path, ledger_url=ledger_url, **QUICK))
    assert outcome.exit_code == 0, outcome.message
    assert_each_row_has_one_result(ledger, tmp_path)


def test_a_ray_of_this_host_alone_is_started_when_asked_and_ends_with_the_run(
    tmp_path: Path, ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TOKENMILL_RAY_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    me = psutil.Process()
    before = set(me.children(recursive=True))
    alone = QUICK | {"ray__resources": {}, "ray__start_local": True}
    outcome, _ = run_at_once(
        make_job(tmp_path, questions(NUM_ROWS), ledger_url=ledger_url, **alone)
    )
    assert outcome.exit_code == 0, outcome.message
    assert_each_row_has_one_result(ledger, tmp_path)
    rays = {each for each in me.children(recursive=True) if "ray" in " ".join(each.cmdline())}
    _, alive = psutil.wait_procs(rays - before, 20)
    assert alive == []
