"""The first tables, the leader's row and the counter of events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_counters()
    _create_events()
    _create_idempotency_keys()
    _create_jobs()
    _create_leader()
    _create_nodes()
    _create_devices()
    _create_engines()
    _create_loans()
    _create_orders()
    _create_attempts()
    _create_loan_devices()
    _create_loan_steps()
    _create_occupancy()
    op.bulk_insert(
        sa.table("leader", sa.column("id"), sa.column("term"), sa.column("holder"), sa.column("expires_at")),
        [{"id": 1, "term": 0, "holder": "", "expires_at": 0.0}],
    )
    op.bulk_insert(sa.table("counters", sa.column("name"), sa.column("value")), [{"name": "events", "value": 0}])


def _create_counters() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("attempt_id", sa.String(length=64), nullable=True),
        sa.Column("loan_id", sa.String(length=64), nullable=True),
        sa.Column("engine_id", sa.String(length=64), nullable=True),
        sa.Column("device_id", sa.String(length=64), nullable=True),
        sa.Column("node_id", sa.String(length=64), nullable=True),
        sa.Column("from_state", sa.String(length=32), nullable=True),
        sa.Column("to_state", sa.String(length=32), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
    )


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("principal", sa.String(length=200), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("principal", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"], unique=False)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("argv", sa.JSON(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("workdir", sa.Text(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("hbm_bytes", sa.BigInteger(), nullable=True),
        sa.Column("time_limit_seconds", sa.Double(), nullable=True),
        sa.Column("kill_grace_seconds", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("reasons", sa.JSON(), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("trouble", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("trouble_count", sa.Integer(), nullable=False),
        sa.Column("assigned_loan_id", sa.String(length=64), nullable=True),
        sa.Column("loan_id", sa.String(length=64), nullable=True),
        sa.Column("stop_wanted", sa.Boolean(), nullable=False),
        sa.Column("cleanup_state", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("engine_restore_state", sa.String(length=32), nullable=True),
        sa.Column("submitted_by", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "state IN ("
            "'held', 'queued', 'starting', 'running', 'stopping', 'succeeded', 'failed', "
            "'cancelled', 'timed_out'"
            ")",
            name=op.f("ck_jobs_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(
        "ix_jobs_state_shape", "jobs", ["state", "gpus", "hbm_bytes", "priority", "created_at"], unique=False
    )


def _create_leader() -> None:
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )


def _create_nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("protocol_version", sa.Integer(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("machine_id", sa.Text(), nullable=False),
        sa.Column("journal_id", sa.Text(), nullable=False),
        sa.Column("journal_before_id", sa.Text(), nullable=True),
        sa.Column("boot_before_id", sa.Text(), nullable=True),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("confirmed_incarnation", sa.BigInteger(), nullable=False),
        sa.Column("acknowledged", sa.BigInteger(), nullable=False),
        sa.Column("order_seq", sa.BigInteger(), nullable=False),
        sa.Column("fence_seq", sa.BigInteger(), nullable=False),
        sa.Column("heard_count", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("silent_since", sa.Double(), nullable=True),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )


def _create_devices() -> None:
    op.create_table(
        "devices",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=False),
        sa.Column("free_bytes", sa.BigInteger(), nullable=False),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("quarantined", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("observed_at", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("present", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_devices_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_node_id"), "devices", ["node_id"], unique=False)


def _create_engines() -> None:
    op.create_table(
        "engines",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("device_ids", sa.JSON(), nullable=False),
        sa.Column("supervised", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("gate", sa.String(length=32), nullable=False),
        sa.Column("verified", sa.Boolean(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=True),
        sa.Column("device_bytes", sa.JSON(), nullable=False),
        sa.Column("residual_bytes", sa.JSON(), nullable=False),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=True),
        sa.Column("reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("policy_version_in_force", sa.Integer(), nullable=False),
        sa.Column("policy_locked", sa.Boolean(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("trouble", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("trouble_count", sa.Integer(), nullable=False),
        sa.Column("present", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_engines_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engines")),
    )
    op.create_index(op.f("ix_engines_name"), "engines", ["name"], unique=False)
    op.create_index(op.f("ix_engines_node_id"), "engines", ["node_id"], unique=False)


def _create_loans() -> None:
    op.create_table(
        "loans",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("device_ids", sa.JSON(), nullable=False),
        sa.Column("engine_ids", sa.JSON(), nullable=False),
        sa.Column("need_bytes", sa.BigInteger(), nullable=False),
        sa.Column("room_bytes", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("engine_lost", sa.Boolean(), nullable=False),
        sa.Column("policies", sa.JSON(), nullable=False),
        sa.Column("restore_by_seconds", sa.Double(), nullable=True),
        sa.Column("recall_ordered", sa.Boolean(), nullable=False),
        sa.Column("reported", sa.Boolean(), nullable=False),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("missing_incarnation", sa.BigInteger(), nullable=True),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "state IN ("
            "'draining', 'parking', 'settling', 'lent', 'recalling', 'waking', 'verifying', "
            "'faulted', 'closed'"
            ")",
            name=op.f("ck_loans_state"),
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_loans_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_loans")),
    )
    op.create_index(
        "ix_loans_open",
        "loans",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("state <> 'closed'"),
        postgresql_where=sa.text("state <> 'closed'"),
    )


def _create_orders() -> None:
    op.create_table(
        "orders",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("loan_id", sa.String(length=64), nullable=True),
        sa.Column("attempt_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("answered_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_orders_node_id_nodes")),
        sa.PrimaryKeyConstraint("node_id", "seq", name=op.f("pk_orders")),
    )
    op.create_index(op.f("ix_orders_created_at"), "orders", ["created_at"], unique=False)


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("loan_id", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("device_ids", sa.JSON(), nullable=False),
        sa.Column("hbm_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("end", sa.String(length=32), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("peak_hbm_bytes", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("cleanup", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("stop_ordered", sa.Boolean(), nullable=False),
        sa.Column("reported", sa.Boolean(), nullable=False),
        sa.Column("doubt", sa.Boolean(), nullable=False),
        sa.Column("missing_incarnation", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "state IN ('placed', 'starting', 'running', 'suspended', 'stopping', 'ended', 'unknown')",
            name=op.f("ck_attempts_state"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs")),
        sa.ForeignKeyConstraint(["loan_id"], ["loans.id"], name=op.f("fk_attempts_loan_id_loans")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_attempts_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "attempt_no", name=op.f("uq_attempts_job_id_attempt_no")),
    )
    op.create_index(
        "ix_attempts_live",
        "attempts",
        ["node_id"],
        unique=False,
        sqlite_where=sa.text("state <> 'ended'"),
        postgresql_where=sa.text("state <> 'ended'"),
    )
    op.create_index(op.f("ix_attempts_loan_id"), "attempts", ["loan_id"], unique=False)
    op.create_index(
        "uq_attempts_live",
        "attempts",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text("state <> 'ended'"),
        postgresql_where=sa.text("state <> 'ended'"),
    )


def _create_loan_devices() -> None:
    op.create_table(
        "loan_devices",
        sa.Column("loan_id", sa.String(length=64), nullable=False),
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["loan_id"], ["loans.id"], name=op.f("fk_loan_devices_loan_id_loans")),
        sa.PrimaryKeyConstraint("loan_id", "device_id", name=op.f("pk_loan_devices")),
    )
    op.create_index(
        "uq_loan_devices_open",
        "loan_devices",
        ["device_id"],
        unique=True,
        sqlite_where=sa.text("open"),
        postgresql_where=sa.text("open"),
    )


def _create_loan_steps() -> None:
    op.create_table(
        "loan_steps",
        sa.Column("loan_id", sa.String(length=64), nullable=False),
        sa.Column("report_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.String(length=32), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=True),
        sa.Column("attempt_id", sa.String(length=64), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("monotonic_seconds", sa.Double(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["loan_id"], ["loans.id"], name=op.f("fk_loan_steps_loan_id_loans")),
        sa.PrimaryKeyConstraint("loan_id", "report_id", name=op.f("pk_loan_steps")),
    )


def _create_occupancy() -> None:
    op.create_table(
        "occupancy",
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=True),
        sa.Column("loan_id", sa.String(length=64), nullable=True),
        sa.CheckConstraint(
            "kind IN ("
            "'serving', 'idle', 'draining', 'parking', 'settling', 'job', 'recalling', "
            "'waking', 'verifying', 'faulted', 'empty', 'foreign', 'quarantined', 'unknown'"
            ")",
            name=op.f("ck_occupancy_kind"),
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name=op.f("fk_occupancy_device_id_devices")),
        sa.PrimaryKeyConstraint("device_id", "no", name=op.f("pk_occupancy")),
    )
    op.create_index("ix_occupancy_ended_at", "occupancy", ["ended_at"], unique=False)
    op.create_index(
        "uq_occupancy_open",
        "occupancy",
        ["device_id"],
        unique=True,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def downgrade() -> None:
    for table in (
        "occupancy",
        "loan_steps",
        "loan_devices",
        "attempts",
        "orders",
        "loans",
        "engines",
        "devices",
        "nodes",
        "leader",
        "jobs",
        "idempotency_keys",
        "events",
        "counters",
    ):
        op.drop_table(table)
