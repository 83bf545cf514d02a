"""Memory services as processes, and clients that can be killed at a step of the protocol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lull.vmm.host_device import HostDevice
from lull.vmm.service.client import ServiceClient, read_events, read_state
from lull.vmm.service.errors import ServiceUnavailable
from tests.memory import memfd_bytes
from tests.waiting import wait_until

MIB = 1 << 20
START_SECONDS_MAX = 30.0


@dataclass
class MemoryService:
    """`python -m lull.vmm.service` on a device, as an agent starts it."""

    device: str
    socket: Path
    state_dir: Path
    environment: Mapping[str, str]
    flags: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "lull.vmm.service", "--device", self.device),
                *("--socket", str(self.socket), "--state-dir", str(self.state_dir), *self.flags),
            ],
            env={**os.environ, **self.environment},
        )
        wait_until(self._answers, START_SECONDS_MAX, "the memory service answering")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the service ended with {self.process.returncode}: {self.log()}"
        try:
            return bool(self.state())
        except ServiceUnavailable:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def state(self) -> dict[str, Any]:
        return read_state(self.socket)

    def pool(self, name: str = "w") -> dict[str, Any]:
        """What the service says about one pool; an empty one is not kept."""
        found = [pool for pool in self.state()["pools"] if pool["name"] == name]
        return found[0] if found else {"state": "gone", "resident_bytes": 0, "backup_bytes": 0, "reader_pids": []}

    def events(self, after: int = 0) -> list[str]:
        return [str(event["kind"]) for event in read_events(self.socket, after=after)]

    def client(self) -> ServiceClient:
        return ServiceClient(self.socket)

    def log(self) -> str:
        path = self.state_dir / "memory-service.log"
        return path.read_text() if path.exists() else ""

    def device_bytes(self, uuid: str) -> int:
        return memfd_bytes(self.pid, uuid)

    def footprint(self) -> tuple[int, int, int]:
        """Descriptors, mappings of device memory and threads of the process, from the kernel."""
        root = Path(f"/proc/{self.pid}")
        maps = (root / "maps").read_text()
        return (
            len(os.listdir(root / "fd")),
            sum("/memfd:" in line for line in maps.splitlines()),
            len(os.listdir(root / "task")),
        )

    def footprint_at_rest(self) -> tuple[int, int, int]:
        """When no connection is left: each has a thread."""
        wait_until(lambda: self.footprint()[2] == 1, 10, "all connections ended")
        return self.footprint()


@contextmanager
def memory_service(
    root: Path, device: str, *, flags: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> Iterator[MemoryService]:
    mine = {"TMPDIR": str(root), **(environment or {})}  # the lock of a GPU, whose UUID is every run's here
    service = MemoryService(device, root / "service" / "m.sock", root / "state", mine, flags)
    service.start()
    try:
        yield service
    finally:
        assert service.process is not None
        if service.process.poll() is None:
            service.process.kill()
        service.process.wait(10)


@contextmanager
def host_service(
    root: Path, *, capacity_bytes: int = 64 * MIB, flags: tuple[str, ...] = ()
) -> Iterator[tuple[MemoryService, HostDevice]]:
    device = HostDevice.create(root / "device", capacity_bytes=capacity_bytes)
    with memory_service(root, str(device.path), flags=flags) as service:
        yield service, device
