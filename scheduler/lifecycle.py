"""The job machine and the attempt machine. The tables are the machines; a pair that a table does not hold raises.

It does no I/O and reads no clock. What an attempt's end means for its job is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from ..agents.protocol.wire import AttemptEnd, AttemptState


class JobState(StrEnum):
    HELD = "held"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class JobEvent(StrEnum):
    HOLD = "hold"
    RELEASE = "release"
    PLACED = "placed"  # an attempt was claimed for it
    STARTED = "started"
    STOP_WANTED = "stop_wanted"  # cancelled while an attempt lives
    REQUEUED = "requeued"  # its attempt is proved over without a result
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class AttemptEvent(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    ENDED = "ended"
    LOST_SIGHT = "lost_sight"  # nobody can say; time alone never ends it


TERMINAL_JOB_STATES: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})

_J, _JE = JobState, JobEvent
_ENDS: Final = {
    _JE.SUCCEEDED: _J.SUCCEEDED,
    _JE.FAILED: _J.FAILED,
    _JE.CANCELLED: _J.CANCELLED,
    _JE.TIMED_OUT: _J.TIMED_OUT,
}

JOB_TRANSITIONS: Final[Mapping[tuple[JobState, JobEvent], JobState]] = MappingProxyType(
    {
        (_J.HELD, _JE.RELEASE): _J.QUEUED,
        (_J.HELD, _JE.CANCELLED): _J.CANCELLED,
        (_J.QUEUED, _JE.HOLD): _J.HELD,
        (_J.QUEUED, _JE.PLACED): _J.STARTING,
        (_J.QUEUED, _JE.CANCELLED): _J.CANCELLED,
        (_J.STARTING, _JE.STARTED): _J.RUNNING,
        (_J.STARTING, _JE.STOP_WANTED): _J.STOPPING,
        (_J.STARTING, _JE.REQUEUED): _J.QUEUED,
        (_J.RUNNING, _JE.STOP_WANTED): _J.STOPPING,
        (_J.RUNNING, _JE.REQUEUED): _J.QUEUED,
        # The start and the wish to stop crossed on the wire.
        (_J.STOPPING, _JE.STARTED): _J.STOPPING,
        **{(state, event): end for state in (_J.STARTING, _J.RUNNING, _J.STOPPING) for event, end in _ENDS.items()},
    }
)

_A, _AE = AttemptState, AttemptEvent
_NEXT: Final = {
    _AE.STARTING: _A.STARTING,
    _AE.RUNNING: _A.RUNNING,
    _AE.SUSPENDED: _A.SUSPENDED,
    _AE.STOPPING: _A.STOPPING,
    _AE.ENDED: _A.ENDED,
    _AE.LOST_SIGHT: _A.UNKNOWN,
}
_ALLOWED: Final[Mapping[AttemptState, tuple[AttemptEvent, ...]]] = {
    _A.PLACED: (_AE.STARTING, _AE.RUNNING, _AE.STOPPING, _AE.ENDED, _AE.LOST_SIGHT),
    _A.STARTING: (_AE.RUNNING, _AE.STOPPING, _AE.ENDED, _AE.LOST_SIGHT),
    _A.RUNNING: (_AE.SUSPENDED, _AE.STOPPING, _AE.ENDED, _AE.LOST_SIGHT),
    _A.SUSPENDED: (_AE.RUNNING, _AE.STOPPING, _AE.ENDED, _AE.LOST_SIGHT),
    _A.STOPPING: (_AE.ENDED, _AE.LOST_SIGHT),
    # The node speaks again: whatever it says is the fact.
    _A.UNKNOWN: tuple(_AE),
    _A.ENDED: (),
}

ATTEMPT_TRANSITIONS: Final[Mapping[tuple[AttemptState, AttemptEvent], AttemptState]] = MappingProxyType(
    {(state, event): _NEXT[event] for state, events in _ALLOWED.items() for event in events}
)

# What an agent's report of a state is as an event; `placed` says nothing new.
EVENT_OF_REPORT: Final[Mapping[AttemptState, AttemptEvent | None]] = MappingProxyType(
    {
        _A.PLACED: None,
        _A.STARTING: _AE.STARTING,
        _A.RUNNING: _AE.RUNNING,
        _A.SUSPENDED: _AE.SUSPENDED,
        _A.STOPPING: _AE.STOPPING,
        _A.ENDED: _AE.ENDED,
        _A.UNKNOWN: _AE.LOST_SIGHT,
    }
)


class IllegalJobTransition(RuntimeError):
    """The machine has no such edge."""

    def __init__(self, job_id: str, state: JobState, event: JobEvent) -> None:
        super().__init__(f"job {job_id} is {state}: {event} has no transition from there")
        self.job_id = job_id
        self.state = state
        self.event = event


class IllegalAttemptTransition(RuntimeError):
    """The machine has no such edge."""

    def __init__(self, attempt_id: str, state: AttemptState, event: AttemptEvent) -> None:
        super().__init__(f"attempt {attempt_id} is {state}: {event} has no transition from there")
        self.attempt_id = attempt_id
        self.state = state
        self.event = event


def advance_job(job_id: str, state: JobState, event: JobEvent) -> JobState:
    try:
        return JOB_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalJobTransition(job_id, state, event) from None


def advance_attempt(attempt_id: str, state: AttemptState, event: AttemptEvent) -> AttemptState:
    try:
        return ATTEMPT_TRANSITIONS[state, event]
    except KeyError:
        raise IllegalAttemptTransition(attempt_id, state, event) from None


def job_event_of_end(end: AttemptEnd, exit_code: int | None, *, stop_wanted: bool) -> tuple[JobEvent, str | None]:
    """What an attempt's end means for its job, and the failure reason if it failed.

    A job that was to be cancelled but ended by itself first keeps its real result: there is one outcome. One
    that has no result is not queued again once somebody wanted it gone.
    """
    match end:
        case AttemptEnd.EXITED:
            return (JobEvent.SUCCEEDED, None) if exit_code == 0 else (JobEvent.FAILED, "exit_code")
        case AttemptEnd.SIGNALLED:
            return JobEvent.FAILED, "signal"
        case AttemptEnd.TIMED_OUT:
            return JobEvent.TIMED_OUT, None
        case AttemptEnd.CANCELLED:
            return JobEvent.CANCELLED, None
        case AttemptEnd.PREEMPTED | AttemptEnd.NOT_STARTED:
            return (JobEvent.CANCELLED if stop_wanted else JobEvent.REQUEUED), None
        case AttemptEnd.SPAWN_FAILED | AttemptEnd.RUNNER_LOST | AttemptEnd.NODE_REBOOTED | AttemptEnd.LOST:
            return JobEvent.FAILED, end.value
