"""OutputFiles: all files of an export appear together, or none, and nothing is left behind."""

import fcntl
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from engine import ConfigError
from flows.outputs.files import OutputFiles


def write_all(folder: Path, contents: dict[str, bytes]) -> None:
    with OutputFiles() as files:
        for name, data in contents.items():
            files.open(folder / name).write(data)
        files.publish()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_is_seen_before_publish_and_all_afterwards(tmp_path: Path) -> None:
    with OutputFiles() as files:
        first, second = files.open(tmp_path / "a"), files.open(tmp_path / "b")
        first.write(b"1")
        second.write(b"2")
        assert not {"a", "b"} & set(os.listdir(tmp_path))
        files.publish()
    assert contents_of(tmp_path) == {"a": b"1", "b": b"2"}


def test_an_error_on_the_way_leaves_the_old_files_and_no_other(tmp_path: Path) -> None:
    write_all(tmp_path, {"a": b"old", "b": b"old"})

    def fail() -> None:
        with OutputFiles() as files:
            files.open(tmp_path / "a").write(b"new")
            files.open(tmp_path / "b")
            raise KeyError

    pytest.raises(KeyError, fail)
    assert contents_of(tmp_path) == {"a": b"old", "b": b"old"}


def test_size_and_hash_are_those_of_the_file(tmp_path: Path) -> None:
    data = os.urandom(700_000)
    with OutputFiles() as files:
        file = files.open(tmp_path / "a")
        for start in range(0, len(data), 999):
            file.write(data[start : start + 999])
        assert (file.num_bytes, file.sha256) == (len(data), sha256(data).hexdigest())
        files.publish()
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_that_is_left_out_takes_its_old_version_away(tmp_path: Path) -> None:
    write_all(tmp_path, {"a": b"old", "errors": b"old"})
    with OutputFiles() as files:
        files.open(tmp_path / "a").write(b"new")
        files.leave_out(files.open(tmp_path / "errors"))
        assert contents_of(tmp_path)["errors"] == b"old"
        files.publish()
    assert contents_of(tmp_path) == {"a": b"new"}


def test_a_failed_rename_is_a_config_error_and_the_last_file_keeps_its_old_version(
    tmp_path: Path,
) -> None:
    write_all(tmp_path, {"last": b"old"})
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "content").touch()
    with pytest.raises(ConfigError, match="first: the output cannot be written"):
        write_all(tmp_path, {"first": b"new", "last": b"new"})
    assert (tmp_path / "last").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["first", "last"]


def test_everything_is_on_the_disk_before_the_first_name_and_names_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def noting(what: Callable[..., str], function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            log.append(what(*arguments))
            return function(*arguments)

        return call

    def kind(descriptor: int) -> str:
        return "folder" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"

    monkeypatch.setattr(os, "fsync", noting(kind, os.fsync))
    replace = noting(lambda _, path: f"name {path.name}", Path.replace)
    monkeypatch.setattr(Path, "replace", lambda *arguments: replace(*arguments))
    write_all(tmp_path, {"output": b"1", "errors": b"2", "manifest": b"3"})
    assert log == [
        *["file"] * 3,
        "name output",
        "name errors",
        "folder",
        "name manifest",
        "folder",
    ]


def test_what_a_killed_export_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    dead, living = tmp_path / ".out.jsonl.11.tmp", tmp_path / ".out.jsonl.12.tmp"
    others = [tmp_path / name for name in (".out.jsonl.x.tmp", "out.jsonl.11.tmp", ".b.11.tmp")]
    for path in (dead, living, *others):
        path.write_bytes(b"half a file")
    with living.open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with OutputFiles() as files:
            files.open(tmp_path / "out.jsonl")
    assert not dead.exists()
    assert living.exists()
    assert all(path.exists() for path in others)


def test_a_file_that_is_being_written_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    with OutputFiles() as files:
        files.open(tmp_path / "a")
        (mine,) = tmp_path.iterdir()
        with mine.open("rb") as handle, pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_full_disk_is_a_config_error_that_names_the_file(tmp_path: Path) -> None:
    def fill() -> None:
        with OutputFiles() as files:
            file = files.open(tmp_path / "output.jsonl")
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, file._handle.fileno())
            os.close(full)
            for _ in range(1000):
                file.write(b"x" * 1000)

    with pytest.raises(ConfigError, match=r"output\.jsonl: .*No space left"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    write_all(tmp_path / "new" / "folder", {"a": b"1"})
    assert contents_of(tmp_path / "new" / "folder") == {"a": b"1"}
