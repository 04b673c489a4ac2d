"""What listens, listens on the loopback alone, unless somebody says otherwise."""

import os
import re
import threading
from pathlib import Path

import psutil
import pytest
import yaml
from rank_threads import run_ranks

from engine.parallel import ParallelGroup
from flows import prefect_server

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    ROOT / "README.md", ROOT / "README.zh.md", ROOT / "Makefile",
    *(file for name in ("configs", "deployments", "docker") for file in (ROOT / name).rglob("*.*")),
]  # fmt: skip


def listening() -> set[tuple[str, int]]:
    """Return where this process listens."""
    connections = psutil.Process(os.getpid()).net_connections(kind="inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_ranks_of_one_model_meet_on_the_loopback(tmp_path: Path):
    before = listening()
    seen = threading.Barrier(2)

    def look(group: ParallelGroup) -> set[tuple[str, int]]:
        found = listening() - before
        seen.wait(timeout=30)  # both are still there
        return found

    first, second = run_ranks(tmp_path / "ranks", 2, look)
    assert len(first | second) >= 2
    assert {address for address, _ in first | second} == {"127.0.0.1"}


def test_the_temporary_server_of_prefect_is_on_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int]) -> None:
        asked.append(address)
        raise OSError("not now")

    monkeypatch.setattr(prefect_server.socket, "create_server", refuse)
    with pytest.raises(OSError, match="not now"):
        prefect_server._start(tmp_path / "server.log")
    assert asked == [("127.0.0.1", 0)]


def test_no_example_opens_a_port_to_the_network():
    opened = {
        (file.name, line.strip())
        for file in EXAMPLES
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"0\.0\.0\.0|\[::\]|--host[ =]\*", line)
    }
    # A container has addresses of its own; what is published of them is tested with the others.
    command = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]["server"][
        "command"
    ]
    assert [name for name, _ in opened] == ["compose.yml"]
    assert command[:5] == ["prefect", "server", "start", "--host", "0.0.0.0"]
