"""The tables. Enumerations are checked by the database from the same enums that the code uses.

Times are seconds since the epoch. JSON columns hold what is only shown or passed on, never what is searched.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from ..agents.protocol.loans import LoanState
from ..agents.protocol.wire import AttemptState, OccupancyKind
from .lifecycle import JobState

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ID = String(64)


def _one_of(column: str, enum: type[StrEnum]) -> CheckConstraint:
    values = ", ".join(f"'{member.value}'" for member in enum)
    return CheckConstraint(f"{column} IN ({values})", name=column)


nodes = Table(
    "nodes",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("protocol_version", Integer, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("machine_id", Text, nullable=False),
    Column("journal_id", Text, nullable=False),
    Column("journal_before_id", Text),  # until the registration that brought a new journal is in use
    Column("boot_before_id", Text),
    Column("incarnation", BigInteger, nullable=False),
    Column("confirmed_incarnation", BigInteger, nullable=False),  # the registration that the agent really uses
    Column("acknowledged", BigInteger, nullable=False),  # reports of this journal up to here are in
    # Those up to here waited at the node when it registered.
    Column("newest_report", BigInteger, nullable=False, server_default="0"),
    Column("order_seq", BigInteger, nullable=False),  # the last one given
    Column("fence_seq", BigInteger, nullable=False),  # orders up to here are over
    Column("heard_count", BigInteger, nullable=False),
    Column("last_seen_at", Double, nullable=False),
    Column("silent_since", Double),
    Column("registered_at", Double, nullable=False),
    Column("start_id", ID, nullable=False, server_default=""),  # of the agent process that registered last
    Column("home", Text, nullable=False, server_default=""),  # and of its data directory
)

devices = Table(
    "devices",
    metadata,
    Column("id", ID, primary_key=True),
    Column("node_id", ID, ForeignKey("nodes.id"), nullable=False, index=True),
    Column("position", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("capacity_bytes", BigInteger, nullable=False),
    Column("free_bytes", BigInteger, nullable=False),
    Column("processes", JSON, nullable=False),
    Column("quarantined", JSON(none_as_null=True)),
    Column("observed_at", Double, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("present", Boolean, nullable=False),  # in the node's last registration
    Column("spawn_margin_bytes", BigInteger),  # what its node adds to the need of every job; null: it does not tell
    # After a loan that was refused there, with no engine on it.
    Column("not_before", Double, nullable=False, server_default="0"),
    Column("trouble", JSON(none_as_null=True)),
    Column("trouble_count", Integer, nullable=False, server_default="0"),
)

engines = Table(
    "engines",
    metadata,
    Column("id", ID, primary_key=True),
    Column("node_id", ID, ForeignKey("nodes.id"), nullable=False, index=True),
    Column("name", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("models", JSON, nullable=False),
    Column("device_ids", JSON, nullable=False),
    Column("supervised", Boolean, nullable=False),
    Column("state", String(32), nullable=False),
    Column("gate", String(32), nullable=False),
    Column("verified", Boolean, nullable=False),
    Column("incarnation", Text),
    Column("device_bytes", JSON, nullable=False),
    Column("residual_bytes", JSON, nullable=False),
    Column("capabilities", JSON(none_as_null=True)),  # null: its agent has not asked it yet
    Column("learned", JSON(none_as_null=True)),  # what its parks were seen to do; null: its agent does not tell
    Column("processes", JSON, nullable=False),
    Column("endpoint", Text),
    Column("reason", JSON(none_as_null=True)),
    Column("policy", JSON, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("policy_version_in_force", Integer, nullable=False),
    Column("policy_locked", Boolean, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("trouble", JSON(none_as_null=True)),
    Column("trouble_count", Integer, nullable=False),
    Column("present", Boolean, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("pressure", JSON(none_as_null=True)),  # what its agent sees of host memory that is short
    Column("last_wake", JSON(none_as_null=True)),  # by a request
    Column("tells_requests", Boolean),  # whether its gate sees requests while it is closed; null: it does not tell
    Column("policy_refused", JSON(none_as_null=True)),  # by its agent: version, sentence
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", Text),
    Column("state", String(32), nullable=False),
    Column("argv", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("workdir", Text),
    Column("priority", Integer, nullable=False),
    Column("project", Text),
    Column("gpus", Integer, nullable=False),
    Column("hbm_bytes", BigInteger),
    Column("time_limit_seconds", Double),
    Column("kill_grace_seconds", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("queued_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("failure_reason", Text),
    Column("reasons", JSON, nullable=False),
    Column("attempt_no", Integer, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("trouble", JSON(none_as_null=True)),
    Column("trouble_count", Integer, nullable=False),
    Column("assigned_loan_id", ID),
    Column("loan_id", ID),
    Column("stop_wanted", Boolean, nullable=False),
    Column("cleanup_state", JSON(none_as_null=True)),
    Column("engine_restore_state", String(32)),
    Column("submitted_by", Text, nullable=False),
    _one_of("state", JobState),
    Index("ix_jobs_state_shape", "state", "gpus", "hbm_bytes", "priority", "created_at"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("principal", String(200), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("job_id", ID, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)

loans = Table(
    "loans",
    metadata,
    Column("id", ID, primary_key=True),
    Column("node_id", ID, ForeignKey("nodes.id"), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("device_ids", JSON, nullable=False),
    Column("engine_ids", JSON, nullable=False),
    Column("need_bytes", BigInteger, nullable=False),
    Column("room_bytes", JSON, nullable=False),
    Column("state", String(32), nullable=False),
    Column("reason", JSON(none_as_null=True)),
    Column("engine_lost", Boolean, nullable=False),
    Column("policies", JSON, nullable=False),  # the snapshot that rules it
    Column("plans", JSON(none_as_null=True)),  # by engine, of those whose park is predicted
    Column("restore_by_seconds", Double),
    Column("recall_ordered", Boolean, nullable=False),
    Column("expects_more", Boolean),  # what the node was last told; null: nothing that it still knows
    Column("reported", Boolean, nullable=False),  # the node has spoken of it
    Column("adopted", Boolean, nullable=False),  # from a registration that was ahead of the reports
    Column("missing_incarnation", BigInteger),  # the registration that did not list it
    Column("without_job", JSON(none_as_null=True)),  # the engines sleep: who wants it, and for how long
    Column("first_byte_seconds", Double),  # that the request waited which ended it
    Column("opened_at", Double, nullable=False),
    Column("closed_at", Double),
    _one_of("state", LoanState),
    Index(
        "ix_loans_open", "node_id", sqlite_where=text("state <> 'closed'"), postgresql_where=text("state <> 'closed'")
    ),
)

# What was asked of an engine and takes its time; how far it is, its loan says.
operations = Table(
    "operations",
    metadata,
    Column("id", ID, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("engine_id", ID, ForeignKey("engines.id"), nullable=False),
    Column("loan_id", ID, ForeignKey("loans.id"), nullable=False, index=True),
    Column("requested_by", Text, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)

loan_devices = Table(
    "loan_devices",
    metadata,
    Column("loan_id", ID, ForeignKey("loans.id"), primary_key=True),
    Column("device_id", ID, primary_key=True),
    Column("open", Boolean, nullable=False),
    # One open loan a device, whatever the code believes.
    Index("uq_loan_devices_open", "device_id", unique=True, sqlite_where=text("open"), postgresql_where=text("open")),
)

loan_steps = Table(
    "loan_steps",
    metadata,
    Column("loan_id", ID, ForeignKey("loans.id"), primary_key=True),
    Column("report_id", BigInteger, primary_key=True),
    Column("step", String(32), nullable=False),
    Column("engine_id", ID),
    Column("attempt_id", ID),
    Column("at", Double, nullable=False),
    Column("monotonic_seconds", Double, nullable=False),
    Column("data", JSON, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", ID, primary_key=True),
    Column("job_id", ID, ForeignKey("jobs.id"), nullable=False),
    Column("attempt_no", Integer, nullable=False),
    Column("loan_id", ID, ForeignKey("loans.id"), nullable=False, index=True),
    Column("node_id", ID, ForeignKey("nodes.id"), nullable=False),
    Column("device_ids", JSON, nullable=False),
    Column("hbm_bytes", BigInteger, nullable=False),
    Column("state", String(32), nullable=False),
    Column("end", String(32)),
    Column("exit_code", Integer),
    Column("signal", Integer),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("peak_hbm_bytes", BigInteger),
    Column("reason", JSON(none_as_null=True)),
    Column("cleanup", JSON(none_as_null=True)),
    Column("processes", JSON, nullable=False),
    Column("stop_ordered", Boolean, nullable=False),
    Column("reported", Boolean, nullable=False),  # the node has spoken of it
    Column("doubt", Boolean, nullable=False),  # reports that might have spoken of it were lost
    Column("missing_incarnation", BigInteger),  # the registration that did not list it
    UniqueConstraint("job_id", "attempt_no"),
    _one_of("state", AttemptState),
    # One attempt of a job that is not proved over.
    Index(
        "uq_attempts_live",
        "job_id",
        unique=True,
        sqlite_where=text("state <> 'ended'"),
        postgresql_where=text("state <> 'ended'"),
    ),
    Index(
        "ix_attempts_live",
        "node_id",
        sqlite_where=text("state <> 'ended'"),
        postgresql_where=text("state <> 'ended'"),
    ),
)

orders = Table(
    "orders",
    metadata,
    Column("node_id", ID, ForeignKey("nodes.id"), primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("body", JSON, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("loan_id", ID),
    Column("attempt_id", ID),
    Column("created_at", Double, nullable=False, index=True),
    Column("outcome", String(32)),
    Column("detail", Text),
    Column("answered_at", Double),
)

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("type", String(64), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("actor", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("job_id", ID),
    Column("attempt_id", ID),
    Column("loan_id", ID),
    Column("engine_id", ID),
    Column("device_id", ID),
    Column("node_id", ID),
    Column("from_state", String(32)),
    Column("to_state", String(32)),
    Column("data", JSON, nullable=False),
)

occupancy = Table(
    "occupancy",
    metadata,
    Column("device_id", ID, ForeignKey("devices.id"), primary_key=True),
    Column("no", BigInteger, primary_key=True, autoincrement=False),  # rises by one per device
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("kind", String(32), nullable=False),
    Column("owner_id", ID),
    Column("loan_id", ID),
    # Whose word it is: the start of an agent, and the number of the report. Empty: nobody saw the device.
    Column("start_id", ID, nullable=False, server_default=""),
    Column("report_no", BigInteger, nullable=False, server_default="0"),
    _one_of("kind", OccupancyKind),
    Index(
        "uq_occupancy_open",
        "device_id",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
    Index("ix_occupancy_ended_at", "ended_at"),
)

# The last bytes of each stream of an attempt that has ended, for when its node does not answer.
log_tails = Table(
    "log_tails",
    metadata,
    Column("attempt_id", ID, ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(8), primary_key=True),
    Column("start_offset", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("kept_at", Double, nullable=False, index=True),
)

leader = Table(
    "leader",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("expires_at", Double, nullable=False),  # by the database's clock
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
