"""Keeps the node's gateway running. While it is away nothing else ends: engines and jobs go on, and it is retried."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from .disk_reserve import is_full, release_above
from .engine_keeper import EngineKeeper
from .gates.base import ClosedTerms, GateError, GateRefused
from .gates.gateway import GatewayGate
from .gateway.launch import GatewayNotStarted, GatewayPaths, adopt_or_start
from .node import Node
from .processes import identity, send_signal, wait_exited
from .protocol.wire import ProcessIdentity

log = structlog.get_logger(__name__)

_PAUSE_SECONDS_FIRST: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 30.0
_LOOK_SECONDS: Final = 3600.0
_END_SECONDS_MAX: Final = 60.0
_KILL_SECONDS_MAX: Final = 10.0


class GatewayKeeper:
    """``keepers``: the engines whose requests go or wait there; routes of others are forgotten. Unless it ``is_needed``
    none is started, and one that an earlier configuration left is ended: its routes lead past the gates of now."""

    def __init__(
        self,
        node: Node,
        gate: GatewayGate,
        paths: GatewayPaths,
        keepers: Mapping[str, EngineKeeper],
        *,
        is_needed: bool,
    ) -> None:
        self._node = node
        self._gate = gate
        self._paths = paths
        self._keepers = keepers
        self._is_needed = is_needed
        self._listen = node.settings.gateway.listen
        self.is_down = False
        self._routes_cleared = False

    async def ensure(self) -> bool:
        """Takes over the gateway that runs or starts one; False, with an alert at first, if there is none."""
        if not self._is_needed:
            await self._end_unneeded()
            return True
        try:
            if is_full(self._paths.state_dir):
                release_above(self._paths.state_dir)
            info, started = await adopt_or_start(self._listen, self._paths)
            if not self._routes_cleared:
                await self._forget_routes()
                self._routes_cleared = True
        except (GatewayNotStarted, GateError, OSError) as error:
            self._say(error)
            return False
        if info.listen != self._listen:
            log.warning("the running gateway listens elsewhere", listens=info.listen)
        if started or self.is_down:
            log.info("the gateway runs", pid=info.pid, started=started)
        self.is_down = False
        return True

    async def _end_unneeded(self) -> None:
        try:
            await self._forget_routes()
        except GateError as error:
            log.debug("there is no gateway, and none is needed", error=str(error))
        await self.end()

    def _say(self, error: Exception) -> None:
        if self.is_down:
            log.debug("the gateway is still down", error=str(error))
            return
        self.is_down = True
        sentence = f"no request reaches an engine of this node: {error}"
        log.error("the gateway is down; it is tried again", listen=self._listen, error=str(error))
        self._node.alert("critical", "gateway_down", sentence[:1000], data={"listen": self._listen})

    async def _forget_routes(self) -> None:
        """Engines that are in the configuration no more get no traffic; a gate of theirs is never opened again."""
        for engine_id in set(await self._gate.observe_all()) - set(self._keepers):
            await self._gate.close(engine_id, ClosedTerms("refuse", 0, 1.0))
            try:
                await self._gate.remove_route(engine_id)
            except GateRefused as error:  # requests in flight: the next agent start does it
                log.warning("an old route is still in use", engine=engine_id, error=str(error))

    async def run(self) -> None:
        """Until cancelled, or at once where none is needed."""
        if not self._is_needed:
            return
        pause = _PAUSE_SECONDS_FIRST
        while True:
            try:
                info = await self._gate.info()
                if not self.is_down:
                    await wait_exited(info.process, _LOOK_SECONDS)
            except GateError as error:
                log.debug("the gateway does not answer", error=str(error))
            if await self.ensure():
                pause = _PAUSE_SECONDS_FIRST
                for keeper in self._keepers.values():
                    keeper.poke()
            else:
                pause = min(_PAUSE_SECONDS_MAX, pause * 2)
            await asyncio.sleep(pause)

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; one that does not answer is found by its pid file."""
        try:
            process: ProcessIdentity | None = (await self._gate.info()).process
        except GateError:
            process = await asyncio.to_thread(self._by_pid_file)
        if process is None:
            return
        send_signal(process, signal.SIGTERM)
        if not await wait_exited(process, _END_SECONDS_MAX):
            send_signal(process, signal.SIGKILL)
            await wait_exited(process, _KILL_SECONDS_MAX)

    def _by_pid_file(self) -> ProcessIdentity | None:
        try:
            found = identity(int(self._paths.pid_file.read_text()))
            if found is None:
                return None
            words = Path(f"/proc/{found.pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return found if os.fsencode(self._paths.control) in words else None
