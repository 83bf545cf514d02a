from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from lull.vmm import host_device, host_memory
from lull.vmm.driver import Access, Handle
from lull.vmm.errors import DeviceFailed, DriverError, OutOfDeviceMemory, OutOfHostMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from tests.memory import GRANULE_BYTES, memfd_bytes, pattern


@pytest.mark.parametrize("granularity_bytes", [0, -4096, 100])
def test_the_granularity_is_whole_pages(driver: HostDriver, granularity_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of the page size"):
        HostDriver(driver.device, granularity_bytes=granularity_bytes)


def test_pages_are_there_from_the_start(driver: HostDriver) -> None:
    handle = driver.create(3 * GRANULE_BYTES)
    assert memfd_bytes(os.getpid(), driver.device_uuid) == 3 * GRANULE_BYTES
    fd = driver.export_handle(handle)
    name = os.readlink(f"/proc/self/fd/{fd}")
    assert name == f"/memfd:lull:{driver.device_uuid}:{handle.key} (deleted)"
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)  # a peer cannot cut pages away under us
    os.close(fd)
    driver.release(handle)
    assert memfd_bytes(os.getpid(), driver.device_uuid) == 0


def test_host_memory_is_asked_for_before_it_is_taken(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GRANULE_BYTES)
    with pytest.raises(OutOfHostMemory, match="host-device memory needs") as caught:
        driver.create(2 * GRANULE_BYTES)
    assert caught.value.available_bytes == GRANULE_BYTES
    assert driver.free_bytes() == driver.capacity_bytes
    with pytest.raises(OutOfDeviceMemory):  # this one is the device's word
        driver.create(driver.capacity_bytes + GRANULE_BYTES)


def test_pages_that_the_kernel_refuses_are_not_charged(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutOfHostMemory):
        driver.create(GRANULE_BYTES)
    assert driver.free_bytes() == driver.capacity_bytes
    assert memfd_bytes(os.getpid(), driver.device_uuid) == 0


def test_a_release_does_not_fail_for_the_ledger(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = driver.create(GRANULE_BYTES)
    monkeypatch.setattr(host_device, "_LOCK_SECONDS_MAX", 0.01)
    with driver.device._locked(1):
        driver.release(handle)
    assert "is free but still charged" in caplog.text
    assert driver.free_bytes() == driver.capacity_bytes - GRANULE_BYTES
    driver.release(driver.create(driver.capacity_bytes - GRANULE_BYTES))  # its ledger write settles the old one too
    assert driver.free_bytes() == driver.capacity_bytes


def test_an_import_beyond_the_capacity_leaves_no_descriptor(tmp_path: Path, driver: HostDriver) -> None:
    handle = driver.create(2 * GRANULE_BYTES)
    fd = driver.export_handle(handle)
    driver.release(handle)
    taken = driver.create(driver.capacity_bytes - GRANULE_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfDeviceMemory):
        driver.import_handle(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    driver.release(taken)
    os.close(fd)


def test_addresses_that_the_system_does_not_give_are_host_memory(driver: HostDriver) -> None:
    with pytest.raises(OutOfHostMemory, match="an address range"):
        driver.reserve((1 << 62) // GRANULE_BYTES * GRANULE_BYTES)


def test_large_copies_fault_their_pages_in_at_once(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "large", capacity_bytes=8 << 20)
    driver = HostDriver(device)
    assert driver.granularity() == 2 << 20
    address, source = driver.reserve(2 << 20), driver.reserve(2 << 20)
    handles = [driver.create(2 << 20) for _ in range(2)]
    for place, handle in zip((address, source), handles, strict=True):
        driver.map(place, 2 << 20, handle)
        driver.set_access(place, 2 << 20, Access.READ_WRITE)
    content = pattern(3, (2 << 20) - 5)
    ctypes.memmove(source, content, len(content))
    driver.copy(address, source, len(content))
    assert ctypes.string_at(address, 2 << 20) == content + bytes(5)
    for place, handle in zip((address, source), handles, strict=True):
        driver.unmap(place, 2 << 20)
        driver.release(handle)


def test_a_failed_device_fails_every_call_from_then_on(driver: HostDriver) -> None:
    handle = driver.create(GRANULE_BYTES)
    driver.inject("copy", DeviceFailed("copy", "an illegal address"))
    with pytest.raises(DeviceFailed):
        driver.copy(0, 0, 1)
    assert driver.failed == "an illegal address"
    with pytest.raises(DeviceFailed, match="an illegal address"):
        driver.release(handle)


def test_memory_that_may_not_be_locked_is_not_pinned(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "lock_pages", lambda address, nbytes: False)
    assert driver.pin_host(mmap.PAGESIZE, mmap.PAGESIZE) is False


def test_an_import_that_is_not_what_was_said_is_refused(driver: HostDriver) -> None:
    handle = driver.create(GRANULE_BYTES)
    fd = driver.export_handle(handle)
    with pytest.raises(DriverError, match="not Handle"):
        driver.import_handle(fd, Handle(handle.key, 2 * GRANULE_BYTES))
    os.close(fd)
