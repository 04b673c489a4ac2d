"""Texts that are long, and ledgers that are damaged or torn: nothing but the damaged part is lost."""

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from interrupted_jobs import ONE_BY_ONE, after_each_commit, die_after
from job_builders import make_job, note_asked, questions, read_rows, run_job
from torture.invariants import check_state, read_state

from engine import LedgerError
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of
from flows.schema import ShardState

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_asked(monkeypatch)


class TestLongTexts:
    """No size beyond which a row is silently emptied: 6 MB in, carried, out and in the ledger."""

    LONG = "long \u2028 " * 700_000

    @pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
    def test_six_megabytes_come_out_as_they_went_in(
        self, make_exported_job: Any, suffix: str
    ) -> None:
        content = json.dumps({"id": "a", "prompt": "x", "note": self.LONG}) + "\n"
        job = make_exported_job(content.encode(), name=f"output.{suffix}")
        job.answer(0, "a", self.LONG[::-1])
        job.export()
        if suffix == "parquet":
            import pyarrow.parquet as pq

            (line,) = pq.read_table(job.output_path).to_pylist()
        elif suffix == "csv":
            import pandas as pd

            (line,) = pd.read_csv(job.output_path).to_dict("records")
        else:
            (line,) = job.lines()
        assert line["note"] == self.LONG
        assert line["text"] == self.LONG[::-1]

    def test_a_job_carries_them_past_a_kill(self, tmp_path: Path) -> None:
        rows = [{**row, "note": self.LONG} for row in questions(2)]
        config = make_job(tmp_path, rows, **ONE_BY_ONE)
        die_after(config, 1)
        run_job(config)
        lines = read_rows(output_path_of(config))
        assert [line["note"] == self.LONG for line in lines] == [True, True]


class TestDamage:
    """What is damaged in the middle of the ledger or at its end costs itself alone."""

    LONG: dict[str, Any] = {"max_tokens": 40, "min_tokens": 40, "temperature": 1.0}

    def test_unfinished_tokens_that_are_damaged_are_generated_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        changes: dict[str, Any] = {"sampling": self.LONG, "shards": 1, "commit_rows": 1}
        whole = make_job(
            tmp_path, questions(3), job_id="whole", job_dir=str(tmp_path / "whole"), **changes
        )
        run_job(whole)
        slow = {"inline": True, "mock_step_seconds": 0.01}
        config = make_job(tmp_path, partial_seconds=0.02, engine__runtime=slow, **changes)
        with JobRun.open(config) as run:
            save = Ledger.save_partials

            def save_and_stop(*arguments: Any) -> None:
                save(*arguments)
                run.stop.set()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Ledger, "save_partials", save_and_stop)
                assert run.run_shard(0).state is ShardState.INTERRUPTED
            damaged = run.ledger.database.write(
                lambda connection: (
                    connection.exec_driver_sql(
                        "UPDATE partials SET token_ids = x'0011' WHERE row_index = 1"
                    ).rowcount
                )
            )
        assert damaged == 1
        outcome, _ = run_job(config)
        assert outcome.message.startswith("3 ok, 0 failed")
        assert "start over: its token ids cannot be unpacked" in caplog.text
        assert output_path_of(config).read_bytes() == output_path_of(whole).read_bytes()

    @pytest.mark.parametrize(
        ("column", "what"), [("token_ids", "token ids"), ("logprobs", "log probabilities")]
    )
    def test_an_answer_that_is_damaged_is_named_and_nothing_is_asked_again(
        self, asked: list[str], tmp_path: Path, column: str, what: str
    ) -> None:
        config = make_job(tmp_path, questions(200), sampling=GREEDY | {"logprobs": 1})
        run_job(config)
        written = output_path_of(config).read_bytes()
        with Ledger.open(config.resolved_ledger_url) as ledger:
            ledger.database.write(
                lambda connection: connection.exec_driver_sql(
                    f"UPDATE payloads SET {column} = x'0011' WHERE row_index = 117"
                )
            )
        asked.clear()
        named = rf"row 'q117' \(row 117, sample 0\): its answer .* is damaged, its {what} cannot be"
        with pytest.raises(LedgerError, match=named):
            run_job(config)
        assert asked == []
        assert output_path_of(config).read_bytes() == written


class TestTornLedger:
    """A kill or a power cut tears the end of a file; what comes before it must stay."""

    def test_a_log_that_is_cut_anywhere_holds_a_whole_ledger_and_the_job_goes_on(
        self, tmp_path: Path
    ) -> None:
        rows = [*questions(9), "{ broken", {"id": "n", "prompt": "x", "sampling": {"n": 3}}]
        config = make_job(tmp_path, rows, partial_seconds=1e-9)
        ledger_path, log_path = tmp_path / "ledger.sqlite", tmp_path / "ledger.sqlite-wal"
        with JobRun.open(config) as run, after_each_commit(lambda _: None):
            outcome = run.finish([run.run_shard(index) for index in run.pending_shards()], {})
            ledger, log = ledger_path.read_bytes(), log_path.read_bytes()
        expected = output_path_of(config).read_bytes()
        assert outcome.message.startswith("10 ok, 1 failed")

        torn = tmp_path / "torn"
        torn.mkdir()
        changes = {"ledger_url": f"sqlite:///{torn / 'ledger.sqlite'}", "job_dir": torn / "job"}
        numbers = []
        cuts = sorted([0, len(log), *random.Random(0).sample(range(len(log)), 40)])
        for number, cut in enumerate(cuts):
            for path in torn.glob("ledger.*"):
                path.unlink()
            (torn / "ledger.sqlite").write_bytes(ledger)
            (torn / "ledger.sqlite-wal").write_bytes(log[:cut])
            state = read_state(changes["ledger_url"])
            check_state(state, 11)
            numbers.append(len(state.completions))
            if number % 10 == 0:
                with closing(sqlite3.connect(torn / "ledger.sqlite")) as connection, connection:
                    for table in ("jobs", "shards") if state.job else ():
                        connection.execute(f"UPDATE {table} SET lease_owner = NULL")
                run_job(config.model_copy(update=changes))
                assert (torn / "job" / "output.jsonl").read_bytes() == expected
        assert numbers == sorted(numbers)
        assert (numbers[0], numbers[-1]) == (0, 13)
        assert len(set(numbers)) > 6
