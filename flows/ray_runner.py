"""Runs the shards of a job on the nodes of a Ray cluster. The one module that imports Ray.

A place is an actor: it holds what Ray counts (NPU, GPU, CPU) as long as its engine is loaded, and
answers one shard after the other. Ray ends it with the process that drives the job. Nothing is
retried by Ray: whether a shard may be taken over from a node that died is the ledger's to say.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from engine import ConfigError, WorkerError, WorkerFailure
from flows.config import JobConfig
from flows.engine_part import ShardJob
from flows.held_shards import wait_until_free
from flows.ledger import Ledger
from flows.owner import Owner
from flows.ray_node import ShardAnswer, ShardNode, ShardSpec
from flows.ray_terms import (
    address_of,
    count_places,
    describe_offer,
    refuse_if_silent,
    resources_of,
)
from flows.schema import ShardState
from flows.shard_runner import ShardSummary
from flows.stacks import StoppedError

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_SAY_SECONDS = 30.0
_CLOSE_SECONDS = 30.0
_MAX_ATTEMPTS = 3  # of a shard whose node dies
_LOCAL_STORE_BYTES = 100_000_000  # nothing large goes through Ray


class _NodeGoneError(Exception):
    """The process on the node, or the node, has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    number: int
    actor: Any


class RayCluster:
    """Places for shards on a cluster; use `RayCluster.open`. Safe to use from several threads."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._wanted = resources_of(config)
        self._lock = threading.Lock()
        self._to_come: set[int] = set()
        self._num_places = 0
        self._idle: list[_Place] = []
        # A device that failed stays taken, so that Ray does not give it to the next shard.
        self._bad: list[_Place] = []
        self.num_loads = 0

    @classmethod
    @contextmanager
    def open(cls, config: JobConfig) -> Iterator["RayCluster"]:
        """Connect to the cluster of a job; ends every process there at the end.

        Raises:
            ConfigError: there is no cluster, or none of its nodes has what a shard takes.
        """
        is_connected = ray.is_initialized()
        if not is_connected:
            _connect(address_of(config))
        cluster = cls(config)
        try:
            cluster.refuse_if_too_small()
            yield cluster
        finally:
            cluster.close()
            if not is_connected:
                ray.shutdown()

    @property
    def num_slots(self) -> int:
        """Shards that can run at a time, when nobody else uses the cluster."""
        return count_places(_living_nodes(), self._wanted) - len(self._bad)

    def expect(self, shard_indices: Iterable[int]) -> None:
        """Name the shards that are to come: as long as there are some, engines stay loaded."""
        self._to_come.update(shard_indices)

    def refuse_if_too_small(self) -> None:
        """Check that some node has all that a shard takes, in use or not.

        Raises:
            ConfigError: none has; says what there is and what a shard takes.
        """
        nodes = _living_nodes()
        if not count_places(nodes, self._wanted):
            raise ConfigError(
                f"no node of the Ray cluster at {ray.get_runtime_context().gcs_address} can run a "
                f"shard: {describe_offer(nodes, self._wanted)}; add a node that has it, or change "
                "engine.device, engine.tensor_parallel_size or ray.resources"
            )

    def run_shard(
        self, shard_job: ShardJob, shard_index: int, *, ledger: Ledger, stop: threading.Event
    ) -> ShardSummary:
        """Answer the pending rows of one shard, on another node when one dies.

        Raises:
            TokenmillError: what shard_runner.run_shard raises, on the node.
            WorkerError: nodes died again and again, or none is left.
        """
        with self._lock:
            self._to_come.discard(shard_index)
        bare_config = shard_job.config.model_copy(update={"ledger_url": None})
        spec = ShardSpec(
            shard_job=replace(shard_job, config=bare_config),
            shard_index=shard_index,
            driver=str(Owner.current()),
            ledger_url=self._config.resolved_ledger_url,
        )
        num_deaths = 0
        try:
            while True:
                try:
                    wait_until_free(ledger, shard_job.job.job_key, shard_index, stop)
                    return self._run_once(spec, stop)
                except _NodeGoneError as error:
                    num_deaths += 1
                    logger.error("shard=%d: %s", shard_index, error)  # noqa: TRY400
                    if num_deaths == _MAX_ATTEMPTS:
                        raise WorkerError(
                            f"shard {shard_index}: the process on a Ray node has ended "
                            f"{num_deaths} times, last: {error}; what it had finished is committed",
                            failure=WorkerFailure.DIED,
                        ) from error
                except _BadDeviceError as error:
                    logger.error("shard=%d goes to another device: %s", shard_index, error)  # noqa: TRY400
        except StoppedError:
            return ShardSummary(shard_index=shard_index, state=ShardState.INTERRUPTED)

    def close(self) -> None:
        """End every idle process, and unload its engine in order."""
        with self._lock:
            places = [*self._idle, *self._bad]
            self._idle, self._bad = [], []
        for place in places:
            _close(place)

    def _run_once(self, spec: ShardSpec, stop: threading.Event) -> ShardSummary:
        place = self._take(spec.shard_index, stop)
        try:
            answer = _ask(place, spec, stop)
        except BaseException:
            ray.kill(place.actor)
            raise
        with self._lock:
            self.num_loads += answer.num_loads
        if answer.summary is not None:
            self._give_back(place)
            busy = sum(answer.summary.busy_seconds_by_slot.values())
            is_begun = answer.summary.slot is not None
            return replace(
                answer.summary,
                slot=place.number if is_begun else None,
                busy_seconds_by_slot={place.number: busy} if is_begun else {},
            )
        error = answer.error
        assert error is not None
        if isinstance(error, WorkerError) and error.failure is WorkerFailure.DEVICE_LOST:
            self._bad.append(place)
            raise _BadDeviceError(str(error)) from error
        _close(place)
        raise error

    def _take(self, shard_index: int, stop: threading.Event) -> _Place:
        if (idle := self._take_idle()) is not None:
            return idle
        with self._lock:
            number = self._num_places
            self._num_places += 1
        if self.num_slots < 1:
            raise WorkerError(
                f"no good place for a shard is left on the Ray cluster: "
                f"{describe_offer(_living_nodes(), self._wanted)}, and {len(self._bad)} device(s) "
                "failed",
                failure=WorkerFailure.DEVICE_LOST,
            )
        place = _Place(number, _start_actor(self._wanted))
        try:
            idle = self._wait_until_there(place, shard_index, stop)
        except BaseException:
            ray.kill(place.actor)
            raise
        if idle is None:
            return place
        ray.kill(place.actor)
        return idle

    def _take_idle(self) -> _Place | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _wait_until_there(
        self, place: _Place, shard_index: int, stop: threading.Event
    ) -> _Place | None:
        """Wait until Ray has started a place; return another one that became idle before."""
        started = place.actor.where.remote()
        say_at = time.monotonic() + _LOOK_SECONDS * 4
        while not ray.wait([started], timeout=_LOOK_SECONDS)[0]:
            if stop.is_set():
                raise StoppedError("stopped while waiting for the Ray cluster")
            # It may hold the very devices that are waited for: a node may have left.
            if (idle := self._take_idle()) is not None:
                return idle
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + _SAY_SECONDS
                self._say_that_it_waits(shard_index)
        try:
            host = ray.get(started)
        except RayActorError as error:
            raise WorkerError(
                f"no process for shard {shard_index} could be started on the Ray cluster; is "
                f"tokenmill installed on every node? {_last_line(error)}",
                failure=WorkerFailure.START_FAILED,
            ) from error
        logger.info("shard=%d runs on host=%s place=%d", shard_index, host, place.number)
        return None

    def _say_that_it_waits(self, shard_index: int) -> None:
        self.refuse_if_too_small()  # its nodes may have left
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        logger.warning(
            "shard=%d waits for %s: the Ray cluster has %s free",
            shard_index,
            ", ".join(f"{name} {amount:g}" for name, amount in self._wanted.items()),
            ", ".join(f"{name} {free.get(name, 0.0):g}" for name in self._wanted),
        )

    def _give_back(self, place: _Place) -> None:
        with self._lock:
            if self._to_come:
                self._idle.append(place)
                return
        _close(place)


class _BadDeviceError(Exception):
    """The device of a place is bad."""


def _connect(address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES}
    elif address != "auto":
        refuse_if_silent(address)
    try:
        with _sigterm_kept():
            ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster at {address or 'this host'} cannot be used: {error}; every host "
            "needs the same Python, Ray and RAY_AUTH_TOKEN; see that `ray status` works on this one"
        ) from error


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep what SIGTERM does: Ray lets it end the process at once, and a job ends in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _living_nodes() -> list[dict[str, float]]:
    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def _start_actor(wanted: dict[str, float]) -> Any:
    custom = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    actor_class: Any = ray.remote(ShardNode)
    return actor_class.options(
        num_cpus=wanted["CPU"],
        num_gpus=wanted.get("GPU", 0),
        resources=custom,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=2,  # a shard, and the word to stop
    ).remote()


def _ask(place: _Place, spec: ShardSpec, stop: threading.Event) -> ShardAnswer:
    """Let a place run a shard, and tell it when to stop.

    Raises:
        _NodeGoneError: the process there has ended, or cannot be reached.
    """
    try:
        asked = place.actor.run_shard.remote(spec)
        is_told = False
        while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
            if stop.is_set() and not is_told:
                is_told = True
                place.actor.stop.remote()
        answer: ShardAnswer = ray.get(asked)
    except RayActorError as error:
        raise _NodeGoneError(
            f"the process on its Ray node has ended: {_last_line(error)}"
        ) from error
    return answer


def _close(place: _Place) -> None:
    try:
        ray.get(place.actor.close.remote(), timeout=_CLOSE_SECONDS)
    except (RayActorError, RayTaskError, TimeoutError) as error:
        logger.warning("place=%d did not unload its engine: %s", place.number, _last_line(error))
    ray.kill(place.actor)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
