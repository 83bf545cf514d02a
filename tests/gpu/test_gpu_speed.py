"""How quick a park and a wake are beside plain copies over the same link. Figures, and two limits that must hold."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lull.vmm import host_memory
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.driver_rigs import GIB, Rig

pytestmark = pytest.mark.gpu
SIZE_BYTES = 4 * GIB


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


@pytest.mark.parametrize("mode", [RestoreMode.PINNED, RestoreMode.CPU])
def test_speed_of_park_and_wake(rig: Rig, mode: RestoreMode, record_property: Callable[[str, object], None]) -> None:
    if host_memory.available_bytes() < 4 * SIZE_BYTES:
        pytest.fail(f"this machine has not {4 * SIZE_BYTES} bytes of free host memory")
    pool = Pool(rig.driver, immutable_tags={"model_weights"})
    weights = pool.allocate(SIZE_BYTES, "model_weights", mode)
    rig.driver.set(weights.address, 5, weights.nbytes)
    copied = seconds_of_plain_copy(rig, weights.address, pinned=mode is RestoreMode.PINNED)
    pool.warm_backups()
    parks = [seconds(lambda: pool.release(["model_weights"]))]
    wakes = [seconds(lambda: pool.resume(["model_weights"]))]
    parks.append(seconds(lambda: pool.release(["model_weights"])))
    wakes.append(seconds(lambda: pool.resume(["model_weights"])))
    assert pool.statistics()["model_weights"].last_park_copied_bytes == 0
    gib = SIZE_BYTES / GIB
    record_property("plain copy to host, GiB/s", round(gib / copied, 1))
    record_property("first park, GiB/s", round(gib / parks[0], 1))
    record_property("wake, GiB/s", round(gib / wakes[1], 1))
    record_property("second park, ms", round(parks[1] * 1000, 1))
    pool.close()
    assert parks[1] < parks[0], "the second park copies nothing"


def seconds_of_plain_copy(rig: Rig, source: int, *, pinned: bool) -> float:
    """By one lane, into memory that is faulted in: what the park is compared with."""
    address = host_memory.map_anonymous(SIZE_BYTES)
    try:
        host_memory.advise_pages(address, SIZE_BYTES, host_memory.MADV_POPULATE_WRITE)
        locked = pinned and rig.driver.pin_host(address, SIZE_BYTES)
        lane = rig.driver.open_lane()

        def copy() -> None:
            lane.copy(address, source, SIZE_BYTES)
            lane.synchronize()

        spent = seconds(copy)
        lane.close()
        if locked:
            rig.driver.unpin_host(address, SIZE_BYTES)
    finally:
        host_memory.unmap_pages(address, SIZE_BYTES)
    return spent
