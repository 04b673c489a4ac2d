"""Finds accesses to one memory that no event and no wait puts in an order.

The simulator runs everything at once and in the order of launching, so what a missing wait would
spoil on a device comes out right here. This looks at the waits themselves: each stream has a
clock for every other one, of the work there that it has waited for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from npu_simulator.acl import NoteKind, RawNote

_Clock = Counter[int]  # by stream: how many of its accesses have come before
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """What one operation or copy reads and writes, at a place among the notes."""

    place: int
    stream: int
    name: str
    reads: tuple[_Range, ...]
    writes: tuple[_Range, ...]


@dataclass(frozen=True, slots=True)
class _Past:
    stream: int
    number: int
    name: str
    range: _Range
    is_write: bool


@dataclass(slots=True)
class Ordering:
    """races in words; and between which streams a wait has put accesses to one memory in order."""

    races: list[str] = field(default_factory=list)
    ordered: Counter[tuple[int, int]] = field(default_factory=Counter)


def range_of(tensor: torch.Tensor) -> _Range:
    """Return the addresses between a tensor's first and last number."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def find_races(notes: Sequence[RawNote], accesses: Sequence[Access]) -> Ordering:
    return _Search().run(notes, accesses)


class _Search:
    def __init__(self) -> None:
        self._clocks: dict[int, _Clock] = defaultdict(Counter)
        self._events: dict[int, _Clock] = {}
        self._host: _Clock = Counter()
        self._past: list[_Past] = []
        self._result = Ordering()

    def run(self, notes: Sequence[RawNote], accesses: Sequence[Access]) -> Ordering:
        rest = iter(sorted(accesses, key=lambda access: access.place))
        access = next(rest, None)
        for place, note in enumerate(notes):
            while access is not None and access.place <= place:
                self._take_in(access)
                access = next(rest, None)
            self._follow(note)
        return self._result

    def _follow(self, note: RawNote) -> None:
        match note.kind:
            case NoteKind.RECORD:
                self._events[note.value] = self._clocks[note.stream] | self._host
            case NoteKind.WAIT:
                self._clocks[note.stream] |= self._events.get(note.value, Counter())
            case NoteKind.EVENT_SYNC:
                self._host |= self._events.get(note.value, Counter())
            case NoteKind.STREAM_SYNC:
                self._host |= self._clocks[note.stream]
            case NoteKind.DEVICE_SYNC | NoteKind.COPY:
                for clock in list(self._clocks.values()):
                    self._host |= clock

    def _take_in(self, access: Access) -> None:
        clock = self._clocks[access.stream]
        clock |= self._host
        clock[access.stream] += 1
        for found, is_write in self._ranges(access):
            for past in self._conflicts(found, is_write):
                if past.stream == access.stream:
                    continue
                if clock[past.stream] >= past.number:
                    self._result.ordered[past.stream, access.stream] += 1
                else:
                    self._result.races.append(
                        f"{access.name} on stream {access.stream} does not wait for {past.name} "
                        f"on stream {past.stream}"
                    )
        for found, is_write in self._ranges(access):
            if is_write:
                self._past = [past for past in self._past if not _covers(found, past.range)]
            self._past.append(
                _Past(access.stream, clock[access.stream], access.name, found, is_write)
            )

    @staticmethod
    def _ranges(access: Access) -> Iterator[tuple[_Range, bool]]:
        yield from ((found, False) for found in access.reads)
        yield from ((found, True) for found in access.writes)

    def _conflicts(self, found: _Range, is_write: bool) -> Iterator[_Past]:
        for past in self._past:
            overlaps = past.range[0] < found[1] and found[0] < past.range[1]
            if overlaps and (is_write or past.is_write):
                yield past


def _covers(outer: _Range, inner: _Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
