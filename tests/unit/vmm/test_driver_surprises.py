"""Drivers that raise after the deed, and a ledger that is none: what is said of the memory is what is there."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path

import pytest

from lull.vmm.driver import Handle
from lull.vmm.errors import ContentsLost, LedgerUnreadable, LedgerUnwritable, LullMemoryError, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from tests.memory import GRANULE_BYTES, mapped_memfds, pattern, read, small_driver, write

CONTENT = pattern(3, GRANULE_BYTES)


class LateError(HostDriver):
    """Does what it is asked, and raises then, once."""

    late: tuple[str, BaseException] | None = None

    def unmap(self, address: int, nbytes: int) -> None:
        super().unmap(address, nbytes)
        self._raise_late("unmap")

    def release(self, handle: Handle) -> None:
        super().release(handle)
        self._raise_late("release")

    def _raise_late(self, verb: str) -> None:
        if self.late is not None and self.late[0] == verb:
            error, self.late = self.late[1], None
            raise error


@pytest.fixture
def late(driver: HostDriver) -> LateError:
    return LateError(driver.device, granularity_bytes=GRANULE_BYTES)


@pytest.mark.parametrize("verb", ["unmap", "release"])
@pytest.mark.parametrize("error", [ValueError("no JSON"), LullMemoryError("late"), KeyboardInterrupt()])
def test_a_park_is_undone_whole_whatever_is_raised_after_the_deed(
    late: LateError, verb: str, error: BaseException
) -> None:
    pool = Pool(late)
    kept = [pool.allocate(GRANULE_BYTES, tag) for tag in ("u", "w", "w")]
    for allocation in kept:
        write(allocation, CONTENT)
    late.late = (verb, error)
    with pytest.raises(type(error)):
        pool.release(["u", "w"])
    assert mapped_memfds(os.getpid(), late.device_uuid) > 0
    assert [read(allocation) for allocation in kept] == [CONTENT] * 3
    assert (pool.failed, pool.parked_tags(), pool.backup_bytes()) == (None, frozenset(), 0)
    pool.release(["u", "w"])
    pool.resume(["u", "w"])
    assert [read(allocation) for allocation in kept] == [CONTENT] * 3
    pool.close()
    assert late.free_bytes() == late.capacity_bytes


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_what_cannot_be_undone_is_not_said_to_be_in_place(late: LateError, verb: str) -> None:
    pool = Pool(late)
    pool.allocate(GRANULE_BYTES, "u")
    late.late = (verb, ValueError("no JSON"))
    late.inject("map", LullMemoryError("injected"), nth_call=1)
    late.inject("create", OutOfDeviceMemory(1, 0, 1))
    late.inject("map", LullMemoryError("injected"), nth_call=1)
    with pytest.raises(ContentsLost) as caught:
        pool.release(["u"])
    assert (caught.value.lost, caught.value.parked, caught.value.live) == ((), ("u",), ())


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_a_free_can_be_repeated_whatever_is_raised_after_the_deed(late: LateError, verb: str) -> None:
    pool = Pool(late)
    allocation = pool.allocate(GRANULE_BYTES, "u")
    late.late = (verb, ValueError("no JSON"))
    with pytest.raises(ValueError, match="no JSON"):
        pool.free(allocation)
    pool.free(allocation)
    assert late.free_bytes() == late.capacity_bytes


def test_a_wake_that_is_undone_ends_its_transition_whatever_is_raised(late: LateError) -> None:
    pool = Pool(late)
    kept = pool.allocate(GRANULE_BYTES, "u")
    write(kept, CONTENT)
    pool.release(["u"])
    pool.prepare_resume(["u"])
    late.late = ("unmap", ValueError("no JSON"))
    with pytest.raises(ContentsLost, match=r"lost \[\], still parked \[u\], in place \[\]"):
        pool.abort_resume()
    assert bytes(pool.backup_views("u")[0]) == CONTENT


@pytest.mark.parametrize("content", ["garbage", "[]", '{"rows": 5}', '{"boot_id": "x"', "\xff"])
def test_a_ledger_that_is_none_stops_no_park(
    tmp_path: Path, driver: HostDriver, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    pool = Pool(driver)
    kept = [pool.allocate(GRANULE_BYTES, tag) for tag in ("u", "w")]
    for allocation in kept:
        write(allocation, CONTENT)
    ledger = tmp_path / "device" / "ledger"
    good = ledger.read_bytes()
    ledger.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        pool.release(["u", "w"])
    assert "is free but still charged" in caplog.text
    assert mapped_memfds(os.getpid(), driver.device_uuid) == 0
    with pytest.raises(LedgerUnreadable, match="remove it"):
        pool.resume(["u", "w"])
    with pytest.raises(LedgerUnreadable):
        driver.free_bytes()
    ledger.write_bytes(good)
    pool.resume(["u", "w"])
    assert [read(allocation) for allocation in kept] == [CONTENT] * 2
    pool.close()
    assert driver.free_bytes() == driver.capacity_bytes


def test_a_row_that_is_none_is_refused(tmp_path: Path) -> None:
    driver = small_driver(tmp_path / "d")
    driver.create(GRANULE_BYTES)
    ledger = tmp_path / "d" / "ledger"
    good = ledger.read_bytes()
    ledger.write_bytes(good.replace(str(GRANULE_BYTES).encode(), b"9" * len(str(GRANULE_BYTES))))
    other = HostDevice.open(tmp_path / "d")
    with pytest.raises(LedgerUnreadable, match="a line is not what was written"):
        other.free_bytes()
    head, _, line = good.rstrip(b"\n").partition(b"\n")
    bad = line.partition(b" ")[2].replace(str(GRANULE_BYTES).encode(), b'"many"')
    ledger.write_bytes(head + b"\n%08x %s\n" % (zlib.crc32(bad), bad))
    with pytest.raises(LedgerUnreadable, match="is no charge"):
        other.free_bytes()


def test_a_device_whose_directory_is_gone_says_so(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1 << 20)
    driver = HostDriver(device)
    for path in (tmp_path / "d").iterdir():
        path.unlink()
    (tmp_path / "d").rmdir()
    with pytest.raises(LedgerUnwritable, match=r"cannot be written .*put that right"):
        driver.create(driver.granularity())
    with pytest.raises(LullMemoryError):
        driver.import_handle(9999)
