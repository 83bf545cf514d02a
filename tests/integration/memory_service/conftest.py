"""One service on a host device for a whole module, and clients that can be killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.pool import ServicePool
from lull.vmm.service.state import Lock
from tests.memory_clients import Clients, memory_clients
from tests.memory_services import MIB, MemoryService, host_service


@dataclass
class World:
    service: MemoryService
    device: HostDevice
    clients: Clients

    def attach(self, lock: Lock = Lock.READ_ONLY, driver: HostDriver | None = None, **given: Any) -> ServicePool:
        """From this process, with a driver of its own unless one is given."""
        given.setdefault("wait_seconds", 20)
        return ServicePool(driver or HostDriver(self.device), self.service.socket, "w", lock=lock, **given)

    def clear(self) -> None:
        """A writer that does not commit leaves nothing behind."""
        self.attach(Lock.READ_WRITE).close()


@pytest.fixture(scope="module")
def module_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("memory")
    flags = ("--oom-wait-seconds-max", "20")
    with (
        host_service(root, capacity_bytes=16 * MIB, flags=flags) as (service, device),
        memory_clients(str(device.path), service.socket) as clients,
    ):
        yield World(service, device, clients)


@pytest.fixture
def world(module_world: World) -> Iterator[World]:
    """With nothing in it, before and after."""
    yield module_world
    for pid in list(module_world.clients.held):
        module_world.clients.kill(pid)
    module_world.clear()
    assert module_world.device.free_bytes() == module_world.device.capacity_bytes
