"""What a node adds to the need of every job on a device; null: its agent does not tell."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("spawn_margin_bytes", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("devices", "spawn_margin_bytes")
