"""Old jobs go, what is young, unfinished or driven stays; on SQLite and on PostgreSQL."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_builders import ELSEWHERE, acquire, error_row, new_job, ok_row, stored
from sqlalchemy import func, select, text

from engine import ConfigError
from flows.database import Database
from flows.experiments import list_experiments
from flows.ledger import JobRow, Ledger, Owner, PartialRow
from flows.ledger_check import check_whole_ledger
from flows.ledger_prune import PruneSummary, parse_age, prune
from flows.schema import Base, JobState
from flows.upkeep import shrink, size_bytes

DAY = 86_400.0
GONE = replace(Owner.current(), start_time=1)


def add_job(
    ledger: Ledger,
    job_id: str,
    *,
    age_days: float,
    state: JobState = JobState.FINISHED,
    job_dir: Path | None = None,
    text_of_row: str = "an answer",
) -> JobRow:
    """Add a job of two rows that ended so long ago, with a line in the experiment log."""
    config = {"name": job_id, "job_dir": None if job_dir is None else str(job_dir)}
    job = ledger.create_job(replace(new_job(job_id, num_rows=2, num_shards=1), config=config))
    lease = acquire(ledger, job)
    ledger.commit(lease, [ok_row(0, text_of_row)])
    if state is JobState.FINISHED:
        ledger.commit(lease, [error_row(1)])
    else:
        ledger.save_partials(lease, [PartialRow(row_index=1, token_ids=(1,))])
        ledger.add_suspects(lease, [1])
    ledger.set_job_state(job.job_key, state)
    sql = "UPDATE jobs SET updated_at = :then, heartbeat_at = NULL WHERE job_key = :key"
    parameters = {"then": time.time() - age_days * DAY, "key": job.job_key}
    ledger.database.write(lambda connection: connection.execute(text(sql), parameters))
    silent = "UPDATE shards SET lease_owner = NULL"
    ledger.database.write(lambda connection: connection.execute(text(silent)))
    return ledger.get_job(job_id)


def prune_days(ledger: Ledger, days: float, **options: bool) -> PruneSummary:
    choices = {"include_unfinished": False, "is_dry_run": False} | options
    return prune(ledger, older_than_seconds=days * DAY, **choices)


def names(ledger: Ledger) -> set[str]:
    return {job.job_id for job in ledger.list_jobs()}


def num_rows_of(ledger: Ledger, name: str) -> int:
    table = Base.metadata.tables[name]
    with ledger.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


@pytest.mark.parametrize(
    ("age", "seconds"), [("12h", 43_200), ("30d", 2_592_000), (" 8 w", 4_838_400), ("0d", 0)]
)
def test_an_age_is_a_number_and_a_unit(age: str, seconds: float) -> None:
    assert parse_age(age) == seconds


@pytest.mark.parametrize("age", ["", "30", "d", "1.5d", "-1d", "30m", "1d12h", "30 days"])
def test_any_other_age_is_answered_with_ones_that_are(age: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted a whole number and a unit.*: 12h, 30d, 8w"):
        parse_age(age)


def test_finished_jobs_that_are_old_go_with_all_that_they_have(ledger: Ledger) -> None:
    add_job(ledger, "old", age_days=31)
    young = add_job(ledger, "young", age_days=29)
    before = stored(ledger, young)
    summary = prune_days(ledger, 30)
    assert [(job.job_id, job.num_rows) for job in summary.jobs] == [("old", 2)]
    assert (summary.kept, summary.not_shrunk) == ((), None)
    assert names(ledger) == {"young"}
    assert stored(ledger, young) == before
    tables = ("jobs", "shards", "completions", "payloads")
    assert [num_rows_of(ledger, table) for table in tables] == [1, 1, 2, 1]
    assert [result for result in check_whole_ledger(ledger) if not result.is_ok] == []


def test_a_dry_run_says_the_same_and_changes_nothing(ledger: Ledger, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "rows.sqlite").write_text("index")
    job = add_job(ledger, "old", age_days=31, job_dir=folder)
    would = prune_days(ledger, 30, is_dry_run=True)
    assert ledger.get_job("old") == job
    assert (folder / "rows.sqlite").exists()
    assert prune_days(ledger, 30).jobs == would.jobs


@pytest.mark.parametrize("state", [JobState.INTERRUPTED, JobState.FAILED, JobState.PLANNED])
def test_a_job_that_can_go_on_stays_unless_it_is_named(ledger: Ledger, state: JobState) -> None:
    add_job(ledger, "old", age_days=31, state=state)
    assert prune_days(ledger, 30) == PruneSummary(jobs=())
    assert names(ledger) == {"old"}
    assert len(prune_days(ledger, 30, include_unfinished=True).jobs) == 1
    tables = set(Base.metadata.tables) - {"experiments"}
    assert {num_rows_of(ledger, table) for table in tables} == {0}


def test_a_job_that_is_driven_is_never_touched(ledger: Ledger) -> None:
    job = add_job(ledger, "driven", age_days=31, state=JobState.RUNNING)
    add_job(ledger, "old", age_days=31)
    ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=2 * DAY)
    sql = text("UPDATE jobs SET heartbeat_at = heartbeat_at - 90000 WHERE job_id = 'driven'")
    ledger.database.write(lambda connection: connection.execute(sql))
    summary = prune_days(ledger, 1, include_unfinished=True)
    assert names(ledger) == {"driven"}
    assert summary.kept == ("job driven is driven by process 1 on host elsewhere",)
    assert summary.not_shrunk == "driven would have to wait for it; prune again when no job runs"


def test_a_heartbeat_makes_a_job_young(ledger: Ledger) -> None:
    job = add_job(ledger, "resumed", age_days=31, state=JobState.RUNNING)
    ledger.acquire_job(job.job_key, owner=GONE, lease_seconds=60)
    assert prune_days(ledger, 30, include_unfinished=True) == PruneSummary(jobs=())


def test_a_shard_that_is_held_keeps_its_job(ledger: Ledger) -> None:
    job = add_job(ledger, "old", age_days=31)
    ledger.acquire_shard(job.job_key, 0, owner=ELSEWHERE, lease_seconds=60)
    summary = prune_days(ledger, 30)
    assert summary.jobs == ()
    assert "shard 0 is held by process 1 on host elsewhere" in summary.kept[0]
    assert ledger.get_job("old") == job


def test_a_job_that_somebody_changes_meanwhile_stays(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(ledger, "old", age_days=31)

    def size_while_somebody_resumes(database: Database) -> int:
        ledger.set_job_state(job.job_key, JobState.INTERRUPTED)
        return size_bytes(database)

    monkeypatch.setattr("flows.ledger_prune.size_bytes", size_while_somebody_resumes)
    assert prune_days(ledger, 30).kept == ("job old was changed a moment ago",)
    assert names(ledger) == {"old"}
    assert ledger.get_job("old").lease_owner is None


def test_the_experiment_log_outlives_the_jobs(ledger: Ledger) -> None:
    job = add_job(ledger, "old", age_days=31)
    columns = {
        "experiment_id": "old/1", "job_key": job.job_key, "job_id": "old", "name": "old",
        "attempt": 1, "created_at": 1.0, "job_state": "finished", "host": "h", "model": "m",
        "device": "cpu", "dtype": "float32", "num_shards": 1, "num_rows": 2, "num_ok": 1,
        "num_error": 1, "num_skipped": 0, "num_prompt_tokens": 1, "num_output_tokens": 1,
        "num_new_rows": 2, "num_new_prompt_tokens": 1, "num_new_output_tokens": 1,
        "wall_seconds": 1.0, "busy_seconds": 1.0, "config": {}, "stats": {}, "versions": {},
    }  # fmt: skip
    table = Base.metadata.tables["experiments"]
    ledger.database.write(lambda connection: connection.execute(table.insert(), columns))
    prune_days(ledger, 30)
    (row,) = list_experiments(ledger)
    assert (row.job_id, row.job_key) == ("old", None)


class TestFiles:
    def test_what_only_runs_need_goes_and_what_people_need_stays(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        folder, elsewhere = tmp_path / "old", tmp_path / "elsewhere.log"
        (folder / "logs").mkdir(parents=True)
        elsewhere.write_text("not ours")
        goes = ["rows.sqlite", "rows-1-2.sqlite", ".rows.sqlite.1.tmp", "stream.jsonl",
                "logs/worker-1-rank0.log", "logs/prefect-server.log"]  # fmt: skip
        stays = ["output.jsonl", "output.manifest.json", "errors.jsonl", "notes.txt"]
        for name in goes + stays:
            (folder / name).write_text("12345")
        (folder / "logs" / "linked.log").symlink_to(elsewhere)
        add_job(ledger, "old", age_days=31, job_dir=folder)
        (job,) = prune_days(ledger, 30).jobs
        assert (job.num_files, job.num_bytes) == (len(goes), 5 * len(goes))
        left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert left == {*stays, "logs", "logs/linked.log"}
        assert elsewhere.exists()

    def test_a_folder_that_is_empty_then_goes_too(self, ledger: Ledger, tmp_path: Path) -> None:
        folder = tmp_path / "old"
        (folder / "logs").mkdir(parents=True)
        (folder / "rows.sqlite").touch()
        (folder / "logs" / "worker.log").touch()
        add_job(ledger, "old", age_days=31, job_dir=folder)
        prune_days(ledger, 30)
        assert not folder.exists()
        assert tmp_path.exists()

    def test_a_folder_that_another_job_uses_is_left_alone(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        (tmp_path / "rows.sqlite").touch()
        add_job(ledger, "old", age_days=31, job_dir=tmp_path)
        add_job(ledger, "young", age_days=1, job_dir=tmp_path)
        (job,) = prune_days(ledger, 30).jobs
        assert job.num_files == 0
        assert (tmp_path / "rows.sqlite").exists()

    def test_a_folder_that_is_gone_or_was_never_named_is_no_fault(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        add_job(ledger, "one", age_days=31, job_dir=tmp_path / "gone")
        add_job(ledger, "two", age_days=31)
        assert len(prune_days(ledger, 30).jobs) == 2


class TestSize:
    def test_the_file_of_an_sqlite_ledger_shrinks(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger.sqlite"
        with Ledger.open(f"sqlite:///{path}") as ledger:
            add_job(ledger, "old", age_days=31, text_of_row="x" * 3_000_000)
            before = size_bytes(ledger.database)
            summary = prune_days(ledger, 30)
            after = size_bytes(ledger.database)
            assert before > 3e6
            assert after < 1e6
            assert summary.num_ledger_bytes == before - after
            assert path.with_name("ledger.sqlite-wal").stat().st_size == 0
            job = add_job(ledger, "new", age_days=0)  # the connection is as good as before
            assert len(stored(ledger, job)) == 2

    def test_a_file_that_somebody_reads_is_left_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flows.connections._BUSY_TIMEOUT_SECONDS", 0.05)
        path = tmp_path / "ledger.sqlite"
        with Ledger.open(f"sqlite:///{path}") as ledger:
            add_job(ledger, "old", age_days=31)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                monkeypatch.setattr(
                    "flows.ledger_prune.shrink",
                    lambda database: (other.execute("BEGIN IMMEDIATE"), shrink(database)),
                )
                summary = prune_days(ledger, 30)
                other.execute("ROLLBACK")
        assert len(summary.jobs) == 1
        assert summary.not_shrunk is not None
        assert "database is locked" in summary.not_shrunk
