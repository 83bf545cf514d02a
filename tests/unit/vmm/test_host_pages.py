"""Pages of the host device: huge where the kernel gives them, all there in either case."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm import host_memory
from lull.vmm.errors import OutOfHostMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.host_memory import HUGE_BYTES
from lull.vmm.host_pages import commit_pages, huge_mapped_bytes
from lull.vmm.pool import Pool
from tests.memory import mapped_memfds, memfd_bytes, read

SIZE_BYTES = 3 * HUGE_BYTES


def large_pool(path: Path, *, huge_pages: bool = True) -> Pool:
    device = HostDevice.create(path / "device", capacity_bytes=4 * SIZE_BYTES)
    return Pool(HostDriver(device, huge_pages=huge_pages, page_threads=2))


def without(advice: int, real: Callable[[int, int, int], bool]) -> Callable[[int, int, int], bool]:
    return lambda address, nbytes, asked: asked != advice and real(address, nbytes, asked)


@pytest.mark.parametrize("refused", [None, host_memory.MADV_COLLAPSE, host_memory.MADV_POPULATE_WRITE])
def test_every_page_is_there_and_zero_whatever_the_kernel_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    if refused is not None:
        monkeypatch.setattr(host_memory, "advise_pages", without(refused, host_memory.advise_pages))
    pool = large_pool(tmp_path)
    allocation = pool.allocate(SIZE_BYTES, "model")
    uuid = pool.driver.device_uuid
    assert memfd_bytes(os.getpid(), uuid) == SIZE_BYTES
    assert mapped_memfds(os.getpid(), uuid) == 1
    assert read(allocation) == bytes(SIZE_BYTES)
    assert huge_mapped_bytes(allocation.address, SIZE_BYTES) in ((0,) if refused else (0, SIZE_BYTES))
    pool.close()
    assert mapped_memfds(os.getpid(), uuid) == 0


def test_ordinary_pages_on_request(tmp_path: Path) -> None:
    pool = large_pool(tmp_path, huge_pages=False)
    allocation = pool.allocate(SIZE_BYTES, "model")
    assert read(allocation) == bytes(SIZE_BYTES)
    odd = tmp_path / os.fsdecode(b"no text \xff")
    odd.write_bytes(b"x")
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):  # a line of smaps names it
        assert huge_mapped_bytes(allocation.address, SIZE_BYTES) == 0
    pool.close()


@pytest.mark.parametrize("nbytes", [4096, HUGE_BYTES, HUGE_BYTES + 4096, 40 * HUGE_BYTES - 4096])
def test_sizes_that_are_no_whole_huge_pages(nbytes: int) -> None:
    fd = os.memfd_create("pages")
    try:
        os.ftruncate(fd, nbytes)
        commit_pages(fd, nbytes, huge=True, threads=2)
        assert os.fstat(fd).st_size == nbytes
        assert os.fstat(fd).st_blocks * 512 == nbytes
    finally:
        os.close(fd)


def test_no_memory_for_pages_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    pool = large_pool(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HUGE_BYTES, limits[1]))  # a memfd is a file
    try:
        with pytest.raises(OutOfHostMemory, match="host-device memory"):
            pool.allocate(SIZE_BYTES, "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pool.driver.free_bytes() == pool.driver.capacity_bytes
    assert memfd_bytes(os.getpid(), pool.driver.device_uuid) == 0
