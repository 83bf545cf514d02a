"""What goes over the wire between scheduler and agents, both ways.

Receivers ignore unknown fields; an unknown kind is answered with ``unsupported`` and changes nothing. Times named
``at`` are the node's wall clock in seconds since the epoch, for people and history only: no decision compares the
clocks of two machines. Durations are seconds from receipt. Change a meaning here: bump PROTOCOL_VERSION.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from .capabilities import Capabilities
from .loans import LoanEvent, LoanState, LoanStep
from .parking import HostPressure as HostPressure
from .parking import RequestAnswered as RequestAnswered
from .parking import WithoutJob as WithoutJob
from .plans import Learned as Learned
from .plans import Plan as Plan
from .policy import EnginePolicy
from .words import AttemptEnd as AttemptEnd
from .words import AttemptState as AttemptState
from .words import EngineState as EngineState
from .words import GateState as GateState
from .words import Message as Message
from .words import OccupancyKind as OccupancyKind
from .words import ProcessIdentity as ProcessIdentity
from .words import Reason as Reason

PROTOCOL_VERSION: Final = 1
GPU_LOST: Final = "gpu_lost"  # why an attempt failed or was preempted whose GPU is lost
LOAN_OVER: Final = "LoanOver"  # why an attempt did not start whose loan had ended by itself meanwhile


# ---- orders: scheduler -> agent -------------------------------------------------------------------------------


class AttemptSpec(Message):
    """One execution of a job, with all that the node needs for it."""

    attempt_id: str
    job_id: str
    attempt_no: int
    argv: list[str]
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    device_ids: list[str]
    hbm_bytes: int  # on each device
    time_limit_seconds: float | None = None
    kill_grace_seconds: float = 30.0


class OpenLoan(Message):
    kind: Literal["open_loan"] = "open_loan"
    loan_id: str
    epoch: int
    device_ids: list[str]
    engine_ids: list[str]  # those that are parked for it; may be empty
    need_bytes: int  # free bytes that every device must show before the first attempt
    restore_by_seconds: float | None  # None only where no engine is parked
    policies: dict[str, EnginePolicy]  # by engine id: the snapshot that rules this loan
    attempts: list[AttemptSpec]  # those that start as soon as the memory is free
    expects_more: bool = True  # see ExpectWork
    # The same where jobs or devices differ: a device without an entry has to show nothing. None: `need_bytes` rules.
    need_bytes_by_device: dict[str, int] | None = None
    # By engine id: just this is released of it. An engine without an entry is parked as its whole policy says.
    plans: dict[str, Plan] = Field(default_factory=dict[str, Plan])
    # An agent that does not know it ends the loan at once, since nothing is left to run: nobody is stranded.
    without_job: WithoutJob | None = None


class StartAttempt(Message):
    kind: Literal["start_attempt"] = "start_attempt"
    loan_id: str
    attempt: AttemptSpec


class StopAttempt(Message):
    kind: Literal["stop_attempt"] = "stop_attempt"
    attempt_id: str
    end: Literal[AttemptEnd.CANCELLED, AttemptEnd.PREEMPTED] = AttemptEnd.CANCELLED


class RecallLoan(Message):
    kind: Literal["recall_loan"] = "recall_loan"
    loan_id: str
    reason: str


class ExpectWork(Message):
    """Whether a loan whose last attempt has ended is kept for jobs that wait for it."""

    kind: Literal["expect_work"] = "expect_work"
    loan_id: str
    more: bool


class SetRestoreBy(Message):
    kind: Literal["set_restore_by"] = "set_restore_by"
    loan_id: str
    restore_by_seconds: float


class SetPolicy(Message):
    kind: Literal["set_policy"] = "set_policy"
    engine_id: str
    version: int
    policy: EnginePolicy


class RestartEngine(Message):
    kind: Literal["restart_engine"] = "restart_engine"
    engine_id: str


class FetchLog(Message):
    """Asks the agent to POST a stream's bytes to ``/api/v1/agent/logs/{request_id}``."""

    kind: Literal["fetch_log"] = "fetch_log"
    request_id: str
    attempt_id: str
    stream: Literal["stdout", "stderr"]
    offset: int = 0
    follow: bool = False


class ReportAgain(Message):
    """The node had been called silent: it says anew who holds its devices."""

    kind: Literal["report_again"] = "report_again"


class GiveUpLoan(Message):
    """An operator gives up a faulted loan: it closes, and the gates of its engines stay closed."""

    kind: Literal["give_up_loan"] = "give_up_loan"
    loan_id: str


class UnknownOrder(Message):
    """Any kind that this version does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str


def _order_tag(value: Any) -> str:
    kind: Any = cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return str(kind) if kind in _ORDER_KINDS else "unknown"


_ORDER_KINDS: Final = frozenset(
    {
        "open_loan",
        "start_attempt",
        "stop_attempt",
        "recall_loan",
        "expect_work",
        "set_restore_by",
        "set_policy",
        "restart_engine",
        "fetch_log",
        "report_again",
        "give_up_loan",
    }
)

Order = Annotated[
    Annotated[OpenLoan, Tag("open_loan")]
    | Annotated[StartAttempt, Tag("start_attempt")]
    | Annotated[StopAttempt, Tag("stop_attempt")]
    | Annotated[RecallLoan, Tag("recall_loan")]
    | Annotated[ExpectWork, Tag("expect_work")]
    | Annotated[SetRestoreBy, Tag("set_restore_by")]
    | Annotated[SetPolicy, Tag("set_policy")]
    | Annotated[RestartEngine, Tag("restart_engine")]
    | Annotated[FetchLog, Tag("fetch_log")]
    | Annotated[ReportAgain, Tag("report_again")]
    | Annotated[GiveUpLoan, Tag("give_up_loan")]
    | Annotated[UnknownOrder, Tag("unknown")],
    Discriminator(_order_tag),
]

ORDER: Final[TypeAdapter[Any]] = TypeAdapter(Order)


class OrderEnvelope(Message):
    """One line of the NDJSON stream. ``seq`` rises per node; a line with seq 0 is a keep-alive without an order."""

    seq: int
    term: int = 0
    incarnation: int = 0
    order: Order | None = None


# ---- reports: agent -> scheduler ------------------------------------------------------------------------------


class LoanChanged(Message):
    """The loan's machine took ``event``. ``engine_lost`` marks a loan that goes on without its engine."""

    kind: Literal["loan_changed"] = "loan_changed"
    loan_id: str
    epoch: int
    event: LoanEvent | None  # None: the first report, `draining` (or `settling` without an engine)
    state: LoanState
    reason: Reason | None = None
    engine_id: str | None = None
    engine_lost: bool = False


class LoanStepTaken(Message):
    kind: Literal["loan_step"] = "loan_step"
    loan_id: str
    step: LoanStep
    engine_id: str | None = None
    attempt_id: str | None = None
    monotonic_seconds: float  # the node's clock since boot: differences are exact
    data: dict[str, Any] = Field(default_factory=dict)


class AttemptChanged(Message):
    kind: Literal["attempt_changed"] = "attempt_changed"
    attempt_id: str
    job_id: str
    loan_id: str
    state: AttemptState
    end: AttemptEnd | None = None  # only with `ended`
    exit_code: int | None = None
    signal: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    peak_hbm_bytes: int | None = None
    cleanup: Reason | None = None  # trouble after the end; it never changes the result
    reason: Reason | None = None
    processes: dict[str, ProcessIdentity] = Field(default_factory=dict)  # "runner", "job"


class PolicyRefused(Message):
    version: int
    sentence: str


class EngineChanged(Message):
    kind: Literal["engine_changed"] = "engine_changed"
    engine_id: str
    name: str
    engine_kind: str
    models: list[str]
    device_ids: list[str]
    supervised: bool
    state: EngineState
    gate: GateState
    verified: bool  # healthy once, golden answer taken: it may be lent
    incarnation: str | None = None
    device_bytes: dict[str, int] = Field(default_factory=dict)  # that its processes hold, by device id
    residual_bytes: dict[str, int] = Field(default_factory=dict)  # that it kept in its last park, by device id
    policy_version: int = 0  # the newest that the agent has put into effect
    processes: dict[str, ProcessIdentity] = Field(default_factory=dict)
    endpoint: str | None = None  # where clients reach it: the gate, never the engine itself
    reason: Reason | None = None
    capabilities: Capabilities | None = None  # None: it was not asked yet
    learned: Learned | None = None  # what its parks were seen to do; None: this agent does not tell
    pressure: HostPressure | None = None  # its policy wants it parked now
    tells_requests: bool | None = None  # whether its gate sees requests while it is closed; None: it does not tell
    policy_refused: PolicyRefused | None = None  # the newest that was offered, where the agent does not obey it


class DeviceProcess(Message):
    pid: int
    bytes: int
    owner: Literal["engine", "job", "service", "foreign"]
    owner_id: str | None = None


class DeviceObserved(Message):
    kind: Literal["device_observed"] = "device_observed"
    device_id: str  # the device's own UUID
    index: int
    device_kind: str  # host_discrete, host_unified, cuda, cuda_unified, mig
    capacity_bytes: int
    free_bytes: int
    processes: list[DeviceProcess] = Field(default_factory=list[DeviceProcess])
    quarantined: Reason | None = None
    spawn_margin_bytes: int | None = None  # the node adds it to the need of every job; None: it does not tell


class OccupancyChanged(Message):
    """From ``at`` on the device is in use for ``occupancy``; the interval before it ends there."""

    kind: Literal["occupancy_changed"] = "occupancy_changed"
    device_id: str
    occupancy: OccupancyKind
    owner_id: str | None = None  # engine id, or attempt id for `job`
    loan_id: str | None = None
    # Which process of the agent saw it, and its how manieth report of this device: between two that follow on each
    # other the device was watched without a break, however long nobody listened.
    start_id: str = ""
    report_no: int = 0


class Alert(Message):
    kind: Literal["alert"] = "alert"
    severity: Literal["info", "warning", "critical"]
    code: str
    sentence: str
    engine_id: str | None = None
    loan_id: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)


class OrderAnswer(Message):
    """``refused`` and ``stale`` changed nothing. For a refused StartAttempt the attempt's end is reported apart."""

    kind: Literal["order_answer"] = "order_answer"
    seq: int
    outcome: Literal["accepted", "refused", "stale", "unsupported"]
    detail: str = ""


Report = Annotated[
    LoanChanged
    | LoanStepTaken
    | RequestAnswered
    | AttemptChanged
    | EngineChanged
    | DeviceObserved
    | OccupancyChanged
    | Alert
    | OrderAnswer,
    Field(discriminator="kind"),
]


class ReportEnvelope(Message):
    """``id`` rises by one within a journal; the scheduler drops what it has already taken."""

    id: int
    at: float
    report: Report


class ReportBatch(Message):
    """At most 500 reports. ``reports`` holds raw objects so that one unknown kind does not lose the batch."""

    node_id: str
    incarnation: int
    journal_id: str
    reports: list[dict[str, Any]]


class ReportsAnswer(Message):
    acknowledged: int  # the highest id taken; everything up to it may be forgotten
    unsupported: list[int] = Field(default_factory=list[int])


# ---- registration ---------------------------------------------------------------------------------------------


class HeldLoan(Message):
    loan_id: str
    epoch: int
    state: LoanState
    device_ids: list[str]
    engine_ids: list[str]
    attempt_ids: list[str]  # not yet ended


class EngineDeclared(Message):
    engine: EngineChanged
    policy: EnginePolicy  # from the agent's TOML: seeds the row in SQL
    policy_locked: bool = False  # the TOML rules; PUT is refused


class Register(Message):
    protocol_version: int = PROTOCOL_VERSION
    node_id: str
    name: str
    version: str
    boot_id: str
    machine_id: str
    journal_id: str
    start_id: str = ""  # made anew by every process of the agent
    home: str = ""  # of the data directory: a copy of it has another one
    devices: list[DeviceObserved]
    engines: list[EngineDeclared]
    loans: list[HeldLoan]
    attempts: list[AttemptChanged]  # live ones, and ended ones not yet acknowledged
    # The highest that this node has persisted: a scheduler whose database is older or new has to go on above them.
    term: int = 0
    incarnation: int = 0
    orders_after: int = 0
    epochs: dict[str, int] = Field(default_factory=dict[str, int])  # by device id
    # The newest report that waits to be sent; 0 if none does. What it holds is newer than anything that can be
    # concluded from what is not listed here.
    newest_report: int = 0
    # The newest number of a report when this process of the agent began. A power cut may take reports that were sent
    # and taken; the numbers above this one are then given anew, to other reports. None: an agent that does not tell.
    reports_at_start: int | None = None


class PolicyInForce(Message):
    engine_id: str
    version: int
    policy: EnginePolicy


class Registered(Message):
    incarnation: int
    term: int
    lease_seconds: float
    orders_after: int  # orders up to this seq are over for this node
    acknowledged: int  # reports up to this id of this journal were taken
    recall_loans: list[str] = Field(default_factory=list)  # unknown to the scheduler, or over there
    stop_attempts: list[str] = Field(default_factory=list)  # likewise
    policies: list[PolicyInForce] = Field(default_factory=list[PolicyInForce])
