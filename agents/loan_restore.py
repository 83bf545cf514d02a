"""Waking, verifying and faulted: the engines come back, each behind its own proofs, and only then traffic.

An engine of the loan that is right serves again even while another one is still in trouble.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from . import loan_plan
from .engine_keeper import ENGINE_TROUBLE, EngineKeeper
from .errors import CanaryFailed, EngineLost
from .gates.base import GateError, GateRouteUnknown
from .processes import environ_value, identity
from .protocol.loans import LoanEvent, LoanState
from .protocol.wire import EngineState, GateState, Reason

if TYPE_CHECKING:
    from .loan import Loan

log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS_FIRST: Final = 0.25
_BACK_OFF_SECONDS_MAX: Final = 60.0
_GATE_SECONDS: Final = 0.5
_BURIED_POLL_SECONDS: Final = 1.0


async def restore(loan: Loan) -> None:
    """Waking or verifying to closed, by way of faulted if an engine does not come back at once."""
    loan.end_unstarted(loan.reason)
    still_waking = {engine.engine_id for engine in loan.engines}
    await asyncio.gather(*(_restore_engine(loan, engine, still_waking) for engine in loan.engines))
    loan.take(LoanEvent.CANARY_RIGHT if loan.state is LoanState.VERIFYING else LoanEvent.ENGINE_BACK)


async def _restore_engine(loan: Loan, engine: EngineKeeper, still_waking: set[str]) -> None:
    policy = loan.policy_of(engine)

    def out_of_memory(said: str) -> None:
        if loan.state is LoanState.WAKING:
            sentence = f"engine {engine.name} could not be woken and is still parked; it is tried again. {said}".strip()
            loan.take(LoanEvent.WAKE_OUT_OF_MEMORY, Reason(code="WakeOutOfMemory", sentence=sentence), engine)
            loan.node.alert("critical", "wake_out_of_memory", sentence, engine_id=engine.engine_id)

    await engine.gate.foretell(engine.engine_id, None)
    try:
        await engine.wake(loan.sink(engine), policy, out_of_memory)
        still_waking.discard(engine.engine_id)
        if not still_waking and loan.state is LoanState.WAKING:
            loan.take(LoanEvent.RUNNING)
        await engine.verify(loan.sink(engine), policy)
        loan_plan.woken(loan, engine)
        await _open(loan, engine)
    except EngineLost as lost:
        late = LoanEvent.RESUME_DEADLINE if lost.timed_out and loan.state is LoanState.WAKING else LoanEvent.ENGINE_LOST
        await _fault(loan, engine, late, "EngineLost", str(lost))
    except CanaryFailed as failed:
        event = LoanEvent.CANARY_DEADLINE if failed.timed_out else LoanEvent.CANARY_WRONG
        if failed.unasked or loan.state is LoanState.WAKING:
            event = LoanEvent.ENGINE_LOST  # another engine still wakes: the table knows no canary there
        await _fault(loan, engine, event, "EngineLost" if failed.unasked else "WakeCorrupt", str(failed))
    except ENGINE_TROUBLE as error:
        await _fault(loan, engine, LoanEvent.ENGINE_LOST, "EngineLost", str(error))
    else:
        loan.give_back(engine)
        return
    await _recover_engine(loan, engine)


async def _fault(loan: Loan, engine: EngineKeeper, event: LoanEvent, code: str, sentence: str) -> None:
    engine.verified = False
    engine.reason = Reason(code=code, sentence=sentence)
    try:
        # It may be open: an earlier agent may have died right after it opened it.
        await engine.close_gate(loan.policy_of(engine))
    except GateError as error:
        log.warning("the gate of a faulted engine does not answer", engine=engine.name, error=str(error))
    engine.report()
    if loan.state in (LoanState.WAKING, LoanState.VERIFYING):
        loan.take(event, engine.reason, engine)
    alert = "wake_corrupt" if code == "WakeCorrupt" else "engine_lost"
    loan.node.alert("critical", alert, sentence, engine_id=engine.engine_id, loan_id=loan.loan_id)


async def _open(loan: Loan, engine: EngineKeeper) -> None:
    """Opens the gate, for as long as it takes a gateway that is away to come back."""
    while True:
        try:
            try:
                await engine.open_gate(loan.sink(engine))
            except GateRouteUnknown:
                await engine.ensure_route()
                await engine.open_gate(loan.sink(engine))
            return
        except GateError as error:
            log.warning("the gate does not answer; it is tried again", engine=engine.name, error=str(error))
            await asyncio.sleep(_GATE_SECONDS)


async def recover(loan: Loan) -> None:
    """Faulted to closed: every engine that is not back is brought back, as often as it takes."""
    loan.end_unstarted(loan.reason)
    await _until_buried(loan)
    await asyncio.gather(*(_recover_engine(loan, engine) for engine in loan.engines if loan.holds(engine)))
    loan.take(LoanEvent.ENGINE_BACK)


async def _until_buried(loan: Loan) -> None:
    """While processes of a job survive SIGKILL, its devices are nobody else's, the engine included."""
    quarantined = loan.node.quarantined
    while any(_is_left(attempt_id, reason) for attempt_id, reason in loan.unkillable):
        for device_id in loan.order.device_ids:
            quarantined.setdefault(device_id, loan.unkillable[0][1])
        await asyncio.sleep(_BURIED_POLL_SECONDS)
    ours = [reason for _, reason in loan.unkillable]
    for device_id in loan.order.device_ids:
        if quarantined.get(device_id) in ours:
            del quarantined[device_id]
    loan.unkillable.clear()


def _is_left(attempt_id: str, reason: Reason) -> bool:
    """One of the processes is still there; one whose environment cannot be read is taken for it."""
    pids = [int(pid) for pid in reason.data.get("pids", [])]
    return any(identity(pid) is not None and environ_value(pid, "LULL_ATTEMPT") in (attempt_id, None) for pid in pids)


async def _recover_engine(loan: Loan, engine: EngineKeeper) -> None:
    back_off, failures = _BACK_OFF_SECONDS_FIRST, 0
    while not await _is_back(engine):
        try:
            await engine.bring_back(loan.sink(engine), loan.policy_of(engine))
        except ENGINE_TROUBLE as error:
            failures += 1
            engine.reason = Reason(code="EngineNotReady", sentence=str(error))
            engine.report()
            log.warning("engine is not back yet", engine=engine.name, failures=failures, error=str(error))
            if failures in (1, 5, 20):
                loan.node.alert(
                    "critical",
                    "engine_not_ready",
                    f"engine {engine.name} is not back after a loan, its gate stays closed: {error}",
                    engine_id=engine.engine_id,
                    loan_id=loan.loan_id,
                )
            await asyncio.sleep(back_off)
            back_off = min(_BACK_OFF_SECONDS_MAX, back_off * 2)
    engine.set_state(EngineState.RUNNING)
    loan.give_back(engine)


async def _is_back(engine: EngineKeeper) -> bool:
    """By the gate's own word, not by memory."""
    if not engine.verified_now():
        return False
    try:
        if (await engine.gate.observe(engine.engine_id)).state is not GateState.OPEN:
            return False
        if engine.gate.is_wanted_closed:  # it would be closed again
            await engine.open_gate()
    except (GateError, EngineLost):
        return False
    return True
