"""Backups, pinning, immutable tags, statistics and the layout of a pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lull.vmm import host_memory
from lull.vmm.blocks import Allocation
from lull.vmm.driver import Access, Handle
from lull.vmm.errors import (
    ContentsLost,
    DriverError,
    HostMemoryNotPinned,
    ImmutableChanged,
    LayoutChanged,
    OutOfHostMemory,
    RuntimeFailed,
    UnsupportedMode,
)
from lull.vmm.host_driver import HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import TRTLLM_TAGS, InvalidTag, RestoreMode
from tests.memory import GRANULE_BYTES, mapped_memfds, pattern, read, small_driver, write

CONTENT = pattern(1, 2 * GRANULE_BYTES - 100)


# -- tags and modes


def test_every_tag_of_the_vocabulary_and_ones_own(pool: Pool, driver: HostDriver) -> None:
    tags = (*TRTLLM_TAGS, "adapters")
    kept = {tag: pool.allocate(100, tag, RestoreMode.CPU) for tag in tags}
    for number, tag in enumerate(tags):
        write(kept[tag], pattern(number, 100))
    runtime = Runtime(pool)
    runtime.release()
    assert driver.free_bytes() == driver.capacity_bytes
    runtime.resume()
    assert [read(kept[tag]) for tag in tags] == [pattern(number, 100) for number in range(len(tags))]


def test_init_only_memory_stays_and_is_never_released(pool: Pool, driver: HostDriver) -> None:
    init = pool.allocate(GRANULE_BYTES, "_no_capture_init_kv_cache")
    write(init, b"in use")
    runtime = Runtime(pool)
    runtime.release()
    assert driver.capacity_bytes - driver.free_bytes() == GRANULE_BYTES
    assert read(init)[:6] == b"in use"
    runtime.resume()
    with pytest.raises(InvalidTag, match="initialization-only tag"):
        runtime.release(["_no_capture_init_kv_cache"])


def test_several_modes_within_one_tag(pool: Pool) -> None:
    kept = {mode: pool.allocate(len(CONTENT), "model", mode) for mode in RestoreMode}
    for allocation in kept.values():
        write(allocation, CONTENT)
    assert dict(pool.statistics()["model"].modes) == dict.fromkeys(RestoreMode, 1)
    pool.release(["model"])
    pool.resume(["model"])
    assert read(kept[RestoreMode.CPU]) == read(kept[RestoreMode.PINNED]) == CONTENT
    assert read(kept[RestoreMode.MEMSET]) == bytes(len(CONTENT))


@pytest.mark.parametrize(
    ("prefer", "mode"), [(None, RestoreMode.CPU), (False, RestoreMode.CPU), (True, RestoreMode.PINNED)]
)
def test_backups_are_pinned_where_that_is_preferred(driver: HostDriver, prefer: bool | None, mode: RestoreMode) -> None:
    pool = Pool(driver, prefer_pinned=prefer)
    assert pool.allocate(1, "model").mode is mode
    assert pool.allocate(1, "kv_cache").mode is RestoreMode.NONE
    pool.close()


def test_the_driver_says_what_it_prefers(driver: HostDriver) -> None:
    class Quick(HostDriver):
        @property
        def prefers_pinned(self) -> bool:
            return True

    pool = Pool(Quick(driver.device, granularity_bytes=GRANULE_BYTES))
    assert pool.allocate(1, "model").mode is RestoreMode.PINNED
    pool.close()


# -- host memory


def test_pinned_backups_are_locked_and_unlocked_by_the_driver(pool: Pool, driver: HostDriver) -> None:
    allocation = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    pool.allocate(1, "sampler", RestoreMode.PINNED)
    pool.warm_backups(["model"])
    assert driver.calls("pin_host") == 1
    assert pool.statistics()["model"].locked_bytes in (0, 2 * GRANULE_BYTES)
    assert pool.statistics()["sampler"].backup_bytes == 0
    locked = pool.statistics()["model"].locked_bytes > 0
    pool.free(allocation)
    assert driver.calls("unpin_host") == locked
    assert pool.backup_bytes() == 0


def refuse_to_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "lock_pages", lambda address, nbytes: False)


def test_what_cannot_be_locked_is_used_unlocked_and_said_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_lock(monkeypatch)
    kept = [pool.allocate(len(CONTENT), "model", RestoreMode.PINNED) for _ in range(2)]
    write(kept[0], CONTENT)
    with caplog.at_level(logging.WARNING):
        pool.release(["model"])
        pool.resume(["model"])
    assert [record.getMessage() for record in caplog.records] == [
        "tag model: its PINNED backup could not be page-locked and is used unlocked; copies work"
    ]
    assert read(kept[0]) == CONTENT
    assert pool.statistics()["model"].locked_bytes == 0


def test_unlocked_backups_can_be_refused(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_lock(monkeypatch)
    monkeypatch.setattr(host_memory, "lockable_bytes", lambda: 65536)
    pool = Pool(driver, require_locked=True)
    allocation = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    write(allocation, CONTENT)
    for call in (pool.warm_backups, lambda: pool.release(["model"])):
        with pytest.raises(HostMemoryNotPinned, match=r"tag model: .* \(65536 are allowed\); raise the memlock limit"):
            call()
    assert read(allocation) == CONTENT
    assert pool.backup_bytes() == 0
    pool.close()


@pytest.mark.parametrize("verb", ["pin_host", "open_lane"])
def test_a_driver_that_fails_before_the_copies_changes_nothing(pool: Pool, driver: HostDriver, verb: str) -> None:
    allocation = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    write(allocation, CONTENT)
    driver.inject(verb, DriverError(verb, "injected"))
    with pytest.raises(DriverError, match="injected"):
        pool.release(["model"])
    assert driver.calls("unmap") == 0
    pool.release(["model"])
    pool.resume(["model"])
    assert read(allocation) == CONTENT


def test_memory_that_stays_locked_is_not_unmapped(
    pool: Pool, driver: HostDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "lock_pages", lambda address, nbytes: True)  # whatever the limit here is
    allocation = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    pool.warm_backups()
    assert pool.statistics()["model"].locked_bytes == 2 * GRANULE_BYTES
    view = pool.backup_views("model")[0]
    driver.inject("unpin_host", DriverError("unpin_host", "injected"))
    with caplog.at_level(logging.WARNING):
        pool.free(allocation)
    assert "stay locked until the process ends" in caplog.text
    view[:1] = b"x"  # still there: a device that may write to it does no harm


def test_backups_are_freed_after_the_wake_on_request(driver: HostDriver) -> None:
    pool = Pool(driver, release_host_after_wake=True, immutable_tags={"weights"})
    kept = [pool.allocate(len(CONTENT), tag, RestoreMode.PINNED) for tag in ("model", "weights")]
    for turn in range(2):
        if turn:
            pool.unseal(["weights"])
        for allocation in kept:
            write(allocation, pattern(turn, len(CONTENT)))
        pool.release(["model", "weights"])
        assert pool.backup_bytes() > 0
        pool.resume(["model", "weights"])
        assert pool.backup_bytes() == 0
        assert [read(allocation) for allocation in kept] == [pattern(turn, len(CONTENT))] * 2
    pool.release(["weights"])  # sealed, and copied all the same
    pool.resume(["weights"])
    assert read(kept[1]) == pattern(1, len(CONTENT))
    pool.close()


def test_kept_backups_can_be_given_back_while_running(pool: Pool) -> None:
    model = pool.allocate(len(CONTENT), "model", RestoreMode.PINNED)
    sampler = pool.allocate(len(CONTENT), "sampler", RestoreMode.PINNED)
    write(model, CONTENT)
    pool.warm_backups()
    pool.release(["model"])
    pool.release_backups()  # the parked one is all there is of its tag
    assert pool.backup_bytes() == 2 * GRANULE_BYTES
    pool.resume(["model"])
    pool.release_backups(["sampler"])
    assert pool.backup_bytes() == 2 * GRANULE_BYTES
    pool.release_backups(["model"])
    assert pool.backup_bytes() == 0
    assert read(model) == CONTENT
    pool.free(sampler)


def test_a_wake_without_host_memory_stays_parked(
    pool: Pool, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: 0)
        with pytest.raises(OutOfHostMemory):
            pool.resume(["model"])
    assert pool.parked_tags() == {"model"}
    assert driver.free_bytes() == driver.capacity_bytes
    pool.resume(["model"])
    assert read(allocation) == CONTENT


def test_how_much_may_be_locked() -> None:
    lockable_bytes = host_memory.lockable_bytes()
    assert lockable_bytes is None or lockable_bytes >= 0


# -- immutable tags


@pytest.fixture
def watched(driver: HostDriver) -> Iterator[tuple[Pool, Allocation]]:
    """A tag that was parked once and is back, read-only."""
    pool = Pool(driver, immutable_tags={"model"}, verify_immutable=True)
    allocation = pool.allocate(len(CONTENT), "model")
    write(allocation, CONTENT)
    pool.release(["model"])
    pool.resume(["model"])
    assert pool.is_sealed(allocation)
    yield pool, allocation
    pool.close()


def test_the_second_park_of_an_immutable_tag_copies_nothing(watched: tuple[Pool, Allocation]) -> None:
    pool, allocation = watched
    assert pool.statistics()["model"].last_park_copied_bytes == len(CONTENT)
    pool.release(["model"])
    assert pool.statistics()["model"].last_park_copied_bytes == 0
    pool.resume(["model"])
    assert pool.statistics()["model"].last_wake_copied_bytes == len(CONTENT)
    assert read(allocation) == CONTENT


def test_a_changed_immutable_tag_is_refused_by_name(watched: tuple[Pool, Allocation], driver: HostDriver) -> None:
    pool, allocation = watched
    driver.set_access(allocation.address, allocation.reserved_bytes, Access.READ_WRITE)
    write(allocation, b"?")
    driver.set_access(allocation.address, allocation.reserved_bytes, Access.READ)
    runtime = Runtime(pool)
    with pytest.raises(ImmutableChanged, match="tag model is immutable") as caught:
        runtime.release(["model"])
    assert (caught.value.tag, caught.value.address) == ("model", allocation.address)
    assert runtime.status().state is MemoryState.RUNNING
    assert read(allocation)[:1] == b"?"
    pool.unseal(["model"])  # it is meant: the new contents are backed up
    runtime.release(["model"])
    runtime.resume()
    assert read(allocation) == b"?" + CONTENT[1:]


# -- statistics


def test_statistics_by_tag(pool: Pool) -> None:
    model = [pool.allocate(GRANULE_BYTES, "model", RestoreMode.PINNED), pool.allocate(1, "model", RestoreMode.CPU)]
    pool.allocate(1, "kv_cache")
    before = pool.statistics()["model"]
    assert (before.tag, before.parked, before.allocations) == ("model", False, 2)
    assert (before.reserved_bytes, before.device_bytes, before.backup_bytes) == (
        2 * GRANULE_BYTES,
        2 * GRANULE_BYTES,
        0,
    )
    assert (before.parks, before.last_park_seconds, before.wakes, before.last_wake_seconds) == (0, None, 0, None)
    pool.release(["model"])
    parked = pool.statistics()["model"]
    assert (parked.parked, parked.device_bytes, parked.reserved_bytes) == (True, 0, 2 * GRANULE_BYTES)
    assert parked.backup_bytes == GRANULE_BYTES + 4096
    assert (parked.parks, parked.last_park_copied_bytes) == (1, GRANULE_BYTES + 1)
    assert parked.last_park_seconds is not None
    pool.resume(["model"])
    awake = pool.statistics()["model"]
    assert (awake.parked, awake.wakes, awake.last_wake_copied_bytes) == (False, 1, GRANULE_BYTES + 1)
    assert awake.backup_bytes == GRANULE_BYTES
    assert pool.statistics()["kv_cache"].parks == 0
    for allocation in model:
        pool.free(allocation)
    assert pool.statistics()["model"].allocations == 0
    with pytest.raises(TypeError):
        before.modes[RestoreMode.CPU] = 3  # type: ignore[index]


def test_a_park_that_was_undone_counts_for_nothing(pool: Pool, driver: HostDriver) -> None:
    pool.allocate(1, "model")
    driver.inject("unmap", DriverError("unmap", "injected"))
    with pytest.raises(DriverError):
        pool.release(["model"])
    assert "model" in pool.statistics()
    assert pool.statistics()["model"].parks == 0


# -- adoption


def made_elsewhere(driver: HostDriver, tag: str, mode: RestoreMode) -> tuple[Allocation, Handle]:
    address = driver.reserve(2 * GRANULE_BYTES)
    handle = driver.create(2 * GRANULE_BYTES)
    driver.map(address, 2 * GRANULE_BYTES, handle)
    driver.set_access(address, 2 * GRANULE_BYTES, Access.READ_WRITE)
    return Allocation(address, len(CONTENT), 2 * GRANULE_BYTES, tag, mode), handle


def test_adopted_memory_parks_and_goes_back_to_its_allocator(pool: Pool, driver: HostDriver) -> None:
    allocation, handle = made_elsewhere(driver, "model", RestoreMode.CPU)
    write(allocation, CONTENT)
    pool.adopt(allocation, handle)
    with pytest.raises(ValueError, match="in this pool already"):
        pool.adopt(replace(allocation), handle)
    pool.release(["model"])
    assert driver.free_bytes() == driver.capacity_bytes
    pool.resume(["model"])
    assert read(allocation) == CONTENT
    current = pool.handle_of(allocation)
    assert current not in (None, handle)
    assert pool.forget(allocation) == current
    assert pool.allocations() == ()
    assert read(allocation) == CONTENT
    assert current is not None
    driver.unmap(allocation.address, allocation.reserved_bytes)
    driver.release(current)
    driver.free_address(allocation.address, allocation.reserved_bytes)


def test_adopted_memory_can_be_forgotten_while_parked(pool: Pool, driver: HostDriver) -> None:
    allocation, handle = made_elsewhere(driver, "model", RestoreMode.CPU)
    pool.adopt(allocation, handle)
    pool.release(["model"])
    late, late_handle = made_elsewhere(driver, "model", RestoreMode.CPU)
    with pytest.raises(LayoutChanged):
        pool.adopt(late, late_handle)
    assert pool.forget(allocation) is None
    with pytest.raises(ValueError, match="freed already"):
        pool.forget(allocation)
    pool.resume(["model"])
    assert pool.backup_bytes() == 0
    driver.free_address(allocation.address, allocation.reserved_bytes)
    pool.adopt(late, late_handle)
    pool.free(late)


def test_what_cannot_be_adopted(pool: Pool, driver: HostDriver, tmp_path: Path) -> None:
    allocation, handle = made_elsewhere(driver, "model", RestoreMode.CPU)
    with pytest.raises(ValueError, match="the handle has"):
        pool.adopt(replace(allocation, reserved_bytes=GRANULE_BYTES), handle)
    with pytest.raises(InvalidTag):
        pool.adopt(replace(allocation, tag="Model"), handle)
    unified = Pool(small_driver(tmp_path / "unified", kind="unified"))
    with pytest.raises(UnsupportedMode):
        unified.adopt(allocation, handle)
    pool.adopt(allocation, handle)
    pool.free(allocation)


class Reusing(HostDriver):
    """Gives a freed range out again before the one who freed it has done anything more."""

    freed: int | None = None
    meanwhile: Callable[[], object] | None = None

    def free_address(self, address: int, nbytes: int) -> None:
        super().free_address(address, nbytes)
        self.freed = address
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()

    def reserve(self, nbytes: int) -> int:
        if self.freed is None:
            return super().reserve(nbytes)
        address, self.freed = self.freed, None
        host_memory.map_pages(address, nbytes, host_memory.PROT_NONE, host_memory.RESERVED | host_memory.MAP_FIXED)
        self._reserved[address] = nbytes
        return address


def test_an_address_can_be_taken_while_its_last_user_is_still_leaving(driver: HostDriver) -> None:
    reusing = Reusing(driver.device, granularity_bytes=GRANULE_BYTES)
    pool = Pool(reusing)
    first = pool.allocate(1, "model")
    reusing.meanwhile = lambda: pool.allocate(2, "model")
    pool.free(first)
    (second,) = pool.allocations()
    assert (second.address, second.nbytes) == (first.address, 2)
    pool.release(["model"])
    pool.resume(["model"])
    pool.close()


# -- the layout after a wake


class Shifty(HostDriver):
    """Gives handles that are not what was asked for, once told to."""

    shift = False

    def create(self, nbytes: int) -> Handle:
        handle = super().create(nbytes)
        return replace(handle, nbytes=2 * nbytes) if self.shift else handle

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        super().map(address, nbytes, replace(handle, nbytes=nbytes))


def test_an_engine_whose_layout_has_changed_fails_instead_of_reading(driver: HostDriver) -> None:
    shifty = Shifty(driver.device, granularity_bytes=GRANULE_BYTES)
    pool = Pool(shifty)
    write(pool.allocate(GRANULE_BYTES, "model"), b"weights")
    runtime = Runtime(pool)
    runtime.release(["model"])
    shifty.shift = True
    with pytest.raises(LayoutChanged, match=r"65536 bytes were parked at 0x.* and 131072 were woken there"):
        runtime.resume()
    assert runtime.status().state is MemoryState.FAILED
    assert mapped_memfds(os.getpid(), driver.device_uuid) == 0
    with pytest.raises(RuntimeFailed):
        runtime.resume()


def test_a_layout_that_lost_an_allocation_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pool.allocate(1, "model"), pool.allocate(1, "model")
    pool.release(["model"])
    pool.free(first)  # this is the user's right
    monkeypatch.setitem(pool._table._parked_layouts["model"], first.address, (1, GRANULE_BYTES))
    with pytest.raises(LayoutChanged, match="tag model was parked as"):
        pool.resume(["model"])
    assert pool.parked_tags() == {"model"}
    monkeypatch.undo()
    pool.resume(["model"])
    assert read(second) == b"\0"


def test_lost_contents_are_named_by_failed(pool: Pool, driver: HostDriver) -> None:
    assert pool.failed is None
    for _ in range(2):
        pool.allocate(1, "model")
    driver.inject("unmap", DriverError("unmap", "injected"), nth_call=2)
    driver.inject("create", DriverError("create", "injected"))
    with pytest.raises(ContentsLost):
        pool.release(["model"])
    assert pool.failed is not None
    assert "could not be rolled back" in pool.failed
