"""The gate that is one server line in somebody's HAProxy, or in several of them, spoken to at their runtime sockets.

Closed is `drain`: no new request goes there, but one that a cookie or a stick table binds to the server still does. So
once nothing is in flight the server is put into `maint`, where nothing at all goes there and HAProxy's own checks leave
the parked engine alone. Each word is read back. Nothing is remembered: HAProxy forgets on a restart what it was told.

In flight is what the server has and what waits in its queue. A reload leaves the old worker with its requests, and the
socket is the new one's: a HAProxy that is younger than its old workers may be is not drained yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from ..protocol.wire import GateState
from .base import ClosedTerms, GateObservation, GateRefused, GateUnreachable
from .haproxy_socket import RuntimeSocket, ServerCount, ServerState
from .parts import all_of, together
from .sections import HaproxySection

_POLL_SECONDS_FIRST: Final = 0.02
_POLL_SECONDS_MAX: Final = 0.5
_NAMES_SHOWN_MAX: Final = 20


class HaproxyGate:
    """Gate over ``section``'s server of the engine ``name``."""

    def __init__(self, section: HaproxySection, name: str) -> None:
        self._servers = [
            _Server(RuntimeSocket(one, section.call_seconds_max), section, name) for one in section.sockets
        ]

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        """HAProxy's server exists and is the engine: GateRefused if it does not, or has another port."""
        port = int(upstream.rpartition(":")[2])
        await all_of(*(server.check(port) for server in self._servers))

    async def remove_route(self, engine_id: str) -> None:
        """HAProxy's file is its owner's."""

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        """How requests fare meanwhile is up to HAProxy: other servers, its backup server, or 503 at once."""
        return sum(await all_of(*(server.close() for server in self._servers)))

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        deadline = asyncio.get_running_loop().time() + seconds
        return sum(await all_of(*(server.wait_drained(deadline) for server in self._servers)))

    async def abort(self, engine_id: str) -> None:
        await all_of(*(server.abort() for server in self._servers))

    async def open(self, engine_id: str) -> None:
        await all_of(*(server.open() for server in self._servers))

    async def observe(self, engine_id: str) -> GateObservation:
        return together(await asyncio.gather(*(one.observe() for one in self._servers), return_exceptions=True))

    async def backup_ports(self) -> list[set[int]]:
        """Of every HAProxy: the ports of the backup servers of the engine's backend."""
        return await all_of(*(server.backup_ports() for server in self._servers))


class _Server:
    """The server line in one HAProxy."""

    def __init__(self, socket: RuntimeSocket, section: HaproxySection, engine_name: str) -> None:
        self._socket = socket
        self._section = section
        self._name = section.server or engine_name
        self._path = f"{section.backend}/{self._name}"

    async def _state(self) -> ServerState:
        states = await self._socket.states(self._section.backend)
        for state in states:
            if state.name == self._name:
                return state
        raise self._is_missing([state.name for state in states])

    async def _count(self) -> ServerCount:
        counts = await self._socket.counts(self._section.backend)
        for count in counts:
            if count.name == self._name:
                return count
        raise self._is_missing([count.name for count in counts])

    def _is_missing(self, names: list[str]) -> GateRefused:
        there = ", ".join(names[:_NAMES_SHOWN_MAX]) or "none"
        text = f"backend {self._section.backend} has no server {self._name}; it has {there}"
        return GateRefused(f"HAProxy at {self._socket.address}: {text}")

    async def check(self, engine_port: int) -> None:
        state = await self._state()
        port = self._section.server_port or engine_port
        if state.port != port:
            raise GateRefused(
                f"HAProxy at {self._socket.address}: server {self._path} has port {state.port}, the engine {port}:"
                " name the right server, or say server_port"
            )

    async def backup_ports(self) -> set[int]:
        counts = await self._socket.counts(self._section.backend)
        return {count.port for count in counts if count.is_backup and count.port is not None}

    async def _set(self, word: str) -> None:
        await self._socket.do(f"set server {self._path} state {word}")

    async def close(self) -> int:
        # From `maint` the word `drain` would lead back to what cookies still reach.
        if not (await self._state()).is_closed:
            await self._set("drain")
            await self._must_be_closed()
        in_flight = (await self._count()).in_flight
        if not in_flight and not (await self._state()).is_in_maintenance:
            await self._set("maint")
            await self._must_be_closed()
        return in_flight

    async def _must_be_closed(self) -> None:
        state = await self._state()
        if not state.is_closed:
            raise GateUnreachable(
                f"HAProxy at {self._socket.address}: server {self._path} was told to close and is not"
                f" (admin state {state.admin_state}, operational {state.op_state})"
            )

    async def wait_drained(self, deadline: float) -> int:
        """In maintenance with nothing in flight, or what still is at the deadline."""
        loop = asyncio.get_running_loop()
        pause = _POLL_SECONDS_FIRST
        while True:
            await self._must_be_closed()
            count = (await self._count()).in_flight
            young_seconds = self._section.old_worker_seconds_max - await self._socket.uptime_seconds()
            if not count and young_seconds <= 0:
                await self._set("maint")
                if (await self._state()).is_in_maintenance and not (await self._count()).in_flight:
                    return 0
            if loop.time() >= deadline:
                if count:
                    return count
                raise GateUnreachable(
                    f"HAProxy at {self._socket.address} was started anew; for {max(0.0, young_seconds):.0f} s more the"
                    " worker before it may have requests in flight (old_worker_seconds_max)"
                )
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)

    async def abort(self) -> None:
        await self._socket.do(f"shutdown sessions server {self._path}")

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._section.call_seconds_max
        if (state := await self._state()).is_open:
            return
        await self._set("ready")
        while not (state := await self._state()).is_open:
            if loop.time() >= deadline:
                raise GateUnreachable(
                    f"HAProxy at {self._socket.address}: server {self._path} was told to take requests and does not"
                    f" (admin state {state.admin_state}, operational {state.op_state}); its own checks may say no"
                )
            await asyncio.sleep(_POLL_SECONDS_FIRST)

    async def observe(self) -> GateObservation:
        state, count = await self._state(), await self._count()
        word = GateState.CLOSED if state.is_closed else GateState.OPEN if state.is_open else GateState.UNKNOWN
        return GateObservation(
            state=word,
            in_flight=count.in_flight,
            held=0,
            last_request_seconds_ago=0.0 if count.in_flight else count.last_seconds_ago,
            requests_total=count.total,
        )
