from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lull.vmm import host_memory
from lull.vmm.backup import UNTOUCHED_BYTES
from lull.vmm.driver import Access
from lull.vmm.errors import (
    ContentsLost,
    DriverError,
    LayoutChanged,
    OutOfDeviceMemory,
    OutOfHostMemory,
    RuntimeFailed,
    TransitionInProgress,
    UnsupportedMode,
)
from lull.vmm.host_driver import VERBS, HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import InvalidTag, RestoreMode
from tests.memory import GRANULE_BYTES, mapped_memfds, memfd_bytes, pattern, read, small_driver, write

CONTENT = pattern(1, 3 * GRANULE_BYTES - 100)


def broken(verb: str) -> DriverError:
    return DriverError(verb, "injected")


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED])
def test_contents_and_address_survive_a_park(pool: Pool, driver: HostDriver, mode: RestoreMode) -> None:
    allocation = pool.allocate(len(CONTENT), "model", mode)
    address = allocation.address
    for turn in range(3):
        content = pattern(turn, len(CONTENT))
        write(allocation, content)
        pool.release(["model"])
        assert driver.free_bytes() == driver.capacity_bytes
        assert memfd_bytes(os.getpid(), driver.device_uuid) == 0
        assert mapped_memfds(os.getpid(), driver.device_uuid) == 0
        pool.resume(["model"])
        assert allocation.address == address
        assert read(allocation) == content


def test_sizes_are_rounded_up_to_the_granularity(pool: Pool, driver: HostDriver) -> None:
    pool.allocate(1, "model")
    allocation = pool.allocate(GRANULE_BYTES + 1, "model")
    assert allocation.nbytes == GRANULE_BYTES + 1
    assert allocation.reserved_bytes == 2 * GRANULE_BYTES
    assert pool.bytes_by_tag() == {"model": 3 * GRANULE_BYTES}
    assert pool.device_bytes() == driver.capacity_bytes - driver.free_bytes() == 3 * GRANULE_BYTES


@pytest.mark.parametrize("mode", [RestoreMode.NONE, RestoreMode.MEMSET])
def test_contents_that_are_not_kept_cost_no_host_memory(pool: Pool, mode: RestoreMode) -> None:
    allocation = pool.allocate(len(CONTENT), "kv_cache", mode)
    write(allocation, CONTENT)
    pool.release(["kv_cache"])
    assert pool.backup_bytes() == 0
    pool.resume(["kv_cache"])
    assert read(allocation) == bytes(len(CONTENT))


def test_memset_zeroes_at_every_wake_and_not_at_first(pool: Pool, driver: HostDriver) -> None:
    allocation = pool.allocate(GRANULE_BYTES, "kv_cache", RestoreMode.MEMSET)
    assert driver.calls("set") == 0
    for turn in (1, 2):
        write(allocation, b"x")
        pool.release(["kv_cache"])
        pool.resume(["kv_cache"])
        assert driver.calls("set") == turn


def test_a_cpu_backup_is_freed_after_the_wake_and_a_pinned_one_kept(pool: Pool) -> None:
    pool.allocate(GRANULE_BYTES, "model", RestoreMode.CPU)
    pool.allocate(2 * GRANULE_BYTES, "sampler", RestoreMode.PINNED)
    assert pool.backup_bytes() == 0
    pool.release(["model", "sampler"])
    assert pool.backup_bytes() == 3 * GRANULE_BYTES
    pool.resume(["model"])
    assert pool.backup_bytes() == 2 * GRANULE_BYTES
    pool.resume(["sampler"])
    assert pool.backup_bytes() == 2 * GRANULE_BYTES


def test_pinned_backups_can_be_made_before_the_first_park(pool: Pool) -> None:
    allocation = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    pool.allocate(GRANULE_BYTES, "sampler", RestoreMode.CPU)
    pool.warm_backups()
    assert pool.backup_bytes() == len(CONTENT) + 100
    write(allocation, CONTENT)
    pool.release(["model"])
    pool.resume(["model"])
    assert read(allocation) == CONTENT


def test_the_default_modes(driver: HostDriver) -> None:
    pool = Pool(driver, restore_modes={"sampler": RestoreMode.MEMSET})
    assert pool.allocate(1, "kv_cache").mode is RestoreMode.NONE
    assert pool.allocate(1, "model").mode is RestoreMode.CPU
    assert pool.allocate(1, "sampler").mode is RestoreMode.MEMSET
    assert pool.allocate(1, "sampler", RestoreMode.CPU).mode is RestoreMode.CPU
    pool.close()


def test_tags_are_parked_and_woken_alone(pool: Pool) -> None:
    model, cache = pool.allocate(GRANULE_BYTES, "model"), pool.allocate(GRANULE_BYTES, "kv_cache")
    write(model, b"m")
    write(cache, b"c")
    pool.release(["kv_cache", "model"])
    pool.resume(["model"])
    assert read(model)[:1] == b"m"
    assert pool.parked_tags() == {"kv_cache"}
    pool.release(["model"])
    pool.release(["model"])  # again: no change
    pool.resume(["model", "kv_cache", "sampler"])
    assert read(model)[:1] == b"m"
    assert pool.parked_tags() == frozenset()


def test_an_immutable_tag_is_copied_once_and_read_only_after_it(driver: HostDriver) -> None:
    pool = Pool(driver, immutable_tags={"model"})
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    copies = driver.calls("copy")
    pool.resume(["model"])
    assert driver.calls("copy") == 2 * copies
    assert pool.backup_bytes() > 0
    pool.release(["model"])
    assert driver.calls("copy") == 2 * copies
    pool.resume(["model"])
    assert read(allocation) == CONTENT

    pool.unseal(["model"])
    assert pool.backup_bytes() == 0
    write(allocation, b"new weights")
    pool.release(["model"])
    pool.resume(["model"])
    assert read(allocation) == b"new weights" + CONTENT[11:]
    pool.close()


def test_free_while_parked_gives_everything_back(pool: Pool, driver: HostDriver) -> None:
    first, second = pool.allocate(GRANULE_BYTES, "model"), pool.allocate(GRANULE_BYTES, "model", RestoreMode.PINNED)
    write(second, b"kept")
    pool.release(["model"])
    pool.free(first)
    assert pool.backup_bytes() == GRANULE_BYTES
    pool.resume(["model"])
    assert read(second)[:4] == b"kept"
    with pytest.raises(ValueError, match="freed already"):
        pool.free(first)
    assert driver.capacity_bytes - driver.free_bytes() == GRANULE_BYTES


def test_an_allocation_belongs_to_one_pool(pool: Pool, driver: HostDriver) -> None:
    other = Pool(driver)
    allocation = other.allocate(1, "model")
    with pytest.raises(ValueError, match="belongs elsewhere"):
        pool.free(allocation)
    other.close()


@pytest.mark.parametrize(("nbytes", "tag"), [(0, "model"), (-1, "model"), (1, "Model"), (1, "")])
def test_bad_requests(pool: Pool, nbytes: int, tag: str) -> None:
    with pytest.raises(ValueError, match=r"nbytes is|tag is"):
        pool.allocate(nbytes, tag)


def test_bad_settings(driver: HostDriver) -> None:
    with pytest.raises(InvalidTag, match="tag is 'Bad'"):
        Pool(driver, restore_modes={"Bad": RestoreMode.CPU})
    with pytest.raises(ValueError, match="copy_threads is 0"):
        Pool(driver, copy_threads=0)


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED])
def test_a_unified_device_refuses_backups(tmp_path: Path, mode: RestoreMode) -> None:
    driver = small_driver(tmp_path / "unified", kind="unified")
    with pytest.raises(UnsupportedMode, match="use NONE or MEMSET"):
        Pool(driver, restore_modes={"model": mode})
    pool = Pool(driver)
    with pytest.raises(UnsupportedMode):
        pool.allocate(1, "model", mode)
    with pytest.raises(UnsupportedMode):
        pool.allocate(1, "model")  # the default keeps contents
    allocation = pool.allocate(1, "model", RestoreMode.MEMSET)
    pool.release(["model"])
    pool.resume(["model"])
    assert read(allocation) == b"\0"
    pool.close()


# -- what fails changes nothing


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


# -- one thing at a time


def test_the_layout_of_a_parked_tag_does_not_change(pool: Pool) -> None:
    pool.allocate(1, "model")
    pool.release(["model"])
    with pytest.raises(LayoutChanged, match="tag model is parked"):
        pool.allocate(1, "model")
    pool.allocate(1, "sampler")


def test_nothing_else_during_a_transition(pool: Pool) -> None:
    allocation = pool.allocate(1, "model")
    with pytest.raises(TransitionInProgress, match="prepare it first"):
        pool.commit_release()
    pool.prepare_release(["model"])
    for call in (
        lambda: pool.allocate(1, "sampler"),
        lambda: pool.free(allocation),
        lambda: pool.release(["model"]),
        lambda: pool.resume(["model"]),
        lambda: pool.commit_resume(),
        lambda: pool.warm_backups(),
        lambda: pool.unseal(["model"]),
    ):
        with pytest.raises(TransitionInProgress):
            call()
    pool.abort_release()
    assert pool.backup_bytes() == 0
    pool.free(allocation)


def test_a_park_waits_for_an_allocation_under_way(driver: HostDriver) -> None:
    creating, go_on = threading.Event(), threading.Event()

    class Slow(HostDriver):
        def set_access(self, address: int, nbytes: int, access: Access) -> None:
            creating.set()
            assert go_on.wait(10)
            super().set_access(address, nbytes, access)

    pool = Pool(Slow(driver.device, granularity_bytes=GRANULE_BYTES))
    allocating = threading.Thread(target=pool.allocate, args=(1, "model"))
    allocating.start()
    assert creating.wait(10)
    parking = threading.Thread(target=pool.release, args=(["model"],))
    parking.start()
    assert pool.parked_tags() == frozenset()
    go_on.set()
    allocating.join(10)
    parking.join(10)
    assert pool.parked_tags() == {"model"}
    assert pool.device_bytes() == 0
    pool.close()


def test_copies_are_cut_into_chunks(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lull.vmm.backup.COPY_CHUNK_BYTES", 4096)
    pool = Pool(driver, copy_threads=3)
    allocation = pool.allocate(10 * 4096 + 1, "model")
    content = pattern(9, 10 * 4096 + 1)
    write(allocation, content)
    pool.release(["model"])
    assert driver.calls("copy") == 11
    pool.resume(["model"])
    assert read(allocation) == content
    write(allocation, b"x")
    driver.inject("copy", broken("copy"), nth_call=5)
    with pytest.raises(DriverError):
        pool.release(["model"])
    assert read(allocation) == b"x" + content[1:]
    pool.close()


# -- switches for tests of others


def test_an_engine_can_be_made_to_keep_its_memory(pool: Pool, driver: HostDriver) -> None:
    allocation = pool.allocate(GRANULE_BYTES, "model")
    write(allocation, b"kept")
    pool.keep_memory_on_release = True
    pool.release(["model"])
    assert pool.parked_tags() == {"model"}
    assert driver.free_bytes() == driver.capacity_bytes - GRANULE_BYTES
    pool.resume(["model"])
    assert read(allocation)[:4] == b"kept"
    pool.keep_memory_on_release = False
    pool.release(["model"])
    assert driver.free_bytes() == driver.capacity_bytes


def test_a_backup_can_be_spoilt(pool: Pool) -> None:
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    (view,) = pool.backup_views("model")
    view[4096:8192] = bytes(4096)
    view.release()
    pool.resume(["model"])
    assert read(allocation) == CONTENT[:4096] + bytes(4096) + CONTENT[8192:]
    assert pool.backup_views("model") == ()


def test_faults_are_injected_by_name_and_number(driver: HostDriver) -> None:
    with pytest.raises(ValueError, match="verb is 'fly'"):
        driver.inject("fly", broken("fly"))
    with pytest.raises(ValueError, match="nth_call is 0"):
        driver.inject("create", broken("create"), nth_call=0)
    driver.inject("free_bytes", broken("free_bytes"), nth_call=2)
    driver.free_bytes()
    with pytest.raises(DriverError):
        driver.free_bytes()
    driver.free_bytes()
    assert driver.calls("free_bytes") == 3
    assert all(callable(getattr(driver, verb)) for verb in VERBS)


def test_pinned_backups_are_locked_where_the_limit_allows(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "lock_pages", lambda address, nbytes: False)
    allocation = pool.allocate(GRANULE_BYTES, "model", RestoreMode.PINNED)
    write(allocation, b"still kept")
    pool.release(["model"])
    pool.resume(["model"])
    assert read(allocation)[:10] == b"still kept"
