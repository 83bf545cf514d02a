"""Which start of an agent said what, which directory it lives in, and the last bytes of ended attempts' logs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("start_id", sa.String(length=64), server_default="", nullable=False))
    op.add_column("nodes", sa.Column("home", sa.Text(), server_default="", nullable=False))
    op.add_column("occupancy", sa.Column("start_id", sa.String(length=64), server_default="", nullable=False))
    op.add_column("occupancy", sa.Column("report_no", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "log_tails",
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("stream", sa.String(length=8), nullable=False),
        sa.Column("start_offset", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("kept_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_log_tails_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("attempt_id", "stream", name=op.f("pk_log_tails")),
    )
    op.create_index(op.f("ix_log_tails_kept_at"), "log_tails", ["kept_at"], unique=False)


def downgrade() -> None:
    op.drop_table("log_tails")
    op.drop_column("occupancy", "report_no")
    op.drop_column("occupancy", "start_id")
    op.drop_column("nodes", "home")
    op.drop_column("nodes", "start_id")
