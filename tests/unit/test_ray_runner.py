"""Places on a cluster: what becomes of a shard whose node dies, or whose device is bad."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from job_builders import make_job, questions
from ledger_builders import ELSEWHERE, new_job

from engine import ConfigError, WorkerError, WorkerFailure
from flows import ray_runner
from flows.engine_part import ShardJob
from flows.ledger import Ledger
from flows.ray_node import ShardAnswer, ShardSpec
from flows.ray_runner import RayCluster
from flows.schema import ShardState
from flows.shard_runner import ShardSummary

DONE = ShardAnswer(
    summary=ShardSummary(
        shard_index=0, state=ShardState.DONE, slot=0, num_ok=5, busy_seconds_by_slot={0: 1.5}
    ),
    num_loads=1,
)
BAD_DEVICE = ShardAnswer(error=WorkerError("bad", failure=WorkerFailure.DEVICE_LOST))


class Places:
    """Stands in for Ray: gives places, notes which are closed, and answers from a list."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: ShardAnswer | Exception) -> None:
        self.asked: list[int] = []
        self.closed: list[int] = []
        self.killed: list[Any] = []
        self._answers = list(answers)
        patch.setattr(ray_runner, "_living_nodes", lambda: [{"CPU": 8.0, "card": 3.0}])
        patch.setattr(ray_runner, "_start_actor", lambda wanted: object())
        patch.setattr(RayCluster, "_wait_until_there", lambda *arguments: None)
        patch.setattr(ray_runner, "_close", lambda place: self.closed.append(place.number))
        patch.setattr(ray_runner, "_ask", self._ask)
        patch.setattr(ray_runner.ray, "kill", self.killed.append)

    def _ask(self, place: Any, spec: ShardSpec, stop: threading.Event) -> ShardAnswer:
        assert spec.shard_job.config.ledger_url is None
        self.asked.append(place.number)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


Run = Callable[[RayCluster, int], ShardSummary]


@pytest.fixture
def shard_job(tmp_path: Path, ledger: Ledger) -> ShardJob:
    config = make_job(tmp_path, questions(10), runner="ray", ray__resources={"card": 1})
    job = ledger.create_job(new_job())
    return ShardJob(
        config=config,
        job=job,
        index_path=tmp_path / "rows.sqlite",
        sampling=config.sampling,
        job_dir=tmp_path,
    )


@pytest.fixture
def run(shard_job: ShardJob, ledger: Ledger) -> Run:
    def run_shard(cluster: RayCluster, shard_index: int = 0) -> ShardSummary:
        return cluster.run_shard(shard_job, shard_index, ledger=ledger, stop=threading.Event())

    return run_shard


def test_a_place_is_kept_while_shards_are_to_come_and_closed_after_the_last(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    places = Places(monkeypatch, DONE, replace(DONE, num_loads=0))
    cluster = RayCluster(shard_job.config)
    cluster.expect([0, 1])
    assert run(cluster, 0).slot == 0
    assert places.closed == []
    run(cluster, 1)
    assert (places.asked, places.closed, cluster.num_loads) == ([0, 0], [0], 1)


def test_a_shard_goes_to_another_place_and_a_bad_device_is_not_given_back(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    places = Places(monkeypatch, BAD_DEVICE, DONE)
    cluster = RayCluster(shard_job.config)
    assert cluster.num_slots == 3
    summary = run(cluster, 0)
    assert (summary.slot, summary.busy_seconds_by_slot) == (1, {1: 1.5})
    assert (places.closed, cluster.num_slots) == ([1], 2)
    cluster.close()
    assert places.closed == [1, 0]


def test_a_job_ends_when_every_device_is_bad(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    places = Places(monkeypatch, BAD_DEVICE, BAD_DEVICE, BAD_DEVICE)
    cluster = RayCluster(shard_job.config)
    with pytest.raises(WorkerError, match=r"no good place .* 3 device\(s\) failed") as caught:
        run(cluster, 0)
    assert caught.value.failure is WorkerFailure.DEVICE_LOST
    assert (places.asked, cluster.num_slots) == ([0, 1, 2], 0)


def test_a_shard_whose_nodes_die_again_and_again_fails(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    gone = ray_runner._NodeGoneError("node 7 has left")
    places = Places(monkeypatch, gone, gone, gone)
    cluster = RayCluster(shard_job.config)
    with pytest.raises(WorkerError, match="ended 3 times, last: node 7 has left") as caught:
        run(cluster, 0)
    assert caught.value.failure is WorkerFailure.DIED  # which Prefect does not retry
    assert (len(places.asked), len(places.killed)) == (3, 3)


def test_a_shard_that_waits_for_a_new_place_takes_one_that_became_idle(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    wait_until_there = RayCluster._wait_until_there
    places = Places(monkeypatch, DONE, DONE)
    cluster = RayCluster(shard_job.config)
    cluster.expect([0, 1, 2])
    monkeypatch.setattr(RayCluster, "_wait_until_there", wait_until_there)
    monkeypatch.setattr(ray_runner, "_start_actor", lambda wanted: MagicMock())

    def finish_another(refs: Any, timeout: float) -> tuple[list[Any], list[Any]]:
        idle = ray_runner._Place(7, object())
        cluster._give_back(idle)
        return [], refs

    monkeypatch.setattr(ray_runner.ray, "wait", finish_another)
    assert run(cluster, 0).slot == 7
    assert len(places.killed) == 1  # the one that was asked for, so that Ray gives it to nobody


def test_an_error_of_the_shard_itself_is_raised_and_its_place_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, run: Run
) -> None:
    places = Places(monkeypatch, ShardAnswer(error=ConfigError("changed")), DONE)
    cluster = RayCluster(shard_job.config)
    cluster.expect([0, 1])
    with pytest.raises(ConfigError, match="changed"):
        run(cluster, 0)
    assert places.closed == [0]
    assert run(cluster, 1).slot == 1


def test_a_shard_waits_until_the_lease_of_a_node_that_died_is_over(
    monkeypatch: pytest.MonkeyPatch,
    shard_job: ShardJob,
    run: Run,
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "flows")
    lease = ledger.acquire_shard(shard_job.job.job_key, 0, owner=ELSEWHERE, lease_seconds=1)
    places = Places(monkeypatch, DONE)
    run(RayCluster(shard_job.config), 0)
    assert places.asked == [0]
    assert "still held by process 1 on host elsewhere; waiting until its lease" in caplog.text
    shard = ledger.get_shard(lease.job_key, 0)
    assert shard.heartbeat_at is not None
    assert ledger.database.read_clock() - shard.heartbeat_at > 1


def test_a_job_that_is_stopped_does_not_wait_for_a_lease(
    monkeypatch: pytest.MonkeyPatch, shard_job: ShardJob, ledger: Ledger
) -> None:
    ledger.acquire_shard(shard_job.job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
    places = Places(monkeypatch)
    stop = threading.Event()
    stop.set()
    cluster = RayCluster(shard_job.config)
    summary = cluster.run_shard(shard_job, 0, ledger=ledger, stop=stop)
    assert (summary.state, places.asked) == (ShardState.INTERRUPTED, [])
