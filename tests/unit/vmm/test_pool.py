from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from lull.vmm import host_memory
from lull.vmm.driver import Access
from lull.vmm.errors import (
    DriverError,
    LayoutChanged,
    OutOfDeviceMemory,
    TransitionInProgress,
    TransitionRefused,
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


def test_a_parked_tag_is_not_unsealed(driver: HostDriver) -> None:
    pool = Pool(driver, immutable_tags={"model"})
    model = pool.allocate(1, "model")
    pool.release(["model"])
    with pytest.raises(TransitionRefused, match="tag model is parked; resume it"):
        pool.unseal(["model"])
    pool.resume(["model"])
    assert pool.is_sealed(model)
    text: Any = "model"
    with pytest.raises(InvalidTag, match="tags is 'model'"):
        pool.unseal(text)
    pool.unseal(["model"])
    write(model, b"2")
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


@pytest.mark.parametrize("nbytes", ["4", 1.5, None, True])
def test_a_size_is_a_whole_number(pool: Pool, nbytes: Any) -> None:
    with pytest.raises(ValueError, match=r"nbytes is .* must be a whole number"):
        pool.allocate(nbytes, "model")


def test_a_tag_is_text(pool: Pool) -> None:
    nothing: Any = None
    with pytest.raises(InvalidTag, match="tag is None"):
        pool.allocate(1, nothing)


def test_more_than_there_is_is_out_of_device_memory(pool: Pool, driver: HostDriver) -> None:
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.allocate(1 << 62, "model")
    assert caught.value.capacity_bytes == driver.capacity_bytes
    assert driver.calls("reserve") == 0


def test_bad_settings(driver: HostDriver) -> None:
    with pytest.raises(InvalidTag, match="tag is 'Bad'"):
        Pool(driver, restore_modes={"Bad": RestoreMode.CPU})
    with pytest.raises(ValueError, match="copy_threads is 0"):
        Pool(driver, copy_threads=0)
    with pytest.raises(ValueError, match=r"copy_threads is 1000000; .* to 256"):
        Pool(driver, copy_threads=10**6)


@pytest.mark.parametrize("bad", ["FOO", "cpu", "", 5])
def test_a_mode_that_is_none_is_refused_before_it_loses_anything(pool: Pool, driver: HostDriver, bad: Any) -> None:
    with pytest.raises(UnsupportedMode, match="use one of CPU, PINNED"):
        pool.allocate(1, "model", bad)
    with pytest.raises(UnsupportedMode, match=r"restore_modes\.model is"):
        Pool(driver, restore_modes={"model": bad})
    assert pool.allocations() == ()


def test_a_mode_may_be_said_by_its_exact_name(driver: HostDriver) -> None:
    pool = Pool(driver, restore_modes=cast("Any", {"model": "MEMSET"}))
    assert pool.allocate(1, "model").mode is RestoreMode.MEMSET
    assert pool.allocate(1, "draft_model", cast("Any", "PINNED")).mode is RestoreMode.PINNED
    pool.close()


def test_an_immutable_tag_keeps_its_contents(driver: HostDriver) -> None:
    with pytest.raises(UnsupportedMode, match="tag kv_cache: the tag is immutable"):
        Pool(driver, immutable_tags={"kv_cache"})
    with pytest.raises(UnsupportedMode, match="tag a: the tag is immutable"):
        Pool(driver, immutable_tags={"a"}, restore_modes={"a": RestoreMode.MEMSET})
    with pytest.raises(InvalidTag, match="immutable_tags is 'w'"):
        Pool(driver, immutable_tags=cast("Any", "w"))
    pool = Pool(driver, immutable_tags={"kv_cache"}, restore_modes={"kv_cache": RestoreMode.CPU})
    with pytest.raises(UnsupportedMode, match="tag kv_cache: the tag is immutable"):
        pool.allocate(1, "kv_cache", RestoreMode.NONE)
    pool.close()


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
    monkeypatch.setattr("lull.vmm.copier.COPY_CHUNK_BYTES", 4096)
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
