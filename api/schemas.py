"""What the API sends: never a table, never the scheduler's own snapshot.

The client reads answers with the same classes and ignores members that it does not know. Times are ISO 8601 in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..agents.protocol.capabilities import Capabilities
from ..agents.protocol.loans import LoanState, LoanStep
from ..agents.protocol.plans import Learned
from ..agents.protocol.policy import EnginePolicy
from ..agents.protocol.wire import (
    AttemptEnd,
    AttemptState,
    DeviceProcess,
    EngineState,
    GateState,
    OccupancyKind,
    WithoutJob,
)


def as_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Time = Annotated[datetime, AfterValidator(as_utc)]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ReasonView(View):
    """Why something is as it is, or why a job waits."""

    code: str
    sentence: str
    since: Time | None = None
    next_check: Time | None = None
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class Attempt(View):
    """One execution of a job."""

    id: str
    job_id: str
    no: int
    state: AttemptState
    end: AttemptEnd | None = None
    exit_code: int | None = None
    signal: int | None = None
    node_id: str
    device_ids: list[str]
    hbm_bytes: int
    loan_id: str | None = None
    created_at: Time
    started_at: Time | None = None
    ended_at: Time | None = None
    peak_hbm_bytes: int | None = None
    reason: ReasonView | None = None
    cleanup: ReasonView | None = None


class Job(View):
    """A job with its reasons and attempts. ``cleanup_state`` and ``engine_restore_state`` never change its result."""

    id: str
    name: str | None = None
    state: str
    argv: list[str]
    env: dict[str, str] = Field(default_factory=dict[str, str])
    workdir: str | None = None
    priority: int = 0
    project: str | None = None
    gpus: int = 1
    hbm_bytes: int | None = None
    time_limit_seconds: float | None = None
    kill_grace_seconds: float | None = None
    created_at: Time
    queued_at: Time | None = None
    started_at: Time | None = None
    ended_at: Time | None = None
    exit_code: int | None = None
    signal: int | None = None
    failure_reason: str | None = None
    reasons: list[ReasonView] = Field(default_factory=list[ReasonView])
    attempt_no: int = 0
    attempts: list[Attempt] = Field(default_factory=list[Attempt])
    loan_id: str | None = None
    cleanup_state: ReasonView | None = None
    engine_restore_state: str | None = None
    submitted_by: str


class Engine(View):
    """A resident inference server and where it stands."""

    id: str
    name: str
    kind: str
    models: list[str]
    node_id: str
    device_ids: list[str]
    supervised: bool
    state: EngineState
    gate: GateState
    verified: bool
    incarnation: str | None = None
    device_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    residual_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    capabilities: Capabilities | None = Field(None, description="What it can do, by its own word; absent until asked")
    learned: Learned | None = Field(None, description="What its parks were seen to free and to cost")
    policy_version: int
    policy_version_in_force: int
    policy_locked: bool = False
    policy_refused: str | None = Field(None, description="Why its agent does not obey `policy_version`")
    tells_requests: bool | None = Field(None, description="Whether its gate sees requests while it is closed")
    endpoint: str | None = None
    reason: ReasonView | None = None
    loan_id: str | None = None
    parked: ParkedView | None = Field(None, description="It sleeps without a job")
    last_wake: WakeView | None = None
    not_before: Time | None = None
    updated_at: Time


class ParkedView(View):
    """The engine sleeps without a job. ``at_most_seconds`` count from ``since``, by its node's clock."""

    loan_id: str
    since: Time
    wanted_by: str
    wake_on_request: bool
    at_most_seconds: float | None = None


class WakeView(View):
    """The last time that a request woke the engine, and how long that request waited for its first byte."""

    loan_id: str
    at: Time
    first_byte_seconds: float


class Operation(View):
    """What was asked of an engine and takes its time. ``state`` is ``running``, ``succeeded`` or ``failed``."""

    id: str
    kind: Literal["park", "resume"]
    state: Literal["running", "succeeded", "failed"]
    engine_id: str
    loan_id: str
    loan_state: LoanState
    reason: ReasonView | None = None
    requested_by: str
    created_at: Time


class PolicyView(View):
    """An engine's policy. ``version`` is also the ETag; ``version_in_force`` is what its agent obeys."""

    engine_id: str
    version: int
    version_in_force: int
    refused: str | None = Field(None, description="Why its agent does not obey this version")
    locked: bool = False
    policy: EnginePolicy


class Device(View):
    id: str
    node_id: str
    index: int
    kind: str
    capacity_bytes: int
    free_bytes: int
    processes: list[DeviceProcess] = Field(default_factory=list[DeviceProcess])
    quarantined: ReasonView | None = None
    observed_at: Time
    occupancy: OccupancyKind
    occupancy_since: Time | None = None
    owner_id: str | None = None
    loan_id: str | None = None


class Node(View):
    """A machine with an agent. ``state`` is ``up`` or ``silent``."""

    id: str
    name: str
    state: Literal["up", "silent"]
    version: str
    boot_id: str
    incarnation: int
    registered_at: Time
    last_seen_at: Time
    silent_since: Time | None = None
    devices: list[Device] = Field(default_factory=list[Device])
    engine_ids: list[str] = Field(default_factory=list[str])


class LoanStepView(View):
    """One step that the agent has taken. Differences of ``monotonic_seconds`` are exact within one boot."""

    step: LoanStep
    at: Time
    monotonic_seconds: float
    engine_id: str | None = None
    attempt_id: str | None = None
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class PlanFigures(View):
    """Bytes are by device; seconds from the call until the memory was proved free, or the answer right."""

    freed_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    park_seconds: float | None = None
    wake_seconds: float | None = None


class LoanPlan(View):
    """What a loan releases of one engine."""

    engine_id: str
    tags: list[str]
    whole: bool = Field(description="All that the engine's policy names")
    predicted: PlanFigures | None = Field(None, description="Absent where nobody had seen such a park")
    happened: PlanFigures | None = Field(None, description="Absent until its memory is proved free, and in lists")


class PlanWay(View):
    """One way to park an engine. ``room_bytes``: what each device would have free."""

    tags: list[str]
    modes: dict[str, str] = Field(default_factory=dict[str, str])
    whole: bool
    measured: bool = Field(description="Parks of it were seen; else the bytes are what the engine holds")
    freed_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    room_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    park_seconds: float | None = None
    wake_seconds: float | None = None
    with_engines: dict[str, list[str]] = Field(
        default_factory=dict[str, list[str]], description="Tags of the engines that share its devices, parked with it"
    )
    why_not: str | None = Field(None, description="Why another way is chosen; absent for the chosen one")


class EnginePlan(View):
    """What a loan would release of an engine so that ``gpus`` devices show ``need_bytes`` free."""

    engine_id: str
    engine: str
    need_bytes: int
    gpus: int
    plan: PlanWay | None = None
    alternatives: list[PlanWay] = Field(default_factory=list[PlanWay])
    nothing_suffices: str | None = Field(None, description="Why there is no plan")
    not_now: ReasonView | None = Field(None, description="Why it would not be done now")


class Loan(View):
    """The time for which a set of devices is lent. ``steps`` come only with a single loan."""

    id: str
    node_id: str
    state: LoanState
    epoch: int
    device_ids: list[str]
    engine_ids: list[str]
    attempt_ids: list[str] = Field(default_factory=list[str])
    need_bytes: int
    engine_lost: bool = False
    recall_ordered: bool = False
    reason: ReasonView | None = None
    opened_at: Time
    closed_at: Time | None = None
    restore_by_seconds: float | None = None
    without_job: WithoutJob | None = Field(default=None, description="Its engines sleep: by whose wish, and how long")
    first_byte_seconds: float | None = Field(default=None, description="That the request waited which ended it")
    plans: list[LoanPlan] = Field(default_factory=list[LoanPlan], description="What is released, engine by engine")
    steps: list[LoanStepView] = Field(default_factory=list[LoanStepView])


class Event(View):
    """One line of the audit trail. ``seq`` rises; pass the last one seen to go on from there."""

    seq: int
    at: Time
    type: str
    severity: str
    actor: str
    sentence: str
    job_id: str | None = None
    attempt_id: str | None = None
    loan_id: str | None = None
    engine_id: str | None = None
    device_id: str | None = None
    node_id: str | None = None
    from_state: str | None = None
    to_state: str | None = None
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class UsageInterval(View):
    """What one device was in use for from ``started_at`` to ``ended_at`` (null: it goes on)."""

    device_id: str
    kind: OccupancyKind
    owner_id: str | None = None
    loan_id: str | None = None
    started_at: Time
    ended_at: Time | None = None


class Version(View):
    version: str
    protocol_version: int
    api: str = "v1"


class JobPage(View):
    items: list[Job]
    next_cursor: str | None = None


class AttemptList(View):
    items: list[Attempt]


class EngineList(View):
    items: list[Engine]


class NodeList(View):
    items: list[Node]


class LoanPage(View):
    items: list[Loan]
    next_cursor: str | None = None


class EventPage(View):
    items: list[Event]
    next_seq: int


class UsageList(View):
    since: Time
    until: Time
    items: list[UsageInterval]


class FieldError(View):
    field: str
    message: str


class ProblemView(View):
    """RFC 9457. ``code`` is stable; further members depend on it."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[FieldError] = Field(default_factory=list[FieldError])
