"""Who drives a job; several samples of a row; what was asked; texts of finished turns."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# What an older ledger's rows get; a new row always names its own.
_NO_LEASE = sa.text("0")
_ONE_SAMPLE = sa.text("1")


def upgrade() -> None:
    """Add the columns; each row of an older ledger had one sample and no lease."""
    op.add_column("jobs", sa.Column("lease_owner", sa.Text(), nullable=True))
    op.add_column(
        "jobs",
        sa.Column("lease_epoch", sa.BigInteger(), nullable=False, server_default=_NO_LEASE),
    )
    op.add_column("jobs", sa.Column("lease_seconds", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("heartbeat_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("forked_from", sa.Text(), nullable=True))
    op.add_column(
        "completions",
        sa.Column("num_samples", sa.BigInteger(), nullable=False, server_default=_ONE_SAMPLE),
    )
    op.add_column(
        "completions",
        sa.Column("is_truncated", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column("completions", sa.Column("request_hash", sa.LargeBinary(), nullable=True))
    op.add_column("partials", sa.Column("text", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("partials", "text")
    for name in ("request_hash", "is_truncated", "num_samples"):
        op.drop_column("completions", name)
    for name in ("forked_from", "heartbeat_at", "lease_seconds", "lease_epoch", "lease_owner"):
        op.drop_column("jobs", name)
