"""A device with streams, played on CPU tensors: nothing runs before its stream is let run.

It satisfies what transfers.py asks of torch.cuda and torch.npu. In-place operations under `api`
are put into the queue of the current stream. Queues are emptied as late as the host's waits allow,
or stream by stream in a chosen order, so a wait that is missing gives wrong numbers.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_PUT_OFF = {torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor}
_AT_ONCE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
}


class FakeEvent:
    def __init__(self, stream: "FakeStream") -> None:
        self._stream = stream
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        if not self._stream.api.is_ignored("host", self._stream.name):
            self.run()

    def run(self) -> None:
        while not self.is_reached:
            self._stream.run_one()


class FakeStream:
    def __init__(self, api: "FakeStreamApi", name: str) -> None:
        self.api = api
        self.name = name
        self._queue: deque[Callable[[], object]] = deque()

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self)
        self.launch(lambda: setattr(event, "is_reached", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        if not self.api.is_ignored(self.name, event._stream.name):
            self.launch(event.run)

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def run_one(self) -> None:
        self._queue.popleft()()

    def run_all(self) -> None:
        while self._queue:
            self.run_one()


class FakeStreamApi(TorchDispatchMode):
    """Names streams in the order in which they are made; the first one is there already."""

    def __init__(self, names: list[str], ignored: tuple[str, str] | None = None) -> None:
        super().__init__()
        self._names = iter(names)
        self._ignored = ignored  # who does not wait, for which stream
        self.waits: Counter[tuple[str, str]] = Counter()
        self.launched: list[tuple[str, str]] = []  # the stream, and the operation put there
        self.streams: dict[str, FakeStream] = {}
        self._current = self.Stream()

    def Stream(self, device: torch.device | None = None) -> FakeStream:  # noqa: N802
        name = next(self._names)
        self.streams[name] = FakeStream(self, name)
        return self.streams[name]

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        outside, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outside

    def is_ignored(self, waiting: str, awaited: str) -> bool:
        self.waits[waiting, awaited] += 1
        return (waiting, awaited) == self._ignored

    def run(self, *names: str) -> None:
        """Empty the queues of these streams, in this order."""
        for name in names:
            self.streams[name].run_all()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PUT_OFF:
            self.launched.append((self._current.name, str(func)))
            self._current.launch(lambda: self._run_now(func, args, kwargs))
            return args[0]
        if func not in _AT_ONCE:
            raise NotImplementedError(f"{func}: say whether it is put off")
        return func(*args, **kwargs)

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with _disable_current_modes():
            func(*args, **kwargs)
