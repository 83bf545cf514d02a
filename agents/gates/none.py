"""The gate that is none: for an engine without traffic, or whose owner keeps traffic away himself.

It claims nothing. Nothing is closed by it; that it is closed is what the agent asked for and no more. A loan rests on
the engine's own count of its requests, or on a time that its operator grants.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.wire import GateState
from .base import ClosedTerms, GateObservation, GateRefused
from .counting import Counter


class NoGate:
    """Gate over nothing. An agent that has just started does not know what an earlier one asked for."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._state = GateState.UNKNOWN

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        """There is no route."""

    async def remove_route(self, engine_id: str) -> None:
        """There is no route."""

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        self._state = GateState.CLOSED
        self._counter.closed()
        return await self._counter.in_flight_if_told()

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        return await self._counter.wait_drained(seconds)

    async def abort(self, engine_id: str) -> None:
        """GateRefused: there is nothing between clients and the engine that could end a request."""
        raise GateRefused("gate_kind 'none' cannot abort requests; set on_drain_deadline = \"abort_loan\"")

    async def open(self, engine_id: str) -> None:
        self._counter.opened()
        self._state = GateState.OPEN

    async def observe(self, engine_id: str) -> GateObservation:
        return GateObservation(state=self._state, in_flight=None, held=0)
