"""Who holds a device, in one word. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .protocol.loans import LoanState
from .protocol.wire import EngineState, OccupancyKind

BUSY_SECONDS: Final = 5.0  # a request within these makes an engine busy

_LOAN: Final = {
    LoanState.DRAINING: OccupancyKind.DRAINING,
    LoanState.PARKING: OccupancyKind.PARKING,
    LoanState.SETTLING: OccupancyKind.SETTLING,
    LoanState.RECALLING: OccupancyKind.RECALLING,
    LoanState.WAKING: OccupancyKind.WAKING,
    LoanState.VERIFYING: OccupancyKind.VERIFYING,
    LoanState.FAULTED: OccupancyKind.FAULTED,
}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    engine_id: str
    state: EngineState
    last_request_seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class Holder:
    """``owner_id``: the engine's or the attempt's."""

    occupancy: OccupancyKind
    owner_id: str | None = None
    loan_id: str | None = None


def holder(
    *,
    quarantined: bool,
    loan_id: str | None,
    loan_state: LoanState | None,
    running_attempt_ids: Sequence[str],
    engines: Sequence[EngineFacts],
    foreign: bool,
) -> Holder:
    """The one word for a device at this moment; a loan rules over everything that is inside it."""
    if loan_state in (LoanState.LENT, LoanState.RECALLING) and running_attempt_ids:
        kind = OccupancyKind.JOB if loan_state is LoanState.LENT else OccupancyKind.RECALLING
        return Holder(kind, running_attempt_ids[0], loan_id)
    if loan_state is not None and loan_state in _LOAN:
        return Holder(_LOAN[loan_state], engines[0].engine_id if engines else None, loan_id)
    if quarantined:
        return Holder(OccupancyKind.QUARANTINED)
    if loan_state is LoanState.LENT:
        return Holder(OccupancyKind.EMPTY, None, loan_id)
    if foreign:
        return Holder(OccupancyKind.FOREIGN)
    running = [engine for engine in engines if engine.state is EngineState.RUNNING]
    busy = [
        engine
        for engine in running
        if engine.last_request_seconds_ago is not None and engine.last_request_seconds_ago < BUSY_SECONDS
    ]
    if busy:
        return Holder(OccupancyKind.SERVING, busy[0].engine_id)
    if running:
        return Holder(OccupancyKind.IDLE, running[0].engine_id)
    if any(engine.state is EngineState.STARTING for engine in engines):
        return Holder(OccupancyKind.WAKING, engines[0].engine_id)
    if engines:
        return Holder(OccupancyKind.FAULTED, engines[0].engine_id)
    return Holder(OccupancyKind.EMPTY)
