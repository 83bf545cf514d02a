"""What a pool and a runtime do on every device: the same addresses and contents over a loan of the memory."""

from __future__ import annotations

import ctypes
import os

import pytest

from lull.vmm.blocks import Allocation
from lull.vmm.errors import OutOfDeviceMemory
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from tests.driver_rigs import Rig

CONTENT_BYTES = 16 << 10


def write(rig: Rig, allocation: Allocation, content: bytes) -> None:
    """At both ends, so that the whole of it has to come back."""
    source = ctypes.create_string_buffer(content, len(content))
    for address in ends(allocation, content):
        rig.driver.copy(address, ctypes.addressof(source), len(content))


def holds(rig: Rig, allocation: Allocation, content: bytes) -> bool:
    back = ctypes.create_string_buffer(len(content))
    for address in ends(allocation, content):
        rig.driver.copy(ctypes.addressof(back), address, len(content))
        if back.raw != content:
            return False
    return True


def ends(allocation: Allocation, content: bytes) -> tuple[int, int]:
    return allocation.address, allocation.address + allocation.nbytes - len(content)


@pytest.fixture
def content() -> bytes:
    return os.urandom(CONTENT_BYTES)


def modes(rig: Rig) -> tuple[RestoreMode, ...]:
    if rig.driver.unified:
        return RestoreMode.NONE, RestoreMode.MEMSET
    return tuple(RestoreMode)


def test_memory_comes_back_as_its_mode_promises(rig: Rig, content: bytes) -> None:
    free_bytes = rig.driver.free_bytes()
    pool = Pool(rig.driver)
    runtime = Runtime(pool)
    allocations = {mode: pool.allocate(rig.unit_bytes - 1000, "model_extra", mode) for mode in modes(rig)}
    for _ in range(2):
        for allocation in allocations.values():
            write(rig, allocation, content)
        runtime.release()
        assert runtime.status().state is MemoryState.PARKED
        assert rig.is_free(free_bytes)
        runtime.resume()
        assert rig.is_free(free_bytes - len(allocations) * rig.unit_bytes)
        for mode, allocation in allocations.items():
            if mode in (RestoreMode.CPU, RestoreMode.PINNED):
                assert holds(rig, allocation, content), mode
            elif mode is RestoreMode.MEMSET:
                assert holds(rig, allocation, bytes(len(content)))
    pool.close()
    assert rig.is_free(free_bytes)


def test_a_wake_without_room_changes_nothing_and_can_be_asked_again(rig: Rig, content: bytes) -> None:
    free_bytes = rig.driver.free_bytes()
    pool = Pool(rig.driver)
    runtime = Runtime(pool)
    mode = modes(rig)[-1]
    parts = [pool.allocate(rig.unit_bytes, tag, mode) for tag in ("model_weights", "model_extra", "drafter")]
    for part in parts:
        write(rig, part, content)
    runtime.release()
    # A job that takes all but one unit: the first of three fits, and must be given back.
    job = rig.driver.create((free_bytes // rig.unit_bytes - 1) * rig.unit_bytes)
    taken_bytes = rig.driver.free_bytes()
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            runtime.resume()
        assert runtime.status().state is MemoryState.PARKED
        assert rig.is_free(taken_bytes)
    rig.driver.release(job)
    runtime.resume()
    expected = content if mode in (RestoreMode.CPU, RestoreMode.PINNED) else bytes(len(content))
    assert all(holds(rig, part, expected) for part in parts)
    pool.close()


def test_sealed_memory_keeps_its_backup_and_is_not_copied_again(rig: Rig, content: bytes) -> None:
    if rig.driver.unified:
        return  # there are no backups to keep
    pool = Pool(rig.driver, immutable_tags={"model_weights"})
    weights = pool.allocate(rig.unit_bytes, "model_weights", RestoreMode.PINNED)
    write(rig, weights, content)
    for copied_bytes in (weights.nbytes, 0):
        pool.release(["model_weights"])
        assert pool.statistics()["model_weights"].last_park_copied_bytes == copied_bytes
        pool.resume(["model_weights"])
        assert holds(rig, weights, content)
    pool.close()
