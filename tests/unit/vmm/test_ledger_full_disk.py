"""A host device whose directory lies on a full disk: what is charged stays exact, and it goes on once there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.errors import LedgerUnwritable
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from tests.small_disk import SmallDisk, small_disk

MIB = 1 << 20
PAGE_LINES_MAX = 100  # of the ledger, on one page


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1 * MIB) as disk:
        yield disk


def names(disk: SmallDisk) -> list[str]:
    return sorted(path.name for path in (disk.path / "d").iterdir())


def test_nothing_is_charged_and_the_ledger_stays_whole(disk: SmallDisk) -> None:
    device = HostDevice.create(disk.path / "d", capacity_bytes=64 * MIB)
    driver = HostDriver(device, granularity_bytes=4096)
    kept = [driver.create(4096) for _ in range(2)]
    files = names(disk)
    disk.fill()
    with pytest.raises(LedgerUnwritable, match=f"{device.path} cannot be written .*give its disk room"):
        kept.extend(driver.create(4096) for _ in range(PAGE_LINES_MAX))  # the rest of the file's last page is had
    ledger = (disk.path / "d" / "ledger").read_bytes()
    assert ledger.endswith(b"\n"), "what a full disk took of a line is cut off again"
    assert names(disk) == files
    count = len(device.charges())
    driver.release(kept.pop())  # its memory is gone, and its row goes as soon as it can
    assert (disk.path / "d" / "ledger").read_bytes() == ledger
    assert len(HostDevice.open(device.path).charges()) == count
    disk.clear()
    kept.append(driver.create(4096))
    assert len(device.charges()) == count
    for handle in kept:
        driver.release(handle)
    assert device.free_bytes() == device.capacity_bytes


def test_a_device_that_cannot_be_made_leaves_no_draft(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space"):
        HostDevice.create(disk.path / "d", capacity_bytes=64 * MIB)
    assert names(disk) == []
    disk.clear()
    assert HostDevice.create(disk.path / "d", capacity_bytes=64 * MIB).charges() == []
