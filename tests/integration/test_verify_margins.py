"""A real model's answers come out again to the bit, and a near tie is told by its margin."""

from pathlib import Path

import pytest
from job_builders import make_job, questions, run_job, stored_rows
from sqlalchemy import update

from flows.config import JobConfig
from flows.ledger import CompletionRow, Ledger
from flows.preparation import resolve
from flows.row_choice import SampleSize
from flows.schema import PayloadTable
from flows.verify import VerifyReport, verify_job

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def job(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """Give a finished job: greedy rows, drawn ones, several samples, a conversation, a score."""
    rows = [
        *({**row, "sampling": {"temperature": 0, "logprobs": 2}} for row in questions(3)),
        {"id": "drawn", "prompt": "the quick", "sampling": {"logprobs": 8}},
        {"id": "samples", "prompt": "def add", "sampling": {"n": 3}},
        {"id": "talk", "turns": ["the fox", "and the cat"]},
        {"id": "scored", "prompt": "the dog", "sampling": {"max_tokens": 0, "prompt_logprobs": 2}},
    ]
    config = make_job(
        tmp_path_factory.mktemp("job"),
        rows,
        sampling={"max_tokens": 12, "ignore_eos": True},
        engine__model_path=str(tiny_llama),
        engine__device="cpu",
        engine__deterministic=True,
        engine__runtime={"inline": True, "num_threads": 1},
        engine__cache={"num_blocks": 64, "block_size": 16},
        prompt={"format": "text"},
    )
    outcome, _ = run_job(config)
    assert outcome.message.startswith("7 ok")
    return config


def verify(config: JobConfig) -> VerifyReport:
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.get_job("job-1")
        return verify_job(resolve(config), job, ledger, size=SampleSize(share=1.0), seed=0)


def put_tokens(config: JobConfig, row: CompletionRow, token_ids: list[int]) -> None:
    statement = update(PayloadTable).where(PayloadTable.row_index == row.row_index)
    with Ledger.open(config.resolved_ledger_url) as ledger:
        ledger.database.write(lambda c: c.execute(statement.values(token_ids=token_ids)))


def test_every_row_comes_out_again_to_the_bit(job: JobConfig) -> None:
    report = verify(job)
    assert (report.num_verified, report.differences, report.tolerance) == (7, (), 0.0)


@pytest.mark.parametrize("row_id", ["q1", "drawn"])
def test_the_margin_is_how_much_likelier_the_model_finds_its_own_token(
    job: JobConfig, row_id: str
) -> None:
    (row,) = [row for row in stored_rows(job) if row.row_id == row_id]
    assert row.logprobs is not None
    scored = row.logprobs.output[5]
    other, logprob = next(pair for pair in scored.top if pair[0] != scored.token_id)
    put_tokens(job, row, [*row.token_ids[:5], other, *row.token_ids[6:]])
    try:
        (found,) = verify(job).differences
    finally:
        put_tokens(job, row, list(row.token_ids))
    assert (found.row_id, found.token_index) == (row_id, 5)
    assert (found.stored_token, found.new_token) == (other, scored.token_id)
    assert found.margin == pytest.approx(scored.logprob - logprob, abs=1e-6)
