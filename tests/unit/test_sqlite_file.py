import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from ledger_builders import acquire, new_job, ok_row, stored
from sqlalchemy import make_url

from engine import LedgerError
from flows.ledger import Ledger
from flows.sqlite_file import prepare_sqlite_file, refuse_network_file_system


def write_mounts(folder: Path, *lines: str) -> Path:
    table = folder / "mounts"
    table.write_text("".join(f"{line}\n" for line in ("/dev/root / ext4 rw 0 0", *lines)))
    return table


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    mounts = write_mounts(tmp_path, f"server:/data {tmp_path} {kind} rw 0 0")
    with pytest.raises(LedgerError, match=rf"network file system \({kind}\).*use PostgreSQL"):
        refuse_network_file_system(tmp_path / "runs" / "ledger.sqlite", mounts)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fuseblk"]
)
def test_a_local_file_system_is_allowed(tmp_path: Path, kind: str) -> None:
    mounts = write_mounts(tmp_path, f"/dev/sdb {tmp_path} {kind} rw 0 0")
    refuse_network_file_system(tmp_path / "ledger.sqlite", mounts)


def test_the_innermost_mount_decides_and_the_last_one_over_it(tmp_path: Path) -> None:
    local = tmp_path / "a disk"
    local.mkdir()
    escaped = str(local).replace(" ", "\\040")
    mounts = write_mounts(
        tmp_path,
        f"/dev/sdb {escaped} ext4 rw 0 0",
        f"server:/ {tmp_path} nfs rw 0 0",
        f"server:/b {tmp_path}b nfs rw 0 0",
    )
    refuse_network_file_system(local / "ledger.sqlite", mounts)
    with pytest.raises(LedgerError, match="nfs"):
        refuse_network_file_system(tmp_path / "other" / "ledger.sqlite", mounts)
    mounts = write_mounts(
        tmp_path, f"/dev/sdb {escaped} ext4 rw 0 0", f"server:/ {escaped} nfs4 rw 0 0"
    )
    with pytest.raises(LedgerError, match="nfs4"):
        refuse_network_file_system(local / "ledger.sqlite", mounts)


def test_a_link_to_a_network_file_system_is_followed(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / "near").symlink_to(far)
    mounts = write_mounts(tmp_path, f"server:/ {far} nfs rw 0 0")
    with pytest.raises(LedgerError, match="nfs"):
        refuse_network_file_system(tmp_path / "near" / "ledger.sqlite", mounts)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true"]
)
def test_a_ledger_in_memory_is_refused(url: str) -> None:
    with pytest.raises(LedgerError, match="a ledger must be a file"):
        prepare_sqlite_file(make_url(url))


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but longer than its header would be\n" * 100)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="not a database"):
        prepare_sqlite_file(make_url(f"sqlite:///{path}"))
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot create its folder"):
        prepare_sqlite_file(make_url(f"sqlite:///{tmp_path}/file/runs/ledger.sqlite"))


class TestMoved:
    """SQLite itself would delete the log of a ledger that is gone, and with it the last commits."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "ledger.sqlite"

    def test_who_writes_stops_at_once_and_all_is_there_when_it_is_back(self, path: Path) -> None:
        url = f"sqlite:///{path}"
        elsewhere = path.with_name("moved.sqlite")
        with Ledger.open(url) as ledger:
            job = ledger.create_job(new_job(num_shards=1))
            lease = acquire(ledger, job)
            ledger.commit(lease, [ok_row(0), ok_row(1)])
            path.rename(elsewhere)
            with pytest.raises(LedgerError, match="was moved, deleted or replaced .* put it back"):
                ledger.commit(lease, [ok_row(2)])
            with ledger.database.read(), pytest.raises(LedgerError, match="unable to open"):
                ledger.get_job("job")  # by a second connection, which must not make a new file
            assert not path.exists()
        with pytest.raises(LedgerError, match=r"its log ledger\.sqlite-wal is, .* put the ledger"):
            Ledger.open(url)
        assert not path.exists()
        elsewhere.rename(path)
        with Ledger.open(url) as ledger:
            assert stored(ledger, ledger.get_job("job")) == [ok_row(0), ok_row(1)]

    def test_another_ledger_in_its_place_is_not_written_to(self, path: Path) -> None:
        with Ledger.open(f"sqlite:///{path}") as ledger:
            for file in path.parent.glob("ledger.sqlite*"):
                file.rename(file.with_name(f"old-{file.name}"))
            with (
                Ledger.open(f"sqlite:///{path}") as other,
                pytest.raises(LedgerError, match="was moved, deleted or replaced"),
            ):
                ledger.create_job(new_job())
            assert other.list_jobs() == []

    def test_an_empty_log_is_nobodys(self, path: Path) -> None:
        path.with_name("ledger.sqlite-wal").touch()
        Ledger.open(f"sqlite:///{path}").close()


def test_many_open_a_new_ledger_at_the_same_moment(tmp_path: Path) -> None:
    failures: list[LedgerError] = []

    def open_all(barrier: threading.Barrier) -> None:
        for number in range(30):
            path = tmp_path / f"{number}.sqlite"
            barrier.wait()
            try:
                prepare_sqlite_file(make_url(f"sqlite:///{path}"))
                with closing(sqlite3.connect(path, timeout=30)) as connection:
                    connection.execute("CREATE TABLE IF NOT EXISTS t (a)")
            except LedgerError as error:
                failures.append(error)

    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=open_all, args=(barrier,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
