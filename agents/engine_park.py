"""Parking an engine, by a loan and by a trial: asked once, then looked at until it is parked or surely is not.

A call that got no answer is never repeated. What the engine says proves nothing about its memory: see ``loan_settle``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .engine_hand import POLL_SECONDS_FIRST, POLL_SECONDS_MAX, EngineHand
from .engines.base import Observation, ParksUnseen
from .errors import AgentError, EngineLost, EngineTimedOut
from .protocol.policy import EnginePolicy
from .protocol.wire import EngineState, Reason

_PARKING_GRACE_SECONDS: Final = 30.0
_RUNNING_LOOKS: Final = 3  # in a row: so often `running` means that it was not taken
_TAKEN_SECONDS: Final = 2.0  # after which an engine that answers looks has read a call that was sent before them


async def ask_to_park(
    engine: EngineHand, policy: EnginePolicy, on_deadline: Callable[[Reason], None]
) -> tuple[Observation, str]:
    """What is seen once the engine says parked, or surely runs on as before, and what it said. Raises EngineLost.

    ``on_deadline``: called once if it is still parking when its time is over; it gets some more.
    """
    said, answered = "", True
    engine.set_state(EngineState.PARKING)
    try:
        await engine.adapter.park(policy, policy.park_call_seconds_max)
    except (AgentError, OSError) as error:
        said = str(error)  # refused, or unknown: look, never ask again
        answered = not isinstance(error, EngineTimedOut)
    return await parked_or_not(engine, policy, said, on_deadline, answered=answered), said


async def parked_or_not(
    engine: EngineHand, policy: EnginePolicy, said: str, on_deadline: Callable[[Reason], None], *, answered: bool
) -> Observation:
    """The engine's state once it is `parked`, or surely `running`; EngineLost past every deadline.

    ``answered``: nothing of the call is at work any more. Else `running` counts only once nothing can be, or at the
    deadline: the gate must not be opened onto an engine that parks a moment later.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline, marked = began + policy.park_call_seconds_max, False
    pause, running = POLL_SECONDS_FIRST, 0
    while True:
        seen = await _look(engine)
        running = running + 1 if seen.state is EngineState.RUNNING else 0
        if seen.state is EngineState.PARKED:
            if not set(seen.parked_tags) & set(policy.restore_modes):
                raise EngineLost(f"engine {engine.name} is parked without the tags {sorted(policy.restore_modes)}")
            engine.set_state(EngineState.PARKED)
            return seen
        unseen_seconds = engine.adapter.unseen_seconds_max() if isinstance(engine.adapter, ParksUnseen) else 0.0
        taken_by = began if answered else min(deadline, began + max(_TAKEN_SECONDS, unseen_seconds))
        if running >= _RUNNING_LOOKS and loop.time() >= taken_by:
            engine.forget_capabilities()  # the call may have taught its adapter something
            return seen
        gone = engine.is_lost_while_parked() or seen.state is EngineState.GONE
        if gone or seen.state is EngineState.FAILED:
            engine.set_state(EngineState.GONE if gone else EngineState.FAILED)
            raise EngineLost(f"engine {engine.name} was lost while it parked. {said}".strip())
        if loop.time() > deadline and not marked:
            marked = True
            deadline = loop.time() + min(_PARKING_GRACE_SECONDS, policy.park_call_seconds_max)
            reason = Reason(code="ParkDeadline", sentence=f"engine {engine.name} is still {seen.state}")
            on_deadline(reason)
            engine.node.alert("critical", "park_deadline", reason.sentence, engine_id=engine.engine_id)
        elif loop.time() > deadline:
            engine.remember(condemned=engine.incarnation)
            raise EngineLost(f"engine {engine.name} is still {seen.state} long after its park deadline", timed_out=True)
        await asyncio.sleep(pause)
        pause = min(POLL_SECONDS_MAX, pause * 1.5)


async def _look(engine: EngineHand) -> Observation:
    """What a look needs may fail on its own, as NVML does: that says nothing about the engine."""
    try:
        return await engine.adapter.observe()
    except (AgentError, OSError) as error:
        return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=True)
