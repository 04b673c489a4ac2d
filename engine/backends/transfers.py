"""Between host and device on streams of their own, for every kind of device that has streams.

Three streams: `compute` runs the model, `uploading` brings each step's numbers to the device,
`fetching` brings its results back. Results have a stream for themselves: they wait for the step
that computes them, and behind them the next step's numbers would wait too.

    uploading   H2D k+1             H2D k+2             H2D k+3
    compute     step k              step k+1            step k+2
    fetching              D2H k               D2H k+1

What is ordered how:

    the step waits for its numbers              compute waits for the H2D copy
    a device buffer is written again            uploading waits for the steps that read it
    a pinned buffer is written again            the host waits for the H2D copy of 3 steps ago
    results are copied                          fetching waits for what was launched before
    results are read                            the host waits for the D2H copy
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from engine.backends.base import Array, Fetched

# An upload's tensors are good until the upload after the next, so a third one needs room of its
# own, and may be on its way while the steps of the two before it run.
_NUM_SETS = 3
_ALIGNMENT_BYTES = 512  # what the devices' own allocators align to
_FIRST_UPLOAD_BYTES = 1 << 16
_FIRST_FETCH_BYTES = 1 << 12


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Tell whether it is reached."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


class DeviceStream(Protocol):
    """Work that a device does in order."""

    def record_event(self) -> DeviceEvent:
        """Return the point after everything that was launched by now."""

    def wait_event(self, event: Any) -> None:
        """Let what is launched from now on wait for a point of another stream."""


class StreamApi(Protocol):
    """What torch.cuda and torch.npu have in common."""

    def Stream(self, device: torch.device) -> DeviceStream:  # noqa: N802 - the modules' own name
        """Return a new stream."""

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """Launch what follows on this stream."""

    def current_stream(self, device: torch.device) -> DeviceStream:
        """Return the stream that work is launched on now."""


@dataclass(slots=True)
class _Buffers:
    """Room for one upload, on both sides."""

    pinned: torch.Tensor  # uint8
    on_device: torch.Tensor  # uint8
    copied: DeviceEvent | None = None  # the last upload has left the pinned side
    read: DeviceEvent | None = None  # nothing that was launched reads the device side any more


@dataclass(slots=True)
class _Layout:
    """Where each array lies in the bytes of an upload."""

    starts: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0


class _OnItsWay(Fetched):
    """A tensor whose copy into pinned memory has been launched."""

    def __init__(self, transfers: "StreamTransfers", source: torch.Tensor) -> None:
        self._transfers = transfers
        # Kept until the copy is done, so that nothing computes into its memory before.
        self._source: torch.Tensor | None = source
        self._pinned, self._arrived = transfers.begin_fetch(source)
        self._array: Array | None = None

    def is_ready(self) -> bool:
        """Tell whether the copy is done."""
        return self._array is not None or self._arrived.query()

    def numpy(self) -> Array:
        """Wait for the copy; return an array that has memory of its own."""
        if self._array is None:
            assert self._source is not None
            self._arrived.synchronize()
            there = _view(self._pinned, 0, self._source.shape, self._source.dtype)
            self._array = there.numpy().copy()
            self._transfers.give_back(self._pinned)
            self._source = None
        return self._array


class StreamTransfers:
    """Uploads, computing and fetches of one device; from one thread only."""

    def __init__(self, api: StreamApi, device: torch.device, *, pin_memory: bool = True) -> None:
        """Make the streams; api is torch.cuda or torch.npu, with the device bound."""
        self._api = api
        self._device = device
        self._pin_memory = pin_memory
        self.compute = api.Stream(device=device)
        self.uploading = api.Stream(device=device)
        self.fetching = api.Stream(device=device)
        self._sets: list[_Buffers | None] = [None] * _NUM_SETS
        self._num_uploads = 0
        self._free_pinned: list[torch.Tensor] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Launch on the compute stream, after what was launched outside and before what will be.

        So what loads weights or zeroes a cache need not know of streams.
        """
        outside = self._current
        if outside == self.compute:
            yield
            return
        self.compute.wait_event(outside.record_event())
        with self._api.stream(self.compute):
            yield
        outside.wait_event(self.compute.record_event())

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Bring arrays to the device by one copy, as DeviceBackend.upload says.

        The host waits only where the copy of three uploads ago is not done yet.
        """
        self._mark_as_read()
        layout = _lay_out(arrays)
        buffers = self._buffers(layout.num_bytes)
        pinned = buffers.pinned.numpy()
        for name, array in arrays.items():
            start = layout.starts[name]
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            pinned[start : start + len(flat)] = flat
        if buffers.read is not None:
            self.uploading.wait_event(buffers.read)
        with self._api.stream(self.uploading):
            end = layout.num_bytes
            buffers.on_device[:end].copy_(buffers.pinned[:end], non_blocking=True)
        buffers.copied = self.uploading.record_event()
        self._current.wait_event(buffers.copied)
        return {
            name: _view(buffers.on_device, layout.starts[name], array.shape, _dtype_of(array.dtype))
            for name, array in arrays.items()
        }

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Begin to bring a tensor to the host, behind what was launched on the current stream.

        Nothing may write to the tensor before it has arrived. Its dtype is one of numpy's.
        """
        return _OnItsWay(self, tensor)

    def begin_fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """Launch the copy; return the pinned bytes that it goes to, and its end."""
        pinned = self._take_pinned(source.nbytes)
        self.fetching.wait_event(self._current.record_event())
        with self._api.stream(self.fetching):
            _view(pinned, 0, source.shape, source.dtype).copy_(source, non_blocking=True)
        return pinned, self.fetching.record_event()

    def give_back(self, pinned: torch.Tensor) -> None:
        """Let the next fetch use these pinned bytes."""
        self._free_pinned.append(pinned)

    @property
    def _current(self) -> DeviceStream:
        """The compute stream inside of computing(), and outside one that waits for it."""
        return self._api.current_stream(self._device)

    def _mark_as_read(self) -> None:
        """Note that the tensors of the upload before the last one end their life here."""
        ending = self._sets[(self._num_uploads - 2) % _NUM_SETS]
        if ending is not None:
            ending.read = self._current.record_event()

    def _buffers(self, num_bytes: int) -> _Buffers:
        """Return the next set, large enough, with a pinned side that the host may write."""
        place = self._num_uploads % _NUM_SETS
        self._num_uploads += 1
        buffers = self._sets[place]
        if buffers is not None and buffers.copied is not None:
            buffers.copied.synchronize()
        if buffers is None or len(buffers.pinned) < num_bytes:
            buffers = self._allocate(_grown(_FIRST_UPLOAD_BYTES, num_bytes))
            self._sets[place] = buffers
        return buffers

    def _allocate(self, num_bytes: int) -> _Buffers:
        # Allocators count memory as free when the stream that it was allocated for no longer
        # needs it. Readers are on the compute stream, so it belongs there, and the copy waits for
        # whoever had this memory before.
        with self.computing():
            on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return _Buffers(
            pinned=self._pinned(num_bytes),
            on_device=on_device,
            read=self._current.record_event(),
        )

    def _take_pinned(self, num_bytes: int) -> torch.Tensor:
        for place, pinned in enumerate(self._free_pinned):
            if len(pinned) >= num_bytes:
                return self._free_pinned.pop(place)
        return self._pinned(_grown(_FIRST_FETCH_BYTES, num_bytes))

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)


def _lay_out(arrays: Mapping[str, Array]) -> _Layout:
    layout = _Layout()
    for name, array in arrays.items():
        layout.starts[name] = layout.num_bytes
        layout.num_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return layout


def _grown(num_bytes: int, wanted: int) -> int:
    while num_bytes < wanted:
        num_bytes *= 2
    return num_bytes


@cache
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _view(
    storage: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the bytes from `start` on as a tensor, without a copy."""
    end = start + math.prod(shape) * dtype.itemsize
    return storage[start:end].view(dtype).view(torch.Size(shape))
