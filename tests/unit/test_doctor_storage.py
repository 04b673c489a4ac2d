"""The doctor's checks of the ledger, the folders and the clock. Nothing is made by looking."""

import os
import shutil
import sqlite3
import time
from collections import namedtuple
from pathlib import Path

import pytest
from job_builders import make_job
from sqlalchemy import text

from engine import FindingStatus, LedgerError
from flows.config import JobConfig
from flows.doctor_storage import check_clock, check_folders, check_ledger
from flows.ledger import Ledger
from flows.migrations import HEAD, REVISIONS, VERSION_TABLE

GIB = 1 << 30
DiskUsage = namedtuple("DiskUsage", "total used free")


def set_revision(url: str, revision: str) -> None:
    with Ledger.open(url) as ledger:
        statement = text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'")
        ledger.database.write(lambda connection: connection.execute(statement))


class TestLedger:
    def test_one_that_is_there_and_new_is_ok_on_both_databases(self, ledger_url: str) -> None:
        Ledger.open(ledger_url).close()
        finding = check_ledger(ledger_url)
        assert finding.status is FindingStatus.OK
        assert finding.found.endswith(f", schema {HEAD}")

    def test_one_that_is_older_is_a_warning_and_stays_as_it_is(self, ledger_url: str) -> None:
        Ledger.open(ledger_url).close()
        set_revision(ledger_url, REVISIONS[0])
        for _ in range(2):
            finding = check_ledger(ledger_url)
            assert finding.status is FindingStatus.WARNING
            assert f"has schema {REVISIONS[0]}, this tokenmill uses {HEAD}" in finding.found

    def test_one_of_a_newer_tokenmill_is_an_error(self, ledger_url: str) -> None:
        Ledger.open(ledger_url).close()
        set_revision(ledger_url, "9999")
        finding = check_ledger(ledger_url)
        assert finding.status is FindingStatus.ERROR
        assert "upgrade tokenmill" in str(finding.remedy)

    def test_one_that_is_not_there_is_announced_and_not_made(self, tmp_path: Path) -> None:
        file = tmp_path / "runs" / "ledger.sqlite"
        finding = check_ledger(f"sqlite:///{file}")
        assert (finding.status, finding.found) == (
            FindingStatus.OK,
            f"none yet; the first run makes {file}",
        )
        assert list(tmp_path.iterdir()) == []

    def test_a_database_without_tables_gets_them_from_the_first_run(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.sqlite"
        sqlite3.connect(file).close()
        file.touch()
        finding = check_ledger(f"sqlite:///{file}")
        assert finding.status is FindingStatus.OK
        assert "without tables" in finding.found

    def test_one_that_may_not_be_written_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "ledger.sqlite"
        Ledger.open(f"sqlite:///{file}").close()
        # Tests may run as root, whom no rights stop.
        monkeypatch.setattr(os, "access", lambda path, mode: path != file)
        assert check_ledger(f"sqlite:///{file}").status is FindingStatus.ERROR

    def test_a_folder_where_none_may_be_made_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        finding = check_ledger(f"sqlite:///{tmp_path}/runs/ledger.sqlite")
        assert finding.status is FindingStatus.ERROR
        assert f"{tmp_path} may not be written" in finding.found

    def test_a_network_file_system_is_refused_before_anything_is_there(
        self, tmp_path: Path
    ) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"server:/x {tmp_path} nfs4 rw 0 0\n")
        with pytest.raises(LedgerError, match="network file system"):
            check_ledger(f"sqlite:///{tmp_path}/runs/ledger.sqlite", mounts)

    @pytest.mark.parametrize(
        "url", ["sqlite://", "sqlite:///:memory:", "mysql://host/database", "no url"]
    )
    def test_what_can_be_no_ledger_is_refused(self, url: str) -> None:
        with pytest.raises(LedgerError):
            check_ledger(url)

    def test_a_file_that_is_no_database_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "ledger.sqlite"
        file.write_text("not a database, but long enough to be looked at as one")
        with pytest.raises(LedgerError, match="not a database"):
            check_ledger(f"sqlite:///{file}")

    def test_a_server_that_is_not_there_is_refused_without_its_password(self) -> None:
        url = "postgresql://ada:secret@127.0.0.1:1/tokenmill"
        with pytest.raises(LedgerError, match="cannot be reached") as caught:
            check_ledger(url)
        assert "secret" not in str(caught.value)

    @pytest.mark.integration
    def test_a_server_that_takes_no_writes_is_an_error(self, postgres_database_url: str) -> None:
        Ledger.open(postgres_database_url).close()
        url = postgres_database_url.replace(
            "options=", "options=-cdefault_transaction_read_only%3Don%20"
        )
        finding = check_ledger(url)
        assert finding.status is FindingStatus.ERROR
        assert finding.found.endswith("takes no writes")


class TestFolders:
    @pytest.fixture
    def job(self, tmp_path: Path) -> JobConfig:
        return make_job(tmp_path, ["one"])

    def test_without_a_job_it_is_runs_and_the_locks_and_nothing_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        runs, locks = check_folders(None)
        assert (runs.check, runs.status) == ("folder runs", FindingStatus.OK)
        assert runs.found.startswith(f"{tmp_path}/runs, to be made in {tmp_path}: ")
        assert locks.check == "folder device locks"
        assert list(tmp_path.iterdir()) == []

    def test_with_a_job_it_is_what_the_job_names(self, job: JobConfig, tmp_path: Path) -> None:
        engine = job.engine.model_copy(
            update={"log_dir": tmp_path / "logs", "cache_dir": tmp_path / "cache"}
        )
        output = job.output.model_copy(update={"path": tmp_path / "out" / "answers.jsonl"})
        changed = job.model_copy(update={"engine": engine, "output": output})
        found = {finding.check: finding.found for finding in check_folders(changed)}
        assert found["folder log_dir"].startswith(f"{tmp_path}/logs, to be made")
        assert found["folder cache_dir"].startswith(f"{tmp_path}/cache, to be made")
        assert found["folder output"].startswith(f"{tmp_path}/out, to be made")
        assert found["folder job_dir"].startswith(f"{job.job_dir}")

    def test_a_folder_that_cannot_be_written_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(dir: Path) -> object:
            raise OSError(30, "Read-only file system", str(dir))

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        finding = check_folders(None)[0]
        assert finding.status is FindingStatus.ERROR
        assert "cannot be written: Read-only file system" in finding.found

    @pytest.mark.parametrize(
        ("free_bytes", "status"),
        [
            (GIB // 8, FindingStatus.ERROR),
            (2 * GIB, FindingStatus.WARNING),
            (50 * GIB, FindingStatus.OK),
        ],
    )
    def test_little_space_is_a_warning_and_none_an_error(
        self, monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: FindingStatus
    ) -> None:
        usage = DiskUsage(total=100 * GIB, used=0, free=free_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert check_folders(None)[0].status is status


class TestClock:
    def test_a_clock_that_is_ahead_of_all_files_is_ok(self, tmp_path: Path) -> None:
        assert check_clock(f"sqlite:///{tmp_path}/ledger.sqlite").status is FindingStatus.OK

    def test_a_clock_behind_the_last_write_of_the_ledger_is_an_error(self, tmp_path: Path) -> None:
        file = tmp_path / "ledger.sqlite"
        file.touch()
        tomorrow = time.time() + 86_400
        os.utime(file, (tomorrow, tomorrow))
        finding = check_clock(f"sqlite:///{file}")
        assert finding.status is FindingStatus.ERROR
        assert str(file) in finding.found

    def test_a_ledger_on_a_server_has_no_file_to_compare_with(self) -> None:
        assert check_clock("postgresql://host/database").status is FindingStatus.OK
