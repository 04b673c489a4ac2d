"""A database server that went away: who waits for it, and for how long.

For long while nobody asks the run to stop; once it is to stop, for a short time together, and from
then on not at all.
"""

import logging
import threading
import time
from collections.abc import Callable

from engine import LedgerError

logger = logging.getLogger(__name__)
_OUTAGE_SECONDS = 3600.0
# Prefect kills a cancelled run after 30 s; the engines are closed in that time too.
_STOPPING_SECONDS = 15.0
_PAUSE_SECONDS = 2.0


class LedgerUnreachableError(LedgerError):
    """The database server went away, or is starting or stopping."""


class Patience:
    """How long the threads of a run wait for the ledger's server."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        """Wait for long, until `stop` is set."""
        self._stop = stop or threading.Event()
        self._stopping_until: float | None = None
        self._given_up: LedgerUnreachableError | None = None

    def refuse_if_given_up(self) -> None:
        """Let nobody try again after the last wait of a run that is to stop.

        Raises:
            LedgerUnreachableError: that wait was in vain.
        """
        if self._given_up is not None:
            raise LedgerUnreachableError(str(self._given_up))

    def wait(self, error: LedgerUnreachableError, is_back: Callable[[], bool]) -> None:
        """Wait for the server that is away because of `error`, saying so.

        Raises:
            LedgerUnreachableError: `error`, when it stays away for too long.
        """
        logger.warning("waiting for the ledger, nothing is lost: %s", error)
        until = time.monotonic() + _OUTAGE_SECONDS
        while time.monotonic() < min(until, self._end_of_patience()):
            if self._stop.is_set():
                time.sleep(_PAUSE_SECONDS)
            else:
                self._stop.wait(_PAUSE_SECONDS)
            if is_back():
                logger.warning("the ledger is back")
                return
        if self._stop.is_set():
            self._given_up = error
        raise error

    def _end_of_patience(self) -> float:
        """Return when a run that is to stop waits no longer, however often it has to wait."""
        if not self._stop.is_set():
            return float("inf")
        if self._stopping_until is None:
            self._stopping_until = time.monotonic() + _STOPPING_SECONDS
        return self._stopping_until
