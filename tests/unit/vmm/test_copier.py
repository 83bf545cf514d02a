"""Lanes: copies that end later than they begin, are kept for the next time, and are over when a run is over."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm import copier
from lull.vmm.copier import Copier, CopyTask, FillTask
from lull.vmm.errors import DriverError
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.host_lane import HostLane
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, pattern, read, write

CONTENT = pattern(3, 3 * GRANULE_BYTES - 7)


class LateLane(HostLane):
    """As a stream may: nothing has happened before synchronize."""

    def __init__(self, driver: LateDriver) -> None:
        super().__init__(driver)
        self.waiting: list[Callable[[], None]] = []
        self.late_driver = driver

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.waiting.append(lambda: HostLane.copy(self, destination, source, nbytes))

    def set(self, address: int, value: int, nbytes: int) -> None:
        self.waiting.append(lambda: HostLane.set(self, address, value, nbytes))

    def synchronize(self) -> None:
        super().synchronize()
        while self.waiting:
            self.waiting.pop(0)()

    def close(self) -> None:
        self.late_driver.open_lanes.remove(self)
        super().close()


class LateDriver(HostDriver):
    def __init__(self, device: HostDevice) -> None:
        self.open_lanes: list[LateLane] = []
        super().__init__(device, granularity_bytes=GRANULE_BYTES)

    def open_lane(self) -> LateLane:
        super().open_lane()
        lane = LateLane(self)
        self.open_lanes.append(lane)
        return lane


@pytest.fixture
def late(tmp_path: Path) -> LateDriver:
    return LateDriver(HostDevice.create(tmp_path / "late", capacity_bytes=64 * GRANULE_BYTES))


@pytest.mark.parametrize("threads", [1, 3])
def test_nothing_is_unmapped_before_its_copy_has_ended(
    late: LateDriver, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(copier, "COPY_CHUNK_BYTES", 4096)
    pool = Pool(late, copy_threads=threads)
    kept = pool.allocate(len(CONTENT), "model")
    zeroed = pool.allocate(GRANULE_BYTES, "model", RestoreMode.MEMSET)
    for _ in range(2):
        write(kept, CONTENT)
        write(zeroed, b"x")
        pool.release(["model"])
        pool.resume(["model"])
        assert read(kept) == CONTENT
        assert read(zeroed) == bytes(GRANULE_BYTES)
    assert late.calls("open_lane") == len(late.open_lanes) == threads  # kept from park to wake to park
    assert not any(lane.waiting for lane in late.open_lanes)
    pool.close()
    assert late.open_lanes == []


def test_a_wake_that_is_undone_has_nothing_left_in_flight(late: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a copy of before could come to lie in memory that was given to somebody else."""
    monkeypatch.setattr(copier, "COPY_CHUNK_BYTES", 4096)
    pool = Pool(late, copy_threads=2)
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    late.inject("copy", DriverError("copy", "injected"), nth_call=5)
    with pytest.raises(DriverError, match="injected"):
        pool.resume(["model"])
    assert not any(lane.waiting for lane in late.open_lanes)
    pool.resume(["model"])
    assert read(allocation) == CONTENT
    pool.close()


def test_a_failure_is_raised_when_all_lanes_are_still(late: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "COPY_CHUNK_BYTES", 16)
    buffer = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(buffer)
    late.inject("copy", DriverError("copy", "injected"), nth_call=3)
    copies = Copier(late, 4)
    with pytest.raises(DriverError, match="injected"):
        copies.run([CopyTask(address, address + 2048, 1024)])
    made = late.calls("copy")
    assert made < 64  # the others have stopped
    assert threading.active_count() == 1 or not any("lull-copy" in one.name for one in threading.enumerate())
    copies.run([CopyTask(address, address + 2048, 16)])
    assert late.calls("copy") == made + 1
    copies.close()
    copies.close()
    copies.run([FillTask(address, 7, 100)])  # opens anew
    assert buffer.raw[:101] == b"\x07" * 100 + b"\0"
    copies.close()


@pytest.mark.parametrize(
    ("total_bytes", "threads", "chunks"),
    [
        (1 << 20, 2, 1),
        (64 << 20, 2, 4),
        (64 << 20, 1, 1),
        (1 << 30, 1, 1),
        (3 << 30, 2, 4),
        (5 << 30, 1, 5),
        (5 << 30, 2, 6),
    ],
)
def test_chunks_are_large_and_give_each_thread_its_share(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, total_bytes: int, threads: int, chunks: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(HostLane, "copy", lambda lane, destination, source, nbytes: sizes.append(nbytes))
    copies = Copier(driver, threads)
    copies.run([CopyTask(0, 0, total_bytes)])
    assert sum(sizes) == total_bytes
    assert len(sizes) == chunks
    copies.close()
