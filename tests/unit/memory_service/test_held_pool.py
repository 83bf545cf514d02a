"""The service's memory of one pool, with the driver failing at every call: whole, or as it was."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm.driver import Access
from lull.vmm.errors import DriverError, OutOfDeviceMemory, OutOfHostMemory
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.held_pool import HeldPool
from lull.vmm.service.state import EventRing
from tests.memory import GRANULE_BYTES, mapped_memfds, memfd_bytes, pattern, small_driver

SIZES = (GRANULE_BYTES, 2 * GRANULE_BYTES - 7, 5)
HELD_BYTES = 4 * GRANULE_BYTES
VERBS = ("reserve", "create", "map", "set_access", "copy", "synchronize", "free_bytes")
CALLS_MAX = 12


@pytest.fixture
def driver(tmp_path: Path) -> HostDriver:
    return small_driver(tmp_path / "device", granules=8)


def held(driver: HostDriver, available: Callable[[], int] = lambda: 1 << 40) -> HeldPool:
    pool = HeldPool("w", driver, EventRing(lambda: 0.0), copy_threads=1, host_bytes_available=available)
    for nbytes in SIZES:
        handle, record = pool.create(nbytes, "model_weights")
        pool.add(handle, record)
    for slot, nbytes in enumerate(SIZES):
        with pool._mapped({slot: pool._handles[slot]}, Access.READ_WRITE) as addresses:
            ctypes.memmove(addresses[slot], pattern(slot, nbytes), nbytes)
    return pool


def contents(pool: HeldPool) -> list[bytes]:
    with pool._mapped(pool._handles, Access.READ) as addresses:
        return [ctypes.string_at(addresses[slot], nbytes) for slot, nbytes in enumerate(SIZES)]


RIGHT = [pattern(slot, nbytes) for slot, nbytes in enumerate(SIZES)]


def nothing_is_mapped(driver: HostDriver) -> bool:
    return mapped_memfds(os.getpid(), driver.device_uuid) == 0


def until_it_works(driver: HostDriver, act: Callable[[], None], verb: str, check: Callable[[], None]) -> int:
    """``act`` with the 1st, 2nd, … call of the verb failing, until none is left to fail; how often it failed."""
    for number in range(1, CALLS_MAX):
        driver.inject(verb, DriverError(verb, "injected"), nth_call=number)
        try:
            act()
        except DriverError:
            driver.clear_faults()
            check()
        else:
            driver.clear_faults()
            return number - 1
    raise AssertionError(f"{verb} is called {CALLS_MAX} times")


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_a_backup_that_fails_at_any_call_leaves_everything_on_the_device(
    driver: HostDriver, verb: str, pinned: bool
) -> None:
    pool = held(driver)

    def nothing_changed() -> None:
        assert (pool.backup_bytes(), pool.resident_bytes()) == (0, HELD_BYTES)
        assert nothing_is_mapped(driver)
        assert contents(pool) == RIGHT

    failed = until_it_works(driver, lambda: pool.back_up(pinned=pinned), verb, nothing_changed)
    assert failed >= (verb in ("reserve", "map", "set_access", "copy"))
    pool.give_back()
    assert driver.free_bytes() == driver.capacity_bytes
    pool.wake()
    assert contents(pool) == RIGHT


@pytest.mark.parametrize("verb", VERBS)
def test_a_wake_that_fails_at_any_call_leaves_everything_parked(driver: HostDriver, verb: str) -> None:
    pool = held(driver)
    pool.back_up(pinned=False)
    pool.give_back()

    def still_parked() -> None:
        assert pool.resident_bytes() == 0
        assert driver.free_bytes() == driver.capacity_bytes
        assert memfd_bytes(os.getpid(), driver.device_uuid) == 0
        assert nothing_is_mapped(driver)

    assert until_it_works(driver, pool.wake, verb, still_parked) >= 1
    assert contents(pool) == RIGHT


def test_a_wake_asks_for_room_before_it_takes_any(driver: HostDriver) -> None:
    pool = held(driver)
    pool.back_up(pinned=False)
    pool.give_back()
    other = driver.create(5 * GRANULE_BYTES)
    before = driver.calls("create")
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.wake()
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (HELD_BYTES, 3 * GRANULE_BYTES)
    assert driver.calls("create") == before
    driver.release(other)
    pool.wake()
    assert contents(pool) == RIGHT


def test_a_backup_asks_for_host_memory_before_it_takes_any(driver: HostDriver) -> None:
    room = [0]
    pool = held(driver, lambda: room[0])
    with pytest.raises(OutOfHostMemory):
        pool.back_up(pinned=False)
    assert (pool.backup_bytes(), contents(pool)) == (0, RIGHT)
    room[0] = 1 << 40
    pool.back_up(pinned=False)


def test_memory_that_will_not_be_released_is_said_and_stops_nothing(driver: HostDriver) -> None:
    pool = held(driver)
    pool.back_up(pinned=False)
    driver.inject("release", DriverError("release", "injected"))
    pool.give_back()
    assert [event.kind for event in pool._events.after(0)] == ["release_failed"]
    assert driver.free_bytes() == driver.capacity_bytes - GRANULE_BYTES, "the one that was refused is still held"
    pool.wake()
    assert contents(pool) == RIGHT
