"""Runs the shards of a job on places of a Ray cluster: which place, and what when one dies."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine import ConfigError, WorkerError, WorkerFailure
from flows import ray_places
from flows.config import JobConfig
from flows.engine_part import ShardJob
from flows.held_shards import wait_until_free
from flows.ledger import Ledger
from flows.owner import Owner
from flows.ray_node import ShardAnswer, ShardSpec
from flows.ray_places import NodeGoneError, Place
from flows.ray_terms import address_of, count_places, describe, describe_offer, resources_of
from flows.schema import ShardState
from flows.shard_runner import ShardSummary
from flows.stacks import StoppedError

logger = logging.getLogger(__name__)
_SAY_AFTER_SECONDS = 10.0  # a process takes some to start
_SAY_SECONDS = 30.0
_MAX_DEATHS = 3  # of the nodes of one shard


class RayCluster:
    """Places for shards on a cluster; use `RayCluster.open`. Safe to use from several threads.

    A place answers one shard after the other, so that its engine stays loaded.
    """

    def __init__(self, config: JobConfig) -> None:
        self._wanted = resources_of(config)
        self._ledger_url = config.resolved_ledger_url
        self._lock = threading.Lock()
        self._to_come: set[int] = set()
        self._numbers = itertools.count()
        self._idle: list[Place] = []
        # A device that failed stays taken, so that Ray does not give it to the next shard.
        self._bad: list[Place] = []
        self.num_loads = 0

    @classmethod
    @contextmanager
    def open(cls, config: JobConfig) -> Iterator["RayCluster"]:
        """Connect to the cluster of a job; ends every process there at the end.

        Raises:
            ConfigError: there is no cluster, or none of its nodes has what a shard takes.
        """
        with ray_places.connected(address_of(config)):
            cluster = cls(config)
            cluster._refuse_if_too_small()
            try:
                yield cluster
            finally:
                cluster.close()

    @property
    def num_slots(self) -> int:
        """Shards that can run at a time, when nobody else uses the cluster."""
        with self._lock:
            self._bad = [place for place in self._bad if place.lives()]
            return count_places(ray_places.living_nodes(), self._wanted) - len(self._bad)

    def expect(self, shard_indices: Iterable[int]) -> None:
        """Name the shards that are to come: as long as there are some, engines stay loaded."""
        with self._lock:
            self._to_come.update(shard_indices)

    def run_shard(
        self, shard_job: ShardJob, shard_index: int, *, ledger: Ledger, stop: threading.Event
    ) -> ShardSummary:
        """Answer the pending rows of one shard, on another node when one dies.

        Raises:
            TokenmillError: what shard_runner.run_shard raises, on the node.
            WorkerError: nodes died again and again, or none is left.
        """
        spec = self._spec_of(shard_job, shard_index)
        num_deaths = 0
        while True:
            try:
                place = self._place_for(spec, ledger, stop)
                answer = place.run_shard(spec, stop)
            except StoppedError:
                return ShardSummary(shard_index=shard_index, state=ShardState.INTERRUPTED)
            except NodeGoneError as error:
                num_deaths += 1
                logger.error("shard=%d: %s", shard_index, error)  # noqa: TRY400
                if num_deaths == _MAX_DEATHS:
                    raise WorkerError(
                        f"shard {shard_index}: {num_deaths} processes on Ray nodes have ended, last: "
                        f"{error}; what they had finished is committed",
                        failure=WorkerFailure.DIED,
                    ) from error
                continue
            if not _is_of_a_bad_device(answer):
                return self._end(place, answer)
            logger.error("shard=%d goes to another device: %s", shard_index, answer.error)
            with self._lock:
                self._bad.append(place)

    def close(self) -> None:
        """End every place; one that a shard is on ends with that shard."""
        with self._lock:
            self._to_come.clear()
            places = [*self._idle, *self._bad]
            self._idle, self._bad = [], []
        Place.close(places)

    def _spec_of(self, shard_job: ShardJob, shard_index: int) -> ShardSpec:
        bare_config = shard_job.config.model_copy(update={"ledger_url": None})
        return ShardSpec(
            shard_job=replace(shard_job, config=bare_config),
            shard_index=shard_index,
            driver=str(Owner.current()),
            ledger_url=self._ledger_url,
        )

    def _place_for(self, spec: ShardSpec, ledger: Ledger, stop: threading.Event) -> Place:
        """Return a place once nobody holds the shard; an engine that it may use stays loaded."""
        shard_index = spec.shard_index
        self.expect([shard_index])
        try:
            wait_until_free(ledger, spec.shard_job.job.job_key, shard_index, stop)
            return self._take(shard_index, stop)
        finally:
            with self._lock:
                self._to_come.discard(shard_index)

    def _take(self, shard_index: int, stop: threading.Event) -> Place:
        """Return an idle place, or wait for Ray to start one.

        Raises:
            StoppedError: `stop` is set.
            NodeGoneError: the process could not be started.
            ConfigError: no node has what a shard takes, or it has another tokenmill.
            WorkerError: every device is bad.
        """
        if (idle := self._take_idle()) is not None:
            return idle
        self._refuse_if_none_is_good()
        place = Place(next(self._numbers), self._wanted)
        try:
            first = self._first_of(place, shard_index, stop)
        except BaseException:
            place.kill()
            raise
        if first is not place:
            place.kill()
        return first

    def _first_of(self, place: Place, shard_index: int, stop: threading.Event) -> Place:
        """Return the place when Ray has started it, or another one that became idle before."""
        say_at = time.monotonic() + _SAY_AFTER_SECONDS
        while not place.is_there():
            if stop.is_set():
                raise StoppedError("stopped while waiting for the Ray cluster")
            # It may hold the very devices that are waited for: a node may have left.
            if (idle := self._take_idle()) is not None:
                return idle
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + _SAY_SECONDS
                self._say_that_it_waits(shard_index)
        logger.info("shard=%d runs on host=%s place=%d", shard_index, place.host(), place.number)
        return place

    def _take_idle(self) -> Place | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _refuse_if_too_small(self) -> None:
        """Check that some node has all that a shard takes, in use or not."""
        nodes = ray_places.living_nodes()
        if not count_places(nodes, self._wanted):
            raise ConfigError(
                f"no node of the Ray cluster at {ray_places.cluster_name()} can run a shard: "
                f"{describe_offer(nodes, self._wanted)}; add a node that has it, or change "
                "engine.device, engine.tensor_parallel_size or ray.resources"
            )

    def _refuse_if_none_is_good(self) -> None:
        if self.num_slots < 1:
            offer = describe_offer(ray_places.living_nodes(), self._wanted)
            raise WorkerError(
                f"no good place for a shard is left on the Ray cluster: {offer}, and "
                f"{len(self._bad)} device(s) failed",
                failure=WorkerFailure.DEVICE_LOST,
            )

    def _say_that_it_waits(self, shard_index: int) -> None:
        self._refuse_if_too_small()  # its nodes may have left
        free = ray_places.free_resources()
        logger.warning(
            "shard=%d waits for %s: the Ray cluster has %s free",
            shard_index,
            describe(self._wanted),
            describe({name: free.get(name, 0.0) for name in self._wanted}),
        )

    def _end(self, place: Place, answer: ShardAnswer) -> ShardSummary:
        with self._lock:
            self.num_loads += answer.num_loads
            is_kept = bool(self._to_come) and answer.is_done
            if is_kept:
                self._idle.append(place)
        if not is_kept:
            Place.close([place])
        if answer.summary is None:
            assert answer.error is not None
            raise answer.error
        return _on_place(answer.summary, place.number)


def _is_of_a_bad_device(answer: ShardAnswer) -> bool:
    error = answer.error
    return isinstance(error, WorkerError) and error.failure is WorkerFailure.DEVICE_LOST


def _on_place(summary: ShardSummary, number: int) -> ShardSummary:
    """Return the summary with the number of its place; a node has but one slot, and calls it 0."""
    if summary.slot is None:
        return summary
    busy_seconds = sum(summary.busy_seconds_by_slot.values())
    return replace(summary, slot=number, busy_seconds_by_slot={number: busy_seconds})
