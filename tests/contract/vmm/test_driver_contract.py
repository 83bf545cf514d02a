"""What every Driver does, whatever the device."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import pytest

from lull.vmm.driver import Access, Driver, Handle
from lull.vmm.errors import DriverError, LullMemoryError, OutOfDeviceMemory


def mapped(driver: Driver, granules: int = 1) -> tuple[int, int, Handle]:
    nbytes = granules * driver.granularity()
    address = driver.reserve(nbytes)
    handle = driver.create(nbytes)
    driver.map(address, nbytes, handle)
    driver.set_access(address, nbytes, Access.READ_WRITE)
    return address, nbytes, handle


def unmapped(driver: Driver, address: int, nbytes: int, handle: Handle) -> None:
    driver.unmap(address, nbytes)
    driver.release(handle)


def test_reserving_takes_no_memory_and_is_aligned(driver: Driver) -> None:
    free_bytes = driver.free_bytes()
    addresses = [driver.reserve(4 * driver.granularity()) for _ in range(3)]
    assert driver.free_bytes() == free_bytes == driver.capacity_bytes
    assert all(address % driver.granularity() == 0 for address in addresses)
    for address in addresses:
        driver.free_address(address, 4 * driver.granularity())


def test_create_takes_and_release_gives_back(driver: Driver) -> None:
    free_bytes = driver.free_bytes()
    handle = driver.create(3 * driver.granularity())
    assert driver.free_bytes() == free_bytes - 3 * driver.granularity()
    driver.release(handle)
    assert driver.free_bytes() == free_bytes


def test_memory_is_zero_then_what_was_written(driver: Driver) -> None:
    address, nbytes, _ = mapped(driver)
    other, _, _ = mapped(driver)
    content = os.urandom(nbytes)
    source = ctypes.create_string_buffer(content, nbytes)
    driver.copy(address, ctypes.addressof(source), nbytes)
    driver.copy(other, address, nbytes)
    back = ctypes.create_string_buffer(nbytes)
    driver.copy(ctypes.addressof(back), other, nbytes)
    driver.synchronize()
    assert back.raw == content
    driver.set(other, 7, nbytes - 3)
    driver.copy(ctypes.addressof(back), other, nbytes)
    driver.synchronize()
    assert back.raw == b"\x07" * (nbytes - 3) + content[-3:]


def test_the_same_address_takes_new_memory_again_and_again(driver: Driver) -> None:
    address, nbytes, handle = mapped(driver, 2)
    for value in range(1, 4):
        driver.set(address, value, nbytes)
        unmapped(driver, address, nbytes, handle)
        handle = driver.create(nbytes)
        driver.map(address, nbytes, handle)
        driver.set_access(address, nbytes, Access.READ_WRITE)
    assert driver.free_bytes() == driver.capacity_bytes - nbytes


def test_memory_released_while_mapped_is_free_when_unmapped(driver: Driver) -> None:
    address, nbytes, handle = mapped(driver)
    driver.set(address, 5, nbytes)
    driver.release(handle)
    assert driver.free_bytes() == driver.capacity_bytes - nbytes
    back = ctypes.create_string_buffer(1)
    driver.copy(ctypes.addressof(back), address, 1)
    assert back.raw == b"\x05"
    driver.unmap(address, nbytes)
    assert driver.free_bytes() == driver.capacity_bytes


def test_out_of_memory_changes_nothing(driver: Driver) -> None:
    driver.create(driver.capacity_bytes - driver.granularity())
    with pytest.raises(OutOfDeviceMemory) as caught:
        driver.create(2 * driver.granularity())
    assert caught.value.requested_bytes == 2 * driver.granularity()
    assert caught.value.free_bytes == driver.granularity()
    assert caught.value.capacity_bytes == driver.capacity_bytes
    driver.create(driver.granularity())
    assert driver.free_bytes() == 0


def test_an_exported_descriptor_keeps_its_memory(driver: Driver) -> None:
    handle = driver.create(driver.granularity())
    fd = driver.export_handle(handle)
    try:
        assert os.get_inheritable(fd) is False
        driver.release(handle)
        imported = driver.import_handle(fd, handle)
    finally:
        os.close(fd)
    assert imported == handle
    driver.release(imported)
    assert driver.free_bytes() == driver.capacity_bytes


def misuse(driver: Driver, verb: str) -> None:
    granule = driver.granularity()
    address, nbytes, handle = mapped(driver)
    unknown = Handle("0" * 32, granule)
    free = driver.reserve(granule)
    calls: dict[str, Callable[[], object]] = {
        "map twice": lambda: driver.map(address, nbytes, handle),
        "map nothing reserved": lambda: driver.map(address + granule, granule, handle),
        "map another size": lambda: driver.map(driver.reserve(2 * granule), 2 * granule, handle),
        "map unknown": lambda: driver.map(free, granule, unknown),
        "unmap twice": lambda: driver.unmap(free, granule),
        "access unmapped": lambda: driver.set_access(free, granule, Access.READ),
        "free mapped": lambda: driver.free_address(address, nbytes),
        "free another size": lambda: driver.free_address(free, 2 * granule),
        "release unknown": lambda: driver.release(unknown),
        "export unknown": lambda: driver.export_handle(unknown),
        "reserve half a granule": lambda: driver.reserve(granule // 2),
        "create nothing": lambda: driver.create(0),
        "import a held one": lambda: import_own(driver, handle),
    }
    before = driver.free_bytes()
    try:
        calls[verb]()
    finally:
        assert driver.free_bytes() == before
        driver.set(address, 1, nbytes)
        unmapped(driver, address, nbytes, handle)


def import_own(driver: Driver, handle: Handle) -> None:
    fd = driver.export_handle(handle)
    try:
        driver.import_handle(fd, handle)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "verb",
    [
        "map twice",
        "map nothing reserved",
        "map another size",
        "map unknown",
        "unmap twice",
        "access unmapped",
        "free mapped",
        "free another size",
        "release unknown",
        "export unknown",
        "reserve half a granule",
        "create nothing",
        "import a held one",
    ],
)
def test_misuse_is_an_error_that_changes_nothing(driver: Driver, verb: str) -> None:
    with pytest.raises(DriverError):
        misuse(driver, verb)


def test_release_twice_is_an_error(driver: Driver) -> None:
    handle = driver.create(driver.granularity())
    driver.release(handle)
    with pytest.raises(LullMemoryError):
        driver.release(handle)


def test_lanes_copy_in_their_order_and_are_done_when_synchronized(driver: Driver) -> None:
    address, nbytes, _ = mapped(driver)
    lanes = [driver.open_lane() for _ in range(2)]
    half_bytes = nbytes // 2
    contents = [os.urandom(half_bytes) for _ in lanes]
    sources = [ctypes.create_string_buffer(content, half_bytes) for content in contents]
    backs = [ctypes.create_string_buffer(half_bytes) for _ in lanes]
    for number, lane in enumerate(lanes):
        there = address + number * half_bytes
        lane.set(there, 9, half_bytes)
        lane.copy(there, ctypes.addressof(sources[number]), half_bytes - 5)
        lane.copy(ctypes.addressof(backs[number]), there, half_bytes)
    for number, lane in enumerate(lanes):
        lane.synchronize()
        assert backs[number].raw == contents[number][:-5] + b"\x09" * 5
        lane.close()
        lane.close()


def test_a_closed_lane_takes_nothing(driver: Driver) -> None:
    address, nbytes, _ = mapped(driver)
    lane = driver.open_lane()
    lane.close()
    for use in (lambda: lane.copy(address, address, 1), lambda: lane.set(address, 0, nbytes), lane.synchronize):
        with pytest.raises(DriverError):
            use()


def test_host_memory_is_pinned_and_unpinned(driver: Driver) -> None:
    address, nbytes, _ = mapped(driver)
    pages = mmap.mmap(-1, nbytes)
    here = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert driver.pin_host(here, nbytes), "this small an amount is allowed everywhere"
    driver.set(address, 3, nbytes)
    driver.copy(here, address, nbytes)
    driver.unpin_host(here, nbytes)
    assert pages[:] == b"\x03" * nbytes
    assert driver.failed is None
