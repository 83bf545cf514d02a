"""Settling: after the park the memory is proved free, on every device of the loan, or the engines are woken again.

Judged are, look by look, what the processes of every engine still hold on each of its devices and what each device has
free. Bytes that merely stop changing prove stillness, not enough of them; the engine's own word proves nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from . import loan_plan
from .equal_samples import EqualSamples
from .loan_plan import NOTHING_SHARE
from .loan_release import foreign_words
from .loan_without_job import SENTENCES
from .probe import DeviceFacts, why_absent
from .protocol.loans import LoanEvent, LoanStep
from .protocol.wire import EngineState, Reason

if TYPE_CHECKING:
    from .loan import Loan

Facts = dict[str, DeviceFacts]

_LOOKS_MIN: Final = 3  # also past the deadline: a node that is too slow to look has not seen that nothing is free


async def settle(loan: Loan) -> None:
    """Settling to lent after k equal samples that cover the need on every device; else waking, or faulted."""
    policies = [loan.policy_of(engine) for engine in loan.engines]
    samples_wanted = max((policy.settle_samples for policy in policies), default=1)
    deadline = time.monotonic() + max((policy.settle_seconds_max for policy in policies), default=15.0)
    needs = loan_plan.needs_bytes(loan)
    samples = EqualSamples()
    for run in loan.live_attempts:
        run.prepare()  # its runner starts while the memory settles; it waits for our word
    while True:
        if _is_broken_off(loan):
            return
        facts = await loan.node.look()
        if _is_disturbed(loan, facts):
            return
        sample = (
            [engine.bytes_on(facts) for engine in loan.engines],
            {device_id: _steady_free_bytes(facts[device_id]) for device_id in loan.order.device_ids},
        )
        covered = all(facts[device_id].free_bytes >= need for device_id, need in needs.items())
        covered = covered and not _gave_nothing(loan, facts)
        agrees = all(loan_plan.agrees(loan, engine, facts) for engine in loan.engines)
        samples.take(sample, is_good=covered and agrees)
        if samples.good >= samples_wanted:
            _settled(loan, facts)
            return
        if time.monotonic() > deadline and samples.taken > min(samples_wanted, _LOOKS_MIN):
            # Less than was predicted, and still, and enough: the job runs. Where a device gave next to nothing of
            # that, a rank of the engine has not released at all.
            still = samples.still >= samples_wanted
            if still and covered and not loan_plan.short_of(loan, facts, NOTHING_SHARE):
                _settled(loan, facts)
            else:
                _not_free(loan, facts, needs, still=still)
            return
        await asyncio.sleep(loan.node.settings.settle_poll_seconds)


def _steady_free_bytes(facts: DeviceFacts) -> int | None:
    """None where the host's memory is the device's: that changes with everything that runs, and only has to suffice."""
    return None if facts.unified else facts.free_bytes


def _is_broken_off(loan: Loan) -> bool:
    if loan.nothing_left:
        loan.recall("NothingLeftToRun")
    left = loan.seconds_left()
    if left is not None and left <= 0:
        loan.recall(loan.deadline_reason)
    if loan.recalled:
        code = loan.recall_reason or "Recalled"
        sentence = f"its engines were woken before their memory was proved free: {SENTENCES.get(code, code)}"
        _back_to_waking(loan, loan.recall_event(), Reason(code=code, sentence=sentence))
    return loan.recalled


def _is_disturbed(loan: Loan, facts: Facts) -> bool:
    absent = why_absent(facts, loan.order.device_ids)
    if absent is not None:
        _back_to_waking(loan, LoanEvent.MEMORY_NOT_FREE, absent)
        return True
    for engine in loan.engines:
        if engine.is_lost_while_parked():
            engine.set_state(EngineState.GONE)
            sentence = f"engine {engine.name} ended while it was parked"
            loan.take(LoanEvent.ENGINE_LOST, Reason(code="EngineLost", sentence=sentence), engine)
            return True
    for device_id in loan.order.device_ids:
        foreign = loan.node.foreign(facts[device_id])
        if foreign:
            code, sentence, data = foreign_words(device_id, foreign)
            _back_to_waking(loan, LoanEvent.FOREIGN_PROCESS, Reason(code=code, sentence=sentence, data=data))
            return True
    return False


def _gave_nothing(loan: Loan, facts: Facts) -> list[str]:
    """Engines that hold all that they held. Without a job nothing but this tells a park that did nothing."""
    if loan.without_job is None:
        return []
    held = {engine.name: (engine, loan_plan.held_before(loan, engine)) for engine in loan.engines}
    return [
        name
        for name, (engine, before) in held.items()
        if any(before.values()) and not any(loan_plan.dropped(before, engine, facts).values())
    ]


def _back_to_waking(loan: Loan, event: LoanEvent, reason: Reason) -> None:
    if not loan.engines:
        event = LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE
    loan.take(event, reason)
    loan.end_unstarted(reason)


def _settled(loan: Loan, facts: Facts) -> None:
    free = {device_id: facts[device_id].free_bytes for device_id in loan.order.device_ids}
    freed = loan_plan.parked(loan, facts)
    for engine in loan.engines:
        residual = engine.bytes_on(facts)
        engine.device_bytes = residual
        engine.report()
        data = {"device_bytes": residual, "free_bytes": free, "freed_bytes": freed[engine.engine_id]}
        loan.step(LoanStep.SETTLED, engine, data=data)
    if not loan.engines:
        loan.step(LoanStep.SETTLED, data={"free_bytes": free})
    loan.node.host_ram.release(loan.loan_id)  # the backups are there: they show in MemAvailable themselves
    loan.settled(facts)
    loan.take(LoanEvent.MEMORY_FREE)


def _not_free(loan: Loan, facts: Facts, needs: dict[str, int], *, still: bool) -> None:
    short = {
        device_id: {
            "need_bytes": need_bytes,
            "free_bytes": facts[device_id].free_bytes,
            "bytes_by_pid": {str(pid): held for pid, held in facts[device_id].bytes_by_pid.items()},
        }
        for device_id, need_bytes in needs.items()
        if facts[device_id].free_bytes < need_bytes
    }
    unreleased = loan_plan.short_of(loan, facts, NOTHING_SHARE)
    names = ", ".join(engine.name for engine in loan.engines) or "no engine"
    sentence = f"{max(needs.values(), default=0)} bytes did not become free after the park of {names}"
    if not short and unreleased:
        device_id, of = next(iter(unreleased.items()))
        sentence = (
            f"engine {of['engine']} gave {of['freed_bytes']} of {of['predicted_bytes']} bytes on device {device_id}:"
            " that part of it did not release"
        )
    elif not short and _gave_nothing(loan, facts):
        sentence = f"nothing became free after the park of {names}"
    elif not short:
        sentence = f"the memory of {names} did not stop changing after the park"
    loan_plan.failed(loan, facts, still=still)
    reason = Reason(code="HBMNotFreed", sentence=sentence, data={"devices": short, "unreleased": unreleased})
    _back_to_waking(loan, LoanEvent.MEMORY_NOT_FREE, reason)
    for engine in loan.engines:
        loan.node.alert("critical", "park_ineffective", sentence, engine_id=engine.engine_id, loan_id=loan.loan_id)
