"""Parking an engine, by a loan and by a trial: asked once, then looked at until it is parked or surely is not.

A call that got no answer is never repeated. What the engine says proves nothing about its memory: see ``loan_settle``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from .engine_hand import POLL_SECONDS_FIRST, POLL_SECONDS_MAX, EngineHand
from .engines.base import Observation
from .errors import AgentError, EngineLost
from .protocol.policy import EnginePolicy
from .protocol.wire import EngineState, Reason

_PARKING_GRACE_SECONDS: Final = 30.0
_RUNNING_LOOKS: Final = 3  # after a park call without an answer: so often `running` means that it was not taken


async def ask_to_park(
    engine: EngineHand, policy: EnginePolicy, on_deadline: Callable[[Reason], None]
) -> tuple[Observation, str]:
    """What is seen once the engine says parked, or surely runs on as before, and what it said. Raises EngineLost.

    ``on_deadline``: called once if it is still parking when its time is over; it gets some more.
    """
    said = ""
    engine.set_state(EngineState.PARKING)
    try:
        await engine.adapter.park(policy, policy.park_call_seconds_max)
    except (AgentError, OSError) as error:
        said = str(error)  # refused, or unknown: look, never ask again
    return await parked_or_not(engine, policy, said, on_deadline), said


async def parked_or_not(
    engine: EngineHand, policy: EnginePolicy, said: str, on_deadline: Callable[[Reason], None]
) -> Observation:
    """The engine's state once it is `parked`, or surely `running`; EngineLost past every deadline."""
    loop = asyncio.get_running_loop()
    deadline, marked = loop.time() + policy.park_call_seconds_max, False
    pause, running = POLL_SECONDS_FIRST, 0
    while True:
        seen = await engine.adapter.observe()
        running = running + 1 if seen.state is EngineState.RUNNING else 0
        if seen.state is EngineState.PARKED:
            if not set(seen.parked_tags) & set(policy.restore_modes):
                raise EngineLost(f"engine {engine.name} is parked without the tags {sorted(policy.restore_modes)}")
            engine.set_state(EngineState.PARKED)
            return seen
        if running >= _RUNNING_LOOKS:
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
