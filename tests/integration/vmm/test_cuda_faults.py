"""An error at every single call of the CUDA driver: nothing leaks, and what is said is true. On the fake driver.

One short sequence is run once whole to count its calls, then once for each of them with that call failing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.driver import Access
from lull.vmm.errors import DeviceFailed, LullMemoryError
from tests.driver_rigs import device_mappings, own_descriptors
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES, FakeCuda

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
LAUNCH_FAILED = 719
WEIGHTS_BYTES = 2 * GRANULE_BYTES
CONTENT = bytes(range(256)) * (WEIGHTS_BYTES // 256)


@pytest.fixture
def fake(new_fake_cuda: NewFakeCuda) -> FakeCuda:
    return new_fake_cuda(strict=True)


def held_by_this_process(fake: FakeCuda) -> dict[str, int]:
    return {**fake.everything_live(), "descriptors": own_descriptors(), "mappings of memory": device_mappings()}


class Undo:
    """The way back of each step that was done. A call that raises has changed nothing, so it can be asked again."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def last(self, count: int) -> None:
        for _ in range(count):
            self._steps[-1]()
            self._steps.pop()

    def all(self) -> None:
        while self._steps:
            step = self._steps.pop()
            try:
                step()
            except LullMemoryError:
                step()


def every_verb(driver: CudaDriver, here: int, undo: Undo) -> None:
    nbytes = GRANULE_BYTES
    address = driver.reserve(nbytes)
    undo.add(lambda: driver.free_address(address, nbytes))
    if driver.pin_host(here, nbytes):
        undo.add(lambda: driver.unpin_host(here, nbytes))
    handle = driver.create(nbytes)
    undo.add(lambda: driver.release(handle))
    driver.map(address, nbytes, handle)
    undo.add(lambda: driver.unmap(address, nbytes))
    driver.set_access(address, nbytes, Access.READ_WRITE)
    driver.copy(address, here, nbytes)
    lane = driver.open_lane()
    undo.add(lane.close)
    lane.set(address, 7, 16)
    lane.copy(here, address, nbytes)
    lane.synchronize()
    undo.last(1)
    driver.set(address, 9, 16)
    fd = driver.export_handle(handle)
    try:
        undo.last(2)
        imported = driver.import_handle(fd, handle)
    finally:
        os.close(fd)
    undo.add(lambda: driver.release(imported))
    driver.map(address, nbytes, imported)
    undo.add(lambda: driver.unmap(address, nbytes))
    driver.set_access(address, nbytes, Access.READ)
    driver.copy(here, address, nbytes)
    driver.synchronize()
    driver.free_bytes()
    undo.all()
    driver.close()


def run_every_verb(driver: CudaDriver) -> None:
    host = mmap.mmap(-1, GRANULE_BYTES)
    undo = Undo()
    try:
        every_verb(driver, ctypes.addressof(ctypes.c_char.from_buffer(host)), undo)
    finally:
        undo.all()


def calls_of(fake: FakeCuda, work: Callable[[], object]) -> int:
    before = fake.calls("*")
    work()
    return fake.calls("*") - before


@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY])
def test_nothing_leaks_when_a_call_fails(fake: FakeCuda, error: int) -> None:
    driver = CudaDriver(CudaDriver.devices()[0])
    before = held_by_this_process(fake)
    count = calls_of(fake, lambda: run_every_verb(driver))
    refused = 0
    for nth_call in range(1, count + 1):
        fake.fail("*", error, nth_call=nth_call)
        try:
            run_every_verb(driver)
        except LullMemoryError:
            refused += 1
        fake.forget_faults()
        assert driver.free_bytes() == driver.capacity_bytes
        driver.close()
        assert held_by_this_process(fake) == before, f"after a failure of call {nth_call} of {count}"
        assert fake.live("contexts") == 0
    assert count > 60
    assert refused > count // 2


def test_from_a_sticky_error_on_everything_is_refused(fake: FakeCuda, new_fake_cuda: NewFakeCuda) -> None:
    count = calls_of(fake, lambda: run_every_verb(CudaDriver(CudaDriver.devices()[0])))
    opening = calls_of(fake, lambda: CudaDriver(CudaDriver.devices()[0]))
    for nth_call in range(1, count - opening + 1):
        new_fake_cuda(strict=True)
        driver = CudaDriver(CudaDriver.devices()[0])
        fake.fail("*", LAUNCH_FAILED, nth_call=nth_call)
        with suppress(LullMemoryError):
            run_every_verb(driver)
        assert driver.failed is not None, f"call {nth_call}"
        assert "CUDA_ERROR_LAUNCH_FAILED" in driver.failed
        with pytest.raises(DeviceFailed):
            driver.create(GRANULE_BYTES)
