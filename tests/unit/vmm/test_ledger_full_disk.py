"""A host device whose directory lies on a full disk: what is charged stays exact, and it goes on once there is room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.errors import LedgerUnwritable
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from tests.small_disk import SmallDisk, small_disk

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1 * MIB) as disk:
        yield disk


def names(disk: SmallDisk) -> list[str]:
    return sorted(path.name for path in (disk.path / "d").iterdir())


def test_nothing_is_charged_and_the_ledger_stays_whole(disk: SmallDisk) -> None:
    device = HostDevice.create(disk.path / "d", capacity_bytes=64 * MIB)
    driver = HostDriver(device)
    kept = [driver.create(driver.granularity()) for _ in range(2)]
    ledger = (disk.path / "d" / "ledger").read_bytes()
    files = names(disk)
    disk.fill()
    with pytest.raises(LedgerUnwritable, match=f"{device.path} cannot be written .*give its disk room"):
        driver.create(driver.granularity())
    assert (disk.path / "d" / "ledger").read_bytes() == ledger
    assert names(disk) == files
    driver.release(kept.pop())  # its memory is gone, and its row goes as soon as it can
    assert len(json.loads(ledger)["rows"]) == len(device.charges()) == 2
    disk.clear()
    kept.append(driver.create(driver.granularity()))
    assert len(device.charges()) == 2
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
