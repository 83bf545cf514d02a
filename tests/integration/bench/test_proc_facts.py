"""Facts from /proc, against memory that this test really holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lull.bench.proc_facts import anonymous_bytes, device_memory, pages_of
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode

MIB = 1 << 20


@pytest.fixture
def device(tmp_path: Path) -> HostDevice:
    return HostDevice.create(tmp_path / "device", capacity_bytes=64 * MIB)


def test_bytes_on_a_device_are_seen_and_go_when_they_are_released(device: HostDevice) -> None:
    pool = Pool(HostDriver(device), restore_modes={"scratch": RestoreMode.NONE})
    allocation = pool.allocate(8 * MIB, "scratch")
    assert device_memory().by_device[device.uuid] == 8 * MIB
    assert device_memory([os.getpid()]).held_by([os.getpid()], device.uuid) == 8 * MIB
    pool.free(allocation)
    assert device.uuid not in device_memory().by_device


def test_another_processs_bytes_are_its_own(device: HostDevice) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from lull.vmm.host_device import HostDevice\nfrom lull.vmm.host_driver import HostDriver\n"
        "from lull.vmm.pool import Pool\nfrom lull.vmm.tags import RestoreMode\n"
        f"device = HostDevice.open(Path({str(device.path)!r}))\n"
        "pool = Pool(HostDriver(device), restore_modes={'a': RestoreMode.NONE})\n"
        f"pool.allocate({4 * MIB}, 'a')\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        seen = device_memory()
        assert seen.by_device[device.uuid] == 4 * MIB
        assert seen.held_by([holder.pid], device.uuid) == 4 * MIB
        assert seen.held_by([os.getpid()], device.uuid) == 0
        holder.communicate()
    assert device.uuid not in device_memory().by_device


def test_a_process_that_is_gone_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        assert pages_of(gone.pid) == []
        assert anonymous_bytes(gone.pid) == 0
    assert anonymous_bytes(os.getpid()) > MIB
