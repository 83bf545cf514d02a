"""What takes an engine out of traffic and puts it back.

A gate knows nothing of loans or memory: it closes, counts, opens. Every call is bounded and safe to repeat. A gate that
cannot be asked raises GateUnreachable: its state is unknown then, never open and never drained.

Some gates close and cannot count. Who counts for them is told by ``CountedBy``: the engine's own gauges, or nobody, and
then a time that the operator grants has to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ..errors import AgentError
from ..protocol.policy import EnginePolicy
from ..protocol.wire import GateState

GateMode = Literal["hold", "refuse"]
CountedBy = Literal["gate", "engine", "grace"]


class GateError(AgentError):
    """The gate did not do what it was asked.

    GateError
    ├── GateUnreachable   no answer; whether the call was done is unknown. All calls may be repeated.
    ├── GateRouteUnknown  the gate does not know the engine: ensure_route first, then look at its state again
    └── GateRefused       it said no, the text says why
    """


class GateUnreachable(GateError):
    """The gate could not be asked."""


class GateRouteUnknown(GateError):
    """The gate has no route of this engine; it was restarted without its state."""


class GateRefused(GateError):
    """The gate answered that it does not do it."""


@dataclass(frozen=True, slots=True)
class GateObservation:
    """One look at one engine's gate. Totals count since the gate's process started.

    ``in_flight`` is None where nobody can tell it.
    """

    state: GateState
    in_flight: int | None
    held: int
    oldest_held_seconds: float | None = None
    last_request_seconds_ago: float | None = None
    requests_total: int = 0
    answered_total: int = 0
    refused_total: int = 0
    failed_total: int = 0
    disconnected_total: int = 0
    # Since the gate was last closed: from the coming of the first request that had waited to its first byte.
    first_byte_seconds: float | None = None
    # Since the gate was last closed: those that were refused because no engine that serves them was open.
    asked_since_closed: int = 0


@dataclass(frozen=True, slots=True)
class ClosedTerms:
    """How requests fare while the gate is closed, where that is the gate's affair."""

    gate: GateMode
    hold_requests_max: int
    hold_seconds_max: float
    retry_after_seconds: int | None = None

    @classmethod
    def of(cls, policy: EnginePolicy) -> ClosedTerms:
        return cls(policy.gate, policy.hold_requests_max, policy.hold_seconds_max)


class Gate(Protocol):
    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        """Makes the engine known. A new route is closed; an existing one keeps its state."""
        ...

    async def remove_route(self, engine_id: str) -> None:
        """Forgets the engine; an engine that is not known is no error. GateRefused while requests are in flight."""
        ...

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        """From the return on no request goes to the engine but those in flight, whose number it returns if it can."""
        ...

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        """Waits until nothing is in flight, at most ``seconds``; what still is. GateError where it cannot be known."""
        ...

    async def abort(self, engine_id: str) -> None:
        """Ends what is in flight. It is gone from the engine when ``wait_drained`` says so, not before."""
        ...

    async def open(self, engine_id: str) -> None:
        """Lets requests through; those that were held go first, in their order."""
        ...

    async def observe(self, engine_id: str) -> GateObservation: ...


@runtime_checkable
class SaysWhoCounts(Protocol):
    """A gate that counts at times, and at times leaves it to others."""

    @property
    def counted_by(self) -> CountedBy: ...


@runtime_checkable
class TellsRequests(Protocol):
    """A gate that sees the requests which come while it is closed."""

    async def wait_wanted(self, engine_id: str, seconds: float) -> GateObservation:
        """Waits until a request waits at the closed gate or was refused by it, at most ``seconds``."""
        ...


@runtime_checkable
class ForetellsOpening(Protocol):
    """A gate that can tell clients when it is worth to come again."""

    async def expect_open(self, engine_id: str, seconds: float | None) -> None:
        """From now until the gate will be opened; None: it may be at any time. Every close forgets it."""
        ...
