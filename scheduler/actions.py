"""The closed set of what ``decide`` can ask for. ``Store.commit`` turns them into rows, orders and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..agents.protocol.plans import Plan
from ..agents.protocol.wire import WithoutJob
from .model import AttemptId, DeviceId, EngineId, JobId, JobReason, LoanId, NodeId


@dataclass(frozen=True, slots=True)
class Place:
    """One job on devices of the loan. ``attempt_no`` is the job's count before: the claim is guarded by it."""

    job_id: JobId
    attempt_no: int
    device_ids: tuple[DeviceId, ...]
    hbm_bytes: int


@dataclass(frozen=True, slots=True)
class OpenLoan:
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]
    engine_ids: tuple[EngineId, ...]
    need_bytes: int
    room_bytes: Mapping[DeviceId, int]
    restore_by_seconds: float | None
    places: tuple[Place, ...]
    later_job_ids: tuple[JobId, ...] = ()  # the rest of the loan's set
    need_bytes_by_device: Mapping[DeviceId, int] | None = None  # None: `need_bytes` on each
    plans: Mapping[EngineId, Plan] = field(default_factory=dict[EngineId, Plan])  # of engines whose park is predicted
    without_job: WithoutJob | None = None  # the engines sleep; `places` is empty


@dataclass(frozen=True, slots=True)
class StartAttempt:
    loan_id: LoanId
    node_id: NodeId
    place: Place


@dataclass(frozen=True, slots=True)
class StopAttempt:
    attempt_id: AttemptId
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class ExpectWork:
    """Whether jobs wait for the loan: without them it ends with its last attempt."""

    loan_id: LoanId
    node_id: NodeId
    more: bool


@dataclass(frozen=True, slots=True)
class RecallLoan:
    loan_id: LoanId
    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class SetReasons:
    job_id: JobId
    reasons: tuple[JobReason, ...]


@dataclass(frozen=True, slots=True)
class MarkSilent:
    """Guarded by ``heard_count``: a sign of life in between wins."""

    node_id: NodeId
    heard_count: int


Action: TypeAlias = OpenLoan | StartAttempt | StopAttempt | ExpectWork | RecallLoan | SetReasons | MarkSilent
