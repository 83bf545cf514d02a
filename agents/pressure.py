"""Policy `on_pressure`: tells the scheduler of an engine that nobody asks anything while host memory is short.

The scheduler opens the loan; the next request ends it, as any that is without a job. So that an engine does not go to
sleep and wake without end it has to be idle anew after each wake, and for twice as long after each sleep that was
shorter than the time for which it had been idle before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from .engine_keeper import EngineKeeper
from .gates.base import GateError
from .journal import boottime
from .loan import Loan
from .node import Node
from .protocol.wire import GateState, HostPressure

log = structlog.get_logger(__name__)

SAMPLES: Final = 3
_DOUBLINGS_MAX: Final = 5
_SHORT_SLEEPS: Final = "short_sleeps"


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. ``ready``: it runs, is right and routed, and no loan has it; ``asleep``: under pressure."""

    at: float
    available_bytes: int
    ready: bool
    asleep: bool
    last_request_seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class Patience:
    """What is remembered of one engine from look to look. Pure."""

    low_samples: int = 0  # in a row
    ready_since: float | None = None
    asleep_since: float | None = None
    short_sleeps: int = 0  # in a row

    def idle_seconds_needed(self, idle_seconds_min: float) -> float:
        return float(idle_seconds_min * 2 ** min(self.short_sleeps, _DOUBLINGS_MAX))

    def after(self, seen: Seen, bound_bytes: int, idle_seconds_min: float) -> Patience:
        low = self.low_samples + 1 if seen.available_bytes < bound_bytes else 0
        short = self.short_sleeps
        if self.asleep_since is not None and not seen.asleep and seen.ready:
            slept = seen.at - self.asleep_since
            short = short + 1 if slept < self.idle_seconds_needed(idle_seconds_min) else 0
        asleep_since = self.asleep_since
        if seen.asleep:
            asleep_since = seen.at if asleep_since is None else asleep_since
        elif seen.ready:
            asleep_since = None
        ready_since = None if not seen.ready else seen.at if self.ready_since is None else self.ready_since
        return Patience(low, ready_since, asleep_since, short)

    def taken(self, at: float, *, asleep: bool) -> Patience:
        """A loan has taken the engine; ``asleep``: under pressure. It may be over before the next look."""
        return replace(self, ready_since=None, asleep_since=at if asleep else self.asleep_since)

    def is_pressed(self, seen: Seen, idle_seconds_min: float) -> bool:
        if not seen.ready or self.ready_since is None or self.low_samples < SAMPLES:
            return False
        ago = seen.last_request_seconds_ago
        idle = min(seen.at - self.ready_since, float("inf") if ago is None else ago)
        return idle >= self.idle_seconds_needed(idle_seconds_min)


class PressureWatch:
    """Looks at host memory and at the engines whose policy says `on_pressure`. ``loan_on``: the loan of a device."""

    def __init__(self, node: Node, keepers: Mapping[str, EngineKeeper], loan_on: Callable[[str], Loan | None]) -> None:
        self._node = node
        self._keepers = keepers
        self._loan_on = loan_on
        self._patience: dict[str, Patience] = {}
        self._blind: set[str] = set()  # engines of which it was said that nobody sees their requests

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            watched = [keeper for keeper in self._keepers.values() if keeper.policy.on_pressure]
            for keeper in self._keepers.values():
                if keeper not in watched:
                    self._patience.pop(keeper.engine_id, None)
                    self._say(keeper, None)
            if watched:
                await self._look(watched)
            await asyncio.sleep(self._node.settings.engine_poll_seconds)

    def loan_opens(self, loan: Loan) -> None:
        """What was told of its engines is answered, or void: each has to be idle anew after it."""
        asleep = loan.without_job is not None and loan.without_job.wanted_by == "pressure"
        for keeper in loan.engines:
            self._patience[keeper.engine_id] = self._patience_with(keeper).taken(boottime(), asleep=asleep)
            self._say(keeper, None)

    def _patience_with(self, keeper: EngineKeeper) -> Patience:
        return self._patience.get(keeper.engine_id) or Patience(short_sleeps=int(keeper.data.get(_SHORT_SLEEPS, 0)))

    async def _look(self, watched: list[EngineKeeper]) -> None:
        try:
            available = await asyncio.to_thread(self._node.mem_available_bytes)
        except (OSError, ValueError) as error:
            log.error("host memory cannot be looked at", error=str(error))
            return
        for keeper in watched:
            self._judge(keeper, available, await self._last_request(keeper))

    async def _last_request(self, keeper: EngineKeeper) -> float | None:
        """Seconds since the last one; 0 where nobody can say that it is idle."""
        if not keeper.gate.tells_requests:
            if keeper.engine_id not in self._blind:
                self._blind.add(keeper.engine_id)
                sentence = f"engine {keeper.name} is not parked under pressure: its gate does not see requests"
                self._node.alert("warning", "pressure_not_watched", sentence, engine_id=keeper.engine_id)
            return 0.0
        try:
            seen = await keeper.gate.observe(keeper.engine_id)
        except GateError:
            return 0.0
        return seen.last_request_seconds_ago

    def _judge(self, keeper: EngineKeeper, available_bytes: int, last_request_seconds_ago: float | None) -> None:
        policy = keeper.policy
        bound_bytes = policy.pressure_free_bytes_min
        assert bound_bytes is not None  # on_pressure needs it
        loan = self._loan_on(keeper.device_ids[0])
        sleeps = None if loan is None else loan.without_job
        routed = keeper.verified and keeper.gate_state is GateState.OPEN
        seen = Seen(
            at=boottime(),
            available_bytes=available_bytes,
            ready=loan is None and routed and keeper.verified_now(),
            asleep=sleeps is not None and sleeps.wanted_by == "pressure",
            last_request_seconds_ago=last_request_seconds_ago,
        )
        patience = self._patience_with(keeper).after(seen, bound_bytes, policy.idle_seconds_min)
        self._patience[keeper.engine_id] = patience
        if patience.short_sleeps != int(keeper.data.get(_SHORT_SLEEPS, 0)):
            keeper.remember(**{_SHORT_SLEEPS: patience.short_sleeps})
        if not patience.is_pressed(seen, policy.idle_seconds_min):
            self._say(keeper, None)
        elif keeper.pressure is None:
            needed = patience.idle_seconds_needed(policy.idle_seconds_min)
            self._say(
                keeper,
                HostPressure(available_bytes=available_bytes, bound_bytes=bound_bytes, idle_seconds_min=needed),
            )

    def _say(self, keeper: EngineKeeper, pressure: HostPressure | None) -> None:
        if keeper.pressure != pressure:
            keeper.pressure = pressure
            log.info("host memory", engine=keeper.name, short=pressure is not None)
            keeper.report()
