"""What goes over the wire about loans without a job: an engine that sleeps until somebody wants it."""

from __future__ import annotations

from typing import Literal

from .words import Message

# Why such a loan ended, beside what ends any loan.
REQUEST = "Request"
RESUMED = "Resumed"
FOR_OVER = "ForOver"


class WithoutJob(Message):
    """The loan is for no job: its engines sleep until somebody wants them, or until ``restore_by_seconds``."""

    wanted_by: Literal["operator", "pressure"] = "operator"
    until_seconds: float | None = None  # what an operator said; None: as long as the policies allow
    wake_on_request: bool = True  # the first request that waits at a gate recalls the loan, unless a job runs in it


class RequestAnswered(Message):
    """The first request that had waited for the engine got its first byte, ``seconds`` after it came to the gate."""

    kind: Literal["request_answered"] = "request_answered"
    loan_id: str
    engine_id: str
    seconds: float


class HostPressure(Message):
    """Host memory is below the bound of the engine's policy, and the engine has been idle for long enough."""

    available_bytes: int
    bound_bytes: int
    idle_seconds_min: float  # what was asked of it this time: more after parks that did not last
