"""What a loan releases of each engine, whether that can be true, and what came of it: each plan is judged by bytes.

A plan that does not hold is refused before anything is released. After the park every device of the engine has to show
what was predicted. What really became free, and how long it took, is written down and is what the next plan goes by;
a park that gave less than it had to is told apart, since the engine can do better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from .engine_hand import EngineHand
from .journal import boottime
from .park_alarms import seen_parked, seen_short
from .probe import DeviceFacts
from .protocol.loans import LoanStep
from .protocol.wire import Reason

if TYPE_CHECKING:
    from .engine_keeper import EngineKeeper
    from .loan import Loan

Facts = Mapping[str, DeviceFacts]

AGREES_SHARE: Final = 0.8  # of what was predicted: less is waited for, and told
NOTHING_SHARE: Final = 0.2  # below it a device counts as not released at all
_HOLDS_SHARE: Final = 0.95  # a prediction that what is known now bears out so far is gone by


def needs_bytes(loan: Loan) -> dict[str, int]:
    """Free bytes that devices must show before anything starts: of those that the first attempts use, if it is said."""
    needs = loan.order.need_bytes_by_device
    if needs is None:
        needs = dict.fromkeys(loan.order.device_ids, loan.order.need_bytes)
    margin_bytes = loan.node.settings.spawn_margin_bytes
    return {device_id: needs[device_id] + margin_bytes for device_id in loan.order.device_ids if device_id in needs}


def not_held(loan: Loan, facts: Facts) -> Reason | None:
    """Why a plan of the loan cannot come true, by what is known and held now; None where nothing speaks against it."""
    freed: dict[str, int] = {}
    guessed: set[str] = set()
    for engine in loan.engines:
        plan = loan.plan_of(engine)
        if plan is None or not plan.known:
            guessed.update(engine.device_ids)
            continue
        held, known = engine.bytes_on(dict(facts)), engine.parks.freed_bytes(plan.modes)
        for device_id, predicted in plan.freed_bytes.items():
            now = min(known.get(device_id, 0), held.get(device_id, 0))
            if now < predicted * _HOLDS_SHARE:
                sentence = (
                    f"a park of {', '.join(plan.tags)} of engine {engine.name} was to free {predicted} bytes"
                    f" on device {device_id}, and would free {now}"
                )
                data = {"device_id": device_id, "predicted_bytes": predicted, "known_bytes": now}
                return Reason(code="PlanNotHeld", sentence=sentence, data=data)
            freed[device_id] = freed.get(device_id, 0) + min(now, predicted)
    for device_id, need in needs_bytes(loan).items():
        there = facts[device_id].free_bytes + freed.get(device_id, 0)
        if device_id not in guessed and there < need:
            sentence = f"with its plan device {device_id} would have {there} of {need} bytes free"
            return Reason(
                code="PlanNotHeld",
                sentence=sentence,
                data={"device_id": device_id, "need_bytes": need, "would_have_bytes": there},
            )
    return None


def agrees(loan: Loan, engine: EngineKeeper, facts: Facts) -> bool:
    """Each of its devices shows what was predicted or, where nothing was, that something was released there."""
    given = dropped(held_before(loan, engine), engine, facts)
    enough = all(given.get(key, 0) >= of * AGREES_SHARE for key, of in _predicted(loan, engine).items())
    return enough and not keeps_all(loan, engine, facts)


def short_of(loan: Loan, facts: Facts, share: float) -> dict[str, dict[str, Any]]:
    """Devices, of every engine of the loan, on which its processes gave less than ``share`` of what was predicted."""
    short: dict[str, dict[str, Any]] = {}
    for engine in loan.engines:
        given = dropped(held_before(loan, engine), engine, facts)
        for device_id, bytes_ in _predicted(loan, engine).items():
            if device_id in facts and given.get(device_id, 0) < bytes_ * share:
                of = {"engine": engine.name, "predicted_bytes": bytes_, "freed_bytes": given.get(device_id, 0)}
                short[device_id] = of
    return short


def _predicted(loan: Loan, engine: EngineKeeper) -> dict[str, int]:
    """By device; empty where nobody has seen such a park."""
    plan = loan.plan_of(engine)
    if plan is not None and plan.known:
        return plan.freed_bytes
    return engine.parks.freed_bytes(loan.policy_of(engine).restore_modes)


def keeps_all(loan: Loan, engine: EngineKeeper, facts: Facts) -> list[str]:
    """Devices on which it gave next to nothing of what was predicted or, where nothing was, of what it held."""
    before, predicted = held_before(loan, engine), _predicted(loan, engine)
    given = dropped(before, engine, facts)
    if predicted:
        return [device_id for device_id, of in predicted.items() if given.get(device_id, 0) < of * NOTHING_SHARE]
    return [device_id for device_id, held in before.items() if held and not given[device_id]]


def _before(loan: Loan, engine: EngineHand) -> dict[str, dict[str, int]]:
    """What was held and free at the preflight; an earlier agent may have looked."""
    for row in reversed(loan.node.journal.steps(loan.loan_id)):
        if row.step is LoanStep.PREFLIGHTED and row.engine_id == engine.engine_id:
            return row.data
    return {}


def held_before(loan: Loan, engine: EngineHand) -> dict[str, int]:
    """Bytes by device of the engine's processes at the preflight."""
    return _before(loan, engine).get("device_bytes", {})


def dropped(before: Mapping[str, int], engine: EngineHand, facts: Facts) -> dict[str, int]:
    """Bytes by device that the engine's processes hold less than before."""
    now = engine.bytes_on(dict(facts))
    return {device_id: max(0, held - now.get(device_id, 0)) for device_id, held in before.items()}


def freed(loan: Loan, facts: Facts) -> dict[str, dict[str, int]]:
    """By engine and device: what it gave, and no more in all than the device has free now and had not before.

    Memory that two engines map, or that its memory service keeps, is not free when one of them lets go of it.
    """
    given_up = {each.engine_id: dropped(held_before(loan, each), each, facts) for each in loan.engines}
    result: dict[str, dict[str, int]] = {engine_id: {} for engine_id in given_up}
    for engine in loan.engines:
        free_before = _before(loan, engine).get("free_bytes", {})
        for device_id, given in given_up[engine.engine_id].items():
            all_given = sum(each.get(device_id, 0) for each in given_up.values())
            gained = max(0, facts[device_id].free_bytes - free_before.get(device_id, 0))
            # Where the host's memory is the device's, it gains and loses by everything that runs.
            all_of_it = all_given <= gained or facts[device_id].unified
            result[engine.engine_id][device_id] = given if all_of_it else given * gained // all_given
    return result


def parked(loan: Loan, facts: Facts) -> dict[str, dict[str, int]]:
    """Writes down what the parks of the loan's engines did, with the alarms; returns the freed bytes by engine."""
    given = freed(loan, facts)
    for engine in loan.engines:
        modes, residual = loan.policy_of(engine).restore_modes, engine.bytes_on(dict(facts))
        of, loan_id = given[engine.engine_id], loan.loan_id
        if agrees(loan, engine, facts):
            seconds = _seconds_since(loan, engine, LoanStep.PARK_SENT)
            seen_parked(engine, modes, of, residual, seconds=seconds, loan_id=loan_id)
        else:
            _fell_short(loan, engine, of, facts, still=True)
    return given


def failed(loan: Loan, facts: Facts, *, still: bool) -> None:
    """The same of a loan that came to nothing. ``still``: the memory had come to rest by then."""
    given = freed(loan, facts)
    for engine in loan.engines:
        _fell_short(loan, engine, given[engine.engine_id], facts, still=still)


def _fell_short(loan: Loan, engine: EngineKeeper, given: dict[str, int], facts: Facts, *, still: bool) -> None:
    modes, residual = loan.policy_of(engine).restore_modes, engine.bytes_on(dict(facts))
    released = still and not keeps_all(loan, engine, facts)
    seen_short(engine, modes, given, residual, released=released, loan_id=loan.loan_id)


def woken(loan: Loan, engine: EngineKeeper) -> None:
    """The engine answered right: what the wake took, if it was a wake and no restart."""
    seconds = _seconds_since(loan, engine, LoanStep.RESUME_SENT)
    if seconds is not None and engine.engine_id not in loan.engine_lost:
        engine.parks.woken(loan.policy_of(engine).restore_modes, seconds)


def _seconds_since(loan: Loan, engine: EngineHand, step: LoanStep) -> float | None:
    """Since the last such step; None where there is none, or where an agent ended meanwhile."""
    if not loan.is_fresh:
        return None
    rows = loan.node.journal.steps(loan.loan_id)
    at = [row.boottime for row in rows if row.step is step and row.engine_id == engine.engine_id]
    return boottime() - at[-1] if at else None
