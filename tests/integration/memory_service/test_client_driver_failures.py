"""The engine's driver fails at every call of a park, a wake and an attach: undone whole, or said to be lost."""

from __future__ import annotations

import ctypes

import pytest

from lull.vmm.errors import ContentsLost, DriverError
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.pool import Piece, ServicePool
from lull.vmm.service.state import Lock
from tests.integration.memory_service.conftest import World
from tests.memory_clients import TAG

PIECES = {"a": Piece(3 << 20), "b": Piece(1 << 20)}
CALLS_MAX = 8


def committed(world: World) -> ServicePool:
    pool = world.attach(Lock.READ_WRITE)
    for key, region in pool.build(PIECES, slab_bytes=2 << 20).items():
        ctypes.memset(region.address, ord(key), region.nbytes)
    pool.commit()
    return pool


def right(pool: ServicePool) -> bool:
    return all(
        ctypes.string_at(region.address, region.nbytes) == key.encode() * region.nbytes
        for key, region in pool.regions().items()
    )


def driver_of(pool: ServicePool) -> HostDriver:
    assert isinstance(pool.driver, HostDriver)
    return pool.driver


@pytest.mark.parametrize("verb", ["synchronize", "unmap", "map", "set_access"])
def test_a_park_that_fails_leaves_the_engine_running(world: World, verb: str) -> None:
    pool = committed(world)
    for number in range(1, CALLS_MAX):
        driver_of(pool).inject(verb, DriverError(verb, "injected"), nth_call=number)
        try:
            pool.release([TAG])
        except DriverError:
            driver_of(pool).clear_faults()
            assert pool.parked_tags() == frozenset()
            assert right(pool)
            assert world.service.pool()["state"] == "reading"
        else:
            break
    driver_of(pool).clear_faults()
    pool.resume([TAG])
    assert right(pool)
    pool.close()


@pytest.mark.parametrize("verb", ["import_handle", "map", "set_access"])
def test_a_wake_that_fails_leaves_the_engine_parked(world: World, verb: str) -> None:
    pool = committed(world)
    pool.release([TAG])
    failed = 0
    for number in range(1, CALLS_MAX):
        driver_of(pool).inject(verb, DriverError(verb, "injected"), nth_call=number)
        try:
            pool.resume([TAG])
        except DriverError:
            failed += 1
            driver_of(pool).clear_faults()
            assert pool.parked_tags() == {TAG}
            assert world.service.pool()["state"] == "parked"
            assert world.device.free_bytes() == world.device.capacity_bytes
        else:
            break
    driver_of(pool).clear_faults()
    assert failed == 2, "once for each allocation"
    assert right(pool)
    pool.close()


@pytest.mark.parametrize("verb", ["reserve", "import_handle", "map", "set_access"])
def test_an_attach_that_fails_leaves_nothing(world: World, verb: str) -> None:
    committed(world).close()
    taken = world.device.free_bytes()
    failed = 0
    for number in range(1, CALLS_MAX):
        driver = HostDriver(world.device)
        driver.inject(verb, DriverError(verb, "injected"), nth_call=number)
        try:
            pool = ServicePool(driver, world.service.socket, "w", lock=Lock.READ_ONLY)
        except DriverError:
            failed += 1
            driver.clear_faults()
            assert world.device.free_bytes() == taken
        else:
            driver.clear_faults()
            assert right(pool)
            pool.close()
            break
    assert failed == 2


def test_memory_that_cannot_be_given_back_in_a_park_is_said_to_be_there_still(world: World) -> None:
    pool = committed(world)
    driver_of(pool).inject("release", DriverError("release", "injected"))
    with pytest.raises(ContentsLost) as caught:
        pool.release([TAG])
    assert (caught.value.lost, caught.value.parked) == ((), (TAG,))
    pool.close()
