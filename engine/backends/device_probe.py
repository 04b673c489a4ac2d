"""Which devices answer, and how much memory they have, asked in a process of its own.

A broken driver hangs or kills whoever asks it; here that is a child, which is given up on.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

from engine.backends import load_backend
from engine.backends.cann import read_installation
from engine.backends.finding import Finding
from engine.errors import TokenmillError

_GIB = 1 << 30
_KINDS = ("cpu", "cuda", "npu")
# Libraries print to stdout too.
_MARK = "tokenmill-probe "
_CHILD = (sys.executable, "-m", "engine.backends.device_probe")
_REAP_SECONDS = 2.0
_TAIL_LINES = 3


def probe_devices(
    *, wanted: str | None = None, timeout_seconds: float, command: Sequence[str] = _CHILD
) -> list[Finding]:
    """Ask each kind of device for its devices and their memory; a finding for each device.

    A kind that has no device gives none, unless it is the wanted one. Each device is bound for a
    moment, unless another process holds it.
    """
    arguments = [*command] if wanted is None else [*command, wanted]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        code = _wait(child, timeout_seconds)
        answers = list(_answers(out))
        tail = _tail(err)
    findings = [finding for answer in answers if (finding := _finding(answer, wanted)) is not None]
    if code == 0:
        return findings
    begun = [str(answer["begin"]) for answer in answers if "begin" in answer]
    # Whoever dies before the first question dies of what all kinds have in common.
    kind = begun[-1] if begun else "any kind"
    if code is None:
        found = f"{kind} gave no answer within {timeout_seconds:g} s"
        remedy = "see what the device's own tool says (npu-smi info, nvidia-smi), and its driver"
    else:
        found = f"asking for {kind} ended with code {code}: {tail or 'without a word'}"
        remedy = "mend what the message names; a negative code is the signal that ended it"
    return [*findings, Finding.error("devices", found, remedy)]


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the child's exit code; None when it had to be killed, or cannot even be that."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # A process inside a driver's call may not die; it is not waited for.
        with suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_SECONDS)
        return None


def _answers(out: IO[str]) -> Iterator[dict[str, Any]]:
    out.seek(0)
    for line in out:
        if line.startswith(_MARK) and line.endswith("\n"):
            yield json.loads(line.removeprefix(_MARK))


def _tail(err: IO[str]) -> str:
    err.seek(0)
    return " / ".join(line.strip() for line in err.read().splitlines()[-_TAIL_LINES:])


def _finding(answer: dict[str, Any], wanted: str | None) -> Finding | None:
    if "error" in answer:
        return Finding.error("device", f"{answer['kind']}: {answer['error']}")
    if "holders" in answer:
        return Finding.warning(
            "device", f"{answer['device']} is held by {answer['holders']}", "wait for it, or end it"
        )
    if "free_bytes" in answer:
        free, total = (answer[name] / _GIB for name in ("free_bytes", "total_bytes"))
        return Finding.ok("device", f"{answer['device']}: {free:.1f} of {total:.1f} GiB free")
    if answer.get("count") == 0 and answer["kind"] == wanted:
        return Finding.error(
            "device", f"engine.device is {wanted}, and there is none", "change engine.device"
        )
    return None


def _say(**answer: object) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def _ask(kind: str) -> None:
    backend = load_backend(kind)
    count = backend.count_devices()
    _say(kind=kind, count=count)
    for device_id in range(count):
        holders = [str(holder.pid) for holder in backend.holders(device_id)]
        if holders:
            _say(kind=kind, device=f"{kind} {device_id}", holders=f"pid {', '.join(holders)}")
            continue
        name = backend.bind(device_id, None)
        memory = backend.memory_info()
        _say(
            kind=kind, device=name,
            free_bytes=memory.free_bytes, total_bytes=memory.total_bytes,
        )  # fmt: skip


def _main(wanted: Sequence[str]) -> None:
    # torch_npu without a card is no device that is broken.
    has_npu = bool(read_installation().device_files) or "npu" in wanted
    said = set()
    for kind in [kind for kind in _KINDS if kind != "npu" or has_npu]:
        _say(begin=kind)
        try:
            _ask(kind)
        except Exception as error:  # noqa: BLE001 - a driver may raise anything, which is the answer
            text = " ".join(str(error).split())
            if not isinstance(error, TokenmillError):
                text = f"{type(error).__name__}: {text}"
            # What breaks torch breaks every kind, and is said once.
            if text not in said:
                _say(kind=kind, error=text)
            said.add(text)


if __name__ == "__main__":
    _main(sys.argv[1:])
