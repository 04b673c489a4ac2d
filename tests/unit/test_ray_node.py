"""A node runs a shard from facts, and stops by itself when nobody drives the job."""

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from interrupted_jobs import after_each_commit
from job_builders import make_job, questions, stored_rows
from ledger_builders import ELSEWHERE
from sqlalchemy import update

from engine import ConfigError, LedgerError, WorkerError, WorkerFailure
from flows.config import JobConfig
from flows.job_driver import JobDriver
from flows.ledger import Ledger
from flows.owner import Owner
from flows.preparation import prepare, resolve
from flows.ray_node import ShardAnswer, ShardNode, ShardSpec, check_host, watch_driver
from flows.schema import JobState, JobTable, ShardState
from flows.shard_writer import TooManyFailedRowsError


@contextmanager
def driven(config: JobConfig) -> Iterator[tuple[ShardSpec, JobDriver, Ledger]]:
    """Prepare a job, drive it, and give what a node would be told of its first shard."""
    config = resolve(config)
    with (
        Ledger.open(config.resolved_ledger_url) as ledger,
        JobDriver(ledger, lease_seconds=config.lease_seconds, lost=threading.Event()) as driver,
    ):
        shard_job, _ = prepare(config, ledger, driver)
        spec = ShardSpec(
            shard_job=shard_job,
            shard_index=0,
            driver=str(Owner.current()),
            ledger_url=config.resolved_ledger_url,
        )
        yield spec, driver, ledger


def test_a_shard_is_answered_from_facts_that_came_through_a_pickle(tmp_path: Path) -> None:
    config = make_job(tmp_path, questions(6), shards=2)
    with driven(config) as (spec, _, _):
        node = ShardNode()
        answer = pickle.loads(pickle.dumps(node.run_shard(pickle.loads(pickle.dumps(spec)))))
        node.close()
    assert answer.error is None
    assert (answer.summary.state, answer.summary.num_ok, answer.num_loads) == (
        ShardState.DONE, 3, 1,
    )  # fmt: skip
    assert [row.row_id for row in stored_rows(config)] == ["q0", "q1", "q2"]


def test_the_engine_stays_loaded_for_the_next_shard(tmp_path: Path) -> None:
    with driven(make_job(tmp_path, questions(6), shards=2)) as (spec, _, _):
        node = ShardNode()
        loads = [node.run_shard(spec).num_loads]
        second = ShardSpec(
            shard_job=spec.shard_job, shard_index=1, driver=spec.driver, ledger_url=spec.ledger_url
        )
        loads.append(node.run_shard(second).num_loads)
        node.close()
    assert loads == [1, 0]


def test_a_node_stops_in_order_when_the_driver_has_gone(tmp_path: Path) -> None:
    one_by_one: dict[str, Any] = {
        "shards": 1,
        "lease_seconds": 1,
        "engine__scheduler": {"max_num_seqs": 1},
        "engine__runtime": {"inline": True, "mock_step_seconds": 0.05},
    }
    config = make_job(tmp_path, questions(40), **one_by_one)
    with driven(config) as (spec, driver, ledger):

        def leave(number: int) -> None:
            if number == 2:
                driver.finish(JobState.INTERRUPTED)

        node = ShardNode()
        with after_each_commit(leave):
            answer = node.run_shard(spec)
        node.close()
        shard = ledger.get_shard(spec.shard_job.job.job_key, 0)
    assert answer.summary is not None
    assert answer.summary.state is shard.state is ShardState.INTERRUPTED
    assert 2 <= answer.summary.num_ok == shard.num_ok < 40
    assert shard.lease_owner is None


@pytest.mark.parametrize("what_happens", ["replaced", "silent", "ledger broken"])
def test_a_driver_that_is_replaced_or_silent_is_noticed(tmp_path: Path, what_happens: str) -> None:
    with driven(make_job(tmp_path, questions(2), lease_seconds=1)) as (spec, _, ledger):
        stop, done = threading.Event(), threading.Event()
        watch = threading.Thread(target=watch_driver, args=(spec, ledger, stop, done), daemon=True)
        watch.start()
        if what_happens == "silent":
            assert not stop.wait(1.2)  # longer than the lease: the driver renews it
            ledger.renew_job = lambda lease: None  # type: ignore[method-assign]
        elif what_happens == "ledger broken":
            ledger.find_job = MagicMock(side_effect=LedgerError("gone"))  # type: ignore[method-assign]
        else:
            taken = {"lease_owner": str(ELSEWHERE), "lease_epoch": 9, "lease_seconds": 3600}
            other = update(JobTable).values(**taken)
            ledger.database.write(lambda connection: connection.execute(other))
        assert stop.wait(5)
        done.set()
        watch.join()


def test_a_node_that_was_told_to_stop_begins_no_shard(tmp_path: Path) -> None:
    with driven(make_job(tmp_path, questions(4))) as (spec, _, _):
        node = ShardNode()
        node.stop()
        answer = node.run_shard(spec)
        node.close()
    assert answer.summary is not None
    assert (answer.summary.state, answer.summary.slot) == (ShardState.INTERRUPTED, None)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        (
            "rows.jsonl",
            r"cannot use what the job names: .*rows\.jsonl.* file system that every node has",
        ),
        ("runs/job-1/rows.sqlite", r"has no .*rows\.sqlite \(the job's row index\)"),
    ],
)
def test_a_file_that_the_host_does_not_have_is_named(
    tmp_path: Path, missing: str, complaint: str
) -> None:
    with driven(make_job(tmp_path, questions(4))) as (spec, _, _):
        check_host(spec.shard_job)
        (tmp_path / missing).unlink()
        with pytest.raises(ConfigError, match=rf"host \S+ of the Ray cluster {complaint}"):
            check_host(spec.shard_job)
        answer = ShardNode().run_shard(spec)
    assert isinstance(answer.error, ConfigError)


def test_a_host_with_another_model_under_the_same_path_is_refused(tmp_path: Path) -> None:
    with driven(make_job(tmp_path, questions(4))) as (spec, _, _):
        there = replace(spec.shard_job.job, fingerprint={"model": "0ddba11", "dtype": "float32"})
        with pytest.raises(
            ConfigError, match=r"host \S+ .* another model .*model: was 0ddba11, is"
        ):
            check_host(replace(spec.shard_job, job=there))


def test_a_ledger_that_the_host_cannot_reach_is_named_with_the_host(tmp_path: Path) -> None:
    with driven(make_job(tmp_path, questions(4))) as (spec, _, _):
        away = ShardSpec(
            shard_job=spec.shard_job,
            shard_index=0,
            driver=spec.driver,
            ledger_url="postgresql://postgres:hidden@127.0.0.1:1/ledger",
        )
        error = ShardNode().run_shard(away).error
    assert isinstance(error, ConfigError)
    assert "of the Ray cluster: ledger postgresql" in str(error)
    assert "a server that every node reaches" in str(error)
    assert "hidden" not in str(error) + repr(away)


@pytest.mark.parametrize(
    "error",
    [
        TooManyFailedRowsError(3, 1),
        WorkerError("lost", failure=WorkerFailure.DEVICE_LOST, request_ids=("1",)),
        ConfigError("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_as_it_was(error: Exception) -> None:
    back = pickle.loads(pickle.dumps(ShardAnswer(error=error))).error  # type: ignore[arg-type]
    assert type(back) is type(error)
    assert (str(back), getattr(back, "failure", None)) == (
        str(error),
        getattr(error, "failure", None),
    )
