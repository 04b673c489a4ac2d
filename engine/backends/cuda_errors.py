"""What goes wrong on a GPU, in words: the texts of CUDA, cuBLAS and NCCL, and what to do.

Facts only, and no torch. Source: the texts of cudaGetErrorString (CUDA runtime API, error handling)
and of torch. After most of them the process can use the GPU no more: those are DEVICE_LOST, whatever
the reason, since a new process is what helps. None of it was seen on a GPU.
"""

from dataclasses import dataclass

from engine.errors import WorkerFailure

_MEMORY = WorkerFailure.OUT_OF_MEMORY
_LOST = WorkerFailure.DEVICE_LOST
_TIMEOUT = WorkerFailure.TIMEOUT
_OTHER = WorkerFailure.OTHER

_LESS_MEMORY = (
    "lower engine.scheduler.max_num_batched_tokens or max_num_seqs, or give the KV cache less "
    "(engine.cache); `nvidia-smi` shows who else holds memory"
)
_TRUE_STACK = (
    "kernels are launched ahead, so the stack may point elsewhere: run once with "
    "CUDA_LAUNCH_BLOCKING=1 and engine.enforce_eager true for the true one"
)
_HARDWARE = (
    "look at the card with `nvidia-smi -q` and at `dmesg` for Xid lines; a fault that comes back "
    "means the card has to be reset or repaired"
)
_DRIVER = "driver, torch's CUDA build and the card do not fit each other: run `tokenmill doctor`"
_RANKS = "look at the log of the rank that failed first; a rank that is gone stops the others"


@dataclass(frozen=True, slots=True)
class _Meaning:
    failure: WorkerFailure
    words: str
    advice: str


# By a part of the text, in lower case. The first that fits counts.
_MEANINGS: dict[str, _Meaning] = {
    "cuda out of memory": _Meaning(_MEMORY, "no memory left on the GPU", _LESS_MEMORY),
    "cuda error: out of memory": _Meaning(_MEMORY, "no memory left on the GPU", _LESS_MEMORY),
    "cublas_status_alloc_failed": _Meaning(_MEMORY, "no memory left for cuBLAS", _LESS_MEMORY),
    "watchdog caught collective operation timeout": _Meaning(
        _TIMEOUT, "a rank waited too long for another", _RANKS
    ),
    "wait timeout": _Meaning(_TIMEOUT, "a rank waited too long for another", _RANKS),
    "the launch timed out": _Meaning(
        _LOST, "a kernel ran too long and was ended", "a GPU that drives a display limits kernels"
    ),
    "illegal memory access": _Meaning(_LOST, "a kernel left its memory", _TRUE_STACK),
    "misaligned address": _Meaning(_LOST, "a kernel left its memory", _TRUE_STACK),
    "illegal instruction": _Meaning(_LOST, "a kernel went astray", _TRUE_STACK),
    "invalid program counter": _Meaning(_LOST, "a kernel went astray", _TRUE_STACK),
    "hardware stack error": _Meaning(_LOST, "a kernel went astray", _TRUE_STACK),
    "operation not supported on global/shared address space": _Meaning(
        _LOST, "a kernel went astray", _TRUE_STACK
    ),
    "device-side assert": _Meaning(
        _LOST, "a kernel found an index or a number out of its range", _TRUE_STACK
    ),
    "unspecified launch failure": _Meaning(_LOST, "a kernel failed", _TRUE_STACK),
    "uncorrectable ecc error": _Meaning(_LOST, "the GPU's memory is faulty", _HARDWARE),
    "uncorrectable nvlink error": _Meaning(_LOST, "a link between GPUs is faulty", _HARDWARE),
    "gpu is lost": _Meaning(_LOST, "the GPU does not answer", _HARDWARE),
    "cuda error: unknown error": _Meaning(_LOST, "the driver cannot say what failed", _HARDWARE),
    "no cuda-capable device is detected": _Meaning(_LOST, "the GPU is gone", _HARDWARE),
    "busy or unavailable": _Meaning(
        _LOST, "another process has the GPU for itself", "`nvidia-smi` shows the processes"
    ),
    "no kernel image is available": _Meaning(_OTHER, "torch has no kernels for this GPU", _DRIVER),
    "driver version is insufficient": _Meaning(_OTHER, "the driver is too old", _DRIVER),
    "system not yet initialized": _Meaning(
        _OTHER, "the links of the GPUs are not set up", "start nvidia-fabricmanager"
    ),
    "stream is capturing": _Meaning(
        _OTHER,
        "an operation that cannot be captured in a graph",
        "set engine.enforce_eager to true",
    ),
    "nccl error": _Meaning(_OTHER, "ranks cannot exchange tensors", _RANKS),
}
_MOST_TEXT = 600  # of the exception itself; the worker's log has all of it


def classify(text: str) -> WorkerFailure:
    """Say what kind of trouble an exception's text is."""
    meaning = _find(text)
    return _OTHER if meaning is None else meaning.failure


def explain(text: str) -> str:
    """Return an exception's text in words, with what to do."""
    line = " ".join(text.split())
    shortened = line if len(line) <= _MOST_TEXT else line[:_MOST_TEXT] + " ..."
    meaning = _find(text)
    if meaning is None:
        return shortened
    return f"{meaning.words}. What to do: {meaning.advice}. {shortened}"


def _find(text: str) -> _Meaning | None:
    lowered = text.lower()
    return next((found for part, found in _MEANINGS.items() if part in lowered), None)
