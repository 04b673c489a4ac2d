"""Captured graphs: lists of what Python launched, which a replay does again on the same memory.

The wheel's own classes (NPUGraph, its capture, its task groups and their update) run over this.
While a graph is captured nothing is computed, as on a device. A replay stops at a wait for an
external event that nobody has recorded, and goes on when somebody records it.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_simulator.acl import Listener, Told, library
from npu_simulator.execution import capture, run_now

_FAILED = 507015


@dataclass(frozen=True, slots=True)
class _Wait:
    event: int


@dataclass(slots=True)
class _Group:
    """Tasks that an update replaces."""

    tasks: list[Callable[[], None]] = field(default_factory=list)


_Task = Callable[[], None] | _Wait | _Group


@dataclass(slots=True)
class _Capture:
    stream: int
    tasks: list[_Task] = field(default_factory=list)
    group: _Group | None = None

    def add(self, task: Callable[[], None]) -> None:
        (self.tasks if self.group is None else self.group.tasks).append(task)


@dataclass(slots=True)
class _Stuck:
    event: int
    rest: list[_Task]


class Graphs:
    """What the simulated ACL tells of graphs, by stream and by graph."""

    def __init__(self) -> None:
        self._graphs: dict[int, list[_Task]] = {}
        self._groups: dict[int, _Group] = {}
        self._capture: _Capture | None = None
        self._updating: dict[int, tuple[_Group, list[Callable[[], None]]]] = {}
        self._stuck: dict[int, _Stuck] = {}

    def run(
        self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, stream: int
    ) -> Any:
        """Run an operation, or take it into the graph or the update that its stream is in."""
        if stream in self._stuck:
            raise RuntimeError(
                f"{func.name()} comes behind a replay that waits for its update; the simulator "
                "wants the update first"
            )
        is_captured = self._capture is not None and self._capture.stream == stream
        if not is_captured and stream not in self._updating:
            return run_now(func, args, kwargs, device)
        outputs, task = capture(func, args, kwargs, device)
        if task is not None and stream in self._updating:
            self._updating[stream][1].append(task)
        elif task is not None and self._capture is not None:
            self._capture.add(task)
        return outputs

    def add(self, stream: int, task: Callable[[], None]) -> bool:
        """Take a task into the graph that its stream is in; return whether there is one."""
        if self._capture is None or self._capture.stream != stream:
            return False
        self._capture.add(task)
        return True

    def hear(self, what: int, subject: int | None, stream: int | None) -> int:
        """Take in what the simulated ACL tells; return 0, a number that was asked for, or an error."""
        try:
            return self._hear(Told(what), subject or 0, stream or 0)
        except Exception:  # noqa: BLE001 - it cannot pass through the C of the caller
            traceback.print_exc()
            return _FAILED

    def _hear(self, what: Told, subject: int, stream: int) -> int:
        match what:
            case Told.CAPTURE_BEGIN:
                self._capture = _Capture(stream)
            case Told.CAPTURE_END:
                assert self._capture is not None
                self._graphs[subject], self._capture = self._capture.tasks, None
            case Told.REPLAY:
                self._go_on(stream, self._graphs[subject])
            case Told.DESTROY:
                self._graphs.pop(subject, None)
            case Told.VALUE_SET:
                self._release(subject)
            case Told.UPDATE_BEGIN:
                self._updating[stream] = (self._groups[subject], [])
            case Told.UPDATE_END:
                group, tasks = self._updating.pop(stream)
                group.tasks[:] = tasks
            case _:
                return self._hear_while_capturing(what, subject)
        return 0

    def _hear_while_capturing(self, what: Told, event: int) -> int:
        assert self._capture is not None
        match what:
            case Told.VALUE_WAIT:
                self._capture.tasks.append(_Wait(event))
            case Told.VALUE_CLEAR:
                self._capture.tasks.append(lambda: library.sim_clear(event))
            case Told.GROUP_BEGIN:
                self._capture.group = _Group()
                self._capture.tasks.append(self._capture.group)
            case _:
                group, self._capture.group = self._capture.group, None
                assert group is not None
                self._groups[len(self._groups) + 1] = group
                return len(self._groups)
        return 0

    def _go_on(self, stream: int, tasks: list[_Task]) -> None:
        if stream in self._stuck:
            raise RuntimeError("a replay behind one that waits for its update is not simulated")
        for place, task in enumerate(tasks):
            if isinstance(task, _Wait):
                if not library.sim_is_set(task.event):
                    self._stuck[stream] = _Stuck(task.event, tasks[place:])
                    library.sim_set_stuck(stream, True)
                    return
            elif isinstance(task, _Group):
                for step in task.tasks:
                    step()
            else:
                task()

    def _release(self, event: int) -> None:
        for stream, stuck in list(self._stuck.items()):
            if stuck.event == event:
                del self._stuck[stream]
                library.sim_set_stuck(stream, False)
                self._go_on(stream, stuck.rest)


graphs = Graphs()
# The C code calls this object as long as the process lives.
_listener = Listener(graphs.hear)


def install() -> None:
    library.sim_listen(_listener)
