"""What the simulated devices were asked to do, in the order in which it was asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from npu_simulator.acl import NoteKind, RawNote, controls, library, read_notes
from npu_simulator.ordering import Access, Ordering, find_races, range_of

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


@dataclass(frozen=True, slots=True)
class Note:
    """One entry. `stream` is its number in the order of creation, 0 where none is concerned.

    name is that of an operation; value that of an event, a graph, or a direction of copying.
    """

    kind: NoteKind
    stream: int
    value: int
    num_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of an `npu::` operation; tensors are on the meta device."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Recorder:
    def __init__(self) -> None:
        self.kernel_calls: list[KernelCall] = []
        self._accesses: list[Access] = []
        self._names: list[str] = []
        self._number_of: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Forget what was, and record until the end of the context."""
        self.clear()
        controls.is_recording = 1
        try:
            yield self
        finally:
            controls.is_recording = 0

    def clear(self) -> None:
        controls.num_notes = 0
        self.kernel_calls.clear()
        self._accesses.clear()

    @property
    def notes(self) -> list[Note]:
        return [self._named(note) for note in read_notes()]

    @property
    def operations(self) -> list[str]:
        return [note.name for note in self.notes if note.kind is NoteKind.OP]

    def copies(self, direction: int) -> list[Note]:
        """Return the copies between host and device in one direction."""
        kinds = (NoteKind.COPY, NoteKind.PINNED_COPY)
        return [note for note in self.notes if note.kind in kinds and note.value == direction]

    def find_races(self) -> Ordering:
        """Look for accesses to one memory that nothing puts in an order; graphs are left out."""
        return find_races(read_notes(), self._accesses)

    def note_access(
        self, name: str, stream: int, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        """Note what is touched on a stream, the handle of which is given."""
        if controls.is_recording:
            self._accesses.append(
                Access(
                    controls.num_notes,
                    library.sim_stream_number(stream),
                    name,
                    tuple(map(range_of, reads)),
                    tuple(map(range_of, writes)),
                )
            )

    def note_operation(self, name: str, stream: int) -> None:
        if controls.is_recording:
            if name not in self._number_of:
                self._number_of[name] = len(self._names)
                self._names.append(name)
            library.sim_note(
                NoteKind.OP, library.sim_stream_number(stream), self._number_of[name], 0
            )

    def keep_call(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if controls.is_recording:
            self.kernel_calls.append(
                KernelCall(name, _to_meta(args), _to_meta(kwargs), _to_meta(result))
            )

    def _named(self, note: RawNote) -> Note:
        name = self._names[note.value] if note.kind is NoteKind.OP else ""
        return Note(note.kind, note.stream, note.value, note.num_bytes, name)


def _to_meta(tree: Any) -> Any:
    return tree_map(_meta_tensor, tree)


def _meta_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


recorder = Recorder()
