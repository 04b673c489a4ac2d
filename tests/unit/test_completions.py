"""What is stored comes back: any text, in little memory; every test runs on SQLite and on PostgreSQL."""

import dataclasses
import zlib

import numpy as np
import psutil
import pytest
from ledger_builders import acquire, error_row, new_job, ok_row, stored
from msgspec.structs import replace
from sqlalchemy import func, select, text

from flows.ledger import Ledger
from flows.schema import CompletionTable, PayloadTable, ShardTable


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "a\x00b",
        "\ud800 alone, \udfff alone, \U0001f600 a pair that is one",
        "line\u2028paragraph\u2029next\u0085line",
        "\x1a0000 looks like an escape, \x1a alone, \x1a\x1a",
        "quotes ' \" \\ % and \r\n",
        "\u00e9 e\u0301 \u4f60\u597d \ufffd \uffff",
        "x" * 6_000_000,
    ],
    ids=["empty", "nul", "surrogates", "separators", "escape", "quotes", "unicode", "6 MB"],
)
def test_any_text_survives(ledger: Ledger, answer: str) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    row = replace(ok_row(0), text=answer, row_id=answer[:100])
    bad = replace(error_row(1), error_message=answer)
    ledger.commit(acquire(ledger, job), [row, bad])
    assert stored(ledger, job) == [row, bad]


def test_replies_of_earlier_turns_survive_with_and_without_a_text(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    turns = ("first", "", "a\x00b \ud800 \u2028 \u4f60")
    rows = [
        replace(ok_row(0), turns=turns),
        ok_row(1),
        replace(error_row(2), turns=turns[:1]),
    ]
    ledger.commit(acquire(ledger, job), rows)
    assert stored(ledger, job) == rows


@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 5000])
def test_token_ids_survive_however_many_there_are(ledger: Ledger, num_tokens: int) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    row = replace(ok_row(0), token_ids=(2**31 - 1, *range(num_tokens))[:num_tokens])
    ledger.commit(acquire(ledger, job), [row])
    assert stored(ledger, job) == [row]


def test_token_ids_that_were_stored_before_few_of_them_were_kept_plain_are_read(
    ledger: Ledger,
) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    row = replace(ok_row(0), token_ids=(5, 0, 2**31 - 1))
    ledger.commit(acquire(ledger, job), [row])
    old = zlib.compress(np.asarray(row.token_ids, dtype="<i4").tobytes(), 1)
    statement = text("UPDATE payloads SET token_ids = :old")
    ledger.database.write(lambda connection: connection.execute(statement, {"old": old}))
    assert stored(ledger, job) == [row]


def test_text_is_searched_by_sql(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    ledger.commit(
        acquire(ledger, job), [ok_row(0, "the \u4f60\u597d needle\x00"), ok_row(1, "hay")]
    )
    with ledger.database.read() as connection:
        found = connection.execute(
            text("SELECT row_index FROM payloads WHERE text LIKE '%\u4f60\u597d needle%'")
        )
        assert [row.row_index for row in found] == [0]


def test_config_and_fingerprint_hold_any_text_and_no_nan(ledger: Ledger) -> None:
    odd = new_job()
    config = {"template": "a\x00\ud800\u2028", "limit": float("inf"), "list": [float("nan"), 1]}
    job = ledger.create_job(
        dataclasses.replace(odd, config=config, fingerprint={"path": "caf\udce9"})
    )
    assert job.config == {"template": "a\x00\ud800\u2028", "limit": None, "list": [None, 1]}
    assert job.fingerprint == {"path": "caf\udce9"}


def test_reading_holds_a_few_rows_at_a_time(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_rows=400, num_shards=1))
    lease = acquire(ledger, job)
    answer = "y" * 250_000
    for first in range(0, 400, 20):
        ledger.commit(lease, [ok_row(index, answer) for index in range(first, first + 20)])
    # The resident memory: what the database's client library holds is not Python's.
    process = psutil.Process()
    before = process.memory_info().rss
    growth = [process.memory_info().rss - before for _ in ledger.iter_completions(job.job_key)]
    assert len(growth) == 400
    assert max(growth) < 50e6  # all answers together are 100 MB


def test_payloads_and_completions_go_together(ledger: Ledger) -> None:
    job = ledger.create_job(new_job(num_shards=1))
    lease = acquire(ledger, job)
    ledger.commit(lease, [ok_row(0), error_row(1), replace(error_row(2), text="half")])
    ledger.commit(lease, [error_row(2, "again")])
    with ledger.database.read() as connection:
        counts = [
            connection.execute(select(func.count()).select_from(table)).scalar()
            for table in (CompletionTable, PayloadTable, ShardTable)
        ]
    assert counts == [3, 1, 1]
