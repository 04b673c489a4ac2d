"""Whatever is done with a ledger, in whatever order, every invariant of the job holds after it."""

import itertools
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger_builders import acquire, error_row, lose, new_job, ok_row, silence, skipped_row
from msgspec.structs import replace

from engine import LedgerError
from flows.job_changes import retry_failed
from flows.ledger import CompletionRow, Lease, Ledger, PartialRow
from flows.ledger_check import check_job
from flows.schema import JobState, ShardState

MAKERS = {"ok": ok_row, "error": error_row, "skipped": skipped_row}
# What becomes of the next sample of a shard that has no result.
OUTCOMES = st.lists(st.sampled_from([*MAKERS, "partial", "crash"]), min_size=1, max_size=8)
_numbers = itertools.count()


class LedgerMachine(RuleBasedStateMachine):
    """A job that is planned, run, killed, taken over, cut anew and tried again."""

    ledger: Ledger  # set by the test: one file for all examples

    @initialize(num_rows=st.integers(1, 6), num_shards=st.integers(1, 4))
    def create(self, num_rows: int, num_shards: int) -> None:
        name = f"job-{next(_numbers)}"
        new = new_job(name, num_rows=num_rows, num_shards=num_shards)
        self.job = self.ledger.create_job(new)
        self.stale: list[Lease] = []

    @rule(shard=st.integers(0, 3), outcomes=OUTCOMES, ending=st.sampled_from(["done", "killed"]))
    def work_on_a_shard(self, shard: int, outcomes: list[str], ending: str) -> None:
        """Give results to some samples, know something of others, and end well or not."""
        job = self.ledger.get_job(self.job.job_id)
        self.ledger.set_job_state(job.job_key, JobState.RUNNING)
        silence(self.ledger)
        lease = acquire(self.ledger, job, shard % job.num_shards)
        rows, partials, suspects = [], [], []
        for (row_index, sample_index), outcome in zip(
            list(self.open_samples(lease)), outcomes, strict=False
        ):
            if outcome == "partial":
                partials.append(PartialRow(row_index=row_index, sample_index=sample_index))
            elif outcome == "crash":
                suspects.append(row_index)
            else:
                rows.append(self.result(row_index, sample_index, outcome))
        self.ledger.save_partials(lease, partials)
        self.ledger.commit(lease, rows[:1])
        done = self.ledger.done_samples(job.job_key, range(job.num_rows))
        suspects = [row for row in suspects if row not in done or not done[row].is_complete]
        self.ledger.add_suspects(lease, suspects)
        self.ledger.commit(lease, rows[1:])
        if ending == "killed":
            self.stale.append(lease)
            return
        is_done = not list(self.open_samples(lease))
        state = ShardState.DONE if is_done else ShardState.INTERRUPTED
        self.ledger.release_shard(lease, state)

    @precondition(lambda self: self.stale)
    @rule(outcome=st.sampled_from(list(MAKERS)))
    def come_back_from_the_dead(self, outcome: str) -> None:
        """Let an owner that was silent write, before or after somebody took its shard."""
        lease = self.stale.pop()
        left = list(self.open_samples(lease))
        with suppress(LedgerError):
            if len(self.stale) % 2:
                lose(self.ledger, lease)
            self.ledger.commit(lease, [self.result(*key, outcome) for key in left[:1]])

    @rule(num_shards=st.integers(1, 4))
    def cut_anew(self, num_shards: int) -> None:
        silence(self.ledger)
        self.ledger.reshard(self.job.job_key, num_shards)

    @rule(row_index=st.integers(0, 5))
    def find_a_bad_row(self, row_index: int) -> None:
        done = self.ledger.done_samples(self.job.job_key, [row_index])
        if row_index < self.job.num_rows and not done:
            self.ledger.commit_bad_rows(self.job.job_key, [error_row(row_index)])

    @rule()
    def retry(self) -> None:
        silence(self.ledger)
        retry_failed(self.ledger, self.job.job_id)

    @rule()
    def finish(self) -> None:
        with suppress(LedgerError):
            self.ledger.set_job_state(self.job.job_key, JobState.FINISHED)

    @invariant()
    def ledger_is_well(self) -> None:
        results = check_job(self.ledger, self.job.job_id)
        assert [result for result in results if not result.is_ok] == []

    def open_samples(self, lease: Lease) -> Iterator[tuple[int, int]]:
        """Yield the samples of a shard that have no result: row 1 has two samples, row 2 three."""
        first, end = lease.first_row, lease.first_row + lease.num_rows
        done = self.ledger.done_samples(lease.job_key, range(first, end))
        for row_index in range(first, end):
            of_row = done.get(row_index)
            if of_row is None or not of_row.is_complete:
                known = set() if of_row is None else of_row.indices
                yield from ((row_index, i) for i in range(1 + row_index % 3) if i not in known)

    def result(self, row_index: int, sample_index: int, outcome: str) -> CompletionRow:
        row = MAKERS[outcome](row_index)
        return replace(row, sample_index=sample_index, num_samples=1 + row_index % 3)


def test_every_invariant_survives_any_sequence_of_operations(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("machine")
    with Ledger.open(f"sqlite:///{folder / 'ledger.sqlite'}") as ledger:
        LedgerMachine.ledger = ledger
        run_state_machine_as_test(
            LedgerMachine,
            settings=settings(
                max_examples=12, stateful_step_count=12, deadline=None,
                # Without shrinking: a dozen steps are readable, and each takes its time.
                phases=(Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
