"""One block mapped over and over at final addresses, later replaced by real memory at the same ones."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from lull.vmm.errors import DriverError, OutOfDeviceMemory
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.scratch import ScratchRange
from tests.memory import GRANULE_BYTES, mapped_memfds, memfd_bytes, small_driver

BYTES = 30 * GRANULE_BYTES


@pytest.fixture
def driver(tmp_path: Path) -> HostDriver:
    return small_driver(tmp_path / "device", granules=32)


def test_a_large_range_costs_one_block_until_it_gets_real_memory(driver: HostDriver) -> None:
    other = driver.create(20 * GRANULE_BYTES)  # somebody else has the device: the whole range would not fit
    scratch = ScratchRange(driver, BYTES - 5, block_bytes=4 * GRANULE_BYTES + 3)
    assert scratch.reserved_bytes == BYTES
    assert scratch.taken_bytes == 6 * GRANULE_BYTES, "a block of 4, and a rest of 2"
    assert driver.free_bytes() == 6 * GRANULE_BYTES
    ctypes.memset(scratch.address, 7, BYTES)  # a standby initialises all of it
    assert ctypes.string_at(scratch.address + BYTES - 1, 1) == b"\7"
    assert mapped_memfds(os.getpid(), driver.device_uuid) >= 8

    driver.release(other)
    address = scratch.address
    scratch.replace(driver.create)
    assert (scratch.address, scratch.taken_bytes) == (address, BYTES)
    assert ctypes.string_at(address, BYTES) == bytes(BYTES), "nothing of the scratch contents shows"
    ctypes.memset(address + BYTES - 1, 1, 1)
    assert ctypes.string_at(address, BYTES) == bytes(BYTES - 1) + b"\1", "and no address shows through another"
    scratch.close()
    assert driver.free_bytes() == driver.capacity_bytes
    assert memfd_bytes(os.getpid(), driver.device_uuid) == 0


def test_without_room_for_a_block_nothing_is_left(driver: HostDriver) -> None:
    held = driver.create(31 * GRANULE_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        ScratchRange(driver, BYTES, block_bytes=2 * GRANULE_BYTES)
    driver.release(held)
    assert driver.free_bytes() == driver.capacity_bytes


@pytest.mark.parametrize("verb", ["reserve", "create", "map", "set_access"])
def test_a_refused_call_leaves_nothing(driver: HostDriver, verb: str) -> None:
    for number in range(1, 10):
        driver.inject(verb, DriverError(verb, "injected"), nth_call=number)
        try:
            ScratchRange(driver, BYTES, block_bytes=4 * GRANULE_BYTES).close()
        except DriverError:
            assert driver.free_bytes() == driver.capacity_bytes
        else:
            driver.clear_faults()
            return
    pytest.fail("the call was refused nine times")


def test_without_room_for_real_memory_it_can_be_asked_again(driver: HostDriver) -> None:
    scratch = ScratchRange(driver, BYTES, block_bytes=GRANULE_BYTES)
    other = driver.create(20 * GRANULE_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        scratch.replace(driver.create)
    assert driver.free_bytes() == 12 * GRANULE_BYTES, "the blocks were given back first"
    driver.release(other)
    scratch.replace(driver.create)
    assert ctypes.string_at(scratch.address, BYTES) == bytes(BYTES)
    scratch.close()


@pytest.mark.parametrize(("nbytes", "block_bytes"), [(0, GRANULE_BYTES), (10, GRANULE_BYTES - 1)])
def test_sizes_that_make_no_range_are_refused(driver: HostDriver, nbytes: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        ScratchRange(driver, nbytes, block_bytes=block_bytes)
