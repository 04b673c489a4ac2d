"""Puts slots that no shard waits for to work on shards which still have rows to give away.

So no device is idle at the end of a job while another has rows that it has not begun.
"""

import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from engine import TokenmillError, WorkerError
from flows.shard_recovery import BadDeviceError
from flows.stacks import Slot, StackPool, StoppedError

logger = logging.getLogger(__name__)


class SharedShard(Protocol):
    """A shard that more than one engine may answer."""

    @property
    def num_to_share(self) -> int:
        """Rows that another engine may take."""
        ...

    def help(self, slot: Slot) -> None:
        """Answer rows with another engine until none is left to take.

        Raises:
            WorkerError: the engine failed; what it had not answered can be taken again.
        """
        ...

    def fail(self, error: Exception) -> None:
        """End the shard with an error that is not the engine's."""
        ...


class SpareSlots:
    """Threads of a job, one for each slot but one, which a shard has anyway."""

    def __init__(
        self, stacks: StackPool, shard_indices: Iterable[int] = (), *, min_rows: int | None = None
    ) -> None:
        """Begin to look for shards to help.

        Args:
            stacks: where the slots are.
            shard_indices: shards that need a slot of their own first.
            min_rows: fewer rows than this are not worth the loading of an engine; left out,
                nobody is helped.
        """
        self._stacks = stacks
        self._min_rows = min_rows
        self._to_come = set(shard_indices)
        self._shards: list[SharedShard] = []
        self._num_helpers = Counter[int]()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        num_threads = 0 if min_rows is None else stacks.num_slots - 1
        self._threads = [
            threading.Thread(
                target=contextvars.copy_context().run,  # its log lines belong to the job's run
                args=(self._work,),
                name=f"spare-{number}",
            )
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, shard_index: int) -> None:
        """Note that a shard asks for its slot; while others have still to, no slot is spare."""
        with self._changed:
            self._to_come.discard(shard_index)
            self._changed.notify_all()

    def share(self, shard: SharedShard) -> None:
        """Let spare slots take rows of the shard."""
        with self._changed:
            self._shards.append(shard)
            self._changed.notify_all()

    def unshare(self, shard: SharedShard) -> None:
        """Let no other slot take rows of the shard, and wait for those that have some."""
        with self._changed:
            if shard in self._shards:
                self._shards.remove(shard)
            self._changed.notify_all()  # the slot of the shard is free
            self._changed.wait_for(lambda: not self._num_helpers[id(shard)])

    def look(self) -> None:
        """Look again: a slot was given back."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the threads; the shards must have ended, or be about to."""
        self._closing.set()
        self.look()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        try:
            while self._wait():
                with self._stacks.borrow(self._closing) as slot:
                    self._help_with(slot)
        except StoppedError:
            pass
        except TokenmillError as error:
            logger.warning("the job goes on with one engine less: %s", error)

    def _wait(self) -> bool:
        """Wait until there is a shard to help and a slot to do it with; False is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._can_help())
            return not self._closing.is_set()

    def _find_shard(self) -> SharedShard | None:
        """Return the shard with most rows that nobody has taken; the caller holds the lock."""
        shard = max(self._shards, key=lambda shard: shard.num_to_share, default=None)
        return None if shard is None or shard.num_to_share == 0 else shard

    def _can_help(self) -> bool:
        """Tell whether a slot is spare and there is enough for it to do."""
        shard = self._find_shard()
        if self._to_come or shard is None:
            return False
        is_worth_a_load = self._min_rows is not None and shard.num_to_share >= self._min_rows
        return self._stacks.has_idle(is_warm=not is_worth_a_load)

    def _help_with(self, slot: Slot) -> None:
        slot.engine()  # before anybody counts on it: no shard waits for a model that is loaded
        with self._changed:
            shard = self._find_shard()
            if shard is None:
                return
            self._num_helpers[id(shard)] += 1
        try:
            shard.help(slot)
        except BadDeviceError as error:
            slot.retire(str(error))
        except WorkerError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by the shard
            shard.fail(error)
            slot.close_engine()
        finally:
            with self._changed:
                self._num_helpers[id(shard)] -= 1
                self._changed.notify_all()
