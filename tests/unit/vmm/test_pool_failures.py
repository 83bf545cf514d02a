"""What fails changes nothing, or says what it could not undo."""

from __future__ import annotations

import os
import threading

import pytest

from lull.vmm.backup import UNTOUCHED_BYTES
from lull.vmm.errors import (
    ContentsLost,
    DriverError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    RuntimeFailed,
)
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, mapped_memfds, pattern, read, write

CONTENT = pattern(1, 3 * GRANULE_BYTES - 100)


def broken(verb: str) -> DriverError:
    return DriverError(verb, "injected")


def test_no_host_memory_for_backups_changes_nothing(driver: HostDriver) -> None:
    room_bytes = UNTOUCHED_BYTES + GRANULE_BYTES
    pool = Pool(driver, host_bytes_available=lambda: room_bytes)
    kept = [pool.allocate(GRANULE_BYTES, "model"), pool.allocate(GRANULE_BYTES, "model", RestoreMode.PINNED)]
    for allocation in kept:
        write(allocation, CONTENT[:GRANULE_BYTES])
    free_bytes = driver.free_bytes()
    with pytest.raises(OutOfHostMemory) as caught:
        pool.release(["model"])
    assert (caught.value.requested_bytes, caught.value.available_bytes) == (2 * GRANULE_BYTES, GRANULE_BYTES)
    assert pool.backup_bytes() == 0
    assert pool.parked_tags() == frozenset()
    assert driver.free_bytes() == free_bytes
    assert all(read(allocation) == CONTENT[:GRANULE_BYTES] for allocation in kept)
    room_bytes += GRANULE_BYTES
    pool.release(["model"])
    pool.close()


def test_two_pools_do_not_count_on_the_same_host_memory(driver: HostDriver) -> None:
    """The second asks while the first has its word but has not filled its backup yet."""
    asked, go_on = threading.Event(), threading.Event()
    available = UNTOUCHED_BYTES + GRANULE_BYTES

    class Slow(HostDriver):
        def copy(self, destination: int, source: int, nbytes: int) -> None:
            asked.set()
            assert go_on.wait(10)
            super().copy(destination, source, nbytes)

    first = Pool(Slow(driver.device, granularity_bytes=GRANULE_BYTES), host_bytes_available=lambda: available)
    second = Pool(driver, host_bytes_available=lambda: available)
    for pool in (first, second):
        pool.allocate(GRANULE_BYTES, "model")
    thread = threading.Thread(target=first.release, args=(["model"],))
    thread.start()
    assert asked.wait(10)
    with pytest.raises(OutOfHostMemory):
        second.release(["model"])
    go_on.set()
    thread.join(10)
    second.release(["model"])
    first.close()
    second.close()


def test_no_device_memory_at_wake_leaves_it_parked_and_retryable(pool: Pool, driver: HostDriver) -> None:
    kept = [pool.allocate(GRANULE_BYTES, "model"), pool.allocate(GRANULE_BYTES, "model", RestoreMode.PINNED)]
    for allocation in kept:
        write(allocation, CONTENT[:GRANULE_BYTES])
    pool.release(["model"])
    backup_bytes = pool.backup_bytes()
    borrowed = driver.create(driver.capacity_bytes - GRANULE_BYTES)
    creates = driver.calls("create")
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.resume(["model"])
    assert caught.value.requested_bytes == 2 * GRANULE_BYTES
    assert driver.calls("create") == creates  # seen before anything was tried
    assert pool.parked_tags() == {"model"}
    assert pool.backup_bytes() == backup_bytes
    driver.release(borrowed)
    pool.resume(["model"])
    assert all(read(allocation) == CONTENT[:GRANULE_BYTES] for allocation in kept)


@pytest.mark.parametrize("mode", list(RestoreMode))
@pytest.mark.parametrize(
    ("verb", "nth_call"),
    [("create", 1), ("create", 2), ("map", 2), ("set_access", 2), ("copy", 1), ("set", 1), ("synchronize", 1)],
)
def test_a_wake_that_fails_is_parked_again(
    pool: Pool, driver: HostDriver, verb: str, nth_call: int, mode: RestoreMode
) -> None:
    kept = [pool.allocate(len(CONTENT), "model", mode) for _ in range(2)]
    for allocation in kept:
        write(allocation, CONTENT)
    pool.release(["model"])
    copies_out = driver.calls("copy")
    driver.inject(verb, broken(verb), nth_call=nth_call)
    try:
        pool.resume(["model"])
    except DriverError:
        assert pool.parked_tags() == {"model"}
        assert driver.free_bytes() == driver.capacity_bytes
        driver.clear_faults()
        pool.resume(["model"])
    expected = CONTENT if mode in (RestoreMode.CPU, RestoreMode.PINNED) else bytes(len(CONTENT))
    assert [read(allocation) for allocation in kept] == [expected] * 2
    assert driver.calls("copy") >= copies_out


def test_undoing_a_wake_never_copies_onto_a_good_backup(pool: Pool, driver: HostDriver) -> None:
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    pool.prepare_resume(["model"])
    write(allocation, b"written before the wake was undone")
    copies = driver.calls("copy")
    pool.abort_resume()
    assert driver.calls("copy") == copies
    pool.resume(["model"])
    assert read(allocation) == CONTENT


@pytest.mark.parametrize(("verb", "nth_call"), [("copy", 2), ("synchronize", 1)])
def test_a_failed_copy_changes_nothing(pool: Pool, driver: HostDriver, verb: str, nth_call: int) -> None:
    kept = [pool.allocate(len(CONTENT), "model", mode) for mode in (RestoreMode.CPU, RestoreMode.PINNED)]
    for allocation in kept:
        write(allocation, CONTENT)
    driver.inject(verb, broken(verb), nth_call=nth_call)
    with pytest.raises(DriverError, match="injected"):
        pool.release(["model"])
    assert driver.calls("unmap") == 0
    assert all(read(allocation) == CONTENT for allocation in kept)
    # Half a backup is no backup: the next park copies again.
    write(kept[1], b"changed")
    pool.release(["model"])
    pool.resume(["model"])
    assert read(kept[0]) == CONTENT
    assert read(kept[1])[:7] == b"changed"


@pytest.mark.parametrize(("verb", "nth_call"), [("unmap", 1), ("unmap", 2), ("release", 1), ("release", 2)])
def test_a_park_that_fails_halfway_is_undone_whole(pool: Pool, driver: HostDriver, verb: str, nth_call: int) -> None:
    kept = [pool.allocate(len(CONTENT), "model") for _ in range(3)]
    for number, allocation in enumerate(kept):
        write(allocation, pattern(number, len(CONTENT)))
    free_bytes = driver.free_bytes()
    driver.inject(verb, broken(verb), nth_call=nth_call)
    with pytest.raises(DriverError, match="injected"):
        pool.release(["model"])
    assert [read(allocation) for allocation in kept] == [pattern(number, len(CONTENT)) for number in range(3)]
    assert pool.parked_tags() == frozenset()
    assert pool.backup_bytes() == 0
    assert driver.free_bytes() == free_bytes
    pool.release(["model"])
    assert driver.free_bytes() == driver.capacity_bytes


def test_what_cannot_be_undone_is_said_and_ends_the_pool(pool: Pool, driver: HostDriver) -> None:
    model = [pool.allocate(GRANULE_BYTES, "model") for _ in range(2)]
    write(model[0], b"first")
    driver.inject("unmap", broken("unmap"), nth_call=2)
    driver.inject("create", OutOfDeviceMemory(1, 0, 1), nth_call=1)
    with pytest.raises(ContentsLost, match="could not be rolled back") as caught:
        pool.release(["model"])
    assert caught.value.lost == ()
    assert isinstance(caught.value.__cause__, OutOfDeviceMemory)
    assert bytes(pool.backup_views("model")[0][:5]) == b"first"
    for call in (pool.release, pool.resume):
        with pytest.raises(RuntimeFailed, match="neither park nor wake"):
            call(["model"])


def test_a_wake_that_cannot_be_undone_ends_the_pool(pool: Pool, driver: HostDriver) -> None:
    model = [pool.allocate(GRANULE_BYTES, "model") for _ in range(2)]
    write(model[1], b"second")
    pool.release(["model"])
    driver.inject("map", broken("map"), nth_call=2)
    driver.inject("unmap", broken("unmap"), nth_call=1)
    with pytest.raises(ContentsLost, match=r"lost \[\], still parked \[model\]"):
        pool.resume(["model"])
    assert any(bytes(view[:6]) == b"second" for view in pool.backup_views("model"))


@pytest.mark.parametrize("verb", ["reserve", "create", "map", "set_access"])
def test_a_failed_allocation_leaves_nothing(pool: Pool, driver: HostDriver, verb: str) -> None:
    driver.inject(verb, broken(verb))
    with pytest.raises(DriverError, match="injected"):
        pool.allocate(GRANULE_BYTES, "model")
    assert pool.allocations() == ()
    assert driver.free_bytes() == driver.capacity_bytes
    assert mapped_memfds(os.getpid(), driver.device_uuid) == 0


def test_what_a_failed_allocation_could_not_give_back_is_said(driver: HostDriver) -> None:
    pool = Pool(driver)
    driver.inject("set_access", broken("set_access"))
    driver.inject("unmap", broken("unmap"))
    with pytest.raises(DriverError) as caught:
        pool.allocate(GRANULE_BYTES, "model")
    assert "could not be given back" in caught.value.__notes__[0]


@pytest.mark.parametrize("verb", ["unmap", "release", "free_address"])
def test_a_failed_free_can_be_repeated_and_never_parked(pool: Pool, driver: HostDriver, verb: str) -> None:
    allocation = pool.allocate(GRANULE_BYTES, "model")
    other = pool.allocate(GRANULE_BYTES, "model")
    write(other, b"other")
    driver.inject(verb, broken(verb))
    with pytest.raises(DriverError):
        pool.free(allocation)
    pool.release(["model"])
    pool.resume(["model"])
    assert read(other)[:5] == b"other"
    pool.free(allocation)
    assert pool.allocations() == (other,)
