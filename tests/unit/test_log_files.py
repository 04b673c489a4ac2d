"""Worker logs: one for each worker, a bounded number in a folder, never one that is written to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import ConfigError
from engine.worker.log_files import MAX_LOGS, new_log_path, opened_for_worker, tail


def old_logs(folder: Path, count: int) -> list[Path]:
    """Return logs of workers that have ended, the oldest first."""
    logs = [folder / f"worker-2020-{number:03d}-rank0.log" for number in range(count)]
    for age, log in enumerate(reversed(logs)):
        log.write_text(f"{log.name}\n")
        os.utime(log, (1e9 - age, 1e9 - age))
    return logs


def test_folder_of_logs_stays_bounded_however_many_workers_there_were(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("not a worker's")
    for _ in range(MAX_LOGS + 20):
        new_log_path(tmp_path, rank=0)
    assert len(list(tmp_path.glob("worker-*.log"))) == MAX_LOGS
    assert (tmp_path / "notes.log").exists()


def test_the_oldest_logs_go_and_the_new_one_stays(tmp_path: Path) -> None:
    logs = old_logs(tmp_path, MAX_LOGS + 2)
    path = new_log_path(tmp_path, rank=3)
    assert path.exists()
    assert path.name.endswith("-rank3.log")
    assert [log for log in logs if not log.exists()] == logs[:3]


def test_log_of_a_worker_that_lives_is_kept_however_old_it_is(tmp_path: Path) -> None:
    logs = old_logs(tmp_path, MAX_LOGS + 2)
    with opened_for_worker(logs[0]) as log:
        worker = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log
        )
    new_log_path(tmp_path, rank=0)
    assert [log for log in logs if not log.exists()] == logs[1:3]
    worker.communicate(b"\n")
    new_log_path(tmp_path, rank=0)
    assert not logs[0].exists()


def test_two_workers_never_share_a_log(tmp_path: Path) -> None:
    assert len({new_log_path(tmp_path, rank=0) for _ in range(MAX_LOGS)}) == MAX_LOGS


def test_folder_that_cannot_be_used_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigError, match=r"no worker log can be written to .*set engine\.log_dir"):
        new_log_path(tmp_path / "logs", rank=0)


def test_end_of_a_log_that_was_deleted_does_not_hide_the_error_it_belongs_to(
    tmp_path: Path,
) -> None:
    assert "cannot be read" in tail(tmp_path / "gone.log")
