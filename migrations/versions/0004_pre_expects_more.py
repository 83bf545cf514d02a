"""What a node was told of jobs that wait for a loan; null: nothing that it still knows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("loans", sa.Column("expects_more", sa.Boolean()))


def downgrade() -> None:
    op.drop_column("loans", "expects_more")
