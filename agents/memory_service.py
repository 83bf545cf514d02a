"""Keeps the memory service of each device that wants one: a process of its own that outlives the agent.

Each has a keeper of its own, so trouble on one device stays there. A service that dies takes nothing from an engine
that runs, since that holds its memory itself and hands it to the next service when it parks; what was parked in it is
lost, and the engine that wakes without it fails and is started again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path
from typing import Any, Final

import structlog

from ..vmm.service.client import read_state
from ..vmm.service.errors import ServiceUnavailable
from .detached import output_tail, start_module
from .disk_reserve import is_full, release_above
from .errors import AgentError
from .node import Device, Node, SharedPool
from .processes import identity, is_same, send_signal, wait_exited
from .protocol.wire import ProcessIdentity

log = structlog.get_logger(__name__)

START_SECONDS_MAX: Final = 20.0
_LOOK_SECONDS: Final = 0.05
_ANSWER_SECONDS_MAX: Final = 5.0
_PAUSE_SECONDS_FIRST: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 30.0
_WATCH_SECONDS: Final = 3600.0
_END_SECONDS_MAX: Final = 30.0
_KILL_SECONDS_MAX: Final = 10.0


class MemoryServiceNotStarted(AgentError):
    """It ended at once, did not answer, or another one has its socket; the text holds what it said."""


def service_socket(data_dir: Path, device_id: str) -> Path:
    """Short, since the path of a Unix socket is, and the same whatever the order of the devices."""
    return data_dir / "memory" / f"{hashlib.sha256(device_id.encode()).hexdigest()[:8]}.sock"


class MemoryServiceKeeper:
    """The service of one device."""

    def __init__(self, node: Node, device: Device) -> None:
        self._node = node
        self._device = device
        self.socket = service_socket(Path(node.settings.data_dir), device.device_id)
        self.state_dir = self.socket.with_suffix("")
        self.process: ProcessIdentity | None = None
        self.is_down = False
        self.restarts = 0
        node.owners.services[device.device_id] = self.pids
        node.services[device.device_id] = self.pools

    def pids(self) -> set[int]:
        return set() if self.process is None else {self.process.pid}

    def pools(self) -> list[SharedPool]:
        """What the service holds now; nothing while it does not answer. Blocks for some milliseconds."""
        try:
            state = read_state(self.socket, seconds_max=_ANSWER_SECONDS_MAX)
            return [_shared(pool) for pool in state["pools"]]
        except (ServiceUnavailable, KeyError, TypeError, ValueError):
            return []

    async def ensure(self) -> bool:
        """Takes over the service that runs or starts one; False, with an alert at first, if there is none."""
        try:
            if is_full(self._node.settings.data_dir):
                release_above(Path(self._node.settings.data_dir))
            self.process = await self._adopt() or await self._start()
        except (MemoryServiceNotStarted, OSError) as error:
            self._say(error)
            return False
        self.is_down = False
        return True

    async def run(self) -> None:
        """Until cancelled."""
        pause = _PAUSE_SECONDS_FIRST
        while True:
            if self.process is not None and is_same(self.process):
                await wait_exited(self.process, _WATCH_SECONDS)
                continue
            if self.process is not None:
                self._say_died(self.process.pid)
                self.process = None
            pause = _PAUSE_SECONDS_FIRST if await self.ensure() else min(_PAUSE_SECONDS_MAX, pause * 2)
            await asyncio.sleep(pause)

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; one that an agent before us started is found by its socket or its pid file."""
        process = self.process or await self._adopt() or await asyncio.to_thread(self._by_pid_file)
        self.process = None
        if process is None:
            return
        send_signal(process, signal.SIGTERM)
        if not await wait_exited(process, _END_SECONDS_MAX):
            send_signal(process, signal.SIGKILL)
            await wait_exited(process, _KILL_SECONDS_MAX)

    async def _adopt(self) -> ProcessIdentity | None:
        """The service that answers. Raises MemoryServiceNotStarted if it is another device's."""
        try:
            state: dict[str, Any] = await asyncio.to_thread(read_state, self.socket, seconds_max=_ANSWER_SECONDS_MAX)
        except ServiceUnavailable:
            return None
        if state["device"] != self._device.device_id:
            raise MemoryServiceNotStarted(f"{self.socket} is the memory service of device {state['device']}; stop it")
        return identity(int(state["pid"]))

    async def _start(self) -> ProcessIdentity:
        if (stuck := await asyncio.to_thread(self._by_pid_file)) is not None:
            raise MemoryServiceNotStarted(f"the memory service (pid {stuck.pid}) runs and does not answer; end it")
        for folder in (self.socket.parent, self.state_dir):  # each by itself: parents would get no mode
            folder.mkdir(mode=0o700, exist_ok=True)
        output = self.state_dir / "memory-service.out"
        words = ["--device", self._device.opened_by, "--socket", str(self.socket), "--state-dir", str(self.state_dir)]
        visible = {"CUDA_VISIBLE_DEVICES": self._device.device_id} if self._device.is_cuda else {}
        process = start_module("lull.vmm.service", words, output, visible)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_SECONDS_MAX
        while True:
            found = await self._adopt()
            if found is not None:
                log.info("the memory service runs", device=self._device.device_id, pid=found.pid)
                return found
            if process.poll() is not None or loop.time() > deadline:
                raise MemoryServiceNotStarted(
                    f"lull memory-service (pid {process.pid}) did not start: {output_tail(output)}"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    def _by_pid_file(self) -> ProcessIdentity | None:
        try:
            found = identity(int((self.state_dir / "memory-service.pid").read_text()))
            if found is None or not is_same(found):
                return None
            words = Path(f"/proc/{found.pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return found if os.fsencode(self.socket) in words else None

    def _say(self, error: Exception) -> None:
        if self.is_down:
            log.debug("the memory service is still down", device=self._device.device_id, error=str(error))
            return
        self.is_down = True
        sentence = f"engines that keep memory in the service of device {self._device.device_id} cannot start: {error}"
        log.error("the memory service is down; it is tried again", device=self._device.device_id, error=str(error))
        self._node.alert("critical", "memory_service_down", sentence[:1000], data={"device_id": self._device.device_id})

    def _say_died(self, pid: int) -> None:
        self.restarts += 1
        sentence = (
            f"the memory service of device {self._device.device_id} (pid {pid}) has ended and is started again: engines"
            " that run keep their memory; what was parked in it is lost, and its engines will be started again"
        )
        log.error("the memory service has ended", device=self._device.device_id, pid=pid)
        data = {"device_id": self._device.device_id, "pid": pid}
        self._node.alert("critical", "memory_service_restarted", sentence, data=data)


def _shared(pool: dict[str, Any]) -> SharedPool:
    mapped_by = frozenset(int(pid) for pid in (*pool["reader_pids"], *pool["writer_pids"]))
    users = mapped_by | {int(pid) for pid in pool["parked_pids"]}
    tags = tuple(str(tag) for tag in pool["tags"])
    return SharedPool(str(pool["name"]), int(pool["resident_bytes"]), users, mapped_by, tags)
