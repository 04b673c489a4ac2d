"""Devices are asked in a child process, and whatever becomes of it, the report goes on."""

import json
import sys
import time
from pathlib import Path

import pytest

from engine import Finding, FindingStatus, probe_devices

CPU = {"kind": "cpu", "device": "cpu (2 threads)", "free_bytes": 3 << 30, "total_bytes": 4 << 30}
ANSWERS = 'import json, os, signal, sys, time\ndef say(**answer): print("tokenmill-probe " + json.dumps(answer), flush=True)\n'


def probe(code: str, *, wanted: str | None = None, seconds: float = 30) -> list[Finding]:
    command = [sys.executable, "-c", ANSWERS + code]
    return probe_devices(wanted=wanted, timeout_seconds=seconds, command=command)


def say(**answer: object) -> str:
    return f"say(**json.loads({json.dumps(json.dumps(answer))}))\n"


def test_each_device_is_a_line_with_its_memory() -> None:
    code = say(begin="cpu") + say(kind="cpu", count=1) + say(**CPU)
    assert probe(code) == [Finding.ok("device", "cpu (2 threads): 3.0 of 4.0 GiB free")]


def test_what_libraries_print_is_no_answer() -> None:
    noise = "print('[WARNING] tokenmill-probe of a library'); print('{}')\n"
    assert probe(noise + say(**CPU) + noise) == [
        Finding.ok("device", "cpu (2 threads): 3.0 of 4.0 GiB free")
    ]


def test_a_driver_that_hangs_is_cut_off_and_what_answered_before_is_kept() -> None:
    started = time.monotonic()
    code = say(begin="cpu") + say(**CPU) + say(begin="npu") + "time.sleep(300)"
    first, second = probe(code, seconds=1)
    assert time.monotonic() - started < 30
    assert first.status is FindingStatus.OK
    assert (second.check, second.status) == ("devices", FindingStatus.ERROR)
    assert second.found == "npu gave no answer within 1 s"


def test_a_hanging_probe_is_ended_with_its_own_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(300)"
    )
    probe(code, seconds=3)
    pids = [int(word) for word in file.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a dead one whom nobody has buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_child_that_a_signal_ends_is_an_error_with_its_last_words() -> None:
    code = (
        say(begin="cpu") + say(**CPU) + say(begin="npu")
        + "print('broken firmware', file=sys.stderr, flush=True)\n"
        + "os.kill(os.getpid(), signal.SIGSEGV)"
    )  # fmt: skip
    finding = probe(code)[-1]
    assert finding.status is FindingStatus.ERROR
    assert finding.found == "asking for npu ended with code -11: broken firmware"


def test_a_child_that_cannot_even_begin_is_an_error() -> None:
    (finding,) = probe("raise ImportError('no torch here')")
    assert finding.status is FindingStatus.ERROR
    assert "asking for any kind ended with code 1" in finding.found
    assert "ImportError: no torch here" in finding.found


def test_what_a_backend_raises_is_an_error_of_that_kind_alone() -> None:
    code = say(begin="npu") + say(kind="npu", error="RuntimeError: 507899") + say(**CPU)
    first, second = probe(code)
    assert (first.status, first.found) == (FindingStatus.ERROR, "npu: RuntimeError: 507899")
    assert second.status is FindingStatus.OK


def test_a_device_that_somebody_holds_is_a_warning_with_the_holder() -> None:
    (finding,) = probe(say(kind="npu", device="npu 0", holders="pid 4711"))
    assert (finding.status, finding.found) == (
        FindingStatus.WARNING,
        "npu 0 is held by pid 4711",
    )


@pytest.mark.parametrize(("wanted", "num_findings"), [("cuda", 1), ("npu", 0), (None, 0)])
def test_a_kind_without_a_device_is_an_error_only_for_a_job_that_wants_it(
    wanted: str | None, num_findings: int
) -> None:
    findings = probe(say(begin="cuda") + say(kind="cuda", count=0), wanted=wanted)
    assert [finding.status for finding in findings] == [FindingStatus.ERROR] * num_findings
