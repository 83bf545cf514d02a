"""What every Driver does, whatever the device."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import pytest

from lull.vmm.driver import Access, Driver, Handle
from lull.vmm.errors import DriverError, LullMemoryError, OutOfDeviceMemory
from tests.driver_rigs import Mapped, Rig

CONTENT_BYTES = 64 << 10


def test_reserving_takes_no_memory_and_is_aligned(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    addresses = [rig.driver.reserve(4 * rig.unit_bytes) for _ in range(3)]
    assert rig.is_free(free_bytes)
    assert all(address % rig.driver.granularity() == 0 for address in addresses)
    for address in addresses:
        rig.driver.free_address(address, 4 * rig.unit_bytes)


def test_create_takes_and_release_gives_back(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    handle = rig.driver.create(3 * rig.unit_bytes)
    assert rig.is_free(free_bytes - 3 * rig.unit_bytes)
    rig.driver.release(handle)
    assert rig.is_free(free_bytes)


def test_memory_holds_what_was_written(rig: Rig) -> None:
    one, other = rig.mapped(), rig.mapped()
    content = os.urandom(CONTENT_BYTES)
    for offset in (0, rig.unit_bytes - CONTENT_BYTES):
        one.write(content, offset)
    rig.driver.copy(other.address, one.address, rig.unit_bytes)
    rig.driver.synchronize()
    for offset in (0, rig.unit_bytes - CONTENT_BYTES):
        assert other.read(CONTENT_BYTES, offset) == content
    rig.driver.set(other.address, 7, CONTENT_BYTES - 3)
    assert other.read(CONTENT_BYTES) == b"\x07" * (CONTENT_BYTES - 3) + content[-3:]


def test_the_same_address_takes_new_memory_again_and_again(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    memory = rig.mapped(2)
    for value in range(1, 4):
        rig.driver.set(memory.address, value, memory.nbytes)
        assert memory.read() == bytes([value]) * 4096
        memory.unmap_and_release()
        assert rig.is_free(free_bytes)
        memory.make_again()
    assert rig.is_free(free_bytes - memory.nbytes)


def test_memory_released_while_mapped_is_free_when_unmapped(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    memory = rig.mapped()
    rig.made.clear()
    rig.driver.set(memory.address, 5, memory.nbytes)
    rig.driver.release(memory.handle)
    assert rig.is_free(free_bytes - memory.nbytes)
    assert memory.read(1) == b"\x05"
    rig.driver.unmap(memory.address, memory.nbytes)
    assert rig.is_free(free_bytes)
    rig.driver.free_address(memory.address, memory.nbytes)


def test_out_of_memory_changes_nothing(rig: Rig) -> None:
    unit = rig.unit_bytes
    free_bytes = rig.driver.free_bytes() // unit * unit
    rest = rig.driver.create(free_bytes - 2 * unit)
    with pytest.raises(OutOfDeviceMemory) as caught:
        rig.driver.create(4 * unit)
    assert caught.value.requested_bytes == 4 * unit
    assert 2 * unit <= caught.value.free_bytes + rig.slack_bytes < 4 * unit
    assert caught.value.capacity_bytes == rig.driver.capacity_bytes
    fits = rig.driver.create(unit)
    for handle in (fits, rest):
        rig.driver.release(handle)
    assert rig.driver.free_bytes() + rig.slack_bytes >= free_bytes


def test_an_exported_descriptor_keeps_its_memory(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    memory = rig.mapped()
    memory.write(b"kept")
    fd = rig.driver.export_handle(memory.handle)
    try:
        assert os.get_inheritable(fd) is False
        memory.unmap_and_release()
        imported = rig.driver.import_handle(fd, memory.handle)
    finally:
        os.close(fd)
    assert imported == memory.handle
    rig.driver.map(memory.address, memory.nbytes, imported)
    rig.driver.set_access(memory.address, memory.nbytes, Access.READ)
    assert memory.read(4) == b"kept"
    rig.give_back()
    assert rig.is_free(free_bytes)


def misuses(rig: Rig, memory: Mapped, free: int) -> dict[str, Callable[[], object]]:
    driver, unit = rig.driver, rig.unit_bytes
    address, nbytes, handle = memory.address, memory.nbytes, memory.handle
    unknown = Handle("0" * 32, unit)
    granule = driver.granularity()
    return {
        "map twice": lambda: driver.map(address, nbytes, handle),
        "map nothing reserved": lambda: driver.map(free + unit, unit, handle),
        "map another size": lambda: driver.map(free, unit, Handle(handle.key, 2 * unit)),
        "map unknown": lambda: driver.map(free, unit, unknown),
        "unmap twice": lambda: driver.unmap(free, unit),
        "unmap another size": lambda: driver.unmap(address, 2 * unit),
        "access unmapped": lambda: driver.set_access(free, unit, Access.READ),
        "free mapped": lambda: driver.free_address(address, nbytes),
        "free another size": lambda: driver.free_address(free, 2 * unit),
        "free twice": lambda: driver.free_address(free + 16 * unit, unit),
        "release unknown": lambda: driver.release(unknown),
        "export unknown": lambda: driver.export_handle(unknown),
        "reserve half a granule": lambda: driver.reserve(granule // 2),
        "create nothing": lambda: driver.create(0),
        "create half a granule": lambda: driver.create(granule // 2),
        "import a held one": lambda: import_own(driver, handle),
        "import no memory": lambda: import_fd_of("/dev/null", driver, unknown),
    }


def import_own(driver: Driver, handle: Handle) -> None:
    fd = driver.export_handle(handle)
    try:
        driver.import_handle(fd, handle)
    finally:
        os.close(fd)


def import_fd_of(path: str, driver: Driver, exported: Handle) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        driver.import_handle(fd, exported)
    finally:
        os.close(fd)


def test_misuse_is_an_error_that_changes_nothing(rig: Rig) -> None:
    memory = rig.mapped()
    free = rig.driver.reserve(rig.unit_bytes)
    before_bytes = rig.driver.free_bytes()
    for name, misuse in misuses(rig, memory, free).items():
        with pytest.raises(DriverError):
            pytest.fail(f"{name} was accepted: {misuse()}")
        assert rig.is_free(before_bytes), name
        memory.write(name.encode())
        assert memory.read(len(name)) == name.encode()
    assert rig.driver.failed is None
    rig.driver.free_address(free, rig.unit_bytes)


def test_release_twice_is_an_error(rig: Rig) -> None:
    handle = rig.driver.create(rig.unit_bytes)
    rig.driver.release(handle)
    with pytest.raises(LullMemoryError):
        rig.driver.release(handle)


def test_lanes_copy_in_their_order_and_are_done_when_synchronized(rig: Rig) -> None:
    memory = rig.mapped()
    lanes = [rig.driver.open_lane() for _ in range(2)]
    half_bytes = CONTENT_BYTES // 2
    contents = [os.urandom(half_bytes) for _ in lanes]
    sources = [ctypes.create_string_buffer(content, half_bytes) for content in contents]
    backs = [ctypes.create_string_buffer(half_bytes) for _ in lanes]
    for number, lane in enumerate(lanes):
        there = memory.address + number * half_bytes
        lane.set(there, 9, half_bytes)
        lane.copy(there, ctypes.addressof(sources[number]), half_bytes - 5)
        lane.copy(ctypes.addressof(backs[number]), there, half_bytes)
    for number, lane in enumerate(lanes):
        lane.synchronize()
        assert backs[number].raw == contents[number][:-5] + b"\x09" * 5
        lane.close()
        lane.close()


def test_a_closed_lane_takes_nothing(rig: Rig) -> None:
    memory = rig.mapped()
    lane = rig.driver.open_lane()
    lane.close()
    address = memory.address
    for use in (lambda: lane.copy(address, address, 1), lambda: lane.set(address, 0, 1), lane.synchronize):
        with pytest.raises(DriverError):
            use()


def test_host_memory_is_pinned_and_unpinned(rig: Rig) -> None:
    memory = rig.mapped()
    pages = mmap.mmap(-1, CONTENT_BYTES)
    here = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert rig.driver.pin_host(here, CONTENT_BYTES), "this small an amount is allowed everywhere"
    rig.driver.set(memory.address, 3, memory.nbytes)
    rig.driver.copy(here, memory.address, CONTENT_BYTES)
    rig.driver.unpin_host(here, CONTENT_BYTES)
    assert pages[:] == b"\x03" * CONTENT_BYTES
    assert rig.driver.failed is None


def test_threads_use_one_driver_at_once(rig: Rig) -> None:
    free_bytes = rig.driver.free_bytes()
    failures: list[BaseException] = []

    def use(value: int) -> None:
        try:
            for _ in range(4):
                memory = rig.mapped()
                rig.driver.set(memory.address, value, memory.nbytes)
                assert memory.read() == bytes([value]) * 4096
                memory.give_back()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rig.made.clear()
    assert failures == []
    assert rig.is_free(free_bytes)
