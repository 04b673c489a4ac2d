"""What goes wrong on an Ascend NPU, in words: codes, kinds of trouble, and what to do.

Facts only, and no torch: codes are found in the text of an exception. Sources: the header of
runtime codes (rt_error_codes.h) and the texts of torch_npu 2.13.0; NPUErrorCodes.h and
NPUException.h of the same wheel. Which codes mean that a device is of no more use is our reading
of those words; none of it was seen on a card.
"""

import re
from dataclasses import dataclass

from engine.errors import WorkerFailure

_MEMORY = WorkerFailure.OUT_OF_MEMORY
_LOST = WorkerFailure.DEVICE_LOST
_TIMEOUT = WorkerFailure.TIMEOUT
_OTHER = WorkerFailure.OTHER

_TRUE_STACK = (
    "kernels are launched ahead, so the stack may point elsewhere: run once with "
    "ASCEND_LAUNCH_BLOCKING=1 and engine.enforce_eager true for the true one"
)
_LOOK_AT_CARD = "look at the card with `npu-smi info` and `npu-smi info -t health -i CARD`"
_HARDWARE = f"{_LOOK_AT_CARD}; a fault that comes back means the card has to be repaired"
_LESS_MEMORY = (
    "lower engine.scheduler.max_num_batched_tokens or max_num_seqs, or give the KV cache less "
    "(engine.cache); `npu-smi info` shows who else holds memory"
)
_LINKS = (
    "look at the rank that failed first, at `npu-smi info` of its card, and at the links with "
    "`hccn_tool -i CARD -link -g`"
)
_SLOW = (
    "a kernel that never ends, a card that is overloaded, or a rank that is gone: look at the log "
    f"of every rank; {_LOOK_AT_CARD}"
)
_CONFLICT = "end what else uses the card; `npu-smi info` shows the processes"
_SOFTWARE = "driver, CANN and torch_npu may not fit each other: run `tokenmill doctor`"


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuTrouble:
    """What one exception says: the kind, and words for the user."""

    failure: WorkerFailure
    words: str


@dataclass(frozen=True, slots=True)
class _Meaning:
    failure: WorkerFailure
    words: str
    advice: str


# Codes of the runtime, as in "error code is 507015".
_RUNTIME: dict[int, _Meaning] = {
    107001: _Meaning(_OTHER, "invalid device id", "compare engine.device_ids with `npu-smi info`"),
    107002: _Meaning(_OTHER, "no context of the device in this thread", _TRUE_STACK),
    107003: _Meaning(_OTHER, "the stream belongs to another context", _TRUE_STACK),
    107019: _Meaning(_TIMEOUT, "waiting took too long", _SLOW),
    107020: _Meaning(_TIMEOUT, "a task took too long", _SLOW),
    107022: _Meaning(_LOST, "the device is aborting its tasks", _HARDWARE),
    107023: _Meaning(_LOST, "the stream is being aborted", _HARDWARE),
    107030: _Meaning(
        _OTHER,
        "an operation that cannot be captured in a graph",
        "set engine.enforce_eager to true",
    ),
    207000: _Meaning(_OTHER, "the feature is not supported", _SOFTWARE),
    207001: _Meaning(_MEMORY, "no memory left on the device", _LESS_MEMORY),
    207004: _Meaning(_LOST, "there is no device", _HARDWARE),
    207005: _Meaning(_OTHER, "a resource of the device could not be allocated", _CONFLICT),
    207007: _Meaning(_OTHER, "no event left on the device", _CONFLICT),
    207008: _Meaning(
        _OTHER,
        "no stream left on the device",
        "captured graphs take streams: lower engine.scheduler.max_num_seqs, or set "
        "engine.enforce_eager to true",
    ),
    207018: _Meaning(_MEMORY, "no memory left on the device", _LESS_MEMORY),
    207020: _Meaning(_TIMEOUT, "the driver took too long", _SLOW),
    507000: _Meaning(_LOST, "internal error of the runtime", _HARDWARE),
    507001: _Meaning(_LOST, "internal error of the task scheduler", _HARDWARE),
    507008: _Meaning(_OTHER, "wrong version of the chip", _SOFTWARE),
    507010: _Meaning(_LOST, "the task scheduler lost its heartbeat", _HARDWARE),
    507011: _Meaning(_LOST, "a model or captured graph failed on the device", _TRUE_STACK),
    507012: _Meaning(_TIMEOUT, "the task scheduler does not report", _SLOW),
    507013: _Meaning(_LOST, "error of the DMA hardware", _HARDWARE),
    507014: _Meaning(_TIMEOUT, "an AI Core kernel took too long", _SLOW),
    507015: _Meaning(_LOST, "AI Core exception: a kernel failed", _TRUE_STACK),
    507016: _Meaning(_LOST, "AI Core trap: a kernel failed", _TRUE_STACK),
    507017: _Meaning(_TIMEOUT, "an AI CPU kernel took too long", _SLOW),
    507018: _Meaning(_LOST, "AI CPU exception, seen when a stream was synchronised", _TRUE_STACK),
    507022: _Meaning(_LOST, "the communication between processes failed", _LINKS),
    507033: _Meaning(_LOST, "the device could not be started", _HARDWARE),
    507034: _Meaning(_TIMEOUT, "a vector core kernel took too long", _SLOW),
    507035: _Meaning(_LOST, "vector core exception: a kernel failed", _TRUE_STACK),
    507036: _Meaning(_LOST, "vector core trap: a kernel failed", _TRUE_STACK),
    507042: _Meaning(_LOST, "AI Core: a kernel read out of bounds", _TRUE_STACK),
    507043: _Meaning(_LOST, "AI Core: a kernel wrote out of bounds", _TRUE_STACK),
    507044: _Meaning(_LOST, "vector core: a kernel read out of bounds", _TRUE_STACK),
    507045: _Meaning(_LOST, "vector core: a kernel wrote out of bounds", _TRUE_STACK),
    507046: _Meaning(_TIMEOUT, "synchronising a stream took too long", _SLOW),
    507047: _Meaning(_TIMEOUT, "waiting for an event took too long", _SLOW),
    507048: _Meaning(_TIMEOUT, "an internal task took too long", _SLOW),
    507049: _Meaning(_LOST, "an internal task failed", _TRUE_STACK),
    507050: _Meaning(_LOST, "an internal task trapped", _TRUE_STACK),
    507899: _Meaning(_LOST, "internal error of the driver", _HARDWARE),
    507900: _Meaning(_LOST, "internal error of the AI CPU", _HARDWARE),
    507901: _Meaning(_LOST, "the session between host and device is broken", _HARDWARE),
}

# Faults that torch_npu names in words; it looks for the runtime's reasons itself.
_NAMED: dict[str, _Meaning] = {
    "HBM MULTI BIT ECC ERROR": _Meaning(_LOST, "memory fault: several bits at once", _HARDWARE),
    "UCE ERROR": _Meaning(_LOST, "memory fault that could not be corrected", _HARDWARE),
    "SUSPECT MEM ERROR": _Meaning(_LOST, "a suspected memory fault", _HARDWARE),
    "SUSPECT REMOTE ERROR": _Meaning(_LOST, "a suspected fault of another device", _LINKS),
    "HCCS LINK ERROR": _Meaning(_LOST, "a link between devices failed", _LINKS),
    "UB LINK ERROR": _Meaning(_LOST, "a link between devices failed", _LINKS),
    "HCCL OP RETRY FAILED": _Meaning(_LOST, "a collective operation failed for good", _LINKS),
    "FORCE STOP": _Meaning(_LOST, "the device was stopped by force", _HARDWARE),
    # A code of CANN: an allocation failed. torch_npu takes it for out of memory, too.
    "EL0004": _Meaning(_MEMORY, "no memory left on the device", _LESS_MEMORY),
}
_OUT_OF_MEMORY = _Meaning(_MEMORY, "no memory left on the device", _LESS_MEMORY)

# ERRccnnn: cc says which part of torch_npu, nnn why.
_PARTS = {
    "00": "PTA: framework",
    "01": "OPS: an operator",
    "02": "DIST: collective communication",
    "03": "GRAPH",
    "04": "PROF: the profiler",
    "99": "unknown part",
}
_REASONS: dict[str, _Meaning] = {
    "001": _Meaning(_OTHER, "invalid parameter", _TRUE_STACK),
    "002": _Meaning(_OTHER, "invalid type", _TRUE_STACK),
    "003": _Meaning(_OTHER, "invalid value", _TRUE_STACK),
    "004": _Meaning(_OTHER, "invalid pointer", _TRUE_STACK),
    "005": _Meaning(_OTHER, "internal error", _TRUE_STACK),
    "006": _Meaning(_MEMORY, "memory error", _LESS_MEMORY),
    "007": _Meaning(_OTHER, "feature not supported", _SOFTWARE),
    "008": _Meaning(_OTHER, "resource not found", _SOFTWARE),
    "009": _Meaning(_OTHER, "resource unavailable", _CONFLICT),
    "010": _Meaning(_OTHER, "a system call failed", "look at the worker's log"),
    "011": _Meaning(_TIMEOUT, "timeout", _SLOW),
    "012": _Meaning(
        _OTHER, "no permission", "the user must be in the group of the device files, HwHiAiUser"
    ),
    "100": _Meaning(_OTHER, "a call of ACL failed", _TRUE_STACK),
    "200": _Meaning(_OTHER, "a call of HCCL failed", _LINKS),
    "300": _Meaning(_OTHER, "a call of GE failed", _SOFTWARE),
    "999": _Meaning(_OTHER, "an exception of the application", _TRUE_STACK),
}

_CODE = re.compile(r"ERR(\d{2})(\d{3})\b")
# Only a number that is called a code: six digits may be a token id as well.
_NUMBER = re.compile(
    r"\b(?:error[ _]?code|errcode|retcode|ret|code)(?: is)?\s*[:=]?\s*(\d{6})\b", re.IGNORECASE
)
_MOST_TEXT = 600  # of the exception itself; the worker's log has all of it


def is_out_of_memory(text: str) -> bool:
    """Tell the allocator's own words from everything else."""
    return "NPU out of memory" in text


def read_trouble(text: str, *, is_memory_error: bool = False) -> NpuTrouble:
    """Return what an exception's text means; is_memory_error when its type says so already."""
    found = list(_meanings(text))
    if is_memory_error or is_out_of_memory(text):
        found.insert(0, ("", _OUT_OF_MEMORY))
    if not found:
        return NpuTrouble(failure=_OTHER, words=_shorten(text))
    kinds = [meaning.failure for _, meaning in found]
    # The first that says more than that something failed; names come before numbers.
    failure = next((kind for kind in kinds if kind is not _OTHER), _OTHER)
    named = "; ".join(dict.fromkeys(f"{code}{meaning.words}" for code, meaning in found))
    advice = next(meaning.advice for _, meaning in found if meaning.failure is failure)
    return NpuTrouble(failure=failure, words=f"{named}. What to do: {advice}. {_shorten(text)}")


def _meanings(text: str) -> list[tuple[str, _Meaning]]:
    """Return what is known of a text, the most certain first: faults, numbers, then ERR codes."""
    found = [
        (f"{name}: ", meaning)
        for name, meaning in _NAMED.items()
        if re.search(rf"\b{name}\b", text)
    ]
    found += [
        (f"{number}: ", _RUNTIME[int(number)])
        for number in dict.fromkeys(_NUMBER.findall(text))
        if int(number) in _RUNTIME
    ]
    for part, reason in dict.fromkeys(_CODE.findall(text)):
        meaning = _REASONS.get(reason, _Meaning(_OTHER, "an unknown reason", _TRUE_STACK))
        name = _PARTS.get(part, "unknown part")
        found.append((f"ERR{part}{reason} ({name}): ", meaning))
    return found


def _shorten(text: str) -> str:
    """Return a text in one line, cut where torch_npu goes on about its own lines of code."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else line[:_MOST_TEXT] + " ..."
