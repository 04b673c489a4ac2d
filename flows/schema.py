"""The tables of the ledger.

Times are UTC epoch seconds. Text that comes from outside is OutsideText, so that whatever it holds
comes back. Alembic migrations in flows.migrations create exactly these tables; a test compares
the two.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from flows.column_types import OutsideText, TokenIds
from flows.logprob_blob import LogprobsBlob, StoredLogprobs


class RowState(StrEnum):
    """How a finished (row, sample) ended."""

    OK = "ok"
    ERROR = "error"
    SKIPPED = "skipped"


class JobState(StrEnum):
    """Where a job stands; interrupted and failed jobs can be resumed."""

    PLANNED = "planned"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    FINISHED = "finished"


class ShardState(StrEnum):
    """Where a shard stands; only a running shard has a lease."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Base(DeclarativeBase):
    """Root of the tables; constraints have names, so that later migrations can change them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger(),
        float: Double(),
        bool: Boolean(),
        bytes: LargeBinary(),
        dict[str, Any]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
        JobState: Text(),
        ShardState: Text(),
        RowState: Text(),
    }


class JobTable(Base):
    """One job: what it is, what it was started with, how far it got, and who drives it.

    num_rows and the counters of states count rows, not samples. forked_from is the job whose
    answers were taken over.
    """

    __tablename__ = "jobs"

    job_key: Mapped[int] = mapped_column(Integer, primary_key=True)
    job_id: Mapped[str] = mapped_column(unique=True)
    group_id: Mapped[str | None]
    engine_name: Mapped[str]
    config: Mapped[dict[str, Any]]
    seed: Mapped[int]
    fingerprint: Mapped[dict[str, Any]]
    manifest_hash: Mapped[str]
    state: Mapped[JobState]
    num_shards: Mapped[int]
    num_rows: Mapped[int]
    num_ok: Mapped[int]
    num_error: Mapped[int]
    num_skipped: Mapped[int]
    num_prompt_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    lease_owner: Mapped[str | None]
    lease_epoch: Mapped[int]
    lease_seconds: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    forked_from: Mapped[str | None]


class ShardTable(Base):
    """A contiguous range of a job's rows, and the lease of whoever works on it.

    lease_epoch only ever grows: a commit that carries an older one is refused.
    """

    __tablename__ = "shards"

    job_key: Mapped[int] = mapped_column(
        Integer, ForeignKey("jobs.job_key", ondelete="CASCADE"), primary_key=True
    )
    shard_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[ShardState]
    first_row: Mapped[int]
    num_rows: Mapped[int]
    num_ok: Mapped[int]
    num_error: Mapped[int]
    num_skipped: Mapped[int]
    num_prompt_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    attempt: Mapped[int]
    lease_owner: Mapped[str | None]
    lease_epoch: Mapped[int]
    lease_seconds: Mapped[float | None]
    heartbeat_at: Mapped[float | None]
    flow_run_id: Mapped[str | None]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    busy_seconds: Mapped[float]
    stats: Mapped[dict[str, Any] | None]
    error_message: Mapped[str | None] = mapped_column(OutsideText)


class CompletionTable(Base):
    """The finished mark of one (row, sample); its text is in the payload.

    A row is done when num_samples of its samples are there. request_hash says what was asked:
    two rows with one hash have the same prompt and the same sampling.
    """

    __tablename__ = "completions"
    # Short rows that are read in the order of their key: SQLite keeps them in the key's tree.
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012

    job_key: Mapped[int] = mapped_column(
        Integer, ForeignKey("jobs.job_key", ondelete="CASCADE"), primary_key=True
    )
    row_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sample_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    row_id: Mapped[str] = mapped_column(OutsideText)
    state: Mapped[RowState]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None] = mapped_column(OutsideText)
    finish_reason: Mapped[str | None]
    num_prompt_tokens: Mapped[int]
    num_cached_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    attempt: Mapped[int]
    device: Mapped[str | None]
    committed_at: Mapped[float]
    num_samples: Mapped[int]
    is_truncated: Mapped[bool]
    request_hash: Mapped[bytes | None]


class PayloadTable(Base):
    """What was generated; written in the transaction of its completion, gone with it."""

    __tablename__ = "payloads"
    __table_args__ = (
        ForeignKeyConstraint(
            ["job_key", "row_index", "sample_index"],
            ["completions.job_key", "completions.row_index", "completions.sample_index"],
            ondelete="CASCADE",
        ),
    )

    job_key: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    row_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sample_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str | None] = mapped_column(OutsideText)
    token_ids: Mapped[Sequence[int] | None] = mapped_column(TokenIds)
    logprobs: Mapped[StoredLogprobs | None] = mapped_column(LogprobsBlob)
    turns: Mapped[list[str] | None]
    choices: Mapped[dict[str, Any] | None]


class PartialTable(Base):
    """Tokens of a sample that is being generated, one line for each turn.

    text is set for the turns that are finished. Gone in the transaction of the completion.
    """

    __tablename__ = "partials"

    job_key: Mapped[int] = mapped_column(
        Integer, ForeignKey("jobs.job_key", ondelete="CASCADE"), primary_key=True
    )
    row_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sample_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    turn_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    token_ids: Mapped[Sequence[int]] = mapped_column(TokenIds)
    logprobs: Mapped[StoredLogprobs | None] = mapped_column(LogprobsBlob)
    text: Mapped[str | None] = mapped_column(OutsideText)
    updated_at: Mapped[float]


class SuspectTable(Base):
    """A row that was in flight when a worker died."""

    __tablename__ = "suspects"

    job_key: Mapped[int] = mapped_column(
        Integer, ForeignKey("jobs.job_key", ondelete="CASCADE"), primary_key=True
    )
    row_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_crashes: Mapped[int]
    updated_at: Mapped[float]


class ExperimentRow(MappedAsDataclass, Base, kw_only=True):
    """One run of a job, in columns that people compare; table and record in one.

    num_rows, num_ok, num_error, num_skipped, num_prompt_tokens, num_output_tokens and the
    percentiles are of the whole job; num_new_* are of this run alone, and so are the seconds and
    the tokens per second (per busy second: loading the model does not count).
    """

    __tablename__ = "experiments"

    experiment_id: Mapped[str] = mapped_column(primary_key=True)
    job_key: Mapped[int | None] = mapped_column(
        Integer, ForeignKey("jobs.job_key", ondelete="SET NULL"), index=True
    )
    job_id: Mapped[str]
    name: Mapped[str]
    attempt: Mapped[int]
    created_at: Mapped[float]
    job_state: Mapped[str]
    host: Mapped[str]
    model: Mapped[str]
    device: Mapped[str]
    dtype: Mapped[str]
    num_shards: Mapped[int]
    max_num_seqs: Mapped[int | None]
    max_num_batched_tokens: Mapped[int | None]
    num_rows: Mapped[int]
    num_ok: Mapped[int]
    num_error: Mapped[int]
    num_skipped: Mapped[int]
    num_prompt_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    num_new_rows: Mapped[int]
    num_new_prompt_tokens: Mapped[int]
    num_new_output_tokens: Mapped[int]
    prompt_tokens_p50: Mapped[int | None]
    prompt_tokens_p95: Mapped[int | None]
    prompt_tokens_max: Mapped[int | None]
    output_tokens_p50: Mapped[int | None]
    output_tokens_p95: Mapped[int | None]
    output_tokens_max: Mapped[int | None]
    wall_seconds: Mapped[float]
    busy_seconds: Mapped[float]
    input_tokens_per_second: Mapped[float | None]
    output_tokens_per_second: Mapped[float | None]
    total_tokens_per_second: Mapped[float | None]
    config: Mapped[dict[str, Any]]
    stats: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
