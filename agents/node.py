"""What all parts of one agent share: the probe, host memory, the journal, and how reports leave."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog

from ..vmm.host_memory import available_bytes
from .device_turns import DeviceTurns
from .journal import Journal
from .node_probe import Absences, NodeProbe
from .probe import DeviceFacts, Facts, mem_available_bytes
from .processes import boot_id
from .protocol.wire import Alert, DeviceObserved, DeviceProcess, Reason
from .quarantine import read_quarantine
from .settings import AgentSettings
from .spare_runners import SpareRunners

log = structlog.get_logger(__name__)


class HostRam:
    """Host bytes promised to backups that are not there yet. What is there shows in MemAvailable by itself."""

    def __init__(self, reserve_bytes: int, available: Callable[[], int] = mem_available_bytes) -> None:
        self._reserve_bytes = reserve_bytes
        self._available = available
        self._promised: dict[str, int] = {}

    def reserve(self, key: str, need_bytes: int) -> int | None:
        """Promises ``need_bytes`` to ``key``; returns None, or the bytes there are if they do not suffice.

        What cannot be read is not there.
        """
        others = sum(value for name, value in self._promised.items() if name != key)
        have = self._available_bytes() - self._reserve_bytes - others
        if need_bytes > have:
            return max(0, have)
        self._promised[key] = need_bytes
        return None

    def release(self, key: str) -> None:
        self._promised.pop(key, None)

    def _available_bytes(self) -> int:
        try:
            return self._available()
        except (OSError, ValueError) as error:
            log.error("host memory cannot be looked at", error=str(error))
            return 0


@dataclass(frozen=True, slots=True)
class Device:
    device_id: str  # the device's own UUID
    index: int
    kind: str  # host_discrete, host_unified, cuda, cuda_unified or mig
    capacity_bytes: int  # that may be lent
    path: str  # of a host-memory device; empty for a GPU
    unified: bool = False  # device and host share one memory
    model: str = ""
    reserve_bytes: int = 0  # that are never lent

    @property
    def is_cuda(self) -> bool:
        return not self.path

    @property
    def opened_by(self) -> str:
        """What processes of ours open it by: its folder, or its UUID."""
        return self.path or self.device_id


def cuda_visible(devices: Iterable[Device]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that may use these: by UUID, since numbers change with what is there."""
    return ",".join(device.device_id for device in devices if device.is_cuda)


@dataclass(frozen=True, slots=True)
class SharedPool:
    """Memory of a device that its memory service owns, and engines map."""

    name: str
    resident_bytes: int
    users: frozenset[int]  # pids, also of engines that are parked
    mapped_by: frozenset[int]
    tags: tuple[str, ...] = ()


OwnerKind = Literal["engine", "job", "service", "foreign"]


@dataclass(slots=True)
class Owners:
    """Which processes belong to whom: filled in by engines and attempts as they come and go."""

    engines: dict[str, Callable[[], set[int]]] = field(default_factory=dict[str, Callable[[], set[int]]])
    attempts: dict[str, Callable[[], set[int]]] = field(default_factory=dict[str, Callable[[], set[int]]])
    services: dict[str, Callable[[], set[int]]] = field(default_factory=dict[str, Callable[[], set[int]]])

    def of(self, pids: Iterable[int]) -> dict[int, tuple[OwnerKind, str | None]]:
        owner: dict[int, tuple[OwnerKind, str | None]] = {}
        for tree in self.services.values():
            owner.update(dict.fromkeys(tree(), ("service", None)))
        for engine_id, tree in self.engines.items():
            owner.update(dict.fromkeys(tree(), ("engine", engine_id)))
        for attempt_id, tree in self.attempts.items():
            owner.update(dict.fromkeys(tree(), ("job", attempt_id)))
        return {pid: owner.get(pid, ("foreign", None)) for pid in pids}


class Node:
    """One machine as its agent sees it."""

    def __init__(self, settings: AgentSettings, journal: Journal, devices: list[Device]) -> None:
        self.settings = settings
        self.journal = journal
        self.devices = {device.device_id: device for device in devices}
        self.mem_available_bytes = partial(mem_available_bytes, settings.meminfo_file)
        self.host_ram = HostRam(settings.host_reserve_bytes, self.mem_available_bytes)
        self.owners = Owners()
        self.boot_id = boot_id()
        self.start_id = uuid.uuid4().hex  # of this process
        self.quarantined: dict[str, Reason] = read_quarantine(Path(settings.data_dir), self.devices)
        self.connected = asyncio.Event()  # set while the scheduler's order stream is up
        self.spares = SpareRunners()
        self.turns = DeviceTurns()
        # Engines that were promised room and have not taken it all yet: what each still takes, by device.
        self.waking: dict[str, Callable[[dict[str, DeviceFacts]], dict[str, int]]] = {}
        # What memory services hold, by device: how to ask, and what was seen at the last look.
        self.services: dict[str, Callable[[], list[SharedPool]]] = {}
        self.shared: dict[str, list[SharedPool]] = {}
        self.on_attempt_end: Callable[[str], None] = lambda attempt_id: None
        self.on_change: Callable[[], None] = lambda: None  # an engine, loan or attempt changed: look at occupancy
        self._probe = NodeProbe(devices, settings.probe_seconds_max, self._can_give)
        self.absences = Absences(self.quarantined, self._alert_of_device)

    def _can_give(self) -> int:
        """Bytes that the host can give now, within every cgroup."""
        return min(self.mem_available_bytes(), available_bytes())

    async def look(self) -> Facts:
        """Every device as it is at some moment after this call began; one that cannot be read is absent from it."""
        facts = await asyncio.to_thread(self._look)
        self.absences.see(facts)
        return facts

    def _look(self) -> Facts:
        facts = self._probe.look()
        if self.services:
            self.shared = {device_id: ask() for device_id, ask in self.services.items()}
        return facts

    def foreign(self, facts: DeviceFacts) -> dict[int, int]:
        """Bytes by pid of processes that are neither an engine's, nor a job's, nor a memory service."""
        owners = self.owners.of(facts.bytes_by_pid)
        strange = {pid: held for pid, held in facts.bytes_by_pid.items() if owners[pid][0] == "foreign"}
        return {pid: held for pid, held in strange.items() if pid not in facts.bystanders}

    def observed(self, facts: Facts) -> list[DeviceObserved]:
        found: list[DeviceObserved] = []
        for device_id, device in self.devices.items():
            fact = facts.get(device_id) or DeviceFacts(device.capacity_bytes, device.capacity_bytes)  # nothing is free
            owners = self.owners.of(fact.bytes_by_pid)
            found.append(
                DeviceObserved(
                    device_id=device_id,
                    index=device.index,
                    device_kind=device.kind,
                    capacity_bytes=device.capacity_bytes,
                    free_bytes=fact.free_bytes,
                    quarantined=self.quarantined.get(device_id),
                    spawn_margin_bytes=self.settings.spawn_margin_bytes,
                    processes=[
                        DeviceProcess(pid=pid, bytes=held, owner=owners[pid][0], owner_id=owners[pid][1])
                        for pid, held in sorted(fact.bytes_by_pid.items())
                    ],
                )
            )
        return found

    def alert(self, severity: Literal["info", "warning", "critical"], code: str, sentence: str, **about: Any) -> None:
        """About: ``engine_id``, ``loan_id``, ``data``."""
        self.journal.report(Alert(severity=severity, code=code, sentence=sentence, **about))

    def _alert_of_device(
        self, severity: Literal["info", "critical"], code: str, sentence: str, data: Mapping[str, str]
    ) -> None:
        self.alert(severity, code, sentence, data=dict(data))
        self.on_change()

    def disk_is_short(self) -> bool:
        if self.journal.short:
            return True
        try:
            disk = os.statvfs(self.settings.data_dir)
        except OSError as error:
            log.error("the agent's disk cannot be looked at", error=str(error))
            return True
        return disk.f_bavail * disk.f_frsize < self.settings.journal_reserve_bytes
