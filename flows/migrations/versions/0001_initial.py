"""The first schema: jobs, shards, completions, payloads, partials, suspects, experiments."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    """Create every table."""
    _create_jobs()
    _create_shards()
    _create_completions()
    _create_payloads()
    _create_partials()
    _create_suspects()
    _create_experiments()


def downgrade() -> None:
    """Drop every table."""
    for name in (
        "experiments",
        "suspects",
        "partials",
        "payloads",
        "completions",
        "shards",
        "jobs",
    ):
        op.drop_table(name)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column("engine_name", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("manifest_hash", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("num_shards", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_ok", sa.BigInteger(), nullable=False),
        sa.Column("num_error", sa.BigInteger(), nullable=False),
        sa.Column("num_skipped", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_key", name="pk_jobs"),
        sa.UniqueConstraint("job_id", name="uq_jobs_job_id"),
    )


def _create_shards() -> None:
    op.create_table(
        "shards",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("shard_index", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("first_row", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_ok", sa.BigInteger(), nullable=False),
        sa.Column("num_error", sa.BigInteger(), nullable=False),
        sa.Column("num_skipped", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_epoch", sa.BigInteger(), nullable=False),
        sa.Column("lease_seconds", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("flow_run_id", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("busy_seconds", sa.Double(), nullable=False),
        sa.Column("stats", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_key"], ["jobs.job_key"], name="fk_shards_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_key", "shard_index", name="pk_shards"),
    )


def _create_completions() -> None:
    op.create_table(
        "completions",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("sample_index", sa.BigInteger(), nullable=False),
        sa.Column("row_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_key"], ["jobs.job_key"], name="fk_completions_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_key", "row_index", "sample_index", name="pk_completions"),
        sqlite_with_rowid=False,
    )


def _create_payloads() -> None:
    op.create_table(
        "payloads",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("sample_index", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("turns", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("choices", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_key", "row_index", "sample_index"],
            ["completions.job_key", "completions.row_index", "completions.sample_index"],
            name="fk_payloads_completions",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_key", "row_index", "sample_index", name="pk_payloads"),
    )


def _create_partials() -> None:
    op.create_table(
        "partials",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("sample_index", sa.BigInteger(), nullable=False),
        sa.Column("turn_index", sa.BigInteger(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_key"], ["jobs.job_key"], name="fk_partials_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "job_key", "row_index", "sample_index", "turn_index", name="pk_partials"
        ),
    )


def _create_suspects() -> None:
    op.create_table(
        "suspects",
        sa.Column("job_key", sa.Integer(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("num_crashes", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_key"], ["jobs.job_key"], name="fk_suspects_jobs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_key", "row_index", name="pk_suspects"),
    )


def _create_experiments() -> None:
    op.create_table(
        "experiments",
        *_experiment_identity(),
        *_experiment_measures(),
        sa.ForeignKeyConstraint(
            ["job_key"], ["jobs.job_key"], name="fk_experiments_jobs", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("experiment_id", name="pk_experiments"),
    )
    op.create_index("ix_experiments_job_key", "experiments", ["job_key"], unique=False)


def _experiment_identity() -> list[sa.Column[Any]]:
    return [
        sa.Column("experiment_id", sa.Text(), nullable=False),
        sa.Column("job_key", sa.Integer(), nullable=True),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("job_state", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("num_shards", sa.BigInteger(), nullable=False),
        sa.Column("max_num_seqs", sa.BigInteger(), nullable=True),
        sa.Column("max_num_batched_tokens", sa.BigInteger(), nullable=True),
    ]


def _experiment_measures() -> list[sa.Column[Any]]:
    return [
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_ok", sa.BigInteger(), nullable=False),
        sa.Column("num_error", sa.BigInteger(), nullable=False),
        sa.Column("num_skipped", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_new_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_new_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_new_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens_p50", sa.BigInteger(), nullable=True),
        sa.Column("prompt_tokens_p95", sa.BigInteger(), nullable=True),
        sa.Column("prompt_tokens_max", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens_p50", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens_p95", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens_max", sa.BigInteger(), nullable=True),
        sa.Column("wall_seconds", sa.Double(), nullable=False),
        sa.Column("busy_seconds", sa.Double(), nullable=False),
        sa.Column("input_tokens_per_second", sa.Double(), nullable=True),
        sa.Column("output_tokens_per_second", sa.Double(), nullable=True),
        sa.Column("total_tokens_per_second", sa.Double(), nullable=True),
        sa.Column("config", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("stats", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("versions", sa.JSON(none_as_null=True), nullable=False),
    ]
