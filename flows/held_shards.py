"""Waits for a shard that a process on another host has left behind."""

import logging
import threading
import time

from flows import leases
from flows.ledger import Ledger
from flows.stacks import StoppedError

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
# How long after the end of its lease a process may still need to notice that it has lost its job.
_GRACE_SECONDS = 10.0


def wait_until_free(ledger: Ledger, job_key: int, shard_index: int, stop: threading.Event) -> None:
    """Wait for the end of a lease that a node which died has left behind.

    Of a process on another host nobody here knows more than that it is silent. One that is not
    silent in the end keeps the shard, and whoever asks for it is told so.
    """
    deadline: float | None = None
    while True:
        shard = ledger.get_shard(job_key, shard_index)
        if shard.lease_owner is None or not leases.is_held(shard, ledger.database.read_clock()):
            return
        if deadline is None:
            deadline = time.monotonic() + (shard.lease_seconds or 0.0) + _GRACE_SECONDS
            logger.warning(
                "shard=%d is still held by %s; waiting until its lease is over",
                shard_index,
                leases.name_of(shard.lease_owner),
            )
        if time.monotonic() > deadline:
            return
        if stop.wait(_LOOK_SECONDS):
            raise StoppedError("stopped while waiting for a lease")
