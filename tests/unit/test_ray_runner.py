"""Places on a cluster: what becomes of a shard whose node dies, or whose device is bad."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from job_builders import make_job, questions
from ledger_builders import ELSEWHERE, new_job

from engine import ConfigError, WorkerError, WorkerFailure
from flows import ray_places, ray_runner
from flows.engine_part import ShardJob
from flows.ledger import Ledger
from flows.ray_node import ShardAnswer, ShardSpec
from flows.ray_places import NodeGoneError
from flows.ray_runner import RayCluster
from flows.ray_terms import Resources
from flows.schema import ShardState
from flows.shard_runner import ShardSummary

DONE = ShardAnswer(
    summary=ShardSummary(
        shard_index=0, state=ShardState.DONE, slot=0, num_ok=5, busy_seconds_by_slot={0: 1.5}
    ),
    num_loads=1,
)
STOPPED = ShardAnswer(summary=ShardSummary(shard_index=0, state=ShardState.INTERRUPTED))
BAD_DEVICE = ShardAnswer(error=WorkerError("bad", failure=WorkerFailure.DEVICE_LOST))


class FakePlace:
    """Stands in for a process of Ray; the class notes what becomes of each, and what they say."""

    answers: list[ShardAnswer | Exception]
    asked: list[int]
    closed: list[int]
    killed: list[int]
    dead: set[int]
    before_it_is_there: Callable[[], None] | None = None

    def __init__(self, number: int, wanted: Resources) -> None:
        assert wanted == {"CPU": 1, "card": 1}
        self.number = number

    def is_there(self) -> bool:
        before, FakePlace.before_it_is_there = FakePlace.before_it_is_there, None
        if before is not None:
            before()
            return False
        return True

    def host(self) -> str:
        return "a-node"

    def lives(self) -> bool:
        return self.number not in self.dead

    def run_shard(self, spec: ShardSpec, stop: threading.Event) -> ShardAnswer:
        assert spec.shard_job.config.ledger_url is None
        self.asked.append(self.number)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.killed.append(self.number)

    @staticmethod
    def close(places: Sequence["FakePlace"]) -> None:
        FakePlace.closed.extend(place.number for place in places)


Places = type[FakePlace]
Run = Callable[[RayCluster, int], ShardSummary]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    for name in ("answers", "asked", "closed", "killed"):
        monkeypatch.setattr(FakePlace, name, [], raising=False)
    monkeypatch.setattr(FakePlace, "dead", set(), raising=False)
    monkeypatch.setattr(ray_places, "living_nodes", lambda: [{"CPU": 8.0, "card": 3.0}])
    monkeypatch.setattr(ray_runner, "Place", FakePlace)
    return FakePlace


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
def cluster(places: Places, shard_job: ShardJob) -> RayCluster:
    return RayCluster(shard_job.config)


@pytest.fixture
def run(shard_job: ShardJob, ledger: Ledger) -> Run:
    def run_shard(cluster: RayCluster, shard_index: int = 0) -> ShardSummary:
        return cluster.run_shard(shard_job, shard_index, ledger=ledger, stop=threading.Event())

    return run_shard


def test_a_place_is_kept_while_shards_are_to_come_and_closed_after_the_last(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [DONE, replace(DONE, num_loads=0)]
    cluster.expect([0, 1])
    assert run(cluster, 0).slot == 0
    assert places.closed == []
    run(cluster, 1)
    assert (places.asked, places.closed, cluster.num_loads) == ([0, 0], [0], 1)


def test_a_place_that_stopped_in_the_middle_of_a_shard_is_not_kept(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [STOPPED, DONE]
    cluster.expect([0, 1])
    summary = run(cluster, 0)
    assert (summary.state, summary.slot, places.closed) == (ShardState.INTERRUPTED, None, [0])
    assert run(cluster, 1).slot == 1


def test_a_shard_that_ends_after_the_cluster_was_closed_leaves_no_place_behind(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [DONE]
    cluster.expect([1])
    places.before_it_is_there = cluster.close
    run(cluster, 0)
    assert places.closed == [0]


def test_a_shard_goes_to_another_place_and_a_bad_device_is_not_given_back(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [BAD_DEVICE, DONE]
    assert cluster.num_slots == 3
    summary = run(cluster, 0)
    assert (summary.slot, summary.busy_seconds_by_slot) == (1, {1: 1.5})
    assert (places.closed, cluster.num_slots) == ([1], 2)
    cluster.close()
    assert places.closed == [1, 0]


def test_a_job_ends_when_every_device_is_bad(places: Places, cluster: RayCluster, run: Run) -> None:
    places.answers = [BAD_DEVICE, BAD_DEVICE, BAD_DEVICE]
    with pytest.raises(WorkerError, match=r"no good place .* 3 device\(s\) failed") as caught:
        run(cluster, 0)
    assert caught.value.failure is WorkerFailure.DEVICE_LOST
    assert (places.asked, cluster.num_slots) == ([0, 1, 2], 0)


def test_a_bad_device_that_left_with_its_node_is_not_counted_against_the_others(
    places: Places, cluster: RayCluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.answers = [BAD_DEVICE, DONE]
    run(cluster, 0)
    monkeypatch.setattr(ray_places, "living_nodes", lambda: [{"CPU": 8.0, "card": 1.0}])
    assert cluster.num_slots == 0
    places.dead = {0}
    assert cluster.num_slots == 1


def test_a_shard_whose_nodes_die_again_and_again_fails(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [NodeGoneError("node 7 has left")] * 3
    with pytest.raises(WorkerError, match="3 processes .* last: node 7 has left") as caught:
        run(cluster, 0)
    assert caught.value.failure is WorkerFailure.DIED  # which Prefect does not retry
    assert places.asked == [0, 1, 2]


def test_a_shard_that_waits_for_a_new_place_takes_one_that_became_idle(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    def end_another() -> None:
        run(cluster, 1)

    places.answers = [DONE, DONE]
    places.before_it_is_there = end_another
    assert run(cluster, 0).slot == 1
    assert (places.asked, places.closed) == ([1, 1], [1])  # the engine was loaded once
    assert places.killed == [0]  # or Ray gives it what nobody needs


def test_an_error_of_the_shard_itself_is_raised_and_its_place_is_not_used_again(
    places: Places, cluster: RayCluster, run: Run
) -> None:
    places.answers = [ShardAnswer(error=ConfigError("changed")), DONE]
    cluster.expect([0, 1])
    with pytest.raises(ConfigError, match="changed"):
        run(cluster, 0)
    assert places.closed == [0]
    assert run(cluster, 1).slot == 1


def test_a_shard_waits_until_the_lease_of_a_node_that_died_is_over(
    places: Places,
    cluster: RayCluster,
    run: Run,
    shard_job: ShardJob,
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "flows")
    lease = ledger.acquire_shard(shard_job.job.job_key, 0, owner=ELSEWHERE, lease_seconds=1)
    places.answers = [DONE]
    run(cluster, 0)
    assert places.asked == [0]
    assert "still held by process 1 on host elsewhere; waiting until its lease" in caplog.text
    shard = ledger.get_shard(lease.job_key, 0)
    assert shard.heartbeat_at is not None
    assert ledger.database.read_clock() - shard.heartbeat_at > 1


def test_a_job_that_is_stopped_does_not_wait_for_a_lease(
    places: Places, cluster: RayCluster, shard_job: ShardJob, ledger: Ledger
) -> None:
    ledger.acquire_shard(shard_job.job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
    stop = threading.Event()
    stop.set()
    summary = cluster.run_shard(shard_job, 0, ledger=ledger, stop=stop)
    assert (summary.state, places.asked) == (ShardState.INTERRUPTED, [])
