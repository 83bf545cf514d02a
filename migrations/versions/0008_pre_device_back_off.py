"""Devices without an engine are left alone for a while after a loan that was refused there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("not_before", sa.Double(), nullable=False, server_default="0"))
    op.add_column("devices", sa.Column("trouble", sa.JSON()))
    op.add_column("devices", sa.Column("trouble_count", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("devices", "trouble_count")
    op.drop_column("devices", "trouble")
    op.drop_column("devices", "not_before")
