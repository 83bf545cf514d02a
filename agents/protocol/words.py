"""The words that both sides of the wire share: states, ends, holders of a device, and what a reason is made of."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Reason(Message):
    """Why something is as it is: a stable code, a sentence for people, and the data behind both."""

    code: str
    sentence: str
    data: dict[str, Any] = Field(default_factory=dict)


class EngineState(StrEnum):
    STARTING = "starting"  # its process runs, it is not healthy yet
    RUNNING = "running"
    PARKING = "parking"
    PARKED = "parked"
    WAKING = "waking"
    FAILED = "failed"
    GONE = "gone"  # no process
    UNREACHABLE = "unreachable"  # a process, but no answer: never taken for parked


class GateState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


class AttemptState(StrEnum):
    PLACED = "placed"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    ENDED = "ended"
    UNKNOWN = "unknown"


class AttemptEnd(StrEnum):
    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"  # the job's own limit
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"  # the loan had to end; the job is queued again
    NOT_STARTED = "not_started"  # proved: the job is queued again
    SPAWN_FAILED = "spawn_failed"  # the command could not be executed
    RUNNER_LOST = "runner_lost"
    NODE_REBOOTED = "node_rebooted"
    LOST = "lost"  # an operator's word where nobody else can say


class OccupancyKind(StrEnum):
    SERVING = "serving"
    IDLE = "idle"
    DRAINING = "draining"
    PARKING = "parking"
    SETTLING = "settling"
    JOB = "job"
    RECALLING = "recalling"
    WAKING = "waking"
    VERIFYING = "verifying"
    FAULTED = "faulted"
    EMPTY = "empty"
    FOREIGN = "foreign"
    QUARANTINED = "quarantined"
    UNKNOWN = "unknown"


class ProcessIdentity(Message):
    """One process, told apart from a later one with the same pid."""

    boot_id: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    start_ticks: Annotated[int, Field(ge=0)]  # /proc/PID/stat field 22
