"""Which rows of a job are looked at again: so many that are ok, chosen by a seed."""

import math
import random
import re
from dataclasses import dataclass

from sqlalchemy import func, select

from engine import ConfigError, LedgerError
from flows.ledger import Ledger
from flows.ledger_rows import JobRow
from flows.schema import CompletionTable, RowState

_FETCH_ROWS = 1000


@dataclass(frozen=True, slots=True)
class SampleSize:
    """How many rows are run again: a share of those that are ok, or a number."""

    share: float | None = None
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> "SampleSize":
        """Read `1%`, `0.01` or `50`.

        Raises:
            ConfigError: it is something else.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
        if match is not None:
            value, is_percent = float(match[1]), bool(match[2])
            if not is_percent and "." not in match[1] and value >= 1:
                return cls(number=int(value))
            share = value / 100 if is_percent else value
            if 0 < share <= 1:
                return cls(share=share)
        raise ConfigError(
            f"--sample {text!r}: wanted a share of the rows, 1% or 0.01, or a number of rows, 50"
        )

    def of(self, num_rows: int) -> int:
        """Return how many of so many rows; of a share, at least one."""
        if self.number is not None:
            return min(self.number, num_rows)
        return max(1, math.ceil((self.share or 0.0) * num_rows))


def choose_rows(ledger: Ledger, job: JobRow, size: SampleSize, seed: int) -> tuple[int, list[int]]:
    """Return how many rows are ok with all their samples, and the chosen ones in order.

    Raises:
        LedgerError: no row is ok.
    """
    table = CompletionTable
    ok_rows = (
        select(table.row_index)
        .where(table.job_key == job.job_key)
        .group_by(table.row_index)
        .having(
            func.count() >= func.max(table.num_samples),
            func.min(table.state) == RowState.OK,
            func.max(table.state) == RowState.OK,
        )
    )
    with ledger.database.read(fetch_rows=_FETCH_ROWS) as connection:
        total = connection.execute(
            select(func.count()).select_from(ok_rows.subquery())
        ).scalar_one()
        if not total:
            raise LedgerError(f"job {job.job_id!r} has no row that is ok: nothing to verify")
        ranks = set(random.Random(seed).sample(range(total), size.of(total)))
        rows = connection.scalars(ok_rows.order_by(table.row_index))
        return total, [row for rank, row in enumerate(rows) if rank in ranks]
