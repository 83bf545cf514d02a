"""Loans without a job: whose wish they are, how long a request waited that ended one, and the operations on engines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("loans", sa.Column("without_job", sa.JSON()))
    op.add_column("loans", sa.Column("first_byte_seconds", sa.Double()))
    op.add_column("engines", sa.Column("pressure", sa.JSON()))
    op.add_column("engines", sa.Column("last_wake", sa.JSON()))
    op.create_table(
        "operations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("engine_id", sa.String(64), sa.ForeignKey("engines.id"), nullable=False),
        sa.Column("loan_id", sa.String(64), sa.ForeignKey("loans.id"), nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_operations_loan_id", "operations", ["loan_id"])
    op.create_index("ix_operations_created_at", "operations", ["created_at"])


def downgrade() -> None:
    op.drop_table("operations")
    op.drop_column("engines", "last_wake")
    op.drop_column("engines", "pressure")
    op.drop_column("loans", "first_byte_seconds")
    op.drop_column("loans", "without_job")
