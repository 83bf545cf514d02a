"""Draining and parking: traffic off, the answer still right, the engine asked once.

Until ``park_sent`` nothing is released and everything may be broken off: the gate is opened again. From then on a
recall is only marked, and waking begins once the engine says parked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from ..vmm.tags import KEEPS_CONTENTS
from . import loan_plan
from .engine_hand import CLOCK_SKEW_SECONDS_MAX
from .engine_keeper import ENGINE_TROUBLE, EngineKeeper
from .engine_park import ask_to_park, parked_or_not
from .errors import AgentError, CanaryFailed, EngineLost
from .gates.base import GateError
from .journal import boottime
from .probe import DeviceFacts, why_absent
from .processes import process_in_words
from .protocol.loans import LoanEvent, LoanStep
from .protocol.plans import held_together
from .protocol.wire import EngineState, Reason
from .tasks import all_or_none

if TYPE_CHECKING:
    from .loan import Loan

log = structlog.get_logger(__name__)


class Refused(Exception):
    """The loan ends before anything is released. ``event`` says by which edge."""

    def __init__(self, event: LoanEvent, code: str, sentence: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.event = event
        self.reason = Reason(code=code, sentence=sentence, data=data or {})


# ---- draining ---------------------------------------------------------------------------------------------------


async def drain(loan: Loan) -> None:
    """Draining to parking; or closed with the gates open again; or faulted."""
    from .loan import Recalled

    if any(loan.has(LoanStep.GATE_CLOSING, engine) for engine in loan.engines):
        # An agent died here. Nothing was released, so the loan is not worth its risk: it ends.
        loan.recall("AgentRestarted")
    try:
        event = await loan.unless_recalled(_drain(loan))
    except Recalled:
        await _reopen(loan)
        sentence = f"the loan was recalled before anything was released ({loan.recall_reason})"
        loan.take(loan.recall_event(), Reason(code=loan.recall_reason or "Recalled", sentence=sentence))
    except Refused as refused:
        await _end_refused(loan, refused)
    except EngineLost as lost:
        loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=str(lost)))
    except ENGINE_TROUBLE as error:
        await _end_refused(
            loan, Refused(LoanEvent.PREFLIGHT_REFUSED, "EngineNotReady", f"it cannot be parked: {error}")
        )
    else:
        loan.take(event)


async def _end_refused(loan: Loan, refused: Refused) -> None:
    await _reopen(loan)
    loan.take(refused.event, refused.reason)
    wrong = refused.event is LoanEvent.GOLDEN_WRONG
    loan.node.alert("critical" if wrong else "warning", "loan_refused", refused.reason.sentence, loan_id=loan.loan_id)


async def _drain(loan: Loan) -> LoanEvent:
    await _preflight(loan)
    events = await all_or_none(*(_drain_engine(loan, engine) for engine in loan.engines))
    forced = LoanEvent.DRAIN_DEADLINE_FORCED
    return forced if forced in events else LoanEvent.DRAINED


async def _preflight(loan: Loan) -> None:
    node = loan.node
    if node.disk_is_short():
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "DiskReserve", "the agent's disk is too full to keep a journal")
    for device_id in loan.order.device_ids:
        if device_id in node.quarantined:
            raise Refused(LoanEvent.PREFLIGHT_REFUSED, "Quarantined", node.quarantined[device_id].sentence)
    for engine in loan.engines:
        _refuse_unready(loan, engine)
    # At once: a look walks over all processes, and a signed status is a round trip.
    looking = asyncio.ensure_future(node.look())
    try:
        await all_or_none(*(_preflight_engine(loan, engine) for engine in loan.engines))
        facts = await looking
    finally:
        looking.cancel()
    absent = why_absent(facts, loan.order.device_ids)
    if absent is not None:
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, absent.code, absent.sentence)
    _refuse_foreign(loan, facts)
    wrong = loan_plan.not_held(loan, facts)
    if wrong is not None:
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, wrong.code, wrong.sentence, wrong.data)
    for engine in loan.engines:
        engine.device_bytes = engine.bytes_on(facts)
    # Its wire does not tell bytes by tag: what an engine holds on its devices is the most a backup can take.
    backup_bytes = held_together(
        (engine.device_bytes, engine.shared_bytes())
        for engine in loan.engines
        if any(mode in KEEPS_CONTENTS for mode in loan.policy_of(engine).restore_modes.values())
    )
    have = node.host_ram.reserve(loan.loan_id, backup_bytes)
    if have is not None:
        raise Refused(
            LoanEvent.PREFLIGHT_REFUSED,
            "HostRAMForBackup",
            f"the backups need {backup_bytes} bytes of host memory and {have} are to be had",
            {"need_bytes": backup_bytes, "have_bytes": have},
        )
    for engine in loan.engines:
        free = {device_id: facts[device_id].free_bytes for device_id in engine.device_ids}
        loan.step(LoanStep.PREFLIGHTED, engine, data={"device_bytes": engine.device_bytes, "free_bytes": free})


def _refuse_foreign(loan: Loan, facts: dict[str, DeviceFacts]) -> None:
    for device_id in loan.order.device_ids:
        foreign = loan.node.foreign(facts[device_id])
        if foreign:
            raise Refused(LoanEvent.PREFLIGHT_REFUSED, *foreign_words(device_id, foreign))


def foreign_words(device_id: str, foreign: dict[int, int]) -> tuple[str, str, dict[str, Any]]:
    pid, held = max(foreign.items(), key=lambda item: item[1])
    return (
        "ForeignProcess",
        f"{process_in_words(pid)}, which is not ours, holds {held} bytes on device {device_id}",
        {"device_id": device_id, "bytes_by_pid": {str(key): value for key, value in foreign.items()}},
    )


def _refuse_unready(loan: Loan, engine: EngineKeeper) -> None:
    if not engine.verified_now():
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "EngineNotReady", f"engine {engine.name} is not verified")
    if not engine.in_effect(loan.whole_policy_of(engine)):
        sentence = f"engine {engine.name} was not started with the restore modes of its policy yet"
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "PolicyNotInEffect", sentence)


async def _preflight_engine(loan: Loan, engine: EngineKeeper) -> None:
    seen = await engine.adapter.observe()
    if seen.state is not EngineState.RUNNING:
        if engine.process_identity is None or seen.state is EngineState.FAILED:
            raise EngineLost(f"engine {engine.name} is {seen.state}. {seen.detail}".strip())
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "EngineNotReady", f"engine {engine.name} is {seen.state}")
    try:
        await engine.probe()
    except AgentError as error:
        sentence = f"engine {engine.name} cannot be asked what it can do: {error}"
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "EngineNotReady", sentence) from error
    refusal = engine.refusal(loan.policy_of(engine))
    if refusal is not None:
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "PolicyRefused", refusal)
    if seen.clock_skew_seconds is not None and abs(seen.clock_skew_seconds) > CLOCK_SKEW_SECONDS_MAX:
        sentence = (
            f"the clock of engine {engine.name} is {seen.clock_skew_seconds:.0f} s off: a resume could not be signed"
        )
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "ClockSkew", sentence)


async def _drain_engine(loan: Loan, engine: EngineKeeper) -> LoanEvent:
    policy = loan.policy_of(engine)
    event = LoanEvent.DRAINED
    loan.step(LoanStep.GATE_CLOSING, engine)
    try:
        in_flight = await engine.close_gate(policy)
        loan.step(LoanStep.GATE_CLOSED, engine, data={"in_flight": in_flight})
        await engine.gate.foretell(engine.engine_id, loan.sleeps_until_seconds)
        loan.watch_requests(engine)
        engine.report()
        left = await engine.gate.wait_drained(engine.engine_id, policy.drain_seconds_max)
        if left and policy.on_drain_deadline == "abort_loan":
            raise Refused(
                LoanEvent.DRAIN_DEADLINE_ABORTED,
                "WaitingForDrain",
                f"{left} requests to engine {engine.name} did not end within {policy.drain_seconds_max} s",
                {"in_flight": left},
            )
        if left:
            event = LoanEvent.DRAIN_DEADLINE_FORCED
            await engine.gate.abort(engine.engine_id)
            left = await engine.gate.wait_drained(engine.engine_id, policy.drain_seconds_max)
            if left:
                sentence = f"{left} requests to engine {engine.name} could not be aborted"
                raise Refused(LoanEvent.DRAIN_DEADLINE_ABORTED, "WaitingForDrain", sentence, {"in_flight": left})
    except GateError as error:
        sentence = f"the gate of engine {engine.name} does not answer: {error}"
        raise Refused(LoanEvent.PREFLIGHT_REFUSED, "GateUnreachable", sentence) from error
    asked = boottime()
    try:
        await engine.check_canary(policy)
    except CanaryFailed as error:
        if engine.process_identity is None:
            raise EngineLost(f"engine {engine.name} ended while it was drained") from error
        if error.unasked:  # no answer is not a wrong one
            raise Refused(LoanEvent.PREFLIGHT_REFUSED, "EngineNotReady", str(error)) from error
        raise Refused(LoanEvent.GOLDEN_WRONG, "GoldenWrong", str(error)) from error
    counted_by = engine.gate.counted_by
    loan.step(LoanStep.IN_FLIGHT_ZERO, engine, data={"canary_seconds": boottime() - asked, "counted_by": counted_by})
    return event


async def _reopen(loan: Loan) -> None:
    """Opens again what was closed; the keeper does it when this fails."""
    for engine in loan.engines:
        if not loan.has(LoanStep.GATE_CLOSING, engine):
            continue
        try:
            seen = await engine.adapter.observe()
            if seen.state is EngineState.RUNNING:
                await engine.open_gate(loan.sink(engine))
        except ENGINE_TROUBLE as error:
            log.warning("the gate was not opened again; its keeper will", engine=engine.name, error=str(error))
        engine.report()


# ---- parking ----------------------------------------------------------------------------------------------------


async def park(loan: Loan) -> None:
    """Parking to settling; or closed (nothing was released); or faulted."""
    results = await asyncio.gather(*(_park_engine(loan, engine) for engine in loan.engines), return_exceptions=True)
    lost = _first(results, EngineLost)
    refused = _first(results, Refused)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (*ENGINE_TROUBLE, Refused)):
            raise result
    lost = lost or next((result for result in results if isinstance(result, ENGINE_TROUBLE)), None)
    if lost is not None:
        loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=str(lost)))
    elif refused is not None and all(isinstance(result, Refused) for result in results):
        await _take_back(loan, refused)
    else:
        if refused is not None:
            loan.recall(refused.reason.code)
        loan.take(LoanEvent.PARKED, None if refused is None else refused.reason)


def _first(results: list[Any], kind: type[Any]) -> Any:
    return next((result for result in results if isinstance(result, kind)), None)


async def _take_back(loan: Loan, refused: Refused) -> None:
    """No engine released anything; still nothing is routed without a right answer."""
    for engine in loan.engines:
        try:
            await engine.verify(loan.sink(engine), loan.policy_of(engine))
            await engine.open_gate(loan.sink(engine))
        except ENGINE_TROUBLE as error:
            loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=str(error)), engine)
            return
    loan.take(LoanEvent.PARK_REFUSED, refused.reason)


async def _park_engine(loan: Loan, engine: EngineKeeper) -> None:
    """Returns once the engine says parked; raises Refused (it runs on) or EngineLost."""
    policy = loan.policy_of(engine)
    if loan.has(LoanStep.PARKED_SEEN, engine):
        return

    def late(reason: Reason) -> None:
        loan.take(LoanEvent.PARK_DEADLINE, reason, engine)
        loan.recall("ParkDeadline")

    if not loan.has(LoanStep.PARK_SENT, engine):
        tags = sorted(policy.restore_modes)
        if not loan.is_fresh:
            loan.recall("AgentRestarted")  # preflight and golden answer were an earlier agent's
        left = loan.seconds_left()
        if loan.recalled or (left is not None and left <= 0):
            sentence = f"engine {engine.name} was not asked to park any more ({loan.recall_reason or 'RestoreBy'})"
            raise Refused(LoanEvent.PARK_REFUSED, loan.recall_reason or "RestoreBy", sentence)
        try:
            await engine.gate.prove_closed(engine.engine_id)
            engine.released()
        except GateError as error:
            sentence = f"engine {engine.name} is not parked, it may have traffic: {error}"
            raise Refused(LoanEvent.PARK_REFUSED, "GateUnreachable", sentence) from error
        except OSError as error:
            sentence = f"it cannot be written down that engine {engine.name} parks: {error}"
            raise Refused(LoanEvent.PARK_REFUSED, "DiskReserve", sentence) from error
        loan.step(LoanStep.PARK_SENT, engine, data={"tags": tags, "device_bytes": engine.device_bytes})
        seen, said = await ask_to_park(engine, policy, late)
    else:
        said = "the agent that asked it ended before its answer came, and it runs"
        seen = await parked_or_not(engine, policy, "", late, answered=False)
    if seen.state is EngineState.RUNNING:
        sentence = f"engine {engine.name} did not park: {said or 'it said yes, and runs'}"
        raise Refused(LoanEvent.PARK_REFUSED, "ParkRefused", sentence)
    loan.step(LoanStep.PARKED_SEEN, engine, data={"parked_tags": list(seen.parked_tags)})
