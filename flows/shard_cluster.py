"""Where the shards of a job run, when not in this process: the door to Ray, opened when asked."""

import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine import ConfigError
from flows.config import JobConfig
from flows.engine_part import ShardJob
from flows.ledger import Ledger
from flows.ray_terms import address_of
from flows.shard_runner import ShardSummary


class ShardCluster(Protocol):
    """Other hosts that run shards."""

    num_loads: int

    @property
    def num_slots(self) -> int:
        """Shards that can run at a time."""
        ...

    def expect(self, shard_indices: Iterable[int]) -> None:
        """Name the shards that are to come."""
        ...

    def run_shard(
        self, shard_job: ShardJob, shard_index: int, *, ledger: Ledger, stop: threading.Event
    ) -> ShardSummary:
        """Answer the pending rows of one shard."""
        ...


@contextmanager
def cluster_of(config: JobConfig) -> Iterator[ShardCluster | None]:
    """Connect to the cluster that a job names; give None when it runs here.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot run the job.
    """
    if config.runner == "local":
        yield None
        return
    if address_of(config) is None:
        # Its ports are open to the network. Ray reads these once, when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        from flows.ray_runner import RayCluster  # an extra, and slow to load
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "runner: ray needs Ray, which is not installed here: pip install 'tokenmill[ray]', "
            "with the same versions on every node"
        ) from error
    with RayCluster.open(config) as cluster:
        yield cluster
