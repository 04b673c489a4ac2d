"""A global concurrency limit of Prefect that counts how many devices of this host are in use.

Its UI shows them, and whoever lowers the limit leaves devices to others. The locks of the devices
are the truth: the limit follows them, and where it has lost count it is set right by them.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
)
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from engine import ConfigError
from flows.device_queue import LimitReachedError

logger = logging.getLogger(__name__)
_CALL_SECONDS = 5.0
_LEASE_SECONDS = 60.0  # the least that the server takes
_LEAK_SECONDS = 2 * _LEASE_SECONDS
_LOOK_SECONDS = 30.0  # the longest between two looks of somebody who waits
_TOO_MANY, _LOCKED = 422, 423


def limit_name() -> str:
    """Return the name of this host's limit."""
    return f"tokenmill-devices-{socket.gethostname()}"


class PrefectDeviceLimit:
    """This host's limit; see DeviceLimit."""

    def __init__(self) -> None:
        self._name = limit_name()
        self._is_missed = False
        self._looked_at = self._counted_too_many_since = 0.0

    def take(self, num_slots: int, num_in_use: int) -> UUID | None:
        """Take slots and return their lease; None when the limit is not there, or switched off.

        Raises:
            LimitReachedError: so many are not free.
            HTTPError: the server does not answer, or with an error.
        """
        with _client() as client:
            try:
                limit = client.read_global_concurrency_limit_by_name(self._name)
            except ObjectNotFound:
                if not self._is_missed:
                    self._is_missed = True
                    logger.info("Prefect has no limit %s: the devices' locks count", self._name)
                return None
            if not limit.active:  # it would not count these slots, but that they are given back
                return None
            self._mend(client, limit.active_slots, num_in_use)
            try:
                answer = client.increment_concurrency_slots_with_lease(
                    [self._name], num_slots, "concurrency", _LEASE_SECONDS
                )
            except HTTPStatusError as error:
                if error.response.status_code not in (_TOO_MANY, _LOCKED):
                    raise
                raise LimitReachedError(
                    f"{num_slots} slot(s) of Prefect's limit {self._name}: {limit.active_slots} of "
                    f"{limit.limit} are in use"
                ) from error
        return UUID(answer.json()["lease_id"])

    def renew(self, lease_id: UUID) -> None:
        """Keep slots for a minute more.

        Raises:
            HTTPError: the server does not answer, or knows no such lease.
        """
        with _client() as client:
            client.renew_concurrency_lease(lease_id, _LEASE_SECONDS)

    def give_back(self, lease_id: UUID) -> None:
        """Let others have the slots.

        Raises:
            HTTPError: the server does not answer.
        """
        with _client() as client:
            client.release_concurrency_slots_with_lease(lease_id)

    def _mend(self, client: SyncPrefectClient, num_active: int, num_in_use: int) -> None:
        """Set the count right when it was too high for longer than a lease.

        A server that keeps leases in its memory forgets them when it is started again, and their
        slots stay in use for ever. A lowered limit is no such leak: what it counts is locked.
        """
        now = time.monotonic()
        if num_active <= num_in_use or now - self._looked_at > _LOOK_SECONDS:
            self._counted_too_many_since = now
        self._looked_at = now
        if now - self._counted_too_many_since < _LEAK_SECONDS:
            return
        logger.warning(
            "Prefect's limit %s has counted more devices in use than are locked here for longer "
            "than a lease: %d, set right to %d", self._name, num_active, num_in_use,
        )  # fmt: skip
        update = GlobalConcurrencyLimitUpdate(active_slots=num_in_use)
        client.update_global_concurrency_limit(self._name, update)


def set_up_limit(num_devices: int, *, may_change: bool) -> str:
    """Make this host's limit, or change one that is there, and return in words what is there.

    Raises:
        ConfigError: Prefect's settings name no server, or it does not answer.
    """
    if not PREFECT_API_URL.value():
        raise ConfigError(
            "no server is named in Prefect's settings, where the limit of the devices could be: "
            "start one with `prefect server start`, and name it with "
            "`prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        )
    name = limit_name()
    try:
        with _client() as client:
            try:
                limit = client.read_global_concurrency_limit_by_name(name)
            except ObjectNotFound:
                new = GlobalConcurrencyLimitCreate(name=name, limit=num_devices)
                client.create_global_concurrency_limit(new)
                return f"{name} is new, with {num_devices} slots"
            if may_change and limit.limit != num_devices:
                update = GlobalConcurrencyLimitUpdate(limit=num_devices)
                client.update_global_concurrency_limit(name, update)
                return f"{name} has {num_devices} slots now instead of {limit.limit}"
    except HTTPError as error:
        raise ConfigError(
            f"the limit {name} cannot be set up, Prefect's server says: {error}; start it, or "
            "correct PREFECT_API_URL in Prefect's settings"
        ) from error
    off = "" if limit.active else ", and is switched off"
    return f"{name} was there: {limit.active_slots} of {limit.limit} slots are in use{off}"


@contextmanager
def _client() -> Iterator[SyncPrefectClient]:
    """Open a client that tries everything once, and not for long."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": _CALL_SECONDS}, sync_client=True) as client,
    ):
        yield client
