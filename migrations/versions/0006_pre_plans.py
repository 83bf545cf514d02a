"""What an engine's parks were seen to do, and the plans that a loan was opened with; null: nobody said."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("learned", sa.JSON()))
    op.add_column("loans", sa.Column("plans", sa.JSON()))


def downgrade() -> None:
    op.drop_column("loans", "plans")
    op.drop_column("engines", "learned")
