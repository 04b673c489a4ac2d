"""Answers that a disk has spoilt: named, taken back and answered again; nothing else is touched."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, run_job
from ledger_builders import ELSEWHERE, acquire, error_row, new_job, ok_row, stored
from msgspec.structs import replace
from sqlalchemy import text
from terminal import Terminal
from torture.invariants import check_state, read_state

from engine import ExitCode, LedgerError
from flows.config import JobConfig
from flows.damaged_answers import retry_damaged
from flows.ledger import JobRow, Ledger
from flows.ledger_check import check_job
from flows.preparation import output_path_of
from flows.schema import JobState, ShardState
from flows.stored_answers import DamagedAnswerError

SAMPLING: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "logprobs": 1}


def spoil(ledger: Ledger, *assignments: str, row_index: int) -> None:
    """Overwrite bytes of one answer, as a bad disk does; both databases understand it."""
    hexadecimal = "'\\x0011'" if "postgresql" in str(ledger.database._engine.url) else "x'0011'"
    for assignment in assignments:
        statement = f"{assignment} WHERE row_index = {row_index}".replace("BYTES", hexadecimal)
        ledger.database.write(lambda connection, s=statement: connection.execute(text(s)))


TOKENS = "UPDATE payloads SET token_ids = BYTES"
LOGPROBS = "UPDATE payloads SET logprobs = BYTES"
GONE = "DELETE FROM payloads"
# What PostgreSQL refuses to store, a bad disk may give back all the same.
NO_TEXT = "UPDATE payloads SET text = CAST(x'ff20ff' AS TEXT)"
NO_JSON = "UPDATE payloads SET turns = '[\"half'"
NO_NAME = "UPDATE completions SET row_id = CAST(x'ff' AS TEXT)"
NO_STATE = "UPDATE completions SET state = 'oj'"
ON_BOTH = (TOKENS, LOGPROBS, GONE, NO_STATE)
ON_SQLITE = (NO_TEXT, NO_JSON, NO_NAME)


@pytest.mark.parametrize(
    ("ledger_url", "damage"),
    [
        *(("sqlite", damage) for damage in (*ON_BOTH, *ON_SQLITE)),
        *(pytest.param("postgresql", each, marks=pytest.mark.integration) for each in ON_BOTH),
    ],
    indirect=["ledger_url"],
)
def test_whatever_is_damaged_is_taken_back_alone_and_the_next_run_has_every_row(
    ledger_url: str, tmp_path: Path, damage: str
) -> None:
    config = make_job(tmp_path, questions(9), ledger_url=ledger_url, sampling=SAMPLING)
    run_job(config)
    written = output_path_of(config).read_bytes()
    before = read_state(ledger_url).answers
    with Ledger.open(ledger_url) as ledger:
        spoil(ledger, damage, row_index=5)
        with pytest.raises(
            DamagedAnswerError, match="`tokenmill retry-failed job-1 --damaged`"
        ) as e:
            run_job(config)
        assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
        assert [damage.key for damage in retry_damaged(ledger, "job-1")] == [(5, 0)]
        job = ledger.get_job("job-1")
        assert (job.state, job.num_ok, job.num_pending) == (JobState.INTERRUPTED, 8, 1)
        assert job.lease_owner is None
        assert [result for result in check_job(ledger, "job-1") if not result.is_ok] == []
    output_path_of(config).unlink()
    outcome, (summary,) = run_job(config)
    assert outcome.message.startswith("9 ok, 0 failed")
    assert summary.num_ok == 1
    state = read_state(ledger_url)
    check_state(state, 9)
    after = state.answers
    assert {key: after[key] for key in before if key != (5, 0)} == {
        key: before[key] for key in before if key != (5, 0)
    }
    assert output_path_of(config).read_bytes() == written


class TestOfALedger:
    @pytest.fixture
    def job(self, ledger: Ledger) -> JobRow:
        """Give a finished job; row 3 has three samples, row 4 has failed."""
        job = ledger.create_job(new_job(num_rows=300, num_shards=2))
        samples = [replace(ok_row(3), sample_index=index, num_samples=3) for index in range(3)]
        rows = [ok_row(index) for index in range(300) if index not in (3, 4)]
        rows = sorted([*rows, *samples, error_row(4)], key=lambda row: row.key)
        for shard_index in (0, 1):
            lease = acquire(ledger, job, shard_index)
            ledger.commit(lease, [row for row in rows if lease.covers(row.row_index)])
            ledger.release_shard(lease, ShardState.DONE)
        ledger.set_job_state(job.job_key, JobState.FINISHED)
        return job

    def test_every_damaged_answer_is_found_in_one_go_and_its_old_state_is_in_the_log(
        self, ledger: Ledger, job: JobRow, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = stored(ledger, job)
        bad = (0, 1, 70, 128, 299)
        for row_index in bad:
            spoil(ledger, TOKENS, row_index=row_index)
        with caplog.at_level(logging.WARNING):
            assert [damage.row_index for damage in retry_damaged(ledger, "job")] == list(bad)
        assert stored(ledger, job) == [row for row in before if row.row_index not in bad]
        assert (
            "row 'row-70' (row 70, sample 0) was ok with 3 output tokens, attempt=1" in caplog.text
        )
        assert "its token ids cannot be unpacked" in caplog.text
        states = [shard.state for shard in ledger.list_shards(job.job_key)]
        assert states == [ShardState.PENDING, ShardState.PENDING]

    def test_the_samples_of_the_row_that_are_well_stay(self, ledger: Ledger, job: JobRow) -> None:
        spoil(ledger, f"{GONE} WHERE sample_index = 1 AND 1 = 1 --", row_index=3)
        assert [damage.key for damage in retry_damaged(ledger, "job")] == [(3, 1)]
        assert ledger.done_samples(job.job_key, [3])[3].indices == {0, 2}

    def test_where_nothing_is_damaged_nothing_changes(self, ledger: Ledger, job: JobRow) -> None:
        assert retry_damaged(ledger, "job") == []
        assert ledger.get_job("job").state is JobState.FINISHED
        assert ledger.get_job("job").num_error == 1

    def test_a_job_that_is_driven_is_left_alone(self, ledger: Ledger, job: JobRow) -> None:
        spoil(ledger, TOKENS, row_index=7)
        ledger.acquire_job(job.job_key, owner=ELSEWHERE, lease_seconds=60)
        with pytest.raises(LedgerError, match="driven by process 1 on host elsewhere"):
            retry_damaged(ledger, "job")
        assert 7 in ledger.done_samples(job.job_key, [7])

    def test_an_answer_that_came_after_the_damage_was_seen_is_not_taken_back(
        self, ledger: Ledger, job: JobRow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoil(ledger, TOKENS, row_index=7)
        write = ledger.database.write

        def answered_meanwhile(work: Any) -> Any:
            write(lambda c: c.execute(text("DELETE FROM completions WHERE row_index = 7")))
            write(
                lambda c: c.execute(
                    text("UPDATE shards SET num_ok = num_ok - 1 WHERE shard_index = 0")
                )
            )
            ledger.commit(acquire(ledger, job), [ok_row(7, "whole")])
            silence_all = text("UPDATE shards SET lease_owner = NULL")
            write(lambda c: c.execute(silence_all))
            return write(work)

        calls: list[int] = []

        def once(work: Any) -> Any:
            if calls:
                return write(work)
            calls.append(1)
            return answered_meanwhile(work)

        monkeypatch.setattr(ledger.database, "write", once)
        retry_damaged(ledger, "job")
        assert [row.text for row in ledger.read_rows(job.job_key, [7])] == ["whole"]


class TestCommand:
    @pytest.fixture
    def terminal(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> Terminal:
        def run_without_prefect(config: JobConfig) -> ExitCode:
            return run_job(config)[0].exit_code

        monkeypatch.setattr("flows.cli.run_in_foreground", run_without_prefect)
        return Terminal(monkeypatch, capfd)

    def test_the_command_that_the_export_names_mends_it(
        self, terminal: Terminal, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = make_job(tmp_path, questions(5), sampling=SAMPLING)
        run_job(config)
        written = output_path_of(config).read_bytes()
        url = ("--ledger", config.resolved_ledger_url)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            spoil(ledger, LOGPROBS, row_index=2)
        refused = terminal("export", "job-1", *url)
        assert refused.code == 2
        assert "row 'q2' (row 2, sample 0): its answer in the ledger is damaged" in refused.err
        assert terminal("ledger", "check", "job-1", *url).code == 1
        mended = terminal("retry-failed", "job-1", "--damaged", *url)
        assert mended.code == 0
        assert "1 damaged answer(s) are asked again" in mended.err
        assert "row 'q2' (row 2, sample 0) was ok with" in caplog.text
        assert output_path_of(config).read_bytes() == written
        assert terminal("ledger", "check", "job-1", *url).code == 0
        assert "0 damaged answer(s)" in terminal("retry-failed", "job-1", "--damaged", *url).err

    def test_codes_and_damage_are_not_mixed(self, terminal: Terminal, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(2))
        run_job(config)
        url = ("--ledger", config.resolved_ledger_url)
        ended = terminal("retry-failed", "job-1", "--damaged", "--code", "timeout", *url)
        assert ended.code == 2
        assert "give one of the two" in ended.err
