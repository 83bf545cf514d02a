"""Lent and recalling: the attempts run, then every one of them is proved over.

The decision that the work is over is made once, here: by a recall, by ``restore_by``, or because the last attempt ended
and no job waits for the loan. Whether one does is known before it ends, so nothing is asked then.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import structlog

from .attempt_run import AttemptRun
from .engine_keeper import EngineKeeper
from .errors import SpawnRefused
from .journal import boottime
from .loan_without_job import SENTENCES
from .probe import why_absent
from .processes import process_in_words
from .protocol.loans import LoanEvent, LoanState
from .protocol.wire import LOAN_OVER, AttemptEnd, EngineState, Reason

if TYPE_CHECKING:
    from .loan import Loan

log = structlog.get_logger(__name__)

_ATTACHED_POLL_SECONDS: Final = 1.0
_LOOK_SECONDS_MAX: Final = 30.0  # the loop's clock stands still while the machine is suspended, `restore_by` does not


async def work(loan: Loan) -> None:
    """Lent to recalling."""
    watches = [asyncio.ensure_future(_watch(loan, engine)) for engine in loan.engines]
    try:
        event = await _until_over(loan)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
    loan.take(
        event,
        None
        if loan.recall_reason is None
        else Reason(
            code=loan.recall_reason, sentence=SENTENCES.get(loan.recall_reason, f"recalled: {loan.recall_reason}")
        ),
    )


async def _until_over(loan: Loan) -> LoanEvent:
    idle_since: float | None = None
    while True:
        loan.changed.clear()
        lost = next(filter(None, map(loan.node.absences.lost, loan.order.device_ids)), None)
        if lost is not None:
            loan.recall(lost.code)
        if loan.recalled:
            return loan.recall_event()
        for run in loan.live_attempts:
            run.begin(_check_room)
        left = loan.seconds_left()
        if left is not None and left <= 0:
            loan.recall(loan.deadline_reason)
            return LoanEvent.RESTORE_BY_REACHED
        idle = not loan.live_attempts and loan.without_job is None
        if idle and not (loan.expects_more and loan.node.connected.is_set()):
            return LoanEvent.WORK_ENDED
        idle_left = None
        idle_since = (idle_since or boottime()) if idle else None
        if idle_since is not None:
            idle_left = idle_since + loan.node.settings.loan_idle_seconds_max - boottime()
            if idle_left <= 0:
                return LoanEvent.WORK_ENDED
        wait = min(value for value in (left, idle_left, _LOOK_SECONDS_MAX) if value is not None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await loan.changed.wait()


async def _check_room(run: AttemptRun) -> None:
    """Right before a spawn: every device still has what the attempt needs, and nobody unknown is there (S4)."""
    node, loan = run.node, run.loan
    facts = loan.settled_facts or await node.look()
    absent = why_absent(facts, run.spec.device_ids)
    if absent is not None:
        raise SpawnRefused(absent.code, absent.sentence)
    for device_id in run.spec.device_ids:
        free = facts[device_id].free_bytes
        # What others that run here have been promised and not taken yet is not free.
        others = [other for other in run.loan.live_attempts if other.running and device_id in other.spec.device_ids]
        promised = sum(max(0, other.spec.hbm_bytes - facts[device_id].bytes_of(other.pids())) for other in others)
        need = run.spec.hbm_bytes + promised + node.settings.spawn_margin_bytes
        foreign = node.foreign(facts[device_id])
        if foreign:
            names = ", ".join(process_in_words(pid) for pid in sorted(foreign)[:10])
            raise SpawnRefused("ForeignProcess", f"{names} hold memory on device {device_id}")
        if free < need:
            raise SpawnRefused("HBMNotFreed", f"device {device_id} has {free} of {need} bytes free")


async def _watch(loan: Loan, engine: EngineKeeper) -> None:
    """Marks the loan when a parked engine dies; the job goes on, unless the policy wants the engine back now."""
    while not engine.is_lost_while_parked():
        if engine.process is not None and engine.process.alive:
            await engine.process.wait_gone(3600.0)
        else:
            await asyncio.sleep(_ATTACHED_POLL_SECONDS)
    if engine.engine_id not in loan.engine_lost:
        engine.set_state(EngineState.GONE)
        sentence = f"engine {engine.name} ended while it was parked; it is brought back after the loan"
        loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=sentence), engine)
        loan.node.alert("critical", "engine_lost", sentence, engine_id=engine.engine_id, loan_id=loan.loan_id)
    if loan.policy_of(engine).restart == "now":
        loan.recall("EngineLost")


async def clear(loan: Loan) -> None:
    """Recalling to waking, closed or faulted, once every attempt is proved over."""
    # One that came in when the work was over already is told as one that comes later is.
    reason = Reason(code=loan.recall_reason or LOAN_OVER, sentence="the loan ended before this attempt was started")
    for run in loan.live_attempts:
        if run.started or run.adoptable:
            run.begin(_check_room)
            run.stop(AttemptEnd.PREEMPTED)
        else:
            run.end_unstarted(reason)
    await asyncio.gather(*(run.ended.wait() for run in loan.attempts.values()))
    loan.unkillable += [(run.attempt_id, run.unkillable) for run in loan.attempts.values() if run.unkillable]
    for _, left in loan.unkillable[:1]:
        loan.node.alert("critical", "unkillable", left.sentence, loan_id=loan.loan_id)
        loan.take(LoanEvent.UNKILLABLE, left)
        return
    for engine in loan.engines:
        if engine.is_lost_while_parked() and engine.engine_id not in loan.engine_lost:
            sentence = f"engine {engine.name} ended while it was parked"
            loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=sentence), engine)
    assert loan.state is LoanState.RECALLING
    if not loan.engines:
        loan.take(LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE)
    elif loan.engine_lost:
        loan.take(LoanEvent.GROUPS_EMPTY_ENGINE_LOST)
    else:
        loan.take(LoanEvent.GROUPS_EMPTY)
