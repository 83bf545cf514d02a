"""Pools on CUDA devices: beside an engine with work in flight, and on several devices at once. On the fake driver."""

from __future__ import annotations

import ctypes

import pytest

from lull.vmm.blocks import Allocation
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.errors import LullMemoryError
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES

INVALID_VALUE = 1


def read(driver: CudaDriver, allocation: Allocation) -> bytes:
    back = ctypes.create_string_buffer(allocation.nbytes)
    driver.copy(ctypes.addressof(back), allocation.address, allocation.nbytes)
    return back.raw


def test_a_park_waits_for_what_the_engine_has_begun(
    new_fake_cuda: NewFakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_fake_cuda(strict=True)
    monkeypatch.setenv("FAKE_CUDA_PACE_BYTES_PER_SECOND", str(4 * GRANULE_BYTES))
    driver = CudaDriver(CudaDriver.devices()[0])
    pool = Pool(driver)
    weights = pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    other = pool.allocate(GRANULE_BYTES, "kv_cache")
    engine = driver.open_lane()
    engine.copy(other.address, other.address, GRANULE_BYTES)  # takes a quarter of a second
    engine.set(weights.address, 9, GRANULE_BYTES)
    pool.release(["model_weights", "kv_cache"])
    monkeypatch.delenv("FAKE_CUDA_PACE_BYTES_PER_SECOND")
    pool.resume(["model_weights", "kv_cache"])
    assert read(driver, weights) == b"\x09" * GRANULE_BYTES
    engine.close()
    pool.close()


def test_several_devices_park_and_wake_as_one(new_fake_cuda: NewFakeCuda) -> None:
    fake = new_fake_cuda(devices=3, strict=True)
    drivers = [CudaDriver(uuid) for uuid in CudaDriver.devices()]
    pools = [Pool(driver) for driver in drivers]
    runtime = Runtime(pools)
    weights = [pool.allocate(2 * GRANULE_BYTES, "model_weights", RestoreMode.PINNED) for pool in pools]
    for number, (driver, allocation) in enumerate(zip(drivers, weights, strict=True)):
        driver.set(allocation.address, number + 1, allocation.nbytes)

    def require(*, parked: bool) -> None:
        assert runtime.status().state is (MemoryState.PARKED if parked else MemoryState.RUNNING)
        taken_bytes = 0 if parked else 2 * GRANULE_BYTES
        assert [driver.capacity_bytes - driver.free_bytes() for driver in drivers] == [taken_bytes] * 3
        if not parked:
            contents = [read(driver, allocation) for driver, allocation in zip(drivers, weights, strict=True)]
            assert contents == [bytes([number + 1]) * 2 * GRANULE_BYTES for number in range(3)]

    fake.fail("cuMemUnmap", INVALID_VALUE, nth_call=2)
    with pytest.raises(LullMemoryError):
        runtime.release()
    require(parked=False)
    runtime.release()
    require(parked=True)
    fake.fail("cuMemMap", INVALID_VALUE, nth_call=2)
    with pytest.raises(LullMemoryError):
        runtime.resume()
    require(parked=True)
    runtime.resume()
    require(parked=False)
    for pool in pools:
        pool.close()
    for driver in drivers:
        driver.close()
    assert set(fake.everything_live().values()) == {0}


def test_every_backup_is_made_before_anything_is_given_back(new_fake_cuda: NewFakeCuda) -> None:
    """And every handle is there before anything is mapped: what fails most often is undone most easily."""
    fake = new_fake_cuda(strict=True)
    pool = Pool(CudaDriver(CudaDriver.devices()[0]))
    for _ in range(3):
        pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    fake.fail("cuMemcpyAsync", INVALID_VALUE, nth_call=3)
    with pytest.raises(LullMemoryError):
        pool.release(["model_weights"])
    assert fake.calls("cuMemUnmap") == fake.calls("cuMemRelease") == 0
    pool.release(["model_weights"])
    assert fake.calls("cuMemUnmap") == fake.calls("cuMemRelease") == 3
    mapped = fake.calls("cuMemMap")
    fake.fail("cuMemCreate", INVALID_VALUE, nth_call=3)
    with pytest.raises(LullMemoryError):
        pool.resume(["model_weights"])
    assert fake.calls("cuMemMap") == mapped
    pool.resume(["model_weights"])
    pool.close()
