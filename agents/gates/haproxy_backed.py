"""HAProxy in front, our gateway as its `backup` server: what arrives while the engine is away waits in the gateway.

Both lead to the engine, so the gate is closed when both are, and each counts what it still lets through. Opened is the
gateway first, so that those that waited go before those that come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from .base import ClosedTerms, Gate, GateObservation, GateRefused
from .gateway import GatewayGate
from .haproxy import HaproxyGate
from .parts import all_of, together


class BackedHaproxyGate:
    """Gate over ``front`` and ``back``. ``back_port``: where the gateway listens."""

    def __init__(self, front: HaproxyGate, back: GatewayGate, back_port: int) -> None:
        self._front = front
        self._back = back
        self._back_port = back_port

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        await self._back.ensure_route(engine_id, name, models, upstream)
        await self._front.ensure_route(engine_id, name, models, upstream)
        for ports in await self._front.backup_ports():
            if self._back_port not in ports:
                raise GateRefused(
                    f"HAProxy's backend has no backup server at port {self._back_port}, where the gateway listens:"
                    f" add `server lull 127.0.0.1:{self._back_port} backup`, or say gateway_backup = false"
                )

    async def remove_route(self, engine_id: str) -> None:
        await self._back.remove_route(engine_id)

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        """The gateway is closed also where HAProxy does not answer: requests may come to both."""
        counts = await all_of(*(part.close(engine_id, terms) for part in self._parts))
        return sum(count or 0 for count in counts)

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        return sum(await all_of(*(part.wait_drained(engine_id, seconds) for part in self._parts)))

    async def abort(self, engine_id: str) -> None:
        await all_of(*(part.abort(engine_id) for part in self._parts))

    async def open(self, engine_id: str) -> None:
        await self._back.open(engine_id)
        await self._front.open(engine_id)

    async def observe(self, engine_id: str) -> GateObservation:
        """Requests are counted and held by the gateway; HAProxy's own count no further than what is in flight."""
        looks = await asyncio.gather(*(part.observe(engine_id) for part in self._parts), return_exceptions=True)
        both, back = together(looks), looks[1]
        if isinstance(back, BaseException):
            return both
        return replace(
            back,
            state=both.state,
            in_flight=both.in_flight,
            last_request_seconds_ago=both.last_request_seconds_ago,
        )

    async def wait_wanted(self, engine_id: str, seconds: float) -> GateObservation:
        """Of the gateway alone: while the gate is closed no request goes anywhere else."""
        return await self._back.wait_wanted(engine_id, seconds)

    async def expect_open(self, engine_id: str, seconds: float | None) -> None:
        """Of the gateway: it is what answers while the gate is closed."""
        await self._back.expect_open(engine_id, seconds)

    @property
    def _parts(self) -> tuple[Gate, Gate]:
        return self._front, self._back
