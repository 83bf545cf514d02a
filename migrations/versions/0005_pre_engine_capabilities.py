"""What an engine can do, by its own word; null: it was not asked yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("capabilities", sa.JSON()))


def downgrade() -> None:
    op.drop_column("engines", "capabilities")
