"""The newest report that waited at the node when it registered: what it did not list may be told of there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("newest_report", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("nodes", "newest_report")
