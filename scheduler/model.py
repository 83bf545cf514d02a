"""What the scheduler knows: the facts that ``decide`` looks at, and the rows that readers get.

All frozen. ``Snapshot`` and its facts carry only what a decision needs; the ``…Row`` types carry what people see.
Times are seconds since the epoch by the server's clock; no decision compares them with another machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from ..agents.protocol.capabilities import Capabilities
from ..agents.protocol.loans import LoanState, LoanStep
from ..agents.protocol.plans import Learned, Plan
from ..agents.protocol.policy import EnginePolicy
from ..agents.protocol.wire import AttemptEnd, AttemptState, EngineState, GateState, OccupancyKind, Reason, WithoutJob
from .lifecycle import JobState

JobId = NewType("JobId", str)
AttemptId = NewType("AttemptId", str)
LoanId = NewType("LoanId", str)
EngineId = NewType("EngineId", str)
DeviceId = NewType("DeviceId", str)
NodeId = NewType("NodeId", str)


@dataclass(frozen=True, slots=True)
class JobReason:
    """Why a job waits. ``next_check`` is when that is looked at again."""

    code: str
    sentence: str
    since: float
    next_check: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


# ---- facts for deciding ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    id: NodeId
    name: str
    up: bool  # registered, its registration is in use, and it is not silent
    silent: bool
    heard_count: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    id: DeviceId
    node_id: NodeId
    index: int
    capacity_bytes: int
    free_bytes: int
    foreign_bytes: int = 0  # held by processes that are neither an engine's nor a job's
    engine_bytes: int = 0  # held by engines when ``free_bytes`` was seen
    job_bytes: int = 0  # likewise by jobs
    margin_bytes: int | None = None  # the node keeps it free beside every job; None: its agent does not tell
    quarantined: bool = False
    not_before: float = 0.0
    trouble: Reason | None = None  # why not_before was set


@dataclass(frozen=True, slots=True)
class Engine:
    id: EngineId
    node_id: NodeId
    name: str
    device_ids: tuple[DeviceId, ...]
    state: EngineState
    gate: GateState
    verified: bool
    policy: EnginePolicy
    device_bytes: Mapping[str, int]
    residual_bytes: Mapping[str, int]
    idle_since: float | None = None  # None: serving, or not known
    not_before: float = 0.0
    trouble: Reason | None = None  # why not_before was set
    is_pressed: bool = False  # its node is short of host memory, and it has been idle for long enough
    refused: str | None = None  # why its policy cannot be honoured, by what the engine says it can do
    capabilities: Capabilities | None = None  # None: it was not asked yet, so it is parked whole
    learned: Learned | None = None  # what its parks were seen to do


@dataclass(frozen=True, slots=True)
class Job:
    """A queued job."""

    id: JobId
    priority: int
    created_at: float
    gpus: int
    hbm_bytes: int | None
    attempt_no: int = 0
    not_before: float = 0.0
    trouble: Reason | None = None  # why the last attempt did not run
    assigned_loan_id: LoanId | None = None  # the loan whose set this job joined when it opened
    reasons: tuple[JobReason, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that is not proved over."""

    id: AttemptId
    job_id: JobId
    loan_id: LoanId
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]
    hbm_bytes: int
    state: AttemptState
    stop_wanted: bool = False
    stop_ordered: bool = False


@dataclass(frozen=True, slots=True)
class Loan:
    """A loan that is not closed."""

    id: LoanId
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]
    engine_ids: tuple[EngineId, ...]
    state: LoanState
    need_bytes: int
    room_bytes: Mapping[DeviceId, int]  # as planned when it opened
    is_narrow: bool = False  # its plan leaves tags of an engine where they are
    recall_ordered: bool = False
    expects_more: bool | None = None  # what the node was told of jobs that wait for it; None: nothing it still knows
    engine_lost: bool = False
    without_job: WithoutJob | None = None
    takes_no_more: bool = False  # its node said so of an attempt


@dataclass(frozen=True, slots=True)
class Snapshot:
    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    engines: tuple[Engine, ...] = ()
    jobs: tuple[Job, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    loans: tuple[Loan, ...] = ()


# ---- rows for readers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitResult:
    job_id: JobId
    replayed: bool  # the Idempotency-Key had been seen with the same body


@dataclass(frozen=True, slots=True)
class AttemptRow:
    id: AttemptId
    job_id: JobId
    no: int
    loan_id: LoanId
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]
    hbm_bytes: int
    state: AttemptState  # `unknown` while its node is silent
    end: AttemptEnd | None
    exit_code: int | None
    signal: int | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    peak_hbm_bytes: int | None
    reason: Reason | None
    cleanup: Reason | None


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last bytes of a stream of an attempt that has ended, as they are kept here."""

    offset: int  # of the first byte
    data: bytes
    node_silent: bool


@dataclass(frozen=True, slots=True)
class JobRow:
    id: JobId
    name: str | None
    state: JobState
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str | None
    priority: int
    project: str | None
    gpus: int
    hbm_bytes: int | None
    time_limit_seconds: float | None
    kill_grace_seconds: float
    created_at: float
    queued_at: float
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    signal: int | None
    failure_reason: str | None
    reasons: tuple[JobReason, ...]
    attempt_no: int
    loan_id: LoanId | None  # of the last attempt
    cleanup_state: Reason | None
    engine_restore_state: str | None  # faulted, restored, failed
    submitted_by: str
    attempts: tuple[AttemptRow, ...] = ()  # newest last; empty in lists


@dataclass(frozen=True, slots=True)
class DeviceRow:
    id: DeviceId
    node_id: NodeId
    index: int
    kind: str
    capacity_bytes: int
    free_bytes: int
    quarantined: Reason | None
    processes: tuple[Mapping[str, Any], ...]
    observed_at: float
    occupancy: OccupancyKind
    occupancy_since: float | None
    owner_id: str | None
    loan_id: LoanId | None


@dataclass(frozen=True, slots=True)
class EngineRow:
    id: EngineId
    node_id: NodeId
    name: str
    kind: str
    models: tuple[str, ...]
    device_ids: tuple[DeviceId, ...]
    supervised: bool
    state: EngineState
    gate: GateState
    verified: bool
    incarnation: str | None
    device_bytes: Mapping[str, int]
    residual_bytes: Mapping[str, int]
    capabilities: Capabilities | None
    learned: Learned | None
    processes: Mapping[str, Any]
    endpoint: str | None
    reason: Reason | None
    policy: EnginePolicy
    policy_version: int
    policy_version_in_force: int
    policy_locked: bool
    not_before: float  # back-off after a park that failed
    loan_id: LoanId | None  # the open loan that holds it
    updated_at: float
    last_wake: Mapping[str, Any] | None = None  # by a request: loan_id, at, first_byte_seconds
    parked: LoanRow | None = None  # the open loan in which it sleeps without a job
    tells_requests: bool | None = None  # whether its gate sees requests while it is closed; None: not told
    policy_refused: str | None = None  # why its agent does not obey this version


@dataclass(frozen=True, slots=True)
class PolicyRow:
    engine_id: EngineId
    version: int  # the ETag
    policy: EnginePolicy
    locked: bool  # the agent's TOML rules
    version_in_force: int  # the newest that the agent has put into effect
    refused: str | None = None  # why the agent does not obey it


@dataclass(frozen=True, slots=True)
class NodeRow:
    id: NodeId
    name: str
    version: str
    boot_id: str
    incarnation: int
    silent_since: float | None
    last_seen_at: float
    registered_at: float
    devices: tuple[DeviceRow, ...]
    engine_ids: tuple[EngineId, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    step: LoanStep
    engine_id: EngineId | None
    attempt_id: AttemptId | None
    at: float  # the node's wall clock
    monotonic_seconds: float  # the node's clock since boot
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoanRow:
    id: LoanId
    node_id: NodeId
    epoch: int
    device_ids: tuple[DeviceId, ...]
    engine_ids: tuple[EngineId, ...]
    need_bytes: int
    policies: Mapping[EngineId, EnginePolicy]
    plans: Mapping[EngineId, Plan]  # of the engines whose park was predicted
    state: LoanState
    reason: Reason | None
    engine_lost: bool
    restore_by_seconds: float | None
    recall_ordered: bool
    opened_at: float
    closed_at: float | None
    attempt_ids: tuple[AttemptId, ...]
    without_job: WithoutJob | None = None
    first_byte_seconds: float | None = None  # that the request waited which ended it
    steps: tuple[StepRow, ...] = ()  # in the order taken; empty in lists


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Something that was asked of an engine and takes its time. ``state`` is running, succeeded or failed."""

    id: str
    kind: str  # park, resume
    engine_id: EngineId
    loan_id: LoanId
    requested_by: str
    created_at: float
    state: str
    reason: Reason | None
    loan_state: LoanState


@dataclass(frozen=True, slots=True)
class EventRow:
    """One line of the audit trail. ``seq`` rises in the order of commits."""

    seq: int
    at: float
    type: str
    severity: str  # info, warning, critical
    actor: str
    sentence: str
    job_id: JobId | None
    attempt_id: AttemptId | None
    loan_id: LoanId | None
    engine_id: EngineId | None
    device_id: DeviceId | None
    node_id: NodeId | None
    from_state: str | None
    to_state: str | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """Who held a device from ``started_at`` to ``ended_at``; None: it goes on."""

    device_id: DeviceId
    started_at: float
    ended_at: float | None
    kind: OccupancyKind
    owner_id: str | None
    loan_id: LoanId | None
