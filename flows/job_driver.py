"""Keeps the right to drive a job: one process at a time gives out its shards.

The lease is taken before anything of the job is changed, renewed by a thread, and given back with
the state in which the job is left.
"""

import contextvars
import logging
import threading
from types import TracebackType
from typing import Self

from engine import LedgerError
from flows.ledger import Ledger
from flows.ledger_rows import JobLease, JobRow
from flows.owner import Owner
from flows.schema import JobState

logger = logging.getLogger(__name__)
_HEARTBEATS_PER_LEASE = 3
_ENDED = (JobState.FINISHED, JobState.FAILED)


class JobDriver:
    """Drives one job of one ledger; a context manager that never leaves the lease behind.

    `lost` is set when another process has taken the job over.
    """

    def __init__(self, ledger: Ledger, *, lease_seconds: float, lost: threading.Event) -> None:
        self._ledger = ledger
        self._lease_seconds = lease_seconds
        self._lost = lost
        self._job_id = ""
        self._lease: JobLease | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # its log lines belong to the job's flow run
            args=(self._beat,),
            name="job-heartbeat",
            daemon=True,
        )

    @property
    def ledger(self) -> Ledger:
        """Return where the job is."""
        return self._ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the job back, unless `finish` has: as interrupted, or as it was when nothing began."""
        self._lost.set()  # the run is over: a server that went away is not waited for any longer
        if self._lease is None:
            return
        try:
            state = self._ledger.get_job(self._job_id).state
            self.finish(state if state in _ENDED else JobState.INTERRUPTED)
        except LedgerError as failure:
            logger.warning("the job could not be given back: %s", failure)

    def take(self, job: JobRow) -> None:
        """Become the driver of a job.

        Raises:
            LedgerError: a living process drives it; says which, and what to do.
        """
        self._job_id = job.job_id
        self._lease = self._ledger.acquire_job(
            job.job_key, owner=Owner.current(), lease_seconds=self._lease_seconds
        )
        self._thread.start()

    def finish(self, state: JobState) -> None:
        """Leave the job in this state, to whoever drives it next.

        Raises:
            LedgerError: another process drives it now.
        """
        assert self._lease is not None, "take it first"
        lease, self._lease = self._lease, None
        self._done.set()
        self._thread.join()
        self._ledger.release_job(lease, state)

    def _beat(self) -> None:
        lease = self._lease
        assert lease is not None
        while not self._done.wait(self._lease_seconds / _HEARTBEATS_PER_LEASE):
            try:
                self._ledger.renew_job(lease)
            except LedgerError as error:
                logger.error("stopping this run: %s", error)  # noqa: TRY400 - the message says it all
                self._lost.set()
                return
