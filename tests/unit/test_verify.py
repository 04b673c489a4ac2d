"""Rows that are run again: the same job gives the same answers, and a changed one is told."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, run_job, stored_rows, write_rows
from ledger_builders import acquire, error_row, new_job, ok_row, skipped_row
from msgspec import structs
from sqlalchemy import update

from engine import (
    Completion,
    ConfigError,
    FinishReason,
    LedgerError,
    RequestError,
    RequestErrorCode,
    TokenLogprob,
)
from flows.answer_comparison import find_difference
from flows.config import JobConfig
from flows.job_run import resolve
from flows.ledger import CompletionRow, Ledger
from flows.logprob_blob import StoredLogprobs
from flows.row_choice import SampleSize, choose_rows
from flows.schema import CompletionTable, JobTable, PayloadTable, RowState
from flows.verify import VerifyReport, verify_job

ALL = SampleSize(share=1.0)


def verify(config: JobConfig, *, size: SampleSize = ALL, **choices: Any) -> VerifyReport:
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.get_job(config.job_id)
        return verify_job(resolve(config), job, ledger, size=size, seed=3, **choices)


def tamper(config: JobConfig, row_id: str, sample_index: int = 0, **values: Any) -> None:
    """Change the payload of a row in the ledger."""
    (row,) = [
        row for row in stored_rows(config)
        if (row.row_id, row.sample_index) == (row_id, sample_index)
    ]  # fmt: skip
    statement = update(PayloadTable).where(
        PayloadTable.row_index == row.row_index, PayloadTable.sample_index == sample_index
    )
    with Ledger.open(config.resolved_ledger_url) as ledger:
        ledger.database.write(lambda connection: connection.execute(statement.values(**values)))


MIXED = [
    *questions(6),
    {"id": "greedy", "prompt": "greedy", "sampling": {"temperature": 0}},
    {"id": "three", "prompt": "three", "sampling": {"n": 3}},
    {"id": "talk", "turns": ["first", "second", "third"]},
    {"id": "scored", "prompt": "scored", "sampling": {"max_tokens": 0, "prompt_logprobs": 1}},
    {"id": "logged", "prompt": "logged", "sampling": {"logprobs": 20, "seed": 5}},
    "{not json",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """Give a finished job of every kind of row; one row is bad."""
    config = make_job(tmp_path_factory.mktemp("mixed"), MIXED)
    run_job(config)
    return config


@pytest.fixture
def mixed(finished: JobConfig, tmp_path: Path) -> JobConfig:
    """Give that job with a ledger of its own, to do harm to."""
    original = finished.resolved_ledger_url.removeprefix("sqlite:///")
    shutil.copy(original, tmp_path / "copy.sqlite")
    return finished.model_copy(update={"ledger_url": f"sqlite:///{tmp_path / 'copy.sqlite'}"})


def test_every_kind_of_row_comes_out_again_and_the_ledger_is_as_before(mixed: JobConfig) -> None:
    with Ledger.open(mixed.resolved_ledger_url) as ledger:
        before = (ledger.list_jobs(), stored_rows(mixed))
    report = verify(mixed)
    assert (report.differences, report.unverified) == ((), ())
    assert (report.num_ok_rows, report.num_verified) == (11, 11)
    assert report.has_passed
    with Ledger.open(mixed.resolved_ledger_url) as ledger:
        assert (ledger.list_jobs(), stored_rows(mixed)) == before


def test_a_token_that_differs_is_named_with_its_place(mixed: JobConfig) -> None:
    (three,) = [r for r in stored_rows(mixed) if r.row_id == "three" and r.sample_index == 1]
    changed = [*three.token_ids[:2], 300, *three.token_ids[3:]]
    tamper(mixed, "three", 1, token_ids=changed)
    report = verify(mixed)
    (found,) = report.differences
    assert (found.row_id, found.sample_index, found.token_index) == ("three", 1, 2)
    assert (found.stored_token, found.new_token) == (300, three.token_ids[2])
    assert found.margin is None  # the mock finds no other token possible
    assert set(report.texts_of_tokens) == {300, three.token_ids[2]}
    assert (report.num_differing, report.share, report.has_passed) == (1, 1 / 11, False)


def test_an_answer_that_was_shorter_or_longer_ends_where_the_other_goes_on(
    mixed: JobConfig,
) -> None:
    by_id = {row.row_id: row for row in stored_rows(mixed)}
    tamper(mixed, "q0", token_ids=by_id["q0"].token_ids[:2])
    tamper(mixed, "q1", token_ids=[*by_id["q1"].token_ids, 9])
    shorter, longer = verify(mixed).differences
    assert (shorter.token_index, shorter.stored_token) == (2, None)
    assert shorter.new_token == by_id["q0"].token_ids[2]
    assert (longer.stored_token, longer.new_token) == (9, None)


@pytest.mark.parametrize(
    ("row_id", "values", "what", "turn_index"),
    [
        ("q2", {"text": "another"}, "text, though its tokens are the same", 0),
        ("talk", {"turns": ["another", "one"]}, "text of an earlier turn", 0),
        (
            "scored",
            {"logprobs": StoredLogprobs(prompt=(None, *[TokenLogprob(5, -2.0, 1)] * 5))},
            "scores of the prompt",
            0,
        ),
    ],
)
def test_what_is_no_token_is_compared_too(
    mixed: JobConfig, row_id: str, values: Mapping[str, Any], what: str, turn_index: int
) -> None:
    tamper(mixed, row_id, **values)
    (found,) = verify(mixed).differences
    assert (found.row_id, found.what, found.token_index) == (row_id, what, None)
    assert found.turn_index == turn_index


def test_a_share_that_is_tolerated_passes(mixed: JobConfig) -> None:
    tamper(mixed, "three", 0, text="x")
    tamper(mixed, "three", 2, text="x")
    assert verify(mixed, tolerance=0.1).has_passed
    assert not verify(mixed, tolerance=0.09).has_passed


@pytest.mark.parametrize(("is_deterministic", "tolerance"), [(True, 0.0), (False, 0.05)])
def test_rounding_is_tolerated_unless_the_job_is_deterministic(
    tmp_path: Path, is_deterministic: bool, tolerance: float
) -> None:
    config = make_job(tmp_path, questions(2), engine__deterministic=is_deterministic)
    run_job(config)
    assert verify(config).tolerance == tolerance


class TestInput:
    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: [{"id": "q0", "prompt": "Question 0"}, *rows[1:]],
            lambda rows: [{"id": "Q0", "prompt": "question 0"}, *rows[1:]],
            lambda rows: [{"id": "q0", "prompt": 12345678901}, *rows[1:]],
            lambda rows: [{"id": "q0", "prompt": "question 0", "sampling": {"top_k": 2}}],
        ],
    )
    def test_a_row_that_has_changed_is_left_out_and_said(
        self, tmp_path: Path, change: Callable[[list[Any]], list[Any]]
    ) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        write_rows(tmp_path / "rows.jsonl", change(questions(3)))
        report = verify(config)
        assert ("q0", "the input does not have the row that was asked any more") in (
            report.unverified
        )
        assert report.num_verified + len(report.unverified) == 3
        assert report.differences == ()

    def test_rows_that_moved_are_found_by_their_id(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(4))
        run_job(config)
        moved = [{"id": "new", "prompt": "new"}, *questions(4)[::-1][:3]]
        write_rows(tmp_path / "rows.jsonl", moved)
        report = verify(config)
        assert (report.num_verified, report.differences) == (3, ())
        assert [row_id for row_id, _ in report.unverified] == ["q0"]

    def test_nothing_is_proven_where_no_row_can_be_run_again(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(2))
        run_job(config)
        write_rows(tmp_path / "rows.jsonl", [{"id": "z", "prompt": "z"}])
        report = verify(config, tolerance=1.0)
        assert (report.num_verified, len(report.unverified)) == (0, 2)
        assert not report.has_passed

    def test_a_row_index_that_is_gone_or_of_another_job_is_made_again(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        index = tmp_path / "runs" / "job-1" / "rows.sqlite"
        index.unlink()
        assert verify(config).num_verified == 3
        assert not index.exists()
        index.write_text("nonsense")
        assert verify(config).num_verified == 3
        write_rows(tmp_path / "others.jsonl", questions(5)[3:])
        other = [{"path": str(tmp_path / "others.jsonl")}]
        run_job(make_job(tmp_path, job_id="job-2", sources=other))
        assert verify(config).num_verified == 3

    def test_a_source_that_is_gone_is_said(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        (tmp_path / "rows.jsonl").unlink()
        with pytest.raises(ConfigError, match="no such file"):
            verify(config)

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            fingerprint = ledger.get_job("job-1").fingerprint | {"model": "other"}
            statement = update(JobTable).values(fingerprint=fingerprint)
            ledger.database.write(lambda connection: connection.execute(statement))
        with pytest.raises(LedgerError, match="another model would answer\n  model: was other"):
            verify(config)

    def test_a_ledger_of_an_older_tokenmill_goes_by_the_id(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        statement = update(CompletionTable).values(request_hash=None)
        with Ledger.open(config.resolved_ledger_url) as ledger:
            ledger.database.write(lambda connection: connection.execute(statement))
        assert verify(config).num_verified == 3


def fill_with_35_rows(ledger: Ledger) -> None:
    """Add a job of 30 rows that are ok in whole, behind ones that are not."""
    job = ledger.create_job(new_job(num_rows=35, num_shards=1))
    samples = [ok_row(0), error_row(0), ok_row(1)]
    half = [
        structs.replace(row, sample_index=index % 2, num_samples=2)
        for index, row in enumerate(samples)
    ]
    rows = [*half, error_row(2), skipped_row(3), *map(ok_row, range(5, 35))]
    ledger.commit(acquire(ledger, job), rows)


@pytest.fixture(scope="module")
def ledger_of_35_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder = tmp_path_factory.mktemp("choice")
    with Ledger.open(f"sqlite:///{folder / 'ledger.sqlite'}") as opened:
        fill_with_35_rows(opened)
        yield opened


class TestChoice:
    def chosen(self, ledger: Ledger, size: str, seed: int = 0) -> list[int]:
        total, rows = choose_rows(ledger, ledger.get_job("job"), SampleSize.parse(size), seed)
        assert total == 30
        assert rows == sorted(set(rows) & set(range(5, 35)))
        return rows

    def test_each_seed_chooses_rows_of_its_own(self, ledger_of_35_rows: Ledger) -> None:
        rows = self.chosen(ledger_of_35_rows, "5")
        assert len(rows) == 5
        assert rows == self.chosen(ledger_of_35_rows, "5")
        assert rows != self.chosen(ledger_of_35_rows, "5", seed=1)

    @pytest.mark.parametrize(
        ("size", "number"),
        [("10%", 3), ("0.1", 3), ("1%", 1), ("100%", 30), ("1.0", 30), ("99", 30)],
    )
    def test_a_size_is_a_share_or_a_number_of_the_rows_that_are_ok(
        self, ledger_of_35_rows: Ledger, size: str, number: int
    ) -> None:
        assert len(self.chosen(ledger_of_35_rows, size)) == number

    def test_each_database_chooses_the_same(
        self, ledger: Ledger, ledger_of_35_rows: Ledger
    ) -> None:
        fill_with_35_rows(ledger)
        assert self.chosen(ledger, "7") == self.chosen(ledger_of_35_rows, "7")

    @pytest.mark.parametrize("size", ["", "0", "0%", "101%", "1.5", "-1", "5 rows", "x"])
    def test_any_other_size_is_answered_with_ones_that_are(self, size: str) -> None:
        with pytest.raises(ConfigError, match="wanted a share of the rows, 1% or 0.01"):
            SampleSize.parse(size)

    def test_a_job_without_an_answer_has_nothing_to_verify(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, ["{not json"])
        run_job(config)
        with pytest.raises(LedgerError, match="has no row that is ok"):
            verify(config)


class TestMargin:
    """How near a tie it was, by the log probabilities of the new run."""

    STORED = CompletionRow(
        row_index=0, row_id="r", state=RowState.OK, text="a", token_ids=(1, 2, 3)
    )

    def compare(self, *logprobs: TokenLogprob) -> float | None:
        new = Completion(
            request_id="r", sample_index=0, text="b", token_ids=(1, 4, 3),
            finish_reason=FinishReason.STOP, num_prompt_tokens=1, logprobs=logprobs,
        )  # fmt: skip
        found = find_difference(self.STORED, new, is_exact=True)
        assert found is not None
        return found.margin

    def test_it_is_the_distance_of_both_tokens_where_they_part(self) -> None:
        same = TokenLogprob(1, -9.0, 1, ((1, -9.0), (2, -9.5)))
        assert self.compare(same, TokenLogprob(4, -1.0, 1, ((4, -1.0), (2, -1.25)))) == 0.25

    def test_it_is_negative_where_the_stored_token_is_likelier(self) -> None:
        same = TokenLogprob(1, 0.0, 1)
        assert self.compare(same, TokenLogprob(4, -3.0, 2, ((2, -0.5),))) == -2.5

    def test_it_is_unknown_where_the_stored_token_is_not_among_the_likeliest(self) -> None:
        same = TokenLogprob(1, 0.0, 1)
        assert self.compare(same, TokenLogprob(4, -1.0, 1, ((4, -1.0),))) is None
        assert self.compare() is None

    @pytest.mark.parametrize(
        ("score", "is_exact", "differs"),
        [(-1.0, True, False), (-1.01, True, True), (-1.01, False, False), (-1.2, False, True)],
    )
    def test_scores_may_round_unless_they_are_exact(
        self, score: float, is_exact: bool, differs: bool
    ) -> None:
        def scores(value: float) -> tuple[TokenLogprob | None, ...]:
            return (None, TokenLogprob(5, value, 1), TokenLogprob(6, float("nan"), 1))

        stored = CompletionRow(
            row_index=0, row_id="r", state=RowState.OK, text="",
            logprobs=StoredLogprobs(prompt=scores(-1.0)),
        )  # fmt: skip
        new = Completion(
            request_id="r", sample_index=0, text="", token_ids=(), num_prompt_tokens=3,
            finish_reason=FinishReason.LENGTH, prompt_logprobs=scores(score),
        )  # fmt: skip
        assert (find_difference(stored, new, is_exact=is_exact) is not None) is differs

    def test_a_row_that_fails_now_differs(self) -> None:
        error = RequestError(RequestErrorCode.KV_CAPACITY, "too small")
        new = Completion(
            request_id="r", sample_index=0, text="", token_ids=(), error=error,
            finish_reason=FinishReason.ERROR, num_prompt_tokens=0,
        )  # fmt: skip
        found = find_difference(self.STORED, new, is_exact=False)
        assert found is not None
        assert found.what == "failed with kv_capacity: too small"
