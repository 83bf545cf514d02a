"""The gate of one engine as the agent holds it: whatever kind it is of, and what the agent wants of it.

A gate that somebody else runs may open by itself: HAProxy that was restarted comes up as its file says, somebody sets a
label. So it is looked at before every decision that rests on it and, while it is wanted closed, again and again; it is
closed at once where it is found otherwise. Nothing here ever opens a gate by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import structlog

from ..protocol.wire import GateState
from .base import (
    ClosedTerms,
    CountedBy,
    ForetellsOpening,
    Gate,
    GateError,
    GateObservation,
    GateRefused,
    GateUnreachable,
    SaysWhoCounts,
    TellsRequests,
)
from .sections import GateKind

log = structlog.get_logger(__name__)

_WORDS_MAX: Final = 800


class Say(Protocol):
    """How an operator is told: ``Node.alert``."""

    def __call__(
        self, severity: Literal["info", "warning", "critical"], code: str, sentence: str, **about: Any
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class GateTraits:
    """What is so for a kind of gate, whatever it is asked."""

    kind: GateKind
    counted_by: CountedBy
    may_open_by_itself: bool
    endpoint: str | None  # where clients reach the engine through it


class KeptGate:
    """A Gate over ``gate``, of the engine ``name``."""

    def __init__(self, gate: Gate, traits: GateTraits, name: str, say: Say) -> None:
        self._gate = gate
        self.traits = traits
        self._name = name
        self._say = say
        self._closed_terms: ClosedTerms | None = None  # None: it is not wanted closed
        self._acting = asyncio.Lock()
        self._closings = 0
        self._drained = False  # since it was last closed
        self._silent = False
        self._reopened = False
        self._stuck = False

    @property
    def counted_by(self) -> CountedBy:
        """Who counted last, where that is up to the gate."""
        return self._gate.counted_by if isinstance(self._gate, SaysWhoCounts) else self.traits.counted_by

    @property
    def is_wanted_closed(self) -> bool:
        return self._closed_terms is not None

    # ---- what every gate does ---------------------------------------------------------------------------------

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        await self._gate.ensure_route(engine_id, name, models, upstream)

    async def remove_route(self, engine_id: str) -> None:
        await self._gate.remove_route(engine_id)

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        self.want_closed(terms)
        async with self._acting:
            self._not_drained()
            return await self._gate.close(engine_id, terms)

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            closings = self._closings
            left = await self._gate.wait_drained(engine_id, max(0.0, deadline - loop.time()))
            if left:
                return left
            if closings == self._closings:  # else it was closed again meanwhile: what came in between is waited for too
                break
        self._drained = True
        await self.prove_closed(engine_id)
        return 0

    def _not_drained(self) -> None:
        self._closings += 1
        self._drained = False

    async def abort(self, engine_id: str) -> None:
        await self._gate.abort(engine_id)

    async def open(self, engine_id: str) -> None:
        self._closed_terms = None
        try:
            async with self._acting:
                self._not_drained()
                await self._gate.open(engine_id)
        except GateError as error:
            self._say_stuck(engine_id, error)
            raise
        self._stuck = False

    async def observe(self, engine_id: str) -> GateObservation:
        return await self._gate.observe(engine_id)

    @property
    def tells_requests(self) -> bool:
        """Whether it sees the requests that come while it is closed, so that one can wake the engine."""
        return isinstance(self._gate, TellsRequests)

    async def wait_wanted(self, engine_id: str, seconds: float) -> GateObservation:
        if not isinstance(self._gate, TellsRequests):
            raise GateRefused(f"the gate of engine {self._name} does not see requests while it is closed")
        return await self._gate.wait_wanted(engine_id, seconds)

    async def foretell(self, engine_id: str, seconds: float | None) -> None:
        """Tells clients that wait, where the gate can, in how many seconds it will be opened; None: nobody knows."""
        if isinstance(self._gate, ForetellsOpening):
            try:
                await self._gate.expect_open(engine_id, seconds)
            except GateError as error:  # clients wait as long as the policy says, then
                log.debug("the gate was not told when it will open", engine=self._name, error=str(error))

    # ---- what the agent wants of it ---------------------------------------------------------------------------

    def want_closed(self, terms: ClosedTerms) -> None:
        """From now on it is kept closed, also by an agent that did not close it itself."""
        self._closed_terms = terms

    async def prove_closed(self, engine_id: str) -> None:
        """Raises GateError unless it was drained since it was last closed, and says now that it is closed and that
        nothing is in flight, as far as it counts; one that cannot open by itself is not asked."""
        in_flight: int | None = None
        if self.traits.may_open_by_itself:
            seen = await self._gate.observe(engine_id)
            if seen.state is not GateState.CLOSED:
                self._not_drained()
                raise GateUnreachable(f"the gate of engine {self._name} was closed and is {seen.state} now")
            in_flight = seen.in_flight
        if not self._drained:
            raise GateUnreachable(f"the gate of engine {self._name} was not drained since it was last closed")
        if in_flight:
            raise GateUnreachable(f"the gate of engine {self._name} was drained and {in_flight} requests are in flight")

    async def guard(self, engine_id: str) -> GateObservation | None:
        """One look; closes again what has opened by itself, and says so. None if it does not answer, or is being acted
        on: who looks waits for nobody."""
        if self._acting.locked():
            return None
        try:
            async with self._acting:
                terms = self._closed_terms  # before the look: what is closed only after it was rightly open
                seen = await self._gate.observe(engine_id)
                is_open = self.traits.may_open_by_itself and seen.state is not GateState.CLOSED
                if is_open and terms is not None and terms is self._closed_terms:
                    seen = await self._close_again(engine_id, terms, seen)
                self._reopened = False
        except GateError as error:
            self._say_silent(engine_id, error)
            return None
        if self._silent:
            self._silent = False
            self._say("info", "gate_well", f"the gate of engine {self._name} answers again", engine_id=engine_id)
        return seen

    async def look(self, engine_id: str) -> GateObservation | None:
        """As ``guard``; but what is guarded by others is looked at and left to them, so this takes no longer than a
        look."""
        if not (self.traits.may_open_by_itself and self.is_wanted_closed):
            return await self.guard(engine_id)
        try:
            return None if self._acting.locked() else await self._gate.observe(engine_id)
        except GateError:
            return None

    async def _close_again(self, engine_id: str, terms: ClosedTerms, seen: GateObservation) -> GateObservation:
        if not self._reopened:
            self._reopened = True
            log.error("a gate opened by itself", engine=self._name, state=seen.state)
            self._say(
                "critical",
                "gate_opened_by_itself",
                f"the gate of engine {self._name} was {seen.state} though it was closed and the engine may be away:"
                " it is closed again. What it let through in between came to an engine that may have been away",
                engine_id=engine_id,
                data={"gate_kind": self.traits.kind},
            )
        self._not_drained()
        await self._gate.close(engine_id, terms)
        return await self._gate.observe(engine_id)

    def _say_stuck(self, engine_id: str, error: GateError) -> None:
        if self._stuck or self.traits.kind == "gateway":  # the gateway's own keeper tells of it
            return
        self._stuck = True
        sentence = f"engine {self._name} is right and its gate does not open; it is tried again: {error}"[:_WORDS_MAX]
        self._say("critical", "gate_not_opened", sentence, engine_id=engine_id)

    def _say_silent(self, engine_id: str, error: GateError) -> None:
        if self._silent or self.traits.kind == "gateway":  # the gateway's own keeper tells of it
            return
        self._silent = True
        sentence = f"the gate of engine {self._name} cannot be asked: {error}"[:_WORDS_MAX]
        severity: Literal["warning", "critical"] = "critical" if self.is_wanted_closed else "warning"
        self._say(severity, "gate_unreachable", sentence, engine_id=engine_id)
