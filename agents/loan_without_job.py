"""A loan without a job: the engine sleeps until its time is over, somebody resumes it, or a request waits at its gate.

The agent alone ends it, with no scheduler in sight. A request counts from the moment on that the gate is closed: one
that comes while the engine still drains ends the loan before anything is released. One that is refused counts as well
as one that waits, for every engine that serves its model: the gate counts them from its closing on, so none is missed
while no agent lives. While an attempt runs in the loan requests wait as in any other, but the loan takes no further
attempt then: the wait is bounded by those that run already. They are looked at again when these have ended. An agent
that starts again asks the gate anew.

How long the first of them waited for its first byte is measured by the gate. Whose it was is in the journal, so that an
agent that starts again in between still tells it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from .engine_keeper import EngineKeeper
from .gates.base import GateError, GateObservation, GateRefused, GateRouteUnknown
from .gates.kept import KeptGate
from .node import Node
from .protocol.parking import FOR_OVER, REQUEST, RESUMED, RequestAnswered
from .protocol.wire import GateState, OpenLoan

if TYPE_CHECKING:
    from .loan import Loan

log = structlog.get_logger(__name__)

_WAIT_SECONDS: Final = 30.0
_GATE_SECONDS: Final = 0.5
_FIRST_BYTE_SECONDS_MAX: Final = 600.0
_PAUSE_SECONDS: Final = (0.05, 1.0)

SENTENCES: Final = {
    REQUEST: "a request waits at the gate",
    RESUMED: "an operator resumed the engine",
    FOR_OVER: "the time is over for which an operator parked the engine",
}


def refusal(order: OpenLoan, keepers: dict[str, EngineKeeper]) -> str | None:
    """Why such a loan cannot be opened; None for a loan that is for jobs."""
    if order.without_job is None:
        return None
    if not order.engine_ids:
        return "a loan without a job parks an engine, and names none"
    for engine_id in order.engine_ids:
        keeper = keepers[engine_id]
        if order.without_job.wake_on_request and not keeper.gate.tells_requests:
            return f"the gate of engine {keeper.name} does not see requests, so none could wake it"
    return None


async def until_wanted(loan: Loan, engine: EngineKeeper) -> None:
    """Recalls the loan once a request wants the engine and no attempt runs. Returns when the loan is recalled."""
    while not loan.recalled:
        try:
            seen = await _wait_wanted(engine.gate, engine.engine_id, loan.node.settings.settle_poll_seconds)
        except GateRouteUnknown:
            await _make_route(engine)
            continue
        except GateError as error:
            log.warning("the gate does not answer; it is asked again", engine=engine.name, error=str(error))
            await asyncio.sleep(_GATE_SECONDS)
            continue
        if not seen.held and not seen.asked_since_closed:
            loan.asked_for.discard(engine.engine_id)
            continue
        loan.asked_for.add(engine.engine_id)
        if loan.live_attempts:
            await asyncio.gather(*(run.ended.wait() for run in loan.live_attempts))
            continue
        if not loan.recalled:
            if seen.held:
                loan.node.journal.set_meta(_mark(engine.engine_id), loan.loan_id)
            loan.recall(REQUEST)


async def _wait_wanted(gate: KeptGate, engine_id: str, poll_seconds: float) -> GateObservation:
    try:
        return await gate.wait_wanted(engine_id, _WAIT_SECONDS)
    except GateRefused as error:
        log.debug("the gateway is older than its agent: it is polled", error=str(error))
    await asyncio.sleep(poll_seconds)
    return await gate.observe(engine_id)


async def _make_route(engine: EngineKeeper) -> None:
    """The gateway lost its state: with a route, which is closed at first, requests wait instead of failing."""
    try:
        await engine.ensure_route()
    except GateError as error:
        log.warning("the route could not be made; it is tried again", engine=engine.name, error=str(error))
        await asyncio.sleep(_GATE_SECONDS)


# ---- the first byte -----------------------------------------------------------------------------------------------


def _mark(engine_id: str) -> str:
    return f"first_byte:{engine_id}"


async def tell_first_byte(node: Node, engine: EngineKeeper) -> None:
    """Reports how long the request that woke the engine waited for its first byte, once, if it can still be known."""
    loan_id = node.journal.meta(_mark(engine.engine_id))
    if not loan_id:
        return
    loop = asyncio.get_running_loop()
    deadline, (pause, pause_max) = loop.time() + _FIRST_BYTE_SECONDS_MAX, _PAUSE_SECONDS
    seconds: float | None = None
    while seconds is None and loop.time() < deadline:
        try:
            seen = await engine.gate.observe(engine.engine_id)
        except GateError:
            seen = None  # it may come back, and has forgotten then
        if seen is not None:
            seconds = seen.first_byte_seconds
            if seen.state is not GateState.OPEN:
                break  # closed again: the time before is told, or lost
        await asyncio.sleep(pause)
        pause = min(pause_max, pause * 1.5)
    with node.journal.together():
        if seconds is not None:
            node.journal.report(RequestAnswered(loan_id=loan_id, engine_id=engine.engine_id, seconds=seconds))
        node.journal.set_meta(_mark(engine.engine_id), "")
