"""Places for shards on a Ray cluster. The one module that imports Ray.

A place is an actor: it holds what Ray counts (NPU, GPU, CPU) as long as it lives, and Ray ends it
with the process that drives the job. Nothing is retried by Ray: whether a shard may be taken over
from a node that died is the ledger's to say.
"""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from engine import ConfigError
from flows.experiments import collect_versions
from flows.ray_node import ShardAnswer, ShardNode, ShardSpec
from flows.ray_terms import Resources, refuse_if_silent

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_CLOSE_SECONDS = 30.0
_LOCAL_STORE_BYTES = 100_000_000  # nothing large goes through Ray


class NodeGoneError(Exception):
    """The process on the node, or the node, has ended."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to a cluster, or to one of this host alone, while the block runs.

    A process that is connected already stays so.

    Raises:
        ConfigError: there is none that can be used.
    """
    if ray.is_initialized():
        yield
        return
    _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def cluster_name() -> str:
    """Return the address of the cluster's head."""
    return str(ray.get_runtime_context().gcs_address)


def living_nodes() -> list[Resources]:
    """Return what each node has, in use or not."""
    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def free_resources() -> Resources:
    """Return what nobody uses, of all nodes together."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


class Place:
    """A process on a node, with an engine; `number` tells it apart from the others of its run."""

    def __init__(self, number: int, wanted: Resources) -> None:
        """Ask Ray for it; it is there when some node has what is wanted free."""
        self.number = number
        self._host = "unknown"
        actor_class: Any = ray.remote(ShardNode)
        self._actor = actor_class.options(
            num_cpus=wanted["CPU"],
            num_gpus=wanted.get("GPU", 0),
            resources={name: each for name, each in wanted.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,  # a shard, and the word to stop
        ).remote()
        self._introduced = self._actor.introduce.remote()

    def is_there(self) -> bool:
        """Wait for a moment, and tell whether Ray has started the process."""
        return bool(ray.wait([self._introduced], timeout=_LOOK_SECONDS)[0])

    def host(self) -> str:
        """Return the name of the host, once it is there.

        Raises:
            NodeGoneError: it could not be started.
            ConfigError: another tokenmill is installed there.
        """
        try:
            host, version = ray.get(self._introduced)
        except RayActorError as error:
            raise NodeGoneError(
                f"no process could be started on node {_ip_of(error)}: {_last_line(error)}; is "
                "tokenmill installed there?"
            ) from error
        own = collect_versions()["tokenmill"]
        if version != own:
            raise ConfigError(
                f"host {host} of the Ray cluster has tokenmill {version}, the host that drives the "
                f"job {own}; install the same on every node"
            )
        self._host = str(host)
        return self._host

    def lives(self) -> bool:
        """Tell whether the process still holds what it was given."""
        try:
            ray.get(self._actor.introduce.remote(), timeout=_ANSWER_SECONDS)
        except ActorDiedError:
            return False
        except (GetTimeoutError, RayActorError):
            logger.debug("place=%d cannot be reached now", self.number)
        return True

    def run_shard(self, spec: ShardSpec, stop: threading.Event) -> ShardAnswer:
        """Run a shard there, and tell it when to stop; whatever is raised, the place is gone.

        Raises:
            NodeGoneError: the process there has ended, or cannot be reached.
        """
        try:
            asked = self._actor.run_shard.remote(spec)
            is_told = False
            while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                if stop.is_set() and not is_told:
                    is_told = True
                    self._actor.stop.remote()
            answer: ShardAnswer = ray.get(asked)
        except BaseException as error:
            self.kill()
            if isinstance(error, RayActorError):
                reason = f"the process on host {self._host} has ended: {_last_line(error)}"
                raise NodeGoneError(reason) from error
            raise
        return answer

    def kill(self) -> None:
        """End the process, and give back what it holds."""
        ray.kill(self._actor)

    @staticmethod
    def close(places: Sequence["Place"]) -> None:
        """End places, all at a time, once their engines are unloaded."""
        if not places:
            return
        closed = [place._actor.close.remote() for place in places]
        _, late = ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        if late:
            logger.warning("%d engine(s) were not unloaded in %g s", len(late), _CLOSE_SECONDS)
        for place in places:
            place.kill()


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
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"the Ray cluster at {address or 'this host'} cannot be used: {error}; this host must "
            "be one of its nodes (`ray start --address=HOST:PORT`), with the same Python, Ray and "
            "RAY_AUTH_TOKEN; see that `ray status` works here"
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


def _ip_of(error: RayActorError) -> str:
    found = re.search(r"\bip[=:]\s*([\w.:]+)", str(error))
    return found[1] if found else "unknown"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
