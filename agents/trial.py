"""Trial parks: an engine that does not serve yet is parked and woken, each way worth knowing, to see what that does.

Opt-in (`trial_park = true`), and once per way and configuration: what comes of it is kept by ``park_history``. The
gate is closed the whole time, the same proofs hold as after a loan, and an engine that does not come back right is
brought back as always. An agent that dies in the middle leaves an engine that is parked without a loan: the next one
wakes it, and tries again a bounded number of times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from ..vmm.tags import KEEPS_CONTENTS
from .device_turns import TurnNotGiven
from .engine_hand import CLOCK_SKEW_SECONDS_MAX, EngineHand
from .engine_park import ask_to_park
from .equal_samples import EqualSamples
from .errors import AgentError, CanaryFailed, EngineLost
from .journal import boottime
from .park_alarms import seen_parked
from .probe import DeviceFacts, why_absent
from .protocol.loans import LoanStep
from .protocol.plans import narrowed, worth_trying
from .protocol.policy import EnginePolicy
from .protocol.wire import EngineState, Reason

log = structlog.get_logger(__name__)

Facts = dict[str, DeviceFacts]


class _NotNow(Exception):
    """Nothing was released; the engine serves without having been tried."""


async def learn_parks(engine: EngineHand) -> None:
    """Tries each way that nobody has seen yet. The engine runs, verified, its gate closed; so it does afterwards.

    Raises EngineLost, CanaryFailed where it does not come back right.
    """
    policy, able = engine.policy, engine.capabilities
    if not engine.settings.trial_park or able is None or engine.refusal(policy) or not engine.in_effect(policy):
        return
    ways = [modes for modes in worth_trying(able, policy) if not engine.parks.is_known(modes)]
    if not ways:
        return
    engine.reason = Reason(code="TrialPark", sentence="its parks are tried before it serves")
    engine.report()
    try:
        async with engine.node.turns.alone(engine.device_ids, engine.settings.health_seconds_max):
            await _drained(engine, policy)
            for modes in ways:
                await _try(engine, narrowed(policy, modes))
    except (TurnNotGiven, _NotNow) as reason:
        sentence = f"engine {engine.name} serves without a trial of its parks: {reason}"
        engine.node.alert("warning", "trial_not_now", sentence, engine_id=engine.engine_id)
    finally:
        engine.room_taken()
        engine.node.host_ram.release(_key(engine))


def _key(engine: EngineHand) -> str:
    return f"trial of {engine.engine_id}"


async def _drained(engine: EngineHand, policy: EnginePolicy) -> None:
    """Its gate is closed, and some that claim nothing let requests through: raises _NotNow while one is in flight."""
    try:
        left = await engine.gate.wait_drained(engine.engine_id, policy.drain_seconds_max)
    except AgentError as error:
        raise _NotNow(str(error)) from error
    if left:
        raise _NotNow(f"{left} requests did not end within {policy.drain_seconds_max:g} s")


async def _try(engine: EngineHand, policy: EnginePolicy) -> None:
    modes = policy.restore_modes
    before = await _preflight(engine, policy)
    if not engine.parks.try_begins(modes):
        sentence = f"{', '.join(sorted(modes))} of engine {engine.name} is not parked alone: its trials never ended"
        engine.node.alert("warning", "trial_failed", sentence, engine_id=engine.engine_id)
        return
    try:
        await _park_and_wake(engine, policy, before)
    except (EngineLost, CanaryFailed) as error:
        if isinstance(error, CanaryFailed) and error.unasked:
            raise  # says nothing about the park
        engine.parks.went_wrong(modes, str(error))
        sentence = f"a trial park of {', '.join(sorted(modes))} went wrong: {error}"
        engine.node.alert("critical", "trial_failed", sentence, engine_id=engine.engine_id)
        raise


async def _preflight(engine: EngineHand, policy: EnginePolicy) -> Facts:
    """A look at its devices; raises _NotNow where a park would not be safe."""
    try:
        seen = await engine.adapter.observe()
        await engine.gate.prove_closed(engine.engine_id)
    except AgentError as error:
        raise _NotNow(str(error)) from error
    if seen.state is not EngineState.RUNNING:
        raise _NotNow(f"it is {seen.state}")
    if seen.clock_skew_seconds is not None and abs(seen.clock_skew_seconds) > CLOCK_SKEW_SECONDS_MAX:
        raise _NotNow(f"its clock is {seen.clock_skew_seconds:.0f} s off")
    facts = await engine.node.look()
    absent = why_absent(facts, engine.device_ids)
    if absent is not None:
        raise _NotNow(absent.sentence)
    for device_id in engine.device_ids:
        foreign = engine.node.foreign(facts[device_id])
        if foreign:
            raise _NotNow(f"processes {sorted(foreign)}, which are not ours, hold memory on device {device_id}")
    if any(mode in KEEPS_CONTENTS for mode in policy.restore_modes.values()):
        need_bytes = sum(engine.bytes_on(facts).values())
        have = engine.node.host_ram.reserve(_key(engine), need_bytes)
        if have is not None:
            raise _NotNow(f"the backups need {need_bytes} bytes of host memory and {have} are to be had")
    return facts


async def _park_and_wake(engine: EngineHand, policy: EnginePolicy, before: Facts) -> None:
    modes = policy.restore_modes
    try:
        engine.released()
    except OSError as error:
        raise _NotNow(f"it cannot be written down that it parks: {error}") from error
    # Whoever wants room meanwhile has to leave what this engine takes back.
    engine.node.waking[engine.engine_id] = engine.still_to_take
    began = boottime()
    seen, said = await ask_to_park(engine, policy, lambda reason: None)
    if seen.state is EngineState.RUNNING:
        engine.parks.went_wrong(modes, f"it did not park: {said or 'it said yes, and runs'}")
    else:
        facts = await _until_still(engine, policy, before)
        if facts is None:
            # A park that did not come to rest in time says nothing about the next one: it is tried again, so often.
            tags = ", ".join(sorted(modes))
            sentence = f"a trial park of {tags} showed nothing: not every device gave memory and came to rest in time"
            engine.node.alert("warning", "trial_failed", sentence, engine_id=engine.engine_id)
        else:
            freed = _freed(engine, before, facts)
            seen_parked(engine, modes, freed, engine.bytes_on(facts), seconds=boottime() - began)
        engine.node.host_ram.release(_key(engine))
        began = boottime()
        await engine.wake(_no_step, policy)
    await engine.verify(_no_step, policy)
    if seen.state is not EngineState.RUNNING:
        engine.parks.woken(modes, boottime() - began)
    log.info("a park was tried", engine=engine.name, modes=modes, learned=engine.parks.freed_bytes(modes))


async def _until_still(engine: EngineHand, policy: EnginePolicy, before: Facts) -> Facts | None:
    """A look that is as the ones before it and shows freed bytes; at the deadline one that is still, and on every
    device something was released; else None."""
    loop = asyncio.get_running_loop()
    deadline, samples = loop.time() + policy.settle_seconds_max, EqualSamples()
    while True:
        facts = await engine.node.look()
        held = engine.bytes_on(facts)
        # Late frees come: stillness counts at once only where every device has given something.
        given = _freed(engine, before, facts)
        samples.take(held, is_good=all(given[key] > 0 for key, was in engine.bytes_on(before).items() if was))
        if samples.good >= policy.settle_samples:
            return facts
        if loop.time() > deadline and samples.taken > policy.settle_samples:
            keeps = any(was and held[key] >= was for key, was in engine.bytes_on(before).items())
            return facts if samples.still >= policy.settle_samples and not keeps else None
        await asyncio.sleep(engine.node.settings.settle_poll_seconds)


def _freed(engine: EngineHand, before: Facts, after: Facts) -> dict[str, int]:
    """By device: what its processes hold less, and no more than the device has gained."""
    was, now = engine.bytes_on(before), engine.bytes_on(after)
    freed: dict[str, int] = {}
    for device_id, held in was.items():
        given = max(0, held - now[device_id])
        gained = max(0, after[device_id].free_bytes - before[device_id].free_bytes)
        # Where the host's memory is the device's, it gains and loses by everything that runs.
        freed[device_id] = given if after[device_id].unified else min(given, gained)
    return freed


def _no_step(step: LoanStep, data: Mapping[str, Any]) -> None:
    """There is no loan whose steps these would be."""
