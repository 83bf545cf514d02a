from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lull.vmm.host_device import HostDevice
from tests.device_children import Child, StartChild
from tests.memory import GRANULE_BYTES


@pytest.fixture
def device(tmp_path: Path) -> HostDevice:
    return HostDevice.create(tmp_path / "device", capacity_bytes=64 * GRANULE_BYTES)


@pytest.fixture
def start_child(device: HostDevice) -> Iterator[StartChild]:
    children: list[Child] = []

    def start(code: str, *, fds: tuple[int, ...] = (), environment: Mapping[str, str] | None = None) -> Child:
        child = Child(device, code, fds, environment or {})
        children.append(child)
        return child

    yield start
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()
