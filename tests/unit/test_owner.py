import os
import subprocess
import sys
from dataclasses import replace

import pytest

from flows.owner import Owner

ME = Owner.current()
SAY_WHO_AND_WAIT = "import sys; from flows.owner import Owner; print(Owner.current(), flush=True); sys.stdin.read()"


def test_an_owner_is_read_back_from_its_text() -> None:
    odd = replace(ME, host="host|with|bars")
    assert Owner.parse(str(ME)) == ME
    assert Owner.parse(str(odd)) == odd


def test_this_process_lives_and_is_always_the_same() -> None:
    assert not ME.is_gone()
    assert Owner.current() == ME


@pytest.mark.parametrize(
    ("changes", "is_gone"),
    [
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "boot_id": "other", "pid": 2**22}, False),
        ({"boot_id": "other"}, True),
        ({"pid": 2**22 + 1}, True),
        ({"start_time": ME.start_time + 1}, True),
        ({"pid_namespace": "pid:[1]", "pid": 2**22 + 1}, False),
    ],
    ids=[
        "elsewhere",
        "elsewhere, other boot",
        "rebooted",
        "no such pid",
        "reused pid",
        "container",
    ],
)
def test_only_what_can_be_known_here_counts_as_gone(
    changes: dict[str, object], is_gone: bool
) -> None:
    assert replace(ME, **changes).is_gone() is is_gone


def test_a_killed_process_is_gone_before_its_parent_has_noticed() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_WHO_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    owner = Owner.parse(child.stdout.readline().strip())
    assert owner.pid == child.pid
    assert not owner.is_gone()
    child.kill()
    # Returns when the process is a zombie, and leaves it one: nobody has waited for it yet.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.is_gone()
    child.communicate()
    assert owner.is_gone()
