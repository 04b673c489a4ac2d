"""The memory of the host, and the limits of the groups (containers) around a process."""

from pathlib import Path

import psutil
import pytest

from engine.backends.host_memory import host_memory

MIB = 1 << 20
HOST = psutil.virtual_memory()


def group_v2(folder: Path, limit: str, usage: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 1\n")


def group_v1(folder: Path, limit: int, usage: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"active_file 7\ntotal_active_file {cached}\n")


def membership(folder: Path, *lines: str) -> Path:
    path = folder / "self_cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_container_has_what_its_limit_leaves_and_not_what_the_machine_has(tmp_path: Path) -> None:
    group_v2(tmp_path / "box", str(100 * MIB), usage=60 * MIB, cached=20 * MIB)
    found = host_memory(tmp_path, membership(tmp_path, "0::/box"))
    # Cached files are given up by the kernel when memory is wanted.
    assert found == (60 * MIB + 1, 100 * MIB)


def test_group_without_a_limit_is_as_large_as_the_one_around_it(tmp_path: Path) -> None:
    group_v2(tmp_path / "slice", str(50 * MIB), usage=10 * MIB)
    group_v2(tmp_path / "slice" / "box", "max", usage=5 * MIB)
    found = host_memory(tmp_path, membership(tmp_path, "0::/slice/box"))
    assert found == (40 * MIB + 1, 50 * MIB)


@pytest.mark.parametrize("group", ["memory/docker/abc", "memory"])
def test_first_version_of_groups_counts_too_seen_from_the_host_or_from_inside(
    tmp_path: Path, group: str
) -> None:
    group_v1(tmp_path / group, 80 * MIB, usage=70 * MIB, cached=30 * MIB)
    lines = ("5:cpu,cpuacct:/docker/abc", "4:hugetlb,memory:/docker/abc", "0::/")
    assert host_memory(tmp_path, membership(tmp_path, *lines)) == (40 * MIB, 80 * MIB)


def test_without_limits_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    group_v1(tmp_path / "memory", (1 << 63) - 4096, usage=70 * MIB)
    group_v2(tmp_path, "max", usage=5)
    for lines in (("4:memory:/", "0::/"), ("0::/../../elsewhere",), ()):
        found = host_memory(tmp_path, membership(tmp_path, *lines))
        assert found.total_bytes == HOST.total
        assert found.free_bytes == pytest.approx(HOST.available, rel=0.5)
    assert host_memory(tmp_path, tmp_path / "none").total_bytes == HOST.total


def test_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group_v2(tmp_path, str(MIB), usage=2 * MIB)
    assert host_memory(tmp_path, membership(tmp_path, "0::/")).free_bytes == 0
