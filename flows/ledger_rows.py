"""What goes into the ledger and what comes out of it: frozen records, no SQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from flows.logprob_blob import StoredLogprobs
from flows.schema import JobState, RowState, ShardState


class CompletionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finished (row, sample). num_output_tokens counts the tokens that ended texts too.

    turns are the replies of a conversation before the last, whose reply is the text. A row that
    failed has those that were there before. The row is done when num_samples of its samples are.
    request_hash is what IndexRow holds; is_truncated tells that its prompt was cut.
    """

    row_index: int
    sample_index: int = 0
    row_id: str
    state: RowState
    error_code: str | None = None
    error_message: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    text: str | None = None
    token_ids: Sequence[int] = ()
    turns: tuple[str, ...] = ()
    logprobs: StoredLogprobs | None = None
    num_samples: int = 1
    is_truncated: bool = False
    request_hash: bytes | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Return what tells it from every other completion of the job."""
        return (self.row_index, self.sample_index)


class DoneSamples(NamedTuple):
    """The samples of a row that have a result, out of so many."""

    indices: set[int]
    num_samples: int

    @property
    def is_complete(self) -> bool:
        """True when the row is done."""
        return len(self.indices) >= self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a job is created with. config is the resolved one, without secrets."""

    job_id: str
    config: dict[str, Any]
    seed: int
    fingerprint: dict[str, str]
    manifest_hash: str
    num_rows: int
    num_shards: int
    group_id: str | None = None
    engine_name: str = "default"
    forked_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as it stood when it was read. lease_owner is the process that drives it, if any."""

    job_key: int
    job_id: str
    group_id: str | None
    engine_name: str
    config: dict[str, Any]
    seed: int
    fingerprint: dict[str, str]
    manifest_hash: str
    state: JobState
    num_shards: int
    num_rows: int
    num_ok: int
    num_error: int
    num_skipped: int
    num_prompt_tokens: int
    num_output_tokens: int
    created_at: float
    updated_at: float
    lease_owner: str | None
    lease_seconds: float | None
    heartbeat_at: float | None
    forked_from: str | None

    @property
    def num_pending(self) -> int:
        """Rows that have no result yet."""
        return self.num_rows - self.num_ok - self.num_error - self.num_skipped

    def shard_of(self, row_index: int) -> int:
        """Return the index of the shard that the row belongs to."""
        return row_index * self.num_shards // self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """A shard as it stood when it was read; it covers rows first_row to first_row + num_rows - 1.

    lease_owner is None when nobody holds it. busy_seconds is the sum over all attempts, stats
    are those of the last one.
    """

    job_key: int
    shard_index: int
    state: ShardState
    first_row: int
    num_rows: int
    num_ok: int
    num_error: int
    num_skipped: int
    num_prompt_tokens: int
    num_output_tokens: int
    attempt: int
    lease_owner: str | None
    lease_epoch: int
    lease_seconds: float | None
    heartbeat_at: float | None
    flow_run_id: str | None
    started_at: float | None
    finished_at: float | None
    busy_seconds: float
    stats: dict[str, Any] | None
    error_message: str | None

    @property
    def num_pending(self) -> int:
        """Rows that have no result yet."""
        return self.num_rows - self.num_ok - self.num_error - self.num_skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to commit rows of one shard, until somebody else raises its epoch.

    num_done is how many of its rows had a result when it was taken.
    """

    job_key: int
    shard_index: int
    epoch: int
    owner: str
    attempt: int
    first_row: int
    num_rows: int
    num_done: int

    def covers(self, row_index: int) -> bool:
        """Tell whether the row belongs to the shard."""
        return self.first_row <= row_index < self.first_row + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLease:
    """The right to drive a job: to give out its shards, and to say how it ended."""

    job_key: int
    epoch: int
    owner: str


class PartialRow(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of one turn of a sample that has no result yet.

    text is that of a finished turn, None while it is generated.
    """

    row_index: int
    sample_index: int = 0
    turn_index: int = 0
    token_ids: Sequence[int] = ()
    logprobs: StoredLogprobs | None = None
    text: str | None = None
