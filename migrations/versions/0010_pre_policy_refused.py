"""Whether a gate sees requests while it is closed, and why an agent does not obey a policy; null: it does not tell."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("engines", sa.Column("tells_requests", sa.Boolean()))
    op.add_column("engines", sa.Column("policy_refused", sa.JSON()))


def downgrade() -> None:
    op.drop_column("engines", "policy_refused")
    op.drop_column("engines", "tells_requests")
