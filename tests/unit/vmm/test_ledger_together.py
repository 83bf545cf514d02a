"""One write of the ledger, and one wait for it, for a park or a wake of many allocations."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lull.vmm import host_device
from lull.vmm.errors import DriverError, LedgerBusy, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from tests.memory import GRANULE_BYTES, pattern, read, write

COUNT = 12


class Writes:
    """How often something was written to the ledger."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        write = os.pwrite

        def counted(fd: int, text: bytes, offset: int) -> int:
            self.count += 1
            return write(fd, text, offset)

        monkeypatch.setattr(os, "pwrite", counted)

    def during(self) -> int:
        count, self.count = self.count, 0
        return count


@contextmanager
def locked_by_another(device: HostDevice) -> Iterator[None]:
    fd = os.open(f"{device.path}/ledger.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_each_phase_writes_the_ledger_once(pool: Pool, driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [pool.allocate(GRANULE_BYTES, "model") for _ in range(COUNT)]
    for number, allocation in enumerate(kept):
        write(allocation, pattern(number, GRANULE_BYTES))
    writes = Writes(monkeypatch)
    pool.release(["model"])
    assert writes.during() == 1
    assert driver.free_bytes() == driver.capacity_bytes
    pool.resume(["model"])
    assert writes.during() == 1
    assert driver.capacity_bytes - driver.free_bytes() == COUNT * GRANULE_BYTES
    assert [read(allocation) for allocation in kept] == [pattern(number, GRANULE_BYTES) for number in range(COUNT)]
    pool.release(["model"])
    pool.prepare_resume(["model"])
    writes.during()
    pool.abort_resume()
    assert writes.during() == 1
    pool.resume(["model"])
    writes.during()
    pool.close()
    assert writes.during() == 1


def test_a_locked_ledger_is_waited_for_once_a_park(
    pool: Pool, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    kept = [pool.allocate(GRANULE_BYTES, "model") for _ in range(COUNT)]
    locked = HostDevice._locked

    def noted(device: HostDevice, seconds_max: float) -> object:
        waits.append(seconds_max)
        return locked(device, seconds_max)

    monkeypatch.setattr(host_device, "_LOCK_SECONDS_MAX", 0.01)
    monkeypatch.setattr(HostDevice, "_locked", noted)
    with locked_by_another(driver.device):
        pool.release(["model"])
        assert waits == [0.01]
        with pytest.raises(LedgerBusy):
            pool.resume(["model"])
        for allocation in kept[:3]:
            pool.free(allocation)
    assert pool.parked_tags() == {"model"}
    pool.resume(["model"])
    assert driver.capacity_bytes - driver.free_bytes() == (COUNT - 3) * GRANULE_BYTES


def test_single_releases_wait_for_a_locked_ledger_once_in_all(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [driver.create(GRANULE_BYTES) for _ in range(3)]
    waits: list[float] = []
    locked = HostDevice._locked

    def noted(device: HostDevice, seconds_max: float) -> object:
        waits.append(seconds_max)
        return locked(device, seconds_max)

    monkeypatch.setattr(host_device, "_LOCK_SECONDS_MAX", 0.01)
    monkeypatch.setattr(HostDevice, "_locked", noted)
    with locked_by_another(driver.device):
        for handle in handles:
            driver.release(handle)
    assert waits == [0.01, 0, 0]
    driver.release(driver.create(GRANULE_BYTES))
    assert waits[-1] == 0.01
    assert driver.free_bytes() == driver.capacity_bytes


def test_what_was_announced_and_not_created_is_given_back(driver: HostDriver) -> None:
    with driver.together([GRANULE_BYTES] * 3):
        kept = driver.create(GRANULE_BYTES)
        assert driver.capacity_bytes - driver.free_bytes() == 3 * GRANULE_BYTES
        other = driver.create(2 * GRANULE_BYTES)  # of a size that was not announced
        driver.inject("create", DriverError("create", "injected"))
        with pytest.raises(DriverError, match="injected"):
            driver.create(GRANULE_BYTES)
    assert driver.capacity_bytes - driver.free_bytes() == 3 * GRANULE_BYTES
    driver.release(kept)
    driver.release(other)
    assert driver.free_bytes() == driver.capacity_bytes


def test_what_does_not_fit_together_charges_nothing(driver: HostDriver) -> None:
    granules = driver.capacity_bytes // GRANULE_BYTES
    with pytest.raises(OutOfDeviceMemory), driver.together([GRANULE_BYTES] * (granules + 1)):
        pytest.fail("it does not fit")
    assert driver.free_bytes() == driver.capacity_bytes
    limited = HostDriver(driver.device, granularity_bytes=GRANULE_BYTES, owner="a", owner_bytes_max=GRANULE_BYTES)
    with pytest.raises(OutOfDeviceMemory, match="the limit of a"), limited.together([GRANULE_BYTES] * 2):
        pytest.fail("it does not fit")
    assert driver.free_bytes() == driver.capacity_bytes


def test_others_may_create_and_release_meanwhile(driver: HostDriver) -> None:
    def work() -> None:
        for _ in range(5):
            driver.release(driver.create(GRANULE_BYTES))

    with driver.together([GRANULE_BYTES] * 2):
        thread = threading.Thread(target=work)
        thread.start()
        handles = [driver.create(GRANULE_BYTES) for _ in range(2)]
        thread.join(10)
    assert driver.capacity_bytes - driver.free_bytes() == 2 * GRANULE_BYTES
    for handle in handles:
        driver.release(handle)
    assert driver.free_bytes() == driver.capacity_bytes


def test_a_ledger_that_another_has_written_is_read_anew(tmp_path: Path, driver: HostDriver) -> None:
    other = HostDriver(HostDevice.open(tmp_path / "device"), granularity_bytes=GRANULE_BYTES)
    first = driver.create(GRANULE_BYTES)
    second = other.create(GRANULE_BYTES)
    assert driver.capacity_bytes - driver.free_bytes() == 2 * GRANULE_BYTES
    driver.release(first)
    assert other.free_bytes() == driver.capacity_bytes - GRANULE_BYTES
    other.release(second)
    assert driver.free_bytes() == driver.capacity_bytes
