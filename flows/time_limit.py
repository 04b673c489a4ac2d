"""Ends what a template does when it does not end by itself.

Jinja's sandbox keeps templates from files and objects, not from loops within loops. An exception is
raised in the thread that renders, between two steps of Python: a single long call into C comes to
its end first.
"""

import ctypes
import logging
import threading
import time
from contextlib import suppress

from engine import RequestError, RequestErrorCode

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


class SlowTemplateError(RequestError):
    """A template has used up its time."""


class _TimeIsUp(BaseException):
    """Goes past whatever the code in the block catches."""


class TimeLimit:
    """A block in which a thread may compute for so long; waiting does not count. Not nested.

    Raises:
        SlowTemplateError: at the end of the block, which was cut short.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        # By thread: when its block is over, on the clock of its computing; None until it was seen.
        self._ends: dict[int, float | None] = {}
        self._watch: threading.Thread | None = None

    def __enter__(self) -> None:
        self._ends[threading.get_ident()] = None
        if self._watch is None:
            self._watch = threading.Thread(target=self._look_again, name="time-limit", daemon=True)
            self._watch.start()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        is_up = kind is _TimeIsUp
        try:
            # With the lock: what is raised in this thread is raised before it leaves the block.
            with self._lock:
                self._ends.pop(threading.get_ident(), None)
        except _TimeIsUp:
            is_up = True
        if is_up:
            message = (
                f"its template took more than {self.seconds:g} s of computing; mend the template, "
                "or what it is given"
            )
            logger.warning("cut short: %s", message)
            raise SlowTemplateError(RequestErrorCode.BAD_TEMPLATE, message) from None

    def _look_again(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                for thread, end in list(self._ends.items()):
                    self._look(thread, end)

    def _look(self, thread: int, end: float | None) -> None:
        now = _computed_seconds(thread)
        if end is None:
            self._ends[thread] = now + self.seconds
        elif now > end:
            del self._ends[thread]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(_TimeIsUp)
            )


def _computed_seconds(thread: int) -> float:
    with suppress(OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0


row_time_limit = TimeLimit(60.0)
# Large vocabularies are converted while a tokenizer loads; its chat template is tried on the way.
load_time_limit = TimeLimit(600.0)
