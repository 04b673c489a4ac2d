"""The simulated ACL as Python sees it: what is set there, and what it has noted."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

_MAX_NOTES = 65536


class NoteKind(IntEnum):
    OP = 0
    COPY = 1
    PINNED_COPY = 2
    RECORD = 3
    WAIT = 4
    EVENT_SYNC = 5
    STREAM_SYNC = 6
    DEVICE_SYNC = 7
    REPLAY = 8
    HOST_OVERWRITE = 9


class Told(IntEnum):
    CAPTURE_BEGIN = 0
    CAPTURE_END = 1
    REPLAY = 2
    DESTROY = 3
    GROUP_BEGIN = 4
    GROUP_END = 5
    UPDATE_BEGIN = 6
    UPDATE_END = 7
    VALUE_WAIT = 8
    VALUE_CLEAR = 9
    VALUE_SET = 10


class _Note(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


class Controls(ctypes.Structure):
    """`struct controls` of acl/sim.h, which says what the fields mean."""

    memory_bytes: int
    wait_error: int
    late_queries: int
    is_recording: int
    num_notes: int
    _fields_ = (
        ("memory_bytes", ctypes.c_uint64),
        ("wait_error", ctypes.c_int32),
        ("late_queries", ctypes.c_uint32),
        ("is_recording", ctypes.c_uint32),
        ("num_notes", ctypes.c_uint32),
        ("notes", _Note * _MAX_NOTES),
    )


@dataclass(frozen=True, slots=True)
class RawNote:
    kind: NoteKind
    stream: int
    value: int
    num_bytes: int


Listener = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
# The wheel has the library loaded already, under the name of one that it replaces.
library = ctypes.CDLL("libcann_simulated.so")
library.sim_controls.restype = ctypes.POINTER(Controls)
library.sim_note.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
library.sim_note.restype = None
library.sim_stream_number.argtypes = [ctypes.c_void_p]
library.sim_stream_number.restype = ctypes.c_uint32
library.sim_listen.argtypes = [Listener]
library.sim_listen.restype = None
library.sim_set_stuck.argtypes = [ctypes.c_void_p, ctypes.c_bool]
library.sim_set_stuck.restype = None
library.sim_is_set.argtypes = [ctypes.c_void_p]
library.sim_is_set.restype = ctypes.c_bool
library.sim_clear.argtypes = [ctypes.c_void_p]
library.sim_clear.restype = None


controls: Controls = library.sim_controls().contents


def read_notes() -> list[RawNote]:
    if controls.num_notes > _MAX_NOTES:
        raise AssertionError(f"{controls.num_notes} notes, and only {_MAX_NOTES} are kept")
    return [
        RawNote(NoteKind(note.kind), note.stream, note.value, note.bytes)
        for note in controls.notes[: controls.num_notes]
    ]
